"""When attention tells all queries apart, and a pair it confuses where it does not (InLine, Propositions 1 to 3).

    softmax, subtract   w(p) = w(q)  <=>  phi(K) (phi(p) - phi(q)) = c 1      (1 and 3; softmax: phi = identity)
                        so none collide if phi is injective and [phi(K), 1] has rank D + 1
    divide              w(p) = w(q)  <=   phi(p) = a phi(q), a > 0            (2: any continuous phi has such a pair)

With D features. A pair is built by solving the right-hand side, for the keys at hand:

    subtract, softmax   phi(p) = phi(q) + x, x in the null space of the centered phi(K) (of the kept keys, where a
                        rule drops some)
    divide              phi(p) = 2 phi(q)
    relu, softmax over channels, ...    p that phi cannot tell from q

and is only returned if the mechanism itself then gives both the same row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.algebra.state import Log
from softless.backends import hide, widen
from softless.errors import UnsupportedError
from softless.functional import attention_weights
from softless.mechanisms import Call, Mechanism, resolve
from softless.mechanisms.kernelized import Kernelized
from softless.mechanisms.linear import FeatureMapped
from softless.mechanisms.scored import Scored
from softless.probes.injectivity import row_distance

Inputs = Mapping[str, Tensor]
EQUAL = 1e-9  # relative; pairs are built and compared in float64


@dataclass(frozen=True)
class RankCondition:
    """Of every sample and head. The propositions need rank [phi(K), 1] = features + 1, so phi(K) is full too.

    A rank does not depend on the scale of keys, so it is counted in [phi(K) / c, 1], where c is the root mean square of
    the entries of phi(K): without it, small keys would be lost beside the ones, and the ones beside large keys.
    """

    features: int
    rank: Int[Tensor, "b g"]  # of [phi(K), 1]
    singular_values: Float[Tensor, "b g r"]  # of [phi(K), 1], the largest first

    @property
    def holds(self) -> Tensor:
        """[B, G]: whether these keys let an injective phi (or a softmax) tell all queries apart."""
        return self.rank == self.features + 1


def rank_condition(
    k: Float[Tensor, "b g m d"],
    mechanism: str | Mechanism,
    *,
    inputs: Inputs | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> RankCondition:
    """Of [phi(K), 1] over real keys; phi is the identity for mechanisms that have none of their own."""
    k = hide(widen(k), key_mask)
    phi = hide(key_features(k, resolve(mechanism), inputs or {}), key_mask)
    values, scaled = (
        torch.linalg.svdvals(hide(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1), key_mask))
        for x in (phi.double(), _unit_size(phi.double(), key_mask))  # float32 gives NaN for subnormal keys
    )
    return RankCondition(phi.shape[-1], _rank(scaled, scaled[..., :1], phi), values)


def _unit_size(phi: Float[Tensor, "b g m f"], key_mask: Bool[Tensor, "b m"] | None) -> Float[Tensor, "b g m f"]:
    """phi(K) / c, whose entries over real keys have a mean square of 1; zero keys stay zero."""
    largest = phi.abs().amax((2, 3), keepdim=True) if phi.numel() else phi.new_ones(*phi.shape[:2], 1, 1)
    phi = phi / torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor vanish
    real = phi.shape[2] if key_mask is None else key_mask.sum(1)[:, None, None, None].clamp(min=1)
    mean = phi.square().sum((2, 3), keepdim=True) / (real * phi.shape[3])
    return phi / torch.where(mean > 0, mean, 1.0).sqrt()


def key_features(k: Float[Tensor, "b g m d"], mechanism: Mechanism, inputs: Inputs) -> Float[Tensor, "b h m f"]:
    """phi(K). Exponentials are divided by the largest of their channel, which changes no rank."""
    if not isinstance(mechanism, FeatureMapped):
        return k
    phi = mechanism.features_k(k, Call(inputs=inputs))
    return (phi.value - phi.value.amax(-2, keepdim=True)).exp() if isinstance(phi, Log) else phi


def colliding_pair(
    k: Float[Tensor, "m d"],
    mechanism: str | Mechanism,
    *,
    q: Float[Tensor, " d"] | None = None,
    inputs: Inputs | None = None,
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]] | None:
    """p != q to which the mechanism gives the same row over these keys of one head; None if no way here finds any.

    The search starts at `q`, or at the mean size of the keys (ones, if all keys are zero), shortened until its largest
    score is 1: where scores are small no rounding hides a difference.
    """
    made = resolve(mechanism)
    if not isinstance(made, Kernelized | Scored):
        raise UnsupportedError(
            f"a row of '{made.name}' depends on more than its query and the keys: it has no colliding pair"
        )
    k, inputs = k.double(), {name: x.double() for name, x in (inputs or {}).items()}
    if q is None:
        q = k.abs().mean(0) if k.any() else torch.ones_like(k[0])
    q = q.double()
    largest = (k @ q).abs().max() * q.shape[0] ** -0.5
    start = q / torch.where(largest > 0, largest, 1.0)
    for p, other in _candidates(start, k, made, inputs):
        if bool((p != other).any()) and _same_row(p, other, k, made, inputs):
            return p, other
    return None


def _candidates(q: Tensor, k: Tensor, made: Mechanism, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(made, Scored):
        for size in (1, 10, 100):  # far queries keep few keys, where a rule drops some
            kept = rows(size * q, k, made, inputs)[0, 0, -1] != 0
            for x in _flat_directions(k[kept]):
                yield from ((size * q, size * (q + step * _size(q.norm()) * x)) for step in (1, 0.1, 0.01))
    if isinstance(made, FeatureMapped):
        phi_k = key_features(k[None, None], made, inputs)[0, 0]
        features = _features(q, made, inputs)
        step = 0.1 * _size(features.abs().max())
        for target in (2 * features, *(features + step * x for x in _flat_directions(phi_k))):
            p = _preimage(target, made, inputs)
            if p is not None:
                yield q, p
    yield q, 2 * q  # homogeneous phi
    yield q, q + q.abs().mean()  # softmax over channels
    yield -q.abs(), -2 * q.abs()  # what relu erases


def _flat_directions(phi_k: Float[Tensor, "m f"]) -> Float[Tensor, "r f"]:
    """Unit vectors x with phi(K) x = c 1: the null space of the centered phi(K)."""
    centered = phi_k - phi_k.mean(0)
    _, values, basis = torch.linalg.svd(centered, full_matrices=True)
    return basis[int(_rank(values, torch.linalg.matrix_norm(phi_k, 2)[None], phi_k)) :]


def _size(x: Tensor) -> Tensor:
    """Of a step away from something of this size."""
    return torch.where(x > 0, x, 1.0)


def _features(q: Float[Tensor, " d"], made: FeatureMapped, inputs: Inputs) -> Float[Tensor, " f"]:
    phi = made.features_q(q[None, None, None], Call(inputs=inputs))
    return (phi.value.exp() if isinstance(phi, Log) else phi)[0, 0, 0]


def _preimage(phi: Float[Tensor, " f"], made: FeatureMapped, inputs: Inputs) -> Float[Tensor, " d"] | None:
    """A query with these features, for a phi that has an inverse; NaN where there is none there."""
    if made.phi in ("identity", "relu"):
        return phi
    if made.phi == "leaky_relu":
        return torch.where(phi < 0, 100 * phi, phi)
    if made.phi == "elu":
        return torch.where(phi < 1, phi.log(), phi - 1)
    if made.phi == "exp":
        return phi.log() / made.t
    if made.phi == "affine_relu":
        return torch.linalg.pinv(inputs["weight"][0]) @ (phi - inputs["bias"][0])
    return None


def rows(q: Float[Tensor, " d"], k: Float[Tensor, "m d"], made: Mechanism, inputs: Inputs) -> Float[Tensor, "1 c m m"]:
    """The weights where every token asks with the same query: a row for each place it could ask from."""
    return attention_weights(q.expand(1, 1, *k.shape), k[None, None], made, inputs=inputs)


def _same_row(p: Tensor, q: Tensor, k: Tensor, made: Mechanism, inputs: Inputs) -> bool:
    a, b = rows(p, k, made, inputs), rows(q, k, made, inputs)
    return bool((row_distance(a, b, 1) <= EQUAL * row_distance(b, torch.zeros_like(b), 1)).all())


def _rank(
    values: Float[Tensor, "*b r"], largest: Float[Tensor, "*b 1"], of: Float[Tensor, "*b m f"]
) -> Int[Tensor, "*b"]:
    """How many singular values rounding of a matrix like `of`, with this largest one, cannot have made."""
    least = largest * max(of.shape[-2], of.shape[-1] + 1) * torch.finfo(of.dtype).eps
    return (values > least).sum(-1)
