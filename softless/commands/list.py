"""softless list: every mechanism, its formula, cost, abilities, options and paper; or every model and its size.

JSON (schema softless.list/1):

    {"schema", "mechanisms": [{"name", "family", "formula", "cost", "paper", "causal", "state", "bias", "grid",
                               "options": {option: default}}]}

With --models (schema softless.list-models/1), parameters and multiply-adds as they are counted:

    {"schema", "models": [{"name", "family", "parameters", "macs", "image_size": [height, width],
                           "blocks", "softmax_blocks",
                           "paper": {"top1", "parameters", "macs"}}]}
"""

from typing import Annotated, Any

import typer

from softless.commands.manners import console, emit_json, polite

COSTS = "Cost: N tokens, d channels of a head, m stand-ins or features, w window, l stride, r rounds."
SCHEMA, MODELS_SCHEMA = "softless.list/1", "softless.list-models/1"
SUMMARY = "Every mechanism or model: what it is, its options or size."
HELP = """List the mechanisms: paper, family, cost, formula, abilities, options with their defaults.

\b
cost    N tokens, d channels of a head, m stand-ins or features, w window,
        l stride, r rounds
causal  has a causal form
state   carries a state of fixed size: prefill, decode, streaming
bias    takes a bias on its scores
grid    reads tokens as a picture, if given its height and width

With --models, the vision backbones: parameters, multiply-adds, image size, accuracy in the paper.
"""


@polite
def run(
    models: Annotated[bool, typer.Option("--models", help="The models in place of the mechanisms.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show the table of mechanisms or of models."""
    rows = _models() if models else [_row(name) for name in _names()]
    if json:
        emit_json({"schema": MODELS_SCHEMA, "models": rows} if models else {"schema": SCHEMA, "mechanisms": rows})
    elif models:
        _show_models(rows)
    else:
        _show(rows)


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
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("mechanism\npaper", min_width=26, max_width=26)
    table.add_column("family\ncost", no_wrap=True)
    table.add_column("formula\nabilities, options")
    for row in rows:
        abilities = "  ".join(name for name in ("causal", "state", "bias", "grid") if row[name])
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
    from softless.mechanisms import resolve
    from softless.models.table import CONFIGS
    from softless.probes.published import FACTS

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

    from softless.commands import units

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
