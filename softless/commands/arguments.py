"""Read the arguments of a command line: numbers, lists, image sizes, and the options of mechanisms and models."""

import math
from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softless.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from softless.mechanisms import Mechanism

MOST = 10**9  # of anything that a command line counts
LONGEST_NUMBER = 15  # digits: no product of a few such numbers is mistaken for infinity
LONGEST = 2**20
LARGEST_SIDE = 2**14
MOST_LAYERS = 10_000
MOST_PROCESSES = 256
MODEL_OPTIONS = ("mechanism", "local", "window", "pattern")
CONSTANTS: dict[str, object] = {"true": True, "false": False, "none": None}

Where = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Backend = Literal["auto", "reference", "torch", "triton"]
OnBad = Literal["fail", "skip"]  # the answer to an image that cannot be decoded


def whole_number(text: str, least: int = 1) -> int:
    """Read one number of a list; an option that is a single number uses typer's min and max."""
    digits = text.strip()
    if not (_is_number(digits) and int(digits) >= least):
        raise typer.BadParameter(f"{text!r} is not a whole number from {least} to {10**LONGEST_NUMBER - 1}")
    return int(digits)


def four_numbers(text: str) -> tuple[int, ...]:
    """Read B,H,N,D."""
    parts = text.split(",")
    if len(parts) != 4:
        raise typer.BadParameter(f"{text!r} is not four whole numbers B,H,N,D such as 1,8,4096,64")
    return tuple(whole_number(part) for part in parts)


def key_value(text: str) -> tuple[str, str]:
    """Read name=value."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r} is not name=value")
    return key, value


def lengths(text: str) -> tuple[int, ...]:
    """Read N,N,...; return each length once, sorted."""
    tokens = sorted({whole_number(part) for part in text.split(",")})
    if tokens[-1] > LONGEST:
        raise typer.BadParameter(f"{tokens[-1]} tokens is more than {LONGEST}, the longest that is measured")
    return tuple(tokens)


def image_size(text: str) -> tuple[int, int]:
    """Read HxW, or one number for both sides."""
    parts = text.lower().split("x")
    if len(parts) not in (1, 2):
        raise typer.BadParameter(f"{text!r} is not an image size such as 224 or 480x640")
    height, width = (whole_number(part) for part in (parts[0], parts[-1]))
    if max(height, width) > LARGEST_SIDE:
        raise typer.BadParameter(f"{text!r} has a side of more than {LARGEST_SIDE} pixels")
    return height, width


def image_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Read HxW,HxW,...; return each size once, the smallest first."""
    return tuple(sorted({image_size(part) for part in text.split(",")}, key=lambda size: (size[0] * size[1], size)))


def windows(text: str) -> tuple[int | None, ...]:
    """Read W,W,...; return each window once, sorted; none, for no windows, comes last."""
    sides = {None if part.strip().lower() == "none" else whole_number(part) for part in text.split(",")}
    return tuple(sorted(sides, key=lambda side: (side is None, side or 0)))


def layer_choice(text: str) -> Callable[[int, str], bool]:
    """Read LAYER,LAYER,...: numbers from 0, spans such as 0-3, or names, in which * stands for anything."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise typer.BadParameter(f"{text!r} is not a list of layers such as 0,5 or 0-3 or blocks.0.attn")
    numbers: set[int] = set()
    for part in parts:
        low, dash, high = part.partition("-")
        if low.isdecimal() and (high.isdecimal() or not dash):
            numbers |= set(range(whole_number(low, 0), min(whole_number(high if dash else low, 0), MOST_LAYERS) + 1))
    return lambda at, name: at in numbers or any(fnmatchcase(name, part) for part in parts)


KeysOption = Annotated[int | None, typer.Option(min=1, max=MOST, metavar="M", help="Tokens of k and v. Default: N.")]
KvHeadsOption = Annotated[int | None, typer.Option(min=1, max=MOST, metavar="G", help="Heads of k and v. Default: H.")]
NamedOptions = Annotated[
    list[Any] | None,
    typer.Option(parser=key_value, metavar="NAME=VALUE", help="An option of the mechanism or model; repeatable."),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Dtype of the tensors. Default: bfloat16 on cuda, float32 on a CPU.", show_default=False),
]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.html", help="Also draw the result as a page.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def make_mechanism(name: str, options: dict[str, str]) -> "Mechanism":
    """Make a mechanism from its name and the texts of its options.

    `general` takes a function, which a command line cannot give: here it is always sim(q, k) = exp(q.k/sqrt(d)).
    """
    from softless.mechanisms import MECHANISMS, NUMBERS, mechanism

    if name == "general":
        if options:
            texts = ", ".join(f"{key}={text}" for key, text in options.items())
            raise ArgumentError(
                f"general takes a function, sim, and not {texts}: on the command line it is always exp(q.k/sqrt(d))"
            )
        return mechanism("general", sim=exponential)
    if name not in MECHANISMS:
        return mechanism(name)
    defaults = {field.name: field.default for field in fields(MECHANISMS[name])}
    return mechanism(
        name,
        **{key: _option(key, text, defaults.get(key), is_number=key in NUMBERS[name]) for key, text in options.items()},
    )


def exponential(q: "Tensor", k: "Tensor") -> "Tensor":
    """exp(q.k/sqrt(d)), which makes general attention softmax attention."""
    return (q @ k.mT * q.shape[-1] ** -0.5).exp()


def option_text(value: object) -> object:
    """Return an option's value as it is typed on a command line: tuples as 1,9,36."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _option(option: str, text: str, default: object, *, is_number: bool) -> object:
    """Read true, false, none, a number or a text, depending on the type of the option's default."""
    if isinstance(default, str):
        return text
    if isinstance(default, tuple):
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ArgumentError(f"option {option} is {text!r} and must be whole numbers such as 1,9,36") from None
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if isinstance(default, bool):
        raise ArgumentError(f"option {option} is {text!r} and must be true or false")
    for number in (int, float):
        try:
            value = number(text)
        except ValueError:
            continue
        if not math.isnan(value):
            return value
    if is_number:
        raise ArgumentError(f"option {option} is {text!r} and must be a number")
    return text


def model_options(name: str, texts: dict[str, str]) -> dict[str, Any]:
    """Read the options of `create_model` from their texts; refuse an unknown model and options it cannot have."""
    from softless.models import customize

    options: dict[str, Any] = {option: _model_option(name, option, text) for option, text in texts.items()}
    customize(name, **options)
    return options


def _model_option(name: str, option: str, text: str) -> object:
    if option not in MODEL_OPTIONS:
        hint = did_you_mean(option, MODEL_OPTIONS) or f"it takes {', '.join(MODEL_OPTIONS)}"
        raise ArgumentError(f"model '{name}' has no option {option!r} here: {hint}")
    if option == "local":
        if text.lower() not in ("true", "false"):
            raise ArgumentError(f"option local is {text!r} and must be true or false")
        return text.lower() == "true"
    if option == "window":
        sides = [_window_side(part.strip()) for part in text.split(",")]
        return sides if len(sides) > 1 else sides[0]
    return text


def _window_side(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not _is_number(text):
        raise ArgumentError(f"option window is {text!r} and must be a number of tokens, or none for the whole picture")
    return int(text)


def _is_number(digits: str) -> bool:
    return digits.isascii() and digits.isdecimal() and len(digits) <= LONGEST_NUMBER
