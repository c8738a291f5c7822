"""A product of two tensors as models write it, read as one matrix product.

out = arrange(left @ right)          left [*L, n, c], right [*L, c, m], left @ right [*L, n, m]

matmul, @, bmm                       as they are
einsum of two tensors                with one letter summed, one of the left alone, one of the right alone; an
                                     ellipsis stands for letters
"""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MATMUL = {"matmul", "__matmul__", "bmm"}
EINSUM = "einsum"


class Product(NamedTuple):
    """A product, read from one of its sides."""

    left: Tensor
    right: Tensor
    order: tuple[int, ...] | None = None  # of the dimensions of left @ right in the output; None is their own

    def arrange(self, out: Tensor) -> Tensor:
        """[*L, n, m] as the output lies."""
        return out if self.order is None else out.permute(self.order)


def operands(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The two tensors that are multiplied, or None where this is no product of two."""
    if name == EINSUM:
        given = args[1:] if len(args) != 2 or isinstance(args[1], Tensor) else args[1]
    elif name in MATMUL:
        given = (*args, *(kwargs[key] for key in ("input", "other", "mat2") if key in kwargs))
    else:
        return None
    tensors = len(given) == 2 and all(isinstance(x, Tensor) and x.is_floating_point() for x in given)
    return (given[0], given[1]) if tensors else None


def scores_product(name: str, args: Sequence[Any], pair: tuple[Tensor, Tensor]) -> Product | None:
    """Read as q k^T: an output [*L, n, m] of activations, which no parameter is among."""
    if any(isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) for x in pair):
        return None
    if name != EINSUM:
        return Product(*pair) if min(x.ndim for x in pair) > 2 else None
    found = (_einsum(args[0], pair, at) for at in (0, 1))
    return next((each for each in found if each is not None and each.order is None), None)


def weights_product(name: str, args: Sequence[Any], pair: tuple[Tensor, Tensor], at: int) -> Product | None:
    """Read as weights v, where the weights are the first (at = 0) or the second of the pair and lie as [*L, n, c]."""
    if name == EINSUM:
        found = _einsum(args[0], pair, at)
        return found if found is not None and found.left is pair[at] else None
    return Product(*pair) if at == 0 else None


def turned_product(pair: tuple[Tensor, Tensor]) -> Product:
    """v^T weights^T, read as weights v."""
    left, right = pair[1].mT, pair[0].mT
    ndim = max(left.ndim, right.ndim)
    return Product(left, right, (*range(ndim - 2), ndim - 1, ndim - 2))


def _einsum(equation: Any, pair: tuple[Tensor, Tensor], at: int) -> Product | None:
    """The product with `pair[at]` on the left."""
    letters = _letters(equation, pair) if isinstance(equation, str) else None
    if letters is None:
        return None
    *sides, out = letters
    left, right = sides[at], sides[1 - at]
    shared = [x for x in out if x in left and x in right]
    alone = [[x for x in side if x in out and x not in other] for side, other in ((left, right), (right, left))]
    summed = [x for x in left if x in right and x not in out]
    sizes = (len(shared) + 2,) * 3
    if [*map(len, alone), len(summed)] != [1, 1, 1] or (len(left), len(right), len(out)) != sizes:
        return None
    (row,), (column,), (inner,) = *alone, summed
    if list(out[-2:]) != [row, column] or out[:-2] != "".join(shared):
        shared = [x for x in left if x in shared]  # the left one as it lies: weights do
    plain = [*shared, row, column]
    order = None if plain == list(out) else tuple(plain.index(x) for x in out)
    return Product(
        _permuted(pair[at], left, [*shared, row, inner]),
        _permuted(pair[1 - at], right, [*shared, inner, column]),
        order,
    )


def _letters(equation: str, pair: tuple[Tensor, Tensor]) -> list[str] | None:
    """Those of both tensors and of the output, ellipses written out; None where they do not say it."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    sides = inputs.split(",")
    if not arrow or len(sides) != 2:
        return None
    more = {x.ndim - len(side.replace("...", "")) for x, side in zip(pair, sides, strict=True) if "..." in side}
    if len(more) > 1 or (more and not all("..." in each for each in (*sides, out))):
        return None
    spare = [x for x in ascii_letters if x not in equation][: max(more, default=0)]
    written = [each.replace("...", "".join(spare)) for each in (*sides, out)]
    return written if all(len(set(each)) == len(each) for each in written) else None


def _permuted(x: Tensor, now: str, wanted: list[str]) -> Tensor:
    return x if list(now) == wanted else x.permute([now.index(letter) for letter in wanted])


def broadcast(*leads: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*map(tuple, leads)))
