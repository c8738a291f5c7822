"""softless list: every mechanism with its cost and abilities, every model with its size, or every recipe.

The JSON document is {"schema", "mechanisms": [...]}, {"schema", "models": [...]} or {"schema", "recipes": [...]}.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypedDict

import typer

from softless.commands.arguments import make_mechanism, option_text
from softless.commands.common import console, emit_json, plain_table, print_dim, refuse, reports_errors
from softless.report import units

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
grid    reads tokens as a picture, if it gets height and width

\b
$ softless list
$ softless list --wide       # with formulas and options
$ softless list --models     # vision backbones: size, cost, accuracy
$ softless list --recipes    # what softless train --recipe takes
"""


class ListedMechanism(TypedDict):
    """One mechanism in the JSON document."""

    name: str
    family: str
    formula: str
    cost: str
    paper: str
    causal: bool
    state: bool
    bias: bool
    grid: bool
    options: dict[str, object]  # the defaults


class ListedModel(TypedDict):
    """One model in the JSON document. Parameters and multiply-adds are our counts; `paper` has the printed ones."""

    name: str
    family: str
    parameters: int
    macs: int
    image_size: list[int]  # height, width
    blocks: int
    softmax_blocks: int
    paper: dict[str, float]  # top1, parameters, macs


class ListedRecipe(TypedDict):
    """One recipe in the JSON document."""

    name: str
    model: str
    image_size: int | list[int] | None  # pixels per side, or height and width; None for text
    length: int | None  # tokens per sequence; None for images
    batch: int
    epochs: int
    precision: str
    expected: str
    cost: str
    command: str


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
    name, schema, rows, show = _table(models, recipes, wide)
    if json:
        emit_json({"schema": schema, name: rows})
    else:
        show(rows)


def _table(models: bool, recipes: bool, wide: bool) -> tuple[str, str, list[Any], Callable[[list[Any]], None]]:
    if models:
        return "models", MODELS_SCHEMA, _models(), _show_models
    if recipes:
        return "recipes", RECIPES_SCHEMA, _recipes(), _show_wide_recipes if wide else _show_recipes
    return "mechanisms", SCHEMA, _mechanisms(), _show_wide if wide else _show


def _mechanisms() -> list[ListedMechanism]:
    from softless.mechanisms import MECHANISMS, list_mechanisms

    return [
        {
            "name": name,
            "family": MECHANISMS[name].family,
            "formula": MECHANISMS[name].formula,
            "cost": MECHANISMS[name].cost,
            "paper": MECHANISMS[name].paper,
            "causal": make_mechanism(name, {}).lacks(is_causal=True) is None,
            "state": make_mechanism(name, {}).carries_state,
            "bias": MECHANISMS[name].takes_bias,
            "grid": make_mechanism(name, {}).reads_grid,
            "options": {field.name: option_text(field.default) for field in fields(MECHANISMS[name])},
        }
        for name in list_mechanisms()
    ]


def _show(rows: list[ListedMechanism]) -> None:
    """Print one line per mechanism, family by family, in 80 columns."""
    from rich.text import Text

    out, width = console(), max(len(row["cost"]) for row in rows)
    name_width = max(len(row["name"]) for row in rows)

    def line(name: str, cost: str, paper: str, abilities: list[str]) -> str:
        cells = (f"{cell:<{len(ability)}}" for cell, ability in zip(abilities, ABILITIES, strict=True))
        return f"  {name:<{name_width}} {cost:<{width}} {' '.join(cells)} {paper}"

    out.print(Text(line("", "cost", "paper", list(ABILITIES)), style="bold"))
    for family, about in FAMILIES.items():
        out.print(Text.assemble((family, "bold"), f": {about}"))
        for row in (row for row in rows if row["family"] == family):
            abilities = ["yes" if able else "-" for able in (row["causal"], row["state"], row["bias"], row["grid"])]
            out.print(Text(line(row["name"], row["cost"], _short_paper(row["paper"]), abilities)))
    out.print()
    print_dim(COSTS, MORE, out=out)


def _short_paper(paper: str) -> str:
    """Return the first author and the year, such as Han 2024, or the year of a paper that names no author."""
    short = paper.partition(",")[0].replace(" et al.", "")
    return short if len(short) <= LONGEST_PAPER else f"a note of {paper.rpartition(', ')[2]}"


def _show_wide(rows: list[ListedMechanism]) -> None:
    """Print everything, in as many lines as the width of the terminal needs."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("mechanism\npaper", min_width=26, max_width=26)
    table.add_column("family\ncost", no_wrap=True)
    table.add_column("formula\nabilities, options")
    for row in rows:
        abilities = "  ".join(name for name in ABILITIES if row[name])  # type: ignore[literal-required]
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
    _print(table, COSTS)


def _models() -> list[ListedModel]:
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
            "paper": FACTS[name].paper,
        }
        for name, config in CONFIGS.items()
    ]


def _show_models(rows: list[ListedModel]) -> None:
    from rich.text import Text

    table = plain_table("model", "parameters", "MACs", "images", "softmax blocks", "top-1", gap=2)
    for row in rows:
        table.add_row(
            Text(row["name"], style="bold"),
            units.count(row["parameters"]),
            units.macs(row["macs"]),
            units.picture(row["image_size"]),
            f"{row['softmax_blocks']} of {row['blocks']}",
            f"{row['paper']['top1']:.1f}",
        )
    _print(table, "Counted at this image size; top-1 on ImageNet-1K as Han et al. 2024 print it.")


def _recipes() -> list[ListedRecipe]:
    from softless.train.dense_recipe import DenseRecipe
    from softless.train.language_recipe import LanguageRecipe
    from softless.train.recipe import AnyRecipe, changed, document_of, shipped

    def size(recipe: AnyRecipe) -> int | list[int] | None:
        if isinstance(recipe, LanguageRecipe):
            return None
        return [*recipe.size] if isinstance(recipe, DenseRecipe) else recipe.image_size

    recipes = {name: changed(document_of(name), ()) for name in shipped()}
    return [
        {
            "name": name,
            "model": recipe.model.name,
            "image_size": size(recipe),
            "length": recipe.length if isinstance(recipe, LanguageRecipe) else None,
            "batch": recipe.batch,
            "epochs": recipe.epochs,
            "precision": recipe.precision,
            "expected": recipe.expected,
            "cost": recipe.cost,
            "command": recipe.command,
        }
        for name, recipe in recipes.items()
    ]


def _show_recipes(rows: list[ListedRecipe]) -> None:
    from rich.text import Text

    table = plain_table("recipe", "model", "input", "batch", "epochs", gap=2)
    table.columns[1].justify = "left"
    for row in rows:
        table.add_row(
            Text(row["name"], style="bold"), row["model"], _input(row), f"{row['batch']:,}", str(row["epochs"])
        )
    _print(table, "softless train --recipe NAME; --wide shows what each recipe reaches and costs.")


def _input(row: ListedRecipe) -> str:
    size, length = row["image_size"], row["length"]
    return f"{length:,} tokens" if size is None else units.picture(size if isinstance(size, list) else [size] * 2)


def _show_wide_recipes(rows: list[ListedRecipe]) -> None:
    from rich.text import Text

    out = console()
    for row in rows:
        epochs = units.counted(row["epochs"], "epoch")
        about = f"{row['model']}, {_input(row)}, batch {row['batch']:,}, {epochs}, {row['precision']}"
        out.print(Text.assemble((row["name"], "bold"), f": {about}"), soft_wrap=True)
        for key, text in (("expected", row["expected"]), ("cost", row["cost"]), ("command", row["command"])):
            out.print(Text(f"  {key:<9}{text}", style="dim"), soft_wrap=True)


def _print(table: Any, note: str) -> None:
    out = console()
    out.print(table)
    out.print()
    print_dim(note, out=out)
