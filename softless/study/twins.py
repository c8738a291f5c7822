"""Twins: models trained alike that differ in their attention, for the tables of the InLine paper (Han et al. 2024).

    table 1    the value of injectivity: softmax with queries that collide
    table 3    division against subtraction, with four feature maps
    table 4    InLine in windows and on the whole picture, with and without the local residual
    table 9    other linear attentions
    table 10   InLine's feature maps

A twin is the model of a recipe with another mechanism, local residual, convolution of q and k, or window. Images,
seeds, optimizer, depth and width are the same. The local residual, the convolution and relu(Ax + b) have parameters of
their own, so twins with and without them differ in more than attention. `softmax` and `inline` are a fair pair, and
so are `softmax-local` and `inline-local`. Where the paper has a number, `Question.top1` has it (top-1 on ImageNet-1K,
of the model in `setting`).

Windows are given by their number along a side. `cut=4` means windows of 14 x 14 tokens on the paper's grid of 56 x 56,
of 7 x 7 on a grid of 28 x 28, and of 4 x 4 on a grid of 16 x 16.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from softless.errors import ArgumentError, no_such
from softless.models import customize
from softless.models.table import Config
from softless.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Twin:
    """One model of a comparison."""

    id: str
    label: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    local: bool = False
    qk_conv: bool = False
    cut: int | None = None  # windows along a side; None attends to the whole picture
    tables: tuple[str, ...] = ()

    def recipe(self, base: Recipe) -> Recipe:
        """The base recipe with this twin's attention."""
        attention = {"name": self.mechanism, **self.options}
        window = None if self.cut is None else tokens_per_side(base) // self.cut
        changes = {"mechanism": attention, "local": self.local, "qk_conv": self.qk_conv or None, "window": window}
        return replace(base, model=replace(base.model, **changes))  # type: ignore[arg-type]

    def fits(self, side: int | None) -> bool:
        """Tell whether windows of 2 x 2 tokens or more fill `side` x `side` tokens; None cannot be cut in windows."""
        return self.cut is None or (side is not None and side % self.cut == 0 and side // self.cut > 1)


def patch_of(recipe: Recipe) -> int:
    """Return the number of pixels along the side of a token."""
    return _known(recipe).patch


def tokens_per_side(recipe: Recipe) -> int:
    """Return the number of tokens along the side of the picture that the first block sees."""
    return -(-recipe.image_size // patch_of(recipe))


def side_of(recipe: Recipe) -> int | None:
    """Return the tokens per side of a picture that can be cut in windows; None for DeiT, which has a class token."""
    return None if _known(recipe).family == "deit" else tokens_per_side(recipe)


def _known(recipe: Recipe) -> Config:
    return customize(recipe.model.name, patch_size=recipe.model.patch_size)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A table of the paper: its subject, the paper's result, and the pairs of twins that it compares."""

    id: str
    title: str
    setting: str  # data set and model of the paper's numbers
    paper: str
    top1: Mapping[str, float]  # of the paper, in percent, by twin
    compares: tuple[tuple[str, str], ...]


def _linear(id: str, label: str, phi: str, *tables: str, **more: Any) -> Twin:  # noqa: A002
    return Twin(id=id, label=label, mechanism="linear", options={"phi": phi}, tables=tables, **more)


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
    Twin(id="blend", label="blend", mechanism="blend", tables=()),
    Twin(id="blend-local", label="blend + local", mechanism="blend", local=True, tables=()),
    Twin(id="regress", label="regress", mechanism="regress", tables=()),
    Twin(id="regress-local", label="regress + local", mechanism="regress", local=True, tables=()),
    _inline("inline-relu-local", "inline relu + local", "10", phi="relu", local=True),
    _inline("inline-leaky-local", "inline leaky relu + local", "10", phi="leaky_relu", local=True),
    _inline("inline-exp-local", "inline exp(0.2 x) + local", "10", phi="exp", local=True),
    Twin(id="softmax-conv", label="softmax + conv", mechanism="softmax", qk_conv=True),
    Twin(id="softmax-conv-local", label="softmax + conv + local", mechanism="softmax", qk_conv=True, local=True),
    _inline("inline-conv", "inline + conv", qk_conv=True),
    _inline("inline-conv-local", "inline + conv + local", qk_conv=True, local=True),
    Twin(id="regress-conv", label="regress + conv", mechanism="regress", qk_conv=True),
    Twin(id="regress-conv-local", label="regress + conv + local", mechanism="regress", qk_conv=True, local=True),
    _linear("linear-relu-local", "linear relu + local", "relu", local=True),
    _inline("inline-cut8", "inline in 8 x 8 windows", "4", cut=8),
    _inline("inline-cut4", "inline in 4 x 4 windows", "4", cut=4),
    _inline("inline-cut2", "inline in 2 x 2 windows", "4", cut=2),
    _inline("inline-local-cut8", "inline + local in 8 x 8 windows", "4", local=True, cut=8),
    _inline("inline-local-cut4", "inline + local in 4 x 4 windows", "4", local=True, cut=4),
    _inline("inline-local-cut2", "inline + local in 2 x 2 windows", "4", local=True, cut=2),
)  # fmt: skip

QUESTIONS: tuple[Question, ...] = (
    Question(
        id="1",
        title="Softmax with queries that collide",
        setting="ImageNet-1K, DeiT-T",
        paper="Collisions cost softmax 1.6 and 2.3 points.",
        top1={"softmax": 72.2, "softmax-relu": 70.6, "softmax-affine": 69.9},
        compares=(("softmax", "softmax-relu"), ("softmax", "softmax-affine")),
    ),
    Question(
        id="3",
        title="Division against subtraction",
        setting="ImageNet-1K, Swin-T",
        paper="Subtraction gains 2.5 points with relu and 9.8 with relu(Ax + b). Division fails with the other maps.",
        top1={
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
        title="Windows and the local residual",
        setting="ImageNet-1K, Swin-T",
        paper="Without the local residual, wider windows gain nothing; with it, they gain 0.8 points. "
        "The residual adds 1.3 to 2.2 points.",
        top1={
            "inline-cut8": 80.3, "inline-cut4": 80.4, "inline-cut2": 80.2, "inline": 80.2,
            "inline-local-cut8": 81.6, "inline-local-cut4": 82.1, "inline-local-cut2": 82.3, "inline-local": 82.4,
        },
        compares=(
            ("inline-local", "inline"), ("inline-local-cut8", "inline-cut8"), ("inline", "inline-cut8"),
            ("inline-local", "inline-local-cut8"),
        ),
    ),
    Question(
        id="9",
        title="Other linear attentions",
        setting="ImageNet-1K, DeiT-T",
        paper="InLine with its local residual is the best of the linear attentions, and 2.3 points ahead of softmax.",
        top1={
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
        setting="ImageNet-1K, Swin-T",
        paper="With the local residual, all four feature maps are within 0.2 points of each other.",
        top1={
            "inline-local": 82.4, "inline-relu-local": 82.5, "inline-leaky-local": 82.3, "inline-exp-local": 82.5,
        },
        compares=(
            ("inline-relu", "inline"), ("inline-leaky", "inline"), ("inline-exp", "inline"),
            ("inline-relu-local", "inline-local"), ("inline-leaky-local", "inline-local"),
            ("inline-exp-local", "inline-local"),
        ),
    ),
)  # fmt: skip


def twins_named(ids: Iterable[str], recipe: Recipe | None = None) -> tuple[Twin, ...]:
    """Return twins by id, in the order given; an unknown id raises an error that lists all ids.

    Args:
        ids: ids of twins, for example ["softmax", "inline"].
        recipe: if given, windows of the twins must fill the picture of this recipe. Default: not checked.
    """
    known = {twin.id: twin for twin in TWINS}
    if unknown := [id_ for id_ in ids if id_ not in known]:
        raise ArgumentError(no_such("twin", unknown[0], known))
    chosen = tuple(known[id_] for id_ in ids)
    if recipe is None:
        return chosen
    side = side_of(recipe)
    if unfit := next((twin for twin in chosen if not twin.fits(side)), None):
        has = "a class token beside its picture" if side is None else f"a picture of {side} x {side} tokens"
        raise ArgumentError(
            f"twin {unfit.id!r} needs a picture that {unfit.cut} x {unfit.cut} windows of 2 x 2 tokens or more fill, "
            f"and model {recipe.model.name!r} of the recipe has {has}"
        )
    return chosen


def twins_of(tables: Iterable[str], *, side: int | None = None) -> tuple[Twin, ...]:
    """Return the twins of some tables of the paper, each twin once.

    Args:
        tables: ids of tables, for example ["1", "4"].
        side: tokens per side of a picture that can be cut in windows, which excludes models with a class token.
            Default: twins in windows are left out.

    >>> from softless.study.twins import twins_of
    >>> [twin.id for twin in twins_of(["1"])]
    ['softmax', 'softmax-relu', 'softmax-affine']
    >>> [twin.id for twin in twins_of(["4"], side=8)][-2:]
    ['inline-local-cut4', 'inline-local-cut2']
    """
    wanted, known = list(tables), [question.id for question in QUESTIONS]
    if unknown := [table for table in wanted if table not in known]:
        raise ArgumentError(f"table {', '.join(unknown)} is not one of {', '.join(known)}")
    return tuple(twin for twin in TWINS if set(twin.tables) & set(wanted) and twin.fits(side))
