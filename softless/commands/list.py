"""softless list: every mechanism, its cost and abilities; or every model and its size; or every recipe.

JSON (schema softless.list/1):

    {"schema", "mechanisms": [{"name", "family", "formula", "cost", "paper", "causal", "state", "bias", "grid",
                               "options": {option: default}}]}

With --models (schema softless.list-models/1), parameters and multiply-adds as they are counted:

    {"schema", "models": [{"name", "family", "parameters", "macs", "image_size": [height, width],
                           "blocks", "softmax_blocks",
                           "paper": {"top1", "parameters", "macs"}}]}

With --recipes (schema softless.list-recipes/1):

    {"schema", "recipes": [{"name", "model", "image_size": pixels a side, "batch", "epochs", "precision",
                            "expected", "cost", "command"}]}
"""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from softless.commands.common import console, emit_json, refuse, reports_errors
from softless.commands.layout import plain_table

COSTS = "Cost: N tokens, d channels per head, m stand-ins or features, w window, l stride, r rounds."
MORE = "softless list --wide adds formulas and options, softless explain NAME the cost of a call."
SCHEMA, MODELS_SCHEMA, RECIPES_SCHEMA = "softless.list/1", "softless.list-models/1", "softless.list-recipes/1"
ABILITIES = ("causal", "state", "bias", "grid")
FAMILIES = {
    "kernelized": "feature maps of q and k; no N x N matrix",
    "scored": "a softmax over all keys, some keys, or stand-ins for them",
    "recurrent": "a state that is updated token by token",
}
LONGEST_PAPER = 18
SUMMARY = "Every mechanism, model or recipe, and what it is."
HELP = """List the mechanisms by family, one line each: cost, abilities, paper.

\b
cost    N tokens, d channels per head, m stand-ins or features, w window,
        l stride, r rounds
causal  has a causal form
state   carries a state of fixed size: prefill, decode, streaming
bias    takes a bias on its scores
grid    reads tokens as a picture, if given its height and width

\b
$ softless list
$ softless list --wide       # with formulas and options
$ softless list --models     # vision backbones: size, cost, accuracy
$ softless list --recipes    # what softless train --recipe takes
"""


@reports_errors
def run(
    models: Annotated[bool, typer.Option("--models", help="The models instead of the mechanisms.")] = False,
    recipes: Annotated[bool, typer.Option("--recipes", help="The recipes instead of the mechanisms.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="Every column: formulas, options, accuracies.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show the table of mechanisms, of models or of recipes."""
    refuse({"--recipes": models and recipes}, "--models asks for another table")
    refuse({"--wide": wide and models}, "the table of models has no more columns")
    refuse({"--wide": wide and json}, "--json always has every column")
    if models:
        name, schema, rows, show = "models", MODELS_SCHEMA, _models(), _show_models
    elif recipes:
        name, schema, rows, show = "recipes", RECIPES_SCHEMA, _recipes(), _show_all_recipes if wide else _show_recipes
    else:
        name, schema, rows, show = "mechanisms", SCHEMA, [*map(_row, _names())], _show_wide if wide else _show
    if json:
        emit_json({"schema": schema, name: rows})
    else:
        show(rows)


def _names() -> list[str]:
    from softless.mechanisms import list_mechanisms

    return list_mechanisms()


def _row(name: str) -> dict[str, Any]:
    from dataclasses import fields

    from softless.commands.mechanism import make, word
    from softless.mechanisms import MECHANISMS

    cls, made = MECHANISMS[name], make(name, {})
    return {
        "name": name,
        "family": cls.family,
        "formula": cls.formula,
        "cost": cls.cost,
        "paper": cls.paper,
        "causal": made.lacks(is_causal=True) is None,
        "state": made.carries_state,
        "bias": cls.takes_bias,
        "grid": cls.reads_grid,
        "options": {field.name: word(field.default) for field in fields(cls)},
    }


def _show(rows: list[dict[str, Any]]) -> None:
    """A line each, family by family: it fits 80 columns."""
    from rich.text import Text

    out = console()
    name, cost = (max(len(row[key]) for row in rows) for key in ("name", "cost"))

    def line(row: dict[str, Any], can: Iterable[str]) -> str:
        cells = (f"{cell:<{len(ability)}}" for cell, ability in zip(can, ABILITIES, strict=True))
        return f"  {row['name']:<{name}} {row['cost']:<{cost}} {' '.join(cells)} {_who(row['paper'])}"

    out.print(Text(line({"name": "", "cost": "cost", "paper": "paper"}, ABILITIES), style="bold"))
    for family, about in FAMILIES.items():
        out.print(Text.assemble((family, "bold"), f": {about}"))
        for row in rows:
            if row["family"] == family:
                out.print(Text(line(row, ("yes" if row[ability] else "-" for ability in ABILITIES))))
    out.print()
    for note in (COSTS, MORE):
        out.print(Text(note, style="dim"))


def _who(paper: str) -> str:
    """Han 2024: the first author and the year, or as much of a title as there is room for."""
    short = paper.partition(",")[0].replace(" et al.", "")
    return short if len(short) <= LONGEST_PAPER else f"{short[: LONGEST_PAPER - 3].rstrip()}..."


def _show_wide(rows: list[dict[str, Any]]) -> None:
    """Everything, in as many lines as the terminal's width takes."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("mechanism\npaper", min_width=26, max_width=26)
    table.add_column("family\ncost", no_wrap=True)
    table.add_column("formula\nabilities, options")
    for row in rows:
        abilities = "  ".join(name for name in ABILITIES if row[name])
        options = "  ".join(f"{name}={default}" for name, default in row["options"].items())
        options = f"needs {', '.join(row['options'])}, a function" if row["name"] == "general" else options
        text = Text(row["formula"])
        if abilities:
            text.append(f"\n{abilities}", style="green")
        if options:
            text.append(f"\n{options}", style="dim")
        paper = row["paper"].replace(", arXiv", ",\narXiv")
        name = Text(row["name"], style="bold").append(f"\n{paper}", style="not bold dim")
        table.add_row(name, Text(row["family"]).append(f"\n{row['cost']}"), text)
    out.print(table)
    out.print()
    out.print(Text(COSTS, style="dim"))


def _models() -> list[dict[str, Any]]:
    from softless.bench.published import FACTS
    from softless.mechanisms import resolve
    from softless.models.table import CONFIGS

    return [
        {
            "name": name,
            "family": config.family,
            "parameters": FACTS[name].parameters,
            "macs": FACTS[name].macs,
            "image_size": list(config.img_size),
            "blocks": sum(config.depths),
            "softmax_blocks": sum(config.depths) - (resolve(config.mechanism).name != "softmax") * sum(config.mixed),
            "paper": {
                "top1": FACTS[name].paper_top1,
                "parameters": round(FACTS[name].paper_parameters * 1e6),
                "macs": round(FACTS[name].paper_macs * 1e9),
            },
        }
        for name, config in CONFIGS.items()
    ]


def _show_models(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from softless.report import units

    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in ("model", "parameters", "MACs", "images", "softmax blocks", "top-1"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row["name"], style="bold"),
            units.count(row["parameters"]),
            units.macs(row["macs"]),
            units.picture(row["image_size"]),
            f"{row['softmax_blocks']} of {row['blocks']}",
            f"{row['paper']['top1']:.1f}",
        )
    out.print(table)
    out.print()
    out.print(Text("Counted at this image size; top-1 on ImageNet-1K as Han et al. 2024 print it.", style="dim"))


def _recipes() -> list[dict[str, Any]]:
    from softless.train.recipe import read_recipe, shipped

    rows = []
    for name in shipped():
        recipe = read_recipe(name)
        same = ("image_size", "batch", "epochs", "precision", "expected", "cost", "command")
        rows.append({"name": name, "model": recipe.model.name, **{key: getattr(recipe, key) for key in same}})
    return rows


def _show_recipes(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from softless.report import units

    out, table = console(), plain_table("recipe", "model", "images", "batch", "epochs", gap=2)
    table.columns[1].justify = "left"
    for row in rows:
        size = units.picture([row["image_size"]] * 2)
        table.add_row(Text(row["name"], style="bold"), row["model"], size, f"{row['batch']:,}", str(row["epochs"]))
    out.print(table)
    out.print()
    out.print(Text("softless train --recipe NAME; --wide shows what each one reaches and costs.", style="dim"))


def _show_all_recipes(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from softless.report import units

    out = console()
    for row in rows:
        size = units.picture([row["image_size"]] * 2)
        epochs = units.counted(row["epochs"], "epoch")
        about = f"{row['model']}, {size}, batch {row['batch']:,}, {epochs}, {row['precision']}"
        out.print(Text.assemble((row["name"], "bold"), f": {about}"), soft_wrap=True)
        for key in ("expected", "cost", "command"):
            out.print(Text(f"  {key:<9}{row[key]}", style="dim"), soft_wrap=True)
