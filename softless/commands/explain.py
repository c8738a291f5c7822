"""softless explain: what a call would run, and what it and softmax cost; or what a model consists of.

softless.bench.cost and softless.bench.anatomy define the numbers and the JSON.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softless.commands import arguments
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
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name from `softless list` or `softless list --models`.")
    ],
    shape: Annotated[
        Any,
        typer.Option(
            parser=arguments.four_numbers,
            metavar="B,H,N,D",
            help=f"Shape of q: batch, heads, tokens, dim. Default: {SHAPE}.",
            show_default=False,
        ),
    ] = None,
    keys: arguments.KeysOption = None,
    kv_heads: arguments.KvHeadsOption = None,
    causal: Annotated[bool, typer.Option("--causal", help="Explain the causal form.")] = False,
    dtype: Annotated[arguments.Dtype | None, typer.Option(help="Dtype of q, k and v. Default: float32.")] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where the tensors would be. Default: cpu.")
    ] = None,
    image_size: Annotated[
        Any,
        typer.Option(parser=arguments.image_size, metavar="HxW", help="Size of a model's images. Default: its own."),
    ] = None,
    option: arguments.NamedOptions = None,
    json: arguments.JsonOption = False,
) -> None:
    """Count one call and show it beside softmax, or count one model and show its stages."""
    import torch

    from softless.bench import anatomy, cost
    from softless.mechanisms import list_mechanisms
    from softless.models.table import CONFIGS

    texts = dict(option or [])
    of_calls = {"--shape": shape, "--keys": keys, "--kv-heads": kv_heads, "--causal": causal}
    of_calls |= {"--dtype": dtype, "--device": device}
    if name in CONFIGS:
        refuse(of_calls, f"'{name}' is a model, which takes --image-size and --option")
        model = anatomy.explain_model(name, arguments.model_options(name, texts), image_size, option_texts=texts)
        if json:
            emit_json(model)
        else:
            show_model(model)
        return
    refuse({"--image-size": image_size}, f"'{name}' is no model; a call takes --shape")
    known = list_mechanisms()
    if name not in known:
        close = did_you_mean(name, [*known, *CONFIGS]) or f"the mechanisms are {', '.join(known)}"
        raise ArgumentError(f"{name!r} is neither a mechanism nor a model of `softless list --models`: {close}")
    mechanism = arguments.make_mechanism(name, texts)
    batch, heads, tokens, dim = shape or arguments.four_numbers(SHAPE)
    size = cost.Shape(batch, heads, tokens, dim, keys or tokens, kv_heads or heads)
    number = getattr(torch, dtype or "float32")
    terms = cost.Terms(shape=size, is_causal=causal, dtype=number, device=device or "cpu")
    options = {option: arguments.option_text(value) for option, value in cost.option_values(mechanism).items()}
    call = cost.explain_call(mechanism, terms, options=options)
    if json:
        emit_json(call)
    else:
        show_call(call)


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


def _call_table(document: "CallExplanation") -> "Table":
    import torch

    name, costs = document["mechanism"], [document["cost"], document["softmax"]]
    costs = costs[:1] if name == "softmax" else costs
    table = plain_table(*("", name, "softmax")[: 1 + len(costs)])
    table.add_column("")
    explicit = document["cost"]["form"] == "explicit weights"
    weights = [units.size(c["weight_bytes"]) if c["form"] == "explicit weights" else "not formed" for c in costs]
    states = ["none" if cost["state_bytes"] is None else units.size(cost["state_bytes"]) for cost in costs]
    shape, itemsize = document["shape"], getattr(torch, document["dtype"]).itemsize
    kv_bytes = 2 * shape["batch"] * shape["kv_heads"] * shape["keys"] * shape["head_dim"] * itemsize
    table.add_row("FLOPs", *_flops(document)[: len(costs)], _flop_ratio(document) if len(costs) > 1 else "")
    table.add_row("memory floor", *[units.size(cost["floor_bytes"]) for cost in costs], "q, k, v read, o written")
    table.add_row("weight matrix", *weights, "" if explicit else f"{units.size(costs[0]['weight_bytes'])} if it were")
    table.add_row("state to carry", *states, f"softmax keeps k and v: {units.size(kv_bytes)}")
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


def _model_table(document: "ModelExplanation") -> "Table":
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
    size = f"{units.count(total['parameters'])} parameters, {units.macs(total['macs'])}"
    shares = " and ".join(units.percent(attention[name] / total[name]) for name in ("parameters", "macs"))
    verdict = f"{document['model']}: {size} at {units.picture(document['image_size'])}; attention has {shares} of them."
    if document["softmax_twin"] is None:
        return verdict
    twin = document["softmax_twin"]["macs"]
    return f"{verdict} With softmax instead: {units.macs(twin)}, {units.compare(twin / total['macs'], 'more', 'less')}."


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
