"""Twins: models that differ in attention and in nothing else, for the tables of the InLine paper (Han et al. 2024).

    table 1    what injectivity is worth: softmax whose queries are made to collide
    table 3    divide against subtract, under four feature maps
    table 4    InLine in windows and on the whole picture, with and without the local residual
    table 9    other linear attentions
    table 10   InLine's feature maps

A twin is a recipe's model with another mechanism, local residual or window. The table is written by hand; where the
paper has a number, it stands beside ours (top-1 on ImageNet, of DeiT-T in tables 1 and 9 and of Swin-T in the others).
Windows of 4 and 8 on a grid of 16 x 16 stand beside the paper's of 14 and 28 on 56 x 56.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from softless.errors import ArgumentError
from softless.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Twin:
    """One model of a comparison."""

    id: str
    label: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    local: bool = False
    window: int | None = None  # tokens a side; None sees the whole picture
    tables: tuple[str, ...] = ()

    def recipe(self, base: Recipe) -> Recipe:
        """The base recipe with this twin's attention."""
        attention = {"name": self.mechanism, **self.options}
        return replace(
            base, model=replace(base.model, mechanism=attention, local=self.local, window=self.window)
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Question:
    """A table of the paper: what it asks, what the paper found, and which twins answer when compared."""

    id: str
    title: str
    paper: str
    found: Mapping[str, float]  # the paper's top-1, in percent, by twin
    compares: tuple[tuple[str, str], ...]


def _linear(id: str, label: str, phi: str, *tables: str) -> Twin:  # noqa: A002
    return Twin(id=id, label=label, mechanism="linear", options={"phi": phi}, tables=tables)


def _inline(id: str, label: str, *tables: str, phi: str = "identity", **more: Any) -> Twin:  # noqa: A002
    options: dict[str, Any] = {"phi": phi, "t": 0.2} if phi == "exp" else {"phi": phi}
    return Twin(id=id, label=label, mechanism="inline", options=options, tables=tables, **more)


TWINS: tuple[Twin, ...] = (
    Twin(id="softmax", label="softmax", mechanism="softmax", tables=("1", "9")),
    _inline("inline", "inline", "3", "4", "10"),
    _inline("inline-local", "inline + local", "4", "9", "10", local=True),
    _linear("linear-relu", "linear relu", "relu", "3"),
    _linear("linear-affine", "linear relu(Ax + b)", "affine_relu", "3"),
    _linear("linear-leaky", "linear leaky relu", "leaky_relu", "3"),
    _linear("linear-identity", "linear identity", "identity", "3"),
    _linear("linear-elu", "linear elu", "elu", "9"),
    _inline("inline-relu", "inline relu", "3", "10", phi="relu"),
    _inline("inline-affine", "inline relu(Ax + b)", "3", phi="affine_relu"),
    _inline("inline-leaky", "inline leaky relu", "3", "10", phi="leaky_relu"),
    _inline("inline-exp", "inline exp(0.2 x)", "10", phi="exp"),
    Twin(id="softmax-local", label="softmax + local", mechanism="softmax", local=True, tables=("9",)),
    Twin(id="efficient", label="efficient", mechanism="efficient", tables=("9",)),
    Twin(id="hydra", label="hydra", mechanism="hydra", tables=("9",)),
    Twin(id="angular", label="angular", mechanism="angular", tables=("9",)),
    Twin(id="focused", label="focused", mechanism="focused", tables=("9",)),
    Twin(id="taylor", label="taylor", mechanism="taylor", tables=("9",)),
    Twin(
        id="softmax-relu", label="softmax of relu(q)/|relu(q)|", mechanism="softmax",
        options={"confusion": "relu"}, tables=("1",),
    ),
    Twin(
        id="softmax-affine", label="softmax of relu(Aq + b)/|relu(Aq + b)|", mechanism="softmax",
        options={"confusion": "affine_relu"}, tables=("1",),
    ),
    _inline("inline-relu-local", "inline relu + local", "10", phi="relu", local=True),
    _inline("inline-leaky-local", "inline leaky relu + local", "10", phi="leaky_relu", local=True),
    _inline("inline-exp-local", "inline exp(0.2 x) + local", "10", phi="exp", local=True),
    _inline("inline-w4", "inline in windows of 4 x 4", "4", window=4),
    _inline("inline-w8", "inline in windows of 8 x 8", "4", window=8),
    _inline("inline-local-w4", "inline + local in windows of 4 x 4", "4", local=True, window=4),
    _inline("inline-local-w8", "inline + local in windows of 8 x 8", "4", local=True, window=8),
)  # fmt: skip

QUESTIONS: tuple[Question, ...] = (
    Question(
        id="1",
        title="Softmax whose queries are made to collide",
        paper="Collisions cost DeiT-T 1.6 and 2.3 points.",
        found={"softmax": 72.2, "softmax-relu": 70.6, "softmax-affine": 69.9},
        compares=(("softmax", "softmax-relu"), ("softmax", "softmax-affine")),
    ),
    Question(
        id="3",
        title="Divide against subtract",
        paper="Subtracting gains 2.5 points with relu and 9.8 with relu(Ax + b); dividing fails with the other two.",
        found={
            "linear-relu": 77.3, "linear-affine": 70.2, "linear-leaky": 1.5, "linear-identity": 0.2,
            "inline-relu": 79.8, "inline-affine": 80.0, "inline-leaky": 79.8, "inline": 80.2,
        },
        compares=(
            ("inline-relu", "linear-relu"), ("inline-affine", "linear-affine"), ("inline-leaky", "linear-leaky"),
            ("inline", "linear-identity"),
        ),
    ),
    Question(
        id="4",
        title="Windows, and the local residual",
        paper="Wider windows gain nothing without the residual, and 0.3 points with it; it adds 1.7 to 2.2.",
        found={
            "inline-w4": 80.4, "inline-w8": 80.2, "inline": 80.2,
            "inline-local-w4": 82.1, "inline-local-w8": 82.3, "inline-local": 82.4,
        },
        compares=(
            ("inline-local", "inline"), ("inline-local-w4", "inline-w4"), ("inline", "inline-w4"),
            ("inline-local", "inline-local-w4"),
        ),
    ),
    Question(
        id="9",
        title="Other linear attentions",
        paper="InLine with its local residual is ahead of all of them, and of softmax by 2.3 points.",
        found={
            "softmax": 72.2, "hydra": 68.3, "efficient": 70.2, "angular": 70.8, "focused": 74.1, "inline-local": 74.5,
        },
        compares=(
            ("inline-local", "softmax"), ("inline-local", "focused"), ("inline-local", "efficient"),
            ("inline-local", "softmax-local"),
        ),
    ),
    Question(
        id="10",
        title="InLine's feature maps",
        paper="All four are within 0.2 points of each other (with the local residual).",
        found={
            "inline-local": 82.4, "inline-relu-local": 82.5, "inline-leaky-local": 82.3, "inline-exp-local": 82.5,
        },
        compares=(
            ("inline-relu", "inline"), ("inline-leaky", "inline"), ("inline-exp", "inline"),
            ("inline-relu-local", "inline-local"), ("inline-leaky-local", "inline-local"),
            ("inline-exp-local", "inline-local"),
        ),
    ),
)  # fmt: skip


def twins_named(ids: Iterable[str]) -> tuple[Twin, ...]:
    """Twins by id, in the order given; an id that is none is answered with those there are."""
    known = {twin.id: twin for twin in TWINS}
    if unknown := [each for each in ids if each not in known]:
        raise ArgumentError(f"twin {', '.join(map(repr, unknown))} is not one of {', '.join(known)}")
    return tuple(known[each] for each in ids)


def twins_of(tables: Iterable[str], *, windows: bool = False) -> tuple[Twin, ...]:
    """Those of some tables, each once; those in windows need a model without a class token, such as Swin.

    >>> from softless.train.twins import twins_of
    >>> [twin.id for twin in twins_of(["1"])]
    ['softmax', 'softmax-relu', 'softmax-affine']
    >>> [twin.id for twin in twins_of(["4"], windows=True)][-2:]
    ['inline-local-w4', 'inline-local-w8']
    """
    wanted, known = list(tables), [question.id for question in QUESTIONS]
    if unknown := [each for each in wanted if each not in known]:
        raise ArgumentError(f"table {', '.join(unknown)} is not one of {', '.join(known)}")
    return tuple(
        twin for twin in TWINS if set(twin.tables) & set(wanted) and (windows or twin.window is None)
    )  # fmt: skip
