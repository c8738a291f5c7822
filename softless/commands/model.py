"""A model from the words of a command line."""

from typing import Any

from softless.commands.common import LONGEST_NUMBER
from softless.errors import ArgumentError, did_you_mean
from softless.models import customize
from softless.models.table import CONFIGS, Config

OPTIONS = ("mechanism", "local", "window", "pattern")
SWITCH = {"true": True, "false": False}


def is_model(name: str) -> bool:
    return name in CONFIGS


def model_options(name: str, words: dict[str, str]) -> dict[str, Any]:
    """Arguments of `create_model` from name=value; what they cannot be is refused here, before any work."""
    options = {option: _value(name, option, text) for option, text in words.items()}
    settled(name, options)
    return options


def settled(name: str, options: dict[str, Any]) -> Config:
    """The configuration that these options make; a name or an option that means nothing raises."""
    return customize(name, **options)


def _value(name: str, option: str, text: str) -> object:
    if option not in OPTIONS:
        hint = did_you_mean(option, OPTIONS) or f"it takes {', '.join(OPTIONS)}"
        raise ArgumentError(f"model '{name}' has no option {option!r} here: {hint}")
    if option == "local":
        if text.lower() not in SWITCH:
            raise ArgumentError(f"option local is {text!r} and must be true or false")
        return SWITCH[text.lower()]
    if option == "window":
        sides = [_side(part) for part in text.split(",")]
        return sides if len(sides) > 1 else sides[0]
    return text


def _side(text: str) -> int | None:
    """A window's side, or none for the whole picture."""
    if text.strip().lower() == "none":
        return None
    if not (text.strip().isascii() and text.strip().isdecimal() and len(text) <= LONGEST_NUMBER):
        raise ArgumentError(f"option window is {text!r} and must be a number of tokens, or none for the whole picture")
    return int(text)
