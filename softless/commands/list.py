"""softless list: every mechanism, its formula, what it can do and the options it takes.

JSON (schema softless.list/1):

    {"schema", "mechanisms": [{"name", "family", "formula", "causal", "state", "bias",
                               "options": {option: default}}]}
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands.manners import console, emit_json, polite

if TYPE_CHECKING:
    from softless.mechanisms import Mechanism

SCHEMA = "softless.list/1"
SUMMARY = "Every mechanism: formula, abilities, options."
HELP = """List the mechanisms: formula, abilities, options with their defaults.

\b
causal  has a causal form
state   carries a state of fixed size: prefill, decode, streaming
bias    takes a bias on its scores
"""


@polite
def run(json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """Show the table of mechanisms."""
    rows = [_row(name) for name in _names()]
    if json:
        emit_json({"schema": SCHEMA, "mechanisms": rows})
    else:
        _show(rows)


def _names() -> list[str]:
    from softless.mechanisms import list_mechanisms

    return list_mechanisms()


def _row(name: str) -> dict[str, Any]:
    from dataclasses import fields

    from softless.commands.mechanism import make
    from softless.mechanisms import MECHANISMS

    cls = MECHANISMS[name]
    return {
        "name": name,
        "family": cls.family,
        "formula": cls.formula,
        "causal": _has_causal_form(make(name, {})),
        "state": cls.carries_state,
        "bias": cls.takes_bias,
        "options": {field.name: field.default for field in fields(cls)},
    }


def _has_causal_form(made: "Mechanism") -> bool:
    """Asked, not assumed: one causal call on tensors without data."""
    from softless.errors import UnsupportedError
    from softless.probes.cost import Shape, flops

    try:
        flops(made, Shape(batch=1, heads=1, queries=2, head_dim=2, keys=2, kv_heads=1), is_causal=True)
    except UnsupportedError:
        return False
    return True


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in ("mechanism", "family", "formula and options"):
        table.add_column(column, no_wrap=column != "formula and options")
    for row in rows:
        abilities = "  ".join(name for name in ("causal", "state", "bias") if row[name])
        options = "  ".join(f"{name}={default}" for name, default in row["options"].items())
        options = f"needs {', '.join(row['options'])}, a function" if row["name"] == "general" else options
        text = Text(row["formula"])
        text.append(f"\n{abilities}", style="green")
        if options:
            text.append(f"\n{options}", style="dim")
        table.add_row(Text(row["name"], style="bold"), row["family"], text)
    out.print(table)
