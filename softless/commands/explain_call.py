"""What `softless explain` says of a call: the form it takes, its FLOPs and bytes, and the same for softmax."""

from dataclasses import asdict, fields
from typing import Any

import torch

from softless.bench.cost import Shape, chosen, cost, crossover
from softless.commands.layout import page, plain_table
from softless.commands.mechanism import word
from softless.mechanisms import Mechanism, mechanism
from softless.report import units

SCHEMA = "softless.explain/1"

FORMS = {
    "SDPA": "SDPA: PyTorch's fused kernel; weights are computed block by block and never stored",
    "explicit weights": "explicit weights: the whole N x M matrix is formed",
    "blocks": "blocks: queries are scored against the keys their pattern gives them; no N x M matrix is formed",
    "low rank": "low rank: queries and keys meet in a few tokens that stand for all; no N x M matrix is formed",
    "parallel state": "parallel state: one pass over k and v makes the state, one pass over q reads it",
    "chunked state": "chunked state: the state grows chunk by chunk, and each chunk sees its own past",
}


def document(made: Mechanism, shape: Shape, causal: bool, dtype: str, device: str) -> dict[str, Any]:
    """Count one call and the same of softmax; what has a causal form alone is explained in it."""
    causal = causal or made.lacks(is_causal=False) is not None
    call: dict[str, Any] = {"is_causal": causal, "dtype": getattr(torch, dtype), "device": device}
    backend, reason = chosen(made, shape, **call)
    untested = chosen(made, shape, **call, ask=True)[0] != backend
    own, softmax = cost(made, shape, **call), cost(mechanism("softmax"), shape, **call)
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    return {
        "schema": SCHEMA,
        "mechanism": made.name,
        "formula": made.formula,
        "family": made.family,
        "options": {name: "exp(q.k/sqrt(d))" if callable(value) else word(value) for name, value in values.items()},
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
        "notes": _notes(made, causal, dtype, device, backend, untested),
    }


def _notes(made: Mechanism, causal: bool, dtype: str, device: str, backend: str, untested: bool) -> list[str]:
    notes = ["FLOPs are those of matrix products; exponentials and sums are not counted."]
    if causal:
        notes.append("Causal softmax counts the whole square; a fused kernel skips up to half of it.")
    as_it_is = backend == "triton" or (made.fused_on_gpu and device == "cuda")
    if dtype in ("bfloat16", "float16") and not as_it_is:
        notes.append(f"{made.name} computes {dtype} in float32 and rounds once, at the end.")
    if untested:
        notes.append("The kernels are untested here: backend='triton' runs them.")
    return notes


def show(document: dict[str, Any]) -> None:
    """What it is, the table beside softmax, a verdict."""
    shape, facts = document["shape"], []
    if document["options"]:
        facts.append(("options", "  ".join(f"{name}={value}" for name, value in document["options"].items())))
    q = [shape["batch"], shape["heads"], shape["queries"], shape["head_dim"]]
    k = [shape["batch"], shape["kv_heads"], shape["keys"], shape["head_dim"]]
    causal = "causal, " if document["causal"] else ""
    facts.append(("call", f"q {q}, k and v {k}, {causal}{document['dtype']} on {document['device']}"))
    facts.append(("backend", f"{document['backend']}, chosen by auto: {document['backend_reason']}"))
    facts.append(("form", FORMS[document["cost"]["form"]]))
    about = f" ({document['family']}):  {document['formula']}"
    page(document["mechanism"], about, facts, _table(document), _verdict(document), document["notes"])


def _table(document: dict[str, Any]) -> Any:
    name, costs = document["mechanism"], [document["cost"], document["softmax"]]
    costs = costs[:1] if name == "softmax" else costs
    table = plain_table(*("", name, "softmax")[: 1 + len(costs)])
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
    shape = document["shape"]
    numbers = 2 * shape["batch"] * shape["kv_heads"] * shape["keys"] * shape["head_dim"]
    return int(numbers * getattr(torch, document["dtype"]).itemsize)
