"""softless explain: what a call with these shapes would run, what it costs, and the same for softmax.

JSON (schema softless.explain/1), every size in bytes:

    {"schema", "mechanism", "formula", "family", "options": {option: value},
     "shape": {"batch", "heads", "queries", "head_dim", "keys", "kv_heads"},
     "causal", "dtype", "device", "backend", "backend_reason",
     "cost":    {"form", "flops", "floor_bytes", "weight_bytes", "state_bytes" | null},
     "softmax": the same,
     "ratio": {"flops"}          the mechanism's / softmax's
     "crossover_tokens" | null   from this N = M on it takes fewer FLOPs than softmax
     "notes": [sentence]}
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softless.commands import units
from softless.commands.manners import console, emit_json, polite, whole_number
from softless.commands.words import four_numbers, key_value

if TYPE_CHECKING:
    from softless.mechanisms import Mechanism

SCHEMA = "softless.explain/1"

FORMS = {
    "SDPA": "SDPA: PyTorch's fused kernel; weights are computed block by block and never stored",
    "explicit weights": "explicit weights: the whole N x M matrix is formed",
    "parallel state": "parallel state: one pass over k and v makes the state, one pass over q reads it",
    "chunked state": "chunked state: the state grows chunk by chunk, and each chunk sees its own past",
}


class Dtype(StrEnum):
    """Dtypes that `attention` takes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Device(StrEnum):
    """Where the tensors would be."""

    cpu = "cpu"
    cuda = "cuda"


SUMMARY = "What a call would run, and what it costs beside softmax."
HELP = """Explain what a call would run: the form, FLOPs, memory floor and state, beside softmax.

Nothing is computed: the call runs on tensors that have a shape and no data. The mechanism `general` has
sim(q, k) = exp(q.k/sqrt(d)) here.

\b
$ softless explain inline --shape 1,8,4096,64
$ softless explain linear --option phi=relu --causal --dtype bfloat16
"""


@polite
def run(
    mechanism: Annotated[str, typer.Argument(help="A name from `softless list`.", show_default=False)],
    shape: Annotated[
        Any, typer.Option(parser=four_numbers, metavar="B,H,N,D", help="Shape of q: batch, heads, tokens, dim.")
    ] = "1,8,4096,64",
    keys: Annotated[
        Any, typer.Option(parser=whole_number, metavar="M", help="Tokens of k and v, if not N.", show_default=False)
    ] = None,
    kv_heads: Annotated[
        Any, typer.Option(parser=whole_number, metavar="G", help="Heads of k and v, if fewer.", show_default=False)
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The causal form.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.float32,
    device: Annotated[Device, typer.Option(help="Where they would be.")] = Device.cpu,
    option: Annotated[
        list[Any] | None,
        typer.Option(parser=key_value, metavar="NAME=VALUE", help="An option of the mechanism; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Count one call and show it beside softmax."""
    from softless.commands.mechanism import make
    from softless.probes.cost import Shape

    batch, heads, tokens, dim = shape
    size = Shape(batch, heads, tokens, dim, keys or tokens, kv_heads or heads)
    document = _document(make(mechanism, dict(option or [])), size, causal, dtype.value, device.value)
    if json:
        emit_json(document)
    else:
        _show(document)


def _document(made: "Mechanism", shape: Any, causal: bool, dtype: str, device: str) -> dict[str, Any]:
    from dataclasses import asdict, fields

    import torch

    from softless.mechanisms import mechanism
    from softless.probes.cost import chosen, cost, crossover

    call = {"is_causal": causal, "dtype": getattr(torch, dtype), "device": device}
    backend, reason = chosen(made, shape, **call)
    own, softmax = cost(made, shape, **call), cost(mechanism("softmax"), shape, **call)
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    return {
        "schema": SCHEMA,
        "mechanism": made.name,
        "formula": made.formula,
        "family": made.family,
        "options": {name: "exp(q.k/sqrt(d))" if callable(value) else value for name, value in values.items()},
        "shape": asdict(shape),
        "causal": causal,
        "dtype": dtype,
        "device": device,
        "backend": backend,
        "backend_reason": reason,
        "cost": asdict(own),
        "softmax": asdict(softmax),
        "ratio": {"flops": own.flops / softmax.flops},
        "crossover_tokens": crossover(made, shape, is_causal=causal),
        "notes": _notes(made, causal, dtype, device),
    }


def _notes(made: "Mechanism", causal: bool, dtype: str, device: str) -> list[str]:
    notes = ["FLOPs are those of matrix products; exponentials and sums are not counted."]
    if causal:
        notes.append("Causal softmax counts the whole square; a fused kernel skips up to half of it.")
    if dtype in ("bfloat16", "float16") and not (made.fused_on_gpu and device == "cuda"):
        notes.append(f"{made.name} computes {dtype} in float32 and rounds once, at the end.")
    if device == "cuda":
        notes.append("On CUDA: untested here.")
    return notes


def _show(document: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    out, shape = console(), document["shape"]
    out.print(Text.assemble((document["mechanism"], "bold"), f" ({document['family']}):  {document['formula']}"))
    facts = Table.grid(padding=(0, 2, 0, 0))
    if document["options"]:
        facts.add_row("options", "  ".join(f"{name}={value}" for name, value in document["options"].items()))
    q = [shape["batch"], shape["heads"], shape["queries"], shape["head_dim"]]
    k = [shape["batch"], shape["kv_heads"], shape["keys"], shape["head_dim"]]
    causal = "causal, " if document["causal"] else ""
    facts.add_row("call", f"q {q}, k and v {k}, {causal}{document['dtype']} on {document['device']}")
    facts.add_row("backend", f"{document['backend']}, chosen by auto: {document['backend_reason']}")
    facts.add_row("form", FORMS[document["cost"]["form"]])
    out.print(facts)
    out.print()
    out.print(_table(document))
    out.print()
    out.print(Text(_verdict(document), style="bold"))
    for note in document["notes"]:
        out.print(Text(note, style="dim"))


def _table(document: dict[str, Any]) -> Any:
    from rich.table import Table

    name, costs = document["mechanism"], [document["cost"], document["softmax"]]
    costs = costs[:1] if name == "softmax" else costs
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for heading in ("", name, "softmax")[: 1 + len(costs)]:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("")
    formed = [cost["form"] == "explicit weights" for cost in costs]
    weights = [
        units.size(cost["weight_bytes"]) if yes else "not formed" for cost, yes in zip(costs, formed, strict=True)
    ]
    states = ["none" if cost["state_bytes"] is None else units.size(cost["state_bytes"]) for cost in costs]
    table.add_row("FLOPs", *_flops(document)[: len(costs)], _flop_ratio(document) if len(costs) > 1 else "")
    table.add_row("memory floor", *[units.size(cost["floor_bytes"]) for cost in costs], "q, k, v read, o written")
    table.add_row("weight matrix", *weights, "" if formed[0] else f"{units.size(costs[0]['weight_bytes'])} if it were")
    table.add_row("state to carry", *states, f"softmax keeps k and v: {units.size(_kv_bytes(document))}")
    return table


def _verdict(document: dict[str, Any]) -> str:
    name, (own, softmax) = document["mechanism"], _flops(document)
    if name == "softmax":
        return f"softmax: {softmax}."
    costs = f"{name}: {own}, softmax: {softmax}, {_flop_ratio(document)}."
    where, form = document["crossover_tokens"], " in the causal form" if document["causal"] else ""
    if where is None:
        return f"{costs} {name} never takes fewer FLOPs than softmax."
    return f"{costs} They cost the same at about {where:,} tokens{form}; beyond, {name} costs less."


def _flops(document: dict[str, Any]) -> tuple[str, str]:
    own, softmax = document["cost"]["flops"], document["softmax"]["flops"]
    return units.flops(own, beside=softmax), units.flops(softmax, beside=own)


def _flop_ratio(document: dict[str, Any]) -> str:
    return units.compare(document["ratio"]["flops"], "more", "less")


def _kv_bytes(document: dict[str, Any]) -> int:
    import torch

    shape = document["shape"]
    numbers = 2 * shape["batch"] * shape["kv_heads"] * shape["keys"] * shape["head_dim"]
    return int(numbers * getattr(torch, document["dtype"]).itemsize)
