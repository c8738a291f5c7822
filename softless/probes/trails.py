"""Trails: how tensors came from q k^T while a model runs, as long as every step on the way is known.

    scores    scale q k^T + bias     times a number; a bias added; entries filled, set or chosen, all of it or a part
    logs      log softmax(scores)    over the keys
    weights   softmax(scores)        over the keys; transposed or not

A trail goes on through other shapes, copies, dtypes, and dropout that drops nothing. Any other operation ends it, and
so does any other change in place: the tensor is `Lost`, and a layer that needs it is not captured.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SCALED = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply", "div", "__truediv__", "div_", "__itruediv__"}
ADDED = {"add", "__add__", "__radd__", "add_", "__iadd__"}
SHIFTED = {"sub", "__sub__", "sub_", "__isub__", "masked_fill", "masked_fill_", "index_fill_", "__setitem__"}
PART = ADDED | SHIFTED | {"fill_", "copy_"}  # done to a part of the scores, in place
SHAPED = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as"}
SAME = SHAPED | {"contiguous", "clone", "detach", "to", "float", "half", "bfloat16", "double", "type", "type_as"}
TRANSPOSED = {"transpose", "swapaxes", "swapdims"}
SOFT = {"softmax", "log_softmax", "softmin", "gumbel_softmax", "exp", "sigmoid"}
IN_PLACE = re.compile(r".*[^_]_|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|__setitem__")
SCORES, LOGS, WEIGHTS = "scores", "logs", "weights"


@dataclass(frozen=True)
class Operation:
    """A finished call of PyTorch."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any

    def argument(self, at: int, name: str, default: Any) -> Any:
        """Return an argument by its position or its name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def changes(self) -> bool:
        """Return whether the call changes a tensor in place."""
        return bool(IN_PLACE.fullmatch(self.name) or self.kwargs.get("inplace") or self.kwargs.get("out") is not None)


@dataclass(frozen=True)
class Trail:
    """How a tensor came from q k^T. `lead` are its leading dimensions, at the step where they were (batch, heads)."""

    q: Tensor
    k: Tensor
    lead: tuple[int, ...]
    module: str
    eps: float  # of the coarsest dtype on the way
    versions: tuple[int | None, ...]  # of q and k, then of the scores
    scale: float = 1.0
    shifted: bool = False
    stage: str = SCORES
    scores: Tensor | None = None  # the input of the softmax, after it has run
    number: int = 0  # of the softmax
    turned: bool = False  # transposed

    def is_fresh(self) -> bool:
        """Return whether q, k and the scores are unchanged since they were used."""
        parts = (self.q, self.k) if self.scores is None else (self.q, self.k, self.scores)
        return self.versions == tuple(map(version_of, parts))


@dataclass(frozen=True)
class Lost:
    """A tensor that came from q k^T by an unknown step. `soft`: a softmax, or a stand-in for one, was on the way."""

    module: str
    soft: bool = False


@dataclass(frozen=True)
class ViewOf:
    """A view of scores or weights: a change of the view in place changes them."""

    root: Tensor
    module: str
    soft: bool = False


Meaning = Trail | Lost | ViewOf


class Trails:
    """The tensors that are followed, and the meaning of each."""

    def __init__(self) -> None:
        self.known: Any = WeakTensorKeyDictionary()
        self.softmaxes = 0

    def of(self, x: Tensor) -> Meaning | None:
        """Return the meaning of a tensor; a tensor that an unseen step changed is lost."""
        meaning, version = self.known.get(x, (None, None))
        stale = isinstance(meaning, Trail) and version != version_of(x)
        if stale or (isinstance(meaning, ViewOf) and not isinstance(self.of(meaning.root), Trail)):
            return lost(meaning)
        return meaning

    def put(self, x: Tensor, meaning: Meaning) -> None:
        self.known[x] = (meaning, version_of(x))

    def among(self, values: Sequence[Any]) -> list[tuple[Tensor, Meaning]]:
        """Return the followed tensors of a call's arguments, those with an unbroken trail first."""
        if not self.known:
            return []
        followed = [(x, meaning) for x in tensors(values) if (meaning := self.of(x)) is not None]
        return sorted(followed, key=lambda pair: not isinstance(pair[1], Trail))

    def follow(self, call: Operation, before: list[tuple[Tensor, Meaning]], module: str) -> bool:
        """Record the meaning of a call's results and its changes in place; return whether it took a softmax of scores.

        `before` is the result of `among` for the call's arguments, from before the call.
        """
        x, meaning = before[0]
        soft = call.name.removesuffix("_") in SOFT and not (isinstance(meaning, Trail) and meaning.stage != SCORES)
        if soft:
            self.softmaxes += 1
        after = step(meaning, x, call, self.softmaxes) if isinstance(meaning, Trail) else None
        if call.changes():
            self.changed(call, x, meaning, after, soft)
        elif after is not None:
            self.put(call.out, after)
        else:
            self.lose(before, [out for out in tensors([call.out]) if out is not x], soft, module)
        return soft

    def changed(self, call: Operation, x: Tensor, meaning: Meaning, after: Trail | None, soft: bool) -> None:
        """Record a step in place."""
        target = call.kwargs.get("out")
        target = target if isinstance(target, Tensor) else call.args[0]
        if target is not x:
            if isinstance(target, Tensor) and target.numel() == x.numel():
                self.put(target, lost(meaning, soft))
        elif isinstance(meaning, ViewOf):
            root = self.known.get(meaning.root, (None, None))[0]
            known = isinstance(root, Trail) and root.stage == SCORES and call.name in PART
            self.put(meaning.root, replace(root, shifted=True) if known else lost(meaning, soft))
        else:
            self.put(x, after or lost(meaning, soft))

    def lose(self, before: list[tuple[Tensor, Meaning]], results: list[Tensor], soft: bool, module: str) -> None:
        """Record an unknown step: views of its inputs become `ViewOf`, other tensors of their size become `Lost`."""
        for x, meaning in before:
            inside = f"{module}.".startswith(f"{meaning.module}.") or not meaning.module
            for out in results:
                if not isinstance(meaning, Lost) and share_memory(x, out):
                    root = meaning.root if isinstance(meaning, ViewOf) else x
                    self.put(out, ViewOf(root, meaning.module, is_soft(meaning)))
                elif inside and out.numel() == x.numel():
                    self.put(out, lost(meaning, soft))


def step(trail: Trail, x: Tensor, call: Operation, number: int) -> Trail | None:
    """Return the trail after a known step on `x`, or None; `number` counts softmaxes, for a step that is one."""
    result = x if call.name == "__setitem__" else call.out
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return None
    trail = replace(trail, eps=max(trail.eps, torch.finfo(result.dtype).eps))
    name, first = call.name, x is call.args[0]
    if name in SAME:
        return _reshaped(trail, x, result) if first else None
    if name == "dropout":
        inert = call.argument(1, "p", 0.5) == 0 or not call.argument(2, "train", call.kwargs.get("training", True))
        return trail if inert else None
    if trail.stage == SCORES:
        return _softmax(trail, x, call, number) if name in SOFT else _shifted(trail, x, call)
    if trail.stage == LOGS:
        return replace(trail, stage=WEIGHTS) if name in ("exp", "exp_") else None
    turns = name in TRANSPOSED and {at % x.ndim for at in call.args[1:3]} == {x.ndim - 1, x.ndim - 2}
    return replace(trail, turned=not trail.turned) if turns or name == "mT" else None


def _softmax(trail: Trail, x: Tensor, call: Operation, number: int) -> Trail | None:
    stage = {"softmax": WEIGHTS, "log_softmax": LOGS}.get(call.name)
    if stage is None or call.argument(1, "dim", None) not in (-1, x.ndim - 1):
        return None
    return replace(trail, scores=x, stage=stage, number=number, versions=(*trail.versions, version_of(x)))


def _shifted(trail: Trail, x: Tensor, call: Operation) -> Trail | None:
    """Return the trail of scores that were added to, filled or scaled."""
    name, first = call.name, x is call.args[0]
    if isinstance(call.out, Tensor) and call.out.shape != x.shape:
        return None
    if name in ADDED or name == "where" or (name in SHIFTED and first):
        return replace(trail, shifted=True)
    factor = _number(call.argument(1, "other", None) if first else call.args[0])
    if name not in SCALED or "rounding_mode" in call.kwargs or factor is None:
        return None
    if "div" not in name:
        return replace(trail, scale=trail.scale * factor)
    return replace(trail, scale=trail.scale / factor) if factor and first else None


def _reshaped(trail: Trail, x: Tensor, out: Tensor) -> Trail | None:
    if out.shape[-2:] != x.shape[-2:] or out.numel() != x.numel():
        return None
    lead = tuple(out.shape[:-2])
    return replace(trail, lead=lead) if len(lead) == 2 and len(trail.lead) != 2 else trail


def _number(x: Any) -> float | None:
    """Return the value of a number or of a tensor with one entry, else None."""
    if isinstance(x, Tensor):
        return float(x.detach()) if x.numel() == 1 and x.ndim <= 1 else None
    return float(x) if isinstance(x, int | float) else None


def lost(meaning: Meaning, soft: bool = False) -> Lost:
    return Lost(meaning.module, soft or is_soft(meaning))


def is_soft(meaning: Meaning) -> bool:
    return meaning.stage != SCORES if isinstance(meaning, Trail) else meaning.soft


def tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (x for x in value if isinstance(x, Tensor))


def share_memory(x: Tensor, other: Tensor) -> bool:
    """Return whether one tensor is a view of the other, or both are views of a third."""
    if x.layout != torch.strided or other.layout != torch.strided or x.device != other.device or x.is_meta:
        return False
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def version_of(x: Tensor) -> int | None:
    """Return how often a tensor or a view of it was changed in place; None in inference mode, where no one counts."""
    return None if x.is_inference() else x._version
