"""The mechanisms that a conversion tries, as a table: what each learns is fitted to the outputs of the softmax."""

from collections.abc import Sequence
from dataclasses import fields

from softless.conversion.layers import Layers
from softless.errors import ArgumentError
from softless.mechanisms import Mechanism, mechanism
from softless.mechanisms.nearfar import NearFar

LEARNED = {"ridge": "learned", "gain": "learned"}
CAUSAL = {
    "nearfar": mechanism("nearfar"),
    "linear": mechanism("linear", phi="affine_relu"),
    "regress": mechanism("regress", relative=False, **LEARNED),
}
ENCODER = {
    "inline": mechanism("inline", phi="affine_relu"),
    "linear": mechanism("linear", phi="affine_relu"),
    "regress": mechanism("regress", **LEARNED),
}
DEFAULT = {True: ("nearfar",), False: ("inline", "linear", "regress")}  # whether the model is causal
NEAR = 1 / 8  # of a sample is the window of nearfar, at most


def candidates_for(layers: Layers, wanted: Sequence[str | Mechanism] | None, tokens: int) -> dict[str, Mechanism]:
    """Return the mechanisms to try by the name that reports show; None means the default.

    A name that is in the table stands for what the table says, and any other name for the mechanism with its defaults.
    The window of nearfar is at most an eighth of the tokens of a sample: otherwise nothing would be far.
    """
    table = CAUSAL if layers.is_causal else ENCODER
    chosen: dict[str, Mechanism] = {}
    for one in DEFAULT[layers.is_causal] if wanted is None else wanted:
        made = one if isinstance(one, Mechanism) else table.get(one) or mechanism(one)
        if one == "nearfar" and (window := max(1, int(NEAR * tokens))) < NearFar.window:
            made = mechanism("nearfar", window=window)
        if made.family == "scored":
            raise ArgumentError(f"'{made.name}' compares every query with every key, and a candidate must be linear")
        layers.check(made)
        chosen[label(made)] = made
    if not chosen:
        raise ArgumentError("candidates is empty, and at least one mechanism is needed")
    return chosen


def label(made: Mechanism) -> str:
    """Return the name of a mechanism and the options that differ from its defaults: linear phi=affine_relu."""
    options = {field.name: getattr(made, field.name) for field in fields(made)}
    plain = {field.name: field.default for field in fields(made)}
    return " ".join([made.name, *(f"{name}={value}" for name, value in options.items() if value != plain[name])])
