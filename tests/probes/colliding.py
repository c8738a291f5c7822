"""Search for two queries that collide: different queries that get the same row of weights over the given keys.

A pair solves the right-hand side of a proposition (`softless.probes.injectivity`), and is returned only if the
mechanism itself then gives both queries the same row:

    subtract, softmax   phi(p) = phi(q) + x, where x is in the null space of the centered phi(K)
                        (of the kept keys, if a rule drops some)
    divide              phi(p) = 2 phi(q)
    relu, softmax over channels, ...    p that phi cannot tell from q
"""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from softless.algebra.state import Log
from softless.errors import UnsupportedError
from softless.functional import attention_weights
from softless.mechanisms import Call, Mechanism, resolve
from softless.mechanisms.kernelized import Kernelized
from softless.mechanisms.linear import FeatureMapped
from softless.mechanisms.scored import Scored
from softless.probes.injectivity import count_rank, key_features, row_distance

Inputs = Mapping[str, Tensor]
EQUAL = 1e-9  # relative; pairs are built and compared in float64


def colliding_pair(
    k: Float[Tensor, "m d"],
    mechanism: str | Mechanism,
    *,
    q: Float[Tensor, " d"] | None = None,
    inputs: Inputs | None = None,
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]] | None:
    """Return two different queries with the same row over these keys of one head, or None if the search finds none.

    The search starts at `q`, or at the mean size of the keys (ones, if all keys are zero), shortened until its largest
    score is 1: where scores are small no rounding hides a difference.
    """
    resolved = resolve(mechanism)
    if not isinstance(resolved, Kernelized | Scored):
        raise UnsupportedError(
            f"a row of '{resolved.name}' depends on more than its query and the keys: it has no colliding pair"
        )
    k, inputs = k.double(), {name: x.double() for name, x in (inputs or {}).items()}
    if q is None:
        q = k.abs().mean(0) if k.any() else torch.ones_like(k[0])
    q = q.double()
    largest = (k @ q).abs().max() * q.shape[0] ** -0.5
    start = q / torch.where(largest > 0, largest, 1.0)
    for p, other in candidates(start, k, resolved, inputs):
        if bool((p != other).any()) and same_row(p, other, k, resolved, inputs):
            return p, other
    return None


def candidates(q: Tensor, k: Tensor, mechanism: Mechanism, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(mechanism, Scored):
        for size in (1, 10, 100):  # far queries keep few keys, where a rule drops some
            kept = rows(size * q, k, mechanism, inputs)[0, 0, -1] != 0
            length = q.norm() if q.any() else 1.0
            for x in flat_directions(k[kept]):
                yield from ((size * q, size * (q + step * length * x)) for step in (1, 0.1, 0.01))
    if isinstance(mechanism, FeatureMapped):
        phi_k = key_features(k[None, None], mechanism, inputs)[0, 0]
        phi = mechanism.features_q(q[None, None, None], Call(inputs=inputs))
        features = (phi.value.exp() if isinstance(phi, Log) else phi)[0, 0, 0]
        step = 0.1 * (features.abs().max() if features.any() else 1.0)
        for target in (2 * features, *(features + step * x for x in flat_directions(phi_k))):
            p = preimage(target, mechanism, inputs)
            if p is not None:
                yield q, p
    yield q, 2 * q  # homogeneous phi
    yield q, q + q.abs().mean()  # softmax over channels
    yield -q.abs(), -2 * q.abs()  # what relu erases


def flat_directions(phi_k: Float[Tensor, "m f"]) -> Float[Tensor, "r f"]:
    """Return unit vectors x with phi(K) x = c 1: the null space of the centered phi(K)."""
    centered = phi_k - phi_k.mean(0)
    _, values, basis = torch.linalg.svd(centered, full_matrices=True)
    return basis[int(count_rank(values, torch.linalg.matrix_norm(phi_k, 2)[None], phi_k)) :]


def preimage(phi: Float[Tensor, " f"], mechanism: FeatureMapped, inputs: Inputs) -> Float[Tensor, " d"] | None:
    """Return a query with these features if phi has an inverse; NaN outside the range of phi."""
    if mechanism.phi in ("identity", "relu"):
        return phi
    if mechanism.phi == "leaky_relu":
        return torch.where(phi < 0, 100 * phi, phi)
    if mechanism.phi == "elu":
        return torch.where(phi < 1, phi.log(), phi - 1)
    if mechanism.phi == "exp":
        return phi.log() / mechanism.t
    if mechanism.phi == "affine_relu":
        return torch.linalg.pinv(inputs["weight"][0]) @ (phi - inputs["bias"][0])
    return None


def rows(q: Tensor, k: Tensor, mechanism: Mechanism, inputs: Inputs) -> Float[Tensor, "1 c m m"]:
    """Return the weights if every token has this query: one row for each position it could have."""
    return attention_weights(q.expand(1, 1, *k.shape), k[None, None], mechanism, inputs=inputs)


def same_row(p: Tensor, q: Tensor, k: Tensor, mechanism: Mechanism, inputs: Inputs) -> bool:
    a, b = rows(p, k, mechanism, inputs), rows(q, k, mechanism, inputs)
    return bool((row_distance(a, b, 1) <= EQUAL * row_distance(b, torch.zeros_like(b), 1)).all())
