"""What the words of a command line stand for."""

import typer

from softless.commands.manners import whole_number

LONGEST = 2**20


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
        raise typer.BadParameter(f"{text!r} is not name=value, such as phi=relu")
    return key, value


def lengths(text: str) -> tuple[int, ...]:
    """N,N,...: sorted, each once."""
    found = sorted({whole_number(part) for part in text.split(",")})
    if found[-1] > LONGEST:
        raise typer.BadParameter(f"{found[-1]} tokens is more than the {LONGEST} that are measured")
    return tuple(found)
