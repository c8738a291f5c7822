"""softless explain: what a call would run, and what it and softmax cost; or what a model consists of.

softless.bench.cost and softless.bench.anatomy define the numbers and the JSON.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softless.commands.arguments import (
    MOST,
    Dtype,
    four_numbers,
    image_size,
    key_value,
    make_mechanism,
    model_options,
    option_text,
)
from softless.commands.common import console, emit_json, plain_table, print_dim, refuse, reports_errors
from softless.errors import ArgumentError, did_you_mean
from softless.report import units

if TYPE_CHECKING:
    from rich.table import Table

    from softless.bench.anatomy import ModelExplanation
    from softless.bench.cost import CallExplanation

SHAPE = "1,8,4096,64"
SUMMARY = "What a call would run or a model consists of, and what it costs."
HELP = """Explain what a call would run: the form, FLOPs, memory floor and state, beside softmax.

Nothing is computed: the call runs on tensors that have a shape but no data. The mechanism `general` has
sim(q, k) = exp(q.k/sqrt(d)) here. For a model, show each stage: resolution, blocks, attention,
parameters, multiply-adds, and attention's share of both.

\b
$ softless explain inline --shape 1,8,4096,64
$ softless explain linear --option phi=relu --causal --dtype bfloat16
$ softless explain inline_swin_tiny --image-size 480x640
$ softless explain inline_swin_tiny --option mechanism=softmax
"""
FORMS = {
    "SDPA": "SDPA: PyTorch's fused kernel; weights are computed block by block and never stored",
    "explicit weights": "explicit weights: the whole N x M matrix is formed",
    "blocks": "blocks: queries are scored against the keys their pattern gives them; no N x M matrix is formed",
    "low rank": "low rank: queries and keys meet in a few tokens that stand for all; no N x M matrix is formed",
    "parallel state": "parallel state: one pass over k and v makes the state, one pass over q reads it",
    "chunked state": "chunked state: the state grows chunk by chunk, and each chunk sees its own past",
}


@reports_errors
def run(
    name: Annotated[str, typer.Argument(help="A name from `softless list` or `softless list --models`.")],
    shape: Annotated[
        Any,
        typer.Option(
            parser=four_numbers,
            metavar="B,H,N,D",
            help="Shape of q: batch, heads, tokens, dim.",
            show_default=SHAPE,
        ),
    ] = None,
    keys: Annotated[
        int | None, typer.Option(min=1, max=MOST, metavar="M", help="Tokens of k and v. Default: N.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MOST, metavar="G", help="Heads of k and v. Default: H.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Explain the causal form.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of q, k and v.", show_default="float32")] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where the tensors would be.", show_default="cpu")
    ] = None,
    image_size: Annotated[
        Any,
        typer.Option(
            parser=image_size, metavar="HxW", help="Size of a model's images.", show_default="the model's own"
        ),
    ] = None,
    option: Annotated[
        list[Any] | None,
        typer.Option(
            parser=key_value, metavar="NAME=VALUE", help="An option of the mechanism or the model; repeatable."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Count one call and show it beside softmax, or one model and show its stages."""
    from softless.bench import anatomy, cost
    from softless.models.table import CONFIGS

    texts = dict(option or [])
    of_calls = {"--shape": shape, "--keys": keys, "--kv-heads": kv_heads, "--causal": causal}
    if name in CONFIGS:
        refuse(
            of_calls | {"--dtype": dtype, "--device": device},
            f"'{name}' is a model, which takes --image-size and --option",
        )
        model = anatomy.explain_model(name, model_options(name, texts), image_size, option_texts=texts)
        if json:
            emit_json(model)
        else:
            show_model(model)
        return
    refuse({"--image-size": image_size}, f"'{name}' is no model; a call takes --shape")
    _check_name(name, CONFIGS)
    mechanism = make_mechanism(name, texts)
    batch, heads, tokens, dim = shape or four_numbers(SHAPE)
    call = cost.explain_call(
        mechanism,
        cost.Shape(batch, heads, tokens, dim, keys or tokens, kv_heads or heads),
        causal=causal,
        dtype=dtype or "float32",
        device=device or "cpu",
        options={option: option_text(value) for option, value in cost.option_values(mechanism).items()},
    )
    if json:
        emit_json(call)
    else:
        show_call(call)


def _check_name(name: str, models: Iterable[str]) -> None:
    from softless.mechanisms import list_mechanisms

    known = list_mechanisms()
    if name in known:
        return
    if close := did_you_mean(name, [*known, *models]):
        raise ArgumentError(f"{name!r} is neither a mechanism nor a model: {close}")
    raise ArgumentError(f"{name!r} is not one of {', '.join(known)}, nor a model of `softless list --models`")


def _page(
    name: str, about: str, facts: Sequence[tuple[str, str]], table: "Table", verdict: str, notes: Sequence[str]
) -> None:
    from rich.table import Table
    from rich.text import Text

    out, grid = console(), Table.grid(padding=(0, 2, 0, 0))
    for fact in facts:
        grid.add_row(*fact)
    out.print(Text.assemble((name, "bold"), about))
    if facts:
        out.print(grid)
    out.print()
    out.print(table)
    out.print()
    out.print(Text(verdict, style="bold"))
    print_dim(*notes, out=out)


def show_call(document: "CallExplanation") -> None:
    """Print what the call is, its costs beside those of softmax, and a verdict."""
    shape, facts = document["shape"], _options(document["options"])
    q = [shape["batch"], shape["heads"], shape["queries"], shape["head_dim"]]
    k = [shape["batch"], shape["kv_heads"], shape["keys"], shape["head_dim"]]
    causal = "causal, " if document["causal"] else ""
    facts.append(("call", f"q {q}, k and v {k}, {causal}{document['dtype']} on {document['device']}"))
    facts.append(("backend", f"{document['backend']}, chosen by auto: {document['backend_reason']}"))
    facts.append(("form", FORMS[document["cost"]["form"]]))
    about = f" ({document['family']}):  {document['formula']}"
    _page(document["mechanism"], about, facts, _call_table(document), _call_verdict(document), document["notes"])


def _call_table(document: "CallExplanation") -> Any:
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


def _call_verdict(document: "CallExplanation") -> str:
    name, (own, softmax) = document["mechanism"], _flops(document)
    if name == "softmax":
        return f"softmax: {softmax}."
    costs = f"{name}: {own}, softmax: {softmax}, {_flop_ratio(document)}."
    where, form = document["crossover_tokens"], " in the causal form" if document["causal"] else ""
    if where is None:
        return f"{costs} {name} never takes fewer FLOPs than softmax."
    return f"{costs} They cost the same at about {where:,} tokens{form}; beyond, {name} costs less."


def _flops(document: "CallExplanation") -> tuple[str, str]:
    own, softmax = document["cost"]["flops"], document["softmax"]["flops"]
    return units.flops(own, beside=softmax), units.flops(softmax, beside=own)


def _flop_ratio(document: "CallExplanation") -> str:
    return units.compare(document["ratio"]["flops"], "more", "less")


def _kv_bytes(document: "CallExplanation") -> int:
    import torch

    shape = document["shape"]
    numbers = 2 * shape["batch"] * shape["kv_heads"] * shape["keys"] * shape["head_dim"]
    return int(numbers * getattr(torch, document["dtype"]).itemsize)


def show_model(document: "ModelExplanation") -> None:
    """Print what the model is, its stages, and a verdict."""
    facts = _options(document["options"])
    own = document["image_size"] == document["native_size"]
    native = "" if own else f"; its own are {units.picture(document['native_size'])}"
    facts.append(("images", f"{units.picture(document['image_size'])}{native}"))
    if paper := document["paper"]:
        counts = f"{units.count(paper['parameters'])} parameters, {units.macs(paper['macs'])}"
        facts.append(("paper", f"{paper['top1']:.1f}% top-1 on ImageNet-1K; it prints {counts}"))
    notes = ["attn: attention's share of the parameters, and of the MACs", *document["notes"]]
    _page(document["model"], f"  {document['about']}", facts, _model_table(document), model_verdict(document), notes)


def _model_table(document: "ModelExplanation") -> Any:
    table = plain_table("stage", "tokens", "blocks", "dim", "heads", "params", "MACs", "attn", gap=1)
    table.add_column("attention", overflow="fold")
    for number, stage in enumerate(document["stages"], 1):
        table.add_row(
            str(number),
            units.picture(stage["grid"]),
            *(str(stage[name]) for name in ("blocks", "dim", "heads")),
            *_counts(stage["total"]),
            _shares(stage["attention"], stage["total"]),
            "\n".join(_kind(kind, stage["blocks"]) for kind in stage["kinds"]),
        )
    table.add_row("rest", "", "", "", "", *_counts(document["rest"]), "", "patches, norms, head")
    shares = _shares(document["attention"], document["total"])
    table.add_row("total", "", "", "", "", *_counts(document["total"]), shares, "", style="bold")
    return table


def model_verdict(document: "ModelExplanation") -> str:
    """Return the size, attention's part of it, and the size of the softmax twin."""
    total, attention = document["total"], document["attention"]
    parts = [attention[name] / total[name] for name in ("parameters", "macs")]
    says = f"{document['model']}: {units.count(total['parameters'])} parameters, {units.macs(total['macs'])} at "
    says += f"{units.picture(document['image_size'])}; attention has {units.percent(parts[0])} and "
    says += f"{units.percent(parts[1])} of them."
    if document["softmax_twin"] is None:
        return says
    twin = document["softmax_twin"]["macs"]
    return (
        f"{says} With softmax in its place: {units.macs(twin)}, {units.compare(twin / total['macs'], 'more', 'less')}."
    )


def _counts(count: dict[str, int]) -> tuple[str, str]:
    return units.count(count["parameters"]), units.macs(count["macs"]).removesuffix("MAC")


def _shares(part: dict[str, int], total: dict[str, int]) -> str:
    """Return shares such as 41/38%: of the parameters, and of the multiply-adds."""
    return "/".join(f"{100 * part[name] / total[name]:.0f}" for name in ("parameters", "macs")) + "%"


def _kind(kind: dict[str, Any], blocks: int) -> str:
    number = "" if kind["blocks"] == blocks else f"{kind['blocks']} "
    local = " + 3x3" if kind["local"] else ""
    return f"{number}{kind['mechanism']}{local}, {kind['sees']}"


def _options(options: Mapping[str, object]) -> list[tuple[str, str]]:
    texts = [f"{name}={value}" for name, value in options.items()]
    return [("options", "  ".join(texts))] if texts else []
