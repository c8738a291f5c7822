"""The mechanisms that a conversion tries, as a table: what each learns is fitted to the outputs of the softmax."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from softless.conversion.layers import Layers
from softless.conversion.stand_ins import LOCAL, Candidate
from softless.errors import ArgumentError, shown
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
TEXT = "nearfar", *ENCODER
PICTURES = tuple(name + LOCAL for name in ENCODER)
NEAR = 1 / 8  # of a sample is the window of nearfar, at most


def default(layers: Layers) -> tuple[str, ...]:
    """Return the names of the candidates that are tried if none is given."""
    if layers.is_causal:
        return ("nearfar",)
    return PICTURES if layers.has_residual else TEXT


def candidates_for(layers: Layers, wanted: Sequence[str | Mechanism] | None, tokens: int) -> dict[str, Candidate]:
    """Return the candidates by the name that reports show; None means the default.

    A name that is in the table stands for what the table says, and any other name for the mechanism with its defaults;
    +local after a name adds the local residual. The window of nearfar is at most an eighth of the tokens of a sample:
    otherwise nothing would be far.
    """
    chosen: dict[str, Candidate] = {}
    for one in default(layers) if wanted is None else _listed(wanted):
        candidate = Candidate(one) if isinstance(one, Mechanism) else _named(one, layers, tokens)
        if candidate.mechanism.family == "scored":
            raise ArgumentError(
                f"'{candidate.mechanism.name}' compares every query with every key, and a candidate must be linear"
            )
        layers.check(candidate)
        chosen[candidate.label] = candidate
    if not chosen:
        raise ArgumentError("candidates is empty, and at least one mechanism is needed")
    return chosen


def _listed(wanted: Any) -> list[str | Mechanism]:
    single = isinstance(wanted, str | Mechanism)
    several = isinstance(wanted, Iterable) and not single and not isinstance(wanted, Mapping)
    listed = list(wanted) if several else []
    if not several or not all(isinstance(one, str | Mechanism) for one in listed):
        example = f": [{shown(wanted)}]" if single else ", such as ['linear']"
        raise ArgumentError(f"candidates is {shown(wanted)} and must be a list of mechanisms{example}")
    return listed


def _named(text: str, layers: Layers, tokens: int) -> Candidate:
    name, local = text.removesuffix(LOCAL).strip(), text.endswith(LOCAL)
    if name == "nearfar" and (window := max(1, int(NEAR * tokens))) < NearFar.window:
        return Candidate(mechanism("nearfar", window=window), local)
    return Candidate((CAUSAL if layers.is_causal else ENCODER).get(name) or mechanism(name), local)
