"""softless explain: what a call would run, what it costs, and the same for softmax; or what a model is made of.

JSON of a call (schema softless.explain/1), every size in bytes:

    {"schema", "mechanism", "formula", "family", "options": {option: value},
     "shape": {"batch", "heads", "queries", "head_dim", "keys", "kv_heads"},
     "causal", "dtype", "device", "backend", "backend_reason",
     "cost":    {"form", "flops", "floor_bytes", "weight_bytes", "state_bytes" | null},
     "softmax": the same,
     "ratio": {"flops"}          the mechanism's / softmax's
     "crossover_tokens" | null   from this N = M on it takes fewer FLOPs than softmax
     "notes": [sentence]}

JSON of a model (schema softless.explain-model/1), for one image; a count is {"parameters", "macs"}:

    {"schema", "model", "family", "about", "options": {option: value},
     "image_size": [height, width], "native_size": [height, width],
     "stages": [{"grid": [height, width], "blocks", "dim", "heads",
                 "kinds": [{"blocks", "mechanism", "local", "sees"}],
                 "total": count, "attention": count}],
     "rest": count, "attention": count, "total": count,
     "softmax_twin": count | null          null where it has no other attention
     "paper": {"top1", "parameters", "macs"} | null      null where options make it another model
     "notes": [sentence]}
"""

from enum import StrEnum
from typing import Annotated, Any

import typer

from softless.commands.arguments import four_numbers, image_size, key_value
from softless.commands.common import emit_json, refuse, reports_errors, whole_number
from softless.errors import ArgumentError, did_you_mean


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


SHAPE = "1,8,4096,64"
SUMMARY = "What a call would run or a model is, and what it costs."
HELP = """Explain what a call would run: the form, FLOPs, memory floor and state, beside softmax.

Nothing is computed: the call runs on tensors that have a shape and no data. The mechanism `general` has
sim(q, k) = exp(q.k/sqrt(d)) here. Of a model, it shows each stage: resolution, blocks, attention,
parameters, multiply-adds, and attention's share of both.

\b
$ softless explain inline --shape 1,8,4096,64
$ softless explain linear --option phi=relu --causal --dtype bfloat16
$ softless explain inline_swin_tiny --image-size 480x640
$ softless explain inline_swin_tiny --option mechanism=softmax
"""


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
        Any, typer.Option(parser=whole_number, metavar="M", help="Tokens of k and v, if not N.", show_default=False)
    ] = None,
    kv_heads: Annotated[
        Any, typer.Option(parser=whole_number, metavar="G", help="Heads of k and v, if fewer.", show_default=False)
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The causal form.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Of q, k and v.", show_default="float32")] = None,
    device: Annotated[Device | None, typer.Option(help="Where they would be.", show_default="cpu")] = None,
    image_size: Annotated[
        Any, typer.Option(parser=image_size, metavar="HxW", help="A model's images, if not its own.")
    ] = None,
    option: Annotated[
        list[Any] | None,
        typer.Option(
            parser=key_value, metavar="NAME=VALUE", help="An option of the mechanism or the model; repeatable."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Count one call and show it beside softmax, or one model and show its stages."""
    from softless.commands.model import is_model

    options = dict(option or [])
    if is_model(name):
        from softless.commands import explain_model

        given = {"--shape": shape, "--keys": keys, "--kv-heads": kv_heads, "--causal": causal}
        given |= {"--dtype": dtype, "--device": device}
        refuse(given, f"'{name}' is a model, which takes --image-size and --option")
        document, show = explain_model.document(name, image_size, options), explain_model.show
    else:
        from softless.commands import explain_call

        refuse({"--image-size": image_size}, f"'{name}' is no model; a call takes --shape")
        size = (shape or four_numbers(SHAPE), keys, kv_heads)
        call = causal, (dtype or Dtype.float32).value, (device or Device.cpu).value
        document, show = explain_call.document(_mechanism(name, options), _shape(*size), *call), explain_call.show
    if json:
        emit_json(document)
    else:
        show(document)


def _mechanism(name: str, options: dict[str, str]) -> Any:
    from softless.commands.mechanism import make
    from softless.mechanisms import list_mechanisms
    from softless.models.table import CONFIGS

    if name not in list_mechanisms():
        if close := did_you_mean(name, [*list_mechanisms(), *CONFIGS]):
            raise ArgumentError(f"{name!r} is neither a mechanism nor a model: {close}")
        known = ", ".join(list_mechanisms())
        raise ArgumentError(f"{name!r} is not one of {known}, nor a model of `softless list --models`")
    return make(name, options)


def _shape(shape: tuple[int, ...], keys: int | None, kv_heads: int | None) -> Any:
    from softless.bench.cost import Shape

    batch, heads, tokens, dim = shape
    return Shape(batch, heads, tokens, dim, keys or tokens, kv_heads or heads)
