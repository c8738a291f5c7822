"""A mechanism from the words of a command line."""

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from softless.errors import ArgumentError
from softless.mechanisms import MECHANISMS, Mechanism, mechanism

if TYPE_CHECKING:
    from torch import Tensor

WORDS: dict[str, object] = {"true": True, "false": False, "none": None}


def make(name: str, options: dict[str, str]) -> Mechanism:
    """The mechanism `name`; `general` has sim(q, k) = exp(q.k/sqrt(d)), for want of functions on a command line."""
    if name == "general":
        if options:
            raise ArgumentError(
                f"general takes a function, sim, and not {_given(options)}: "
                "on the command line it is always exp(q.k/sqrt(d))"
            )
        return mechanism("general", sim=exponential)
    if name not in MECHANISMS:
        return mechanism(name)
    defaults = {field.name: field.default for field in fields(MECHANISMS[name])}
    return mechanism(name, **{key: _value(key, text, defaults.get(key)) for key, text in options.items()})


def word(value: object) -> object:
    """An option's value as a command line has it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def exponential(q: "Tensor", k: "Tensor") -> "Tensor":
    """exp(q.k/sqrt(d)), which makes general attention softmax attention."""
    return (q @ k.mT * q.shape[-1] ** -0.5).exp()


def _value(option: str, text: str, default: object) -> object:
    """true, false, none, a number, or the word itself, by what the option's default is."""
    if isinstance(default, str):
        return text
    if isinstance(default, tuple):
        return _numbers(option, text)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if isinstance(default, bool):
        raise ArgumentError(f"option {option} is {text!r} and must be true or false")
    for number in (int, float):
        try:
            value = number(text)
        except ValueError:
            continue
        if math.isnan(value):
            break
        return value
    if isinstance(default, int | float):
        raise ArgumentError(f"option {option} is {text!r} and must be a number")
    return text


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(f"option {option} is {text!r} and must be whole numbers such as 1,9,36") from None


def _given(options: dict[str, str]) -> str:
    return ", ".join(f"{key}={text}" for key, text in options.items())
