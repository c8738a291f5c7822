"""Read a product of two tensors, however a model writes it, as one matrix product.

out = arrange(left @ right)          left [*L, n, c], right [*L, c, m], left @ right [*L, n, m]

matmul, @, bmm                       as they are
einsum of two tensors                with one letter summed, one of the left alone, one of the right alone; an
                                     ellipsis stands for letters
"""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any, NamedTuple

from torch import Tensor, nn

MATMUL = {"matmul", "__matmul__", "bmm"}
EINSUM = "einsum"


class Product(NamedTuple):
    """A product left @ right, and the order of its dimensions in the output."""

    left: Tensor
    right: Tensor
    order: tuple[int, ...] | None = None  # of the dimensions of left @ right in the output; None is their own

    def arrange(self, out: Tensor) -> Tensor:
        """Return [*L, n, m] with its dimensions in the order of the output."""
        return out if self.order is None else out.permute(self.order)


def operands(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the two tensors that are multiplied, or None if the call is no product of two tensors."""
    if name == EINSUM:
        factors = args[1:] if len(args) != 2 or isinstance(args[1], Tensor) else args[1]
    elif name in MATMUL:
        factors = (*args, *(kwargs[key] for key in ("input", "other", "mat2") if key in kwargs))
    else:
        return None
    tensors = len(factors) == 2 and all(isinstance(x, Tensor) and x.is_floating_point() for x in factors)
    return (factors[0], factors[1]) if tensors else None


def scores_product(name: str, args: Sequence[Any], pair: tuple[Tensor, Tensor]) -> Product | None:
    """Read a product as q k^T: an output [*L, n, m] of activations. A product with a parameter is none."""
    if any(isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) for x in pair):
        return None
    if name != EINSUM:
        return Product(*pair) if min(x.ndim for x in pair) > 2 else None
    products = (_einsum(args[0], pair, at) for at in (0, 1))
    return next((product for product in products if product is not None and product.order is None), None)


def weights_product(name: str, args: Sequence[Any], pair: tuple[Tensor, Tensor], at: int) -> Product | None:
    """Read a product as weights v, where `pair[at]` are the weights [*L, n, c]."""
    if name == EINSUM:
        product = _einsum(args[0], pair, at)
        return product if product is not None and product.left is pair[at] else None
    return Product(*pair) if at == 0 else None


def turned_product(pair: tuple[Tensor, Tensor]) -> Product:
    """Read v^T weights^T as weights v."""
    left, right = pair[1].mT, pair[0].mT
    ndim = max(left.ndim, right.ndim)
    return Product(left, right, (*range(ndim - 2), ndim - 1, ndim - 2))


def _einsum(equation: Any, pair: tuple[Tensor, Tensor], at: int) -> Product | None:
    """Return the product with `pair[at]` on the left."""
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
        shared = [x for x in left if x in shared]  # the left tensor keeps its order: weights must
    plain = [*shared, row, column]
    order = None if plain == list(out) else tuple(plain.index(x) for x in out)
    return Product(
        _permuted(pair[at], left, [*shared, row, inner]),
        _permuted(pair[1 - at], right, [*shared, inner, column]),
        order,
    )


def _letters(equation: str, pair: tuple[Tensor, Tensor]) -> list[str] | None:
    """Return the letters of both tensors and of the output, ellipses written out; None if they are not explicit."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    sides = inputs.split(",")
    if not arrow or len(sides) != 2:
        return None
    more = {x.ndim - len(side.replace("...", "")) for x, side in zip(pair, sides, strict=True) if "..." in side}
    if len(more) > 1 or (more and not all("..." in term for term in (*sides, out))):
        return None
    spare = [x for x in ascii_letters if x not in equation][: max(more, default=0)]
    terms = [term.replace("...", "".join(spare)) for term in (*sides, out)]
    return terms if all(len(set(term)) == len(term) for term in terms) else None


def _permuted(x: Tensor, now: str, wanted: list[str]) -> Tensor:
    return x if list(now) == wanted else x.permute([now.index(letter) for letter in wanted])
