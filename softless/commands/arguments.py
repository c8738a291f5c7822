"""What the words of a command line stand for."""

from collections.abc import Callable
from enum import StrEnum
from fnmatch import fnmatchcase

import typer

from softless.commands.common import whole_number

LONGEST = 2**20
LARGEST_SIDE = 2**14
MOST_LAYERS = 10_000
MOST_PROCESSES = 256


class Where(StrEnum):
    """Devices to run on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class OnBad(StrEnum):
    """What to do about an image that cannot be decoded."""

    fail = "fail"
    skip = "skip"


def from_zero(text: str) -> int:
    """A number that may be none."""
    return whole_number(text, least=0)


def processes(text: str) -> int:
    """So many beside this one."""
    number = from_zero(text)
    if number > MOST_PROCESSES:
        raise typer.BadParameter(f"{number} is more than {MOST_PROCESSES} processes")
    return number


def four_numbers(text: str) -> tuple[int, ...]:
    """B,H,N,D."""
    parts = text.split(",")
    if len(parts) != 4:
        raise typer.BadParameter(f"{text!r} is not four whole numbers B,H,N,D such as 1,8,4096,64")
    return tuple(whole_number(part) for part in parts)


def key_value(text: str) -> tuple[str, str]:
    """name=value."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r} is not name=value")
    return key, value


def lengths(text: str) -> tuple[int, ...]:
    """N,N,...: sorted, each once."""
    found = sorted({whole_number(part) for part in text.split(",")})
    if found[-1] > LONGEST:
        raise typer.BadParameter(f"{found[-1]} tokens is more than the {LONGEST} that are measured")
    return tuple(found)


def image_size(text: str) -> tuple[int, int]:
    """HxW, or one number for both sides."""
    parts = text.lower().split("x")
    if len(parts) not in (1, 2):
        raise typer.BadParameter(f"{text!r} is not an image size such as 224 or 480x640")
    height, width = (whole_number(part) for part in (parts[0], parts[-1]))
    if max(height, width) > LARGEST_SIDE:
        raise typer.BadParameter(f"{text!r} is more than the {LARGEST_SIDE} pixels a side that are counted")
    return height, width


def image_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """HxW,HxW,...: the smallest first, each once."""
    return tuple(sorted({image_size(part) for part in text.split(",")}, key=lambda size: (size[0] * size[1], size)))


def windows(text: str) -> tuple[int | None, ...]:
    """W,W,...: sorted, each once; none, the whole picture, last."""
    found = {None if part.strip().lower() == "none" else whole_number(part) for part in text.split(",")}
    return tuple(sorted(found, key=lambda side: (side is None, side or 0)))


def layer_choice(text: str) -> Callable[[int, str], bool]:
    """LAYER,LAYER,...: numbers from 0, spans such as 0-3, or names, in which * stands for anything."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise typer.BadParameter(f"{text!r} is not a list of layers such as 0,5 or 0-3 or blocks.0.attn")
    numbers: set[int] = set()
    for part in parts:
        low, dash, high = part.partition("-")
        if low.isdecimal() and (high.isdecimal() or not dash):
            numbers |= set(range(whole_number(low, 0), min(whole_number(high if dash else low, 0), MOST_LAYERS) + 1))
    return lambda at, name: at in numbers or any(fnmatchcase(name, part) for part in parts)
