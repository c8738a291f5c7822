"""What every mechanism must answer, straight from its formula: the explicit weights, in float64.

Dense tensors and nothing else: no state, no chunks, no running maximum, nothing of softless. The error
that a row is allowed is derived from the row:

    tolerance (1 + size_i max|v|),   size_i = sum_j |s_ij| over the terms that are rounded when s_ij is formed

in the units in which they reach the output (divide: over the row's mass). An exponent x is rounded by
eps |x|, so exponential rows count (1 + |x|) times.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Explicit weights [B, H, N, M]; the size of each row [B, H, N]; which rows are well enough posed to judge."""

    weights: Tensor
    size: Tensor
    safe: Tensor


# What a query sees.


def visible(q: Tensor, k: Tensor, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    """[B, H, N, M]; causal is aligned at the bottom right: the last query sees the last key."""
    seen = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)
    if is_causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


def even(seen: Tensor) -> Tensor:
    return seen.double() / seen.sum(-1, keepdim=True).clamp(min=1)


# How scores become weights.


def divide(score: Tensor, size: Tensor, seen: Tensor, eps: float, tiny: float) -> Rows:
    """score / sum; no mass: the mean of what is seen. A sum that nearly cancels, or underflows, is not judged."""
    score, size = torch.where(seen, score, 0.0), torch.where(seen, size, 0.0)
    mass, total = score.sum(-1, keepdim=True), size.sum(-1, keepdim=True)
    weights = torch.where(mass != 0, score / torch.where(mass != 0, mass, 1.0), even(seen))
    steady = (mass.abs() >= 0.1 * score.abs().sum(-1, keepdim=True)) & (total >= tiny / eps)
    ratio = torch.where(mass != 0, total / torch.where(mass != 0, mass.abs(), 1.0), 1.0)
    return Rows(weights, ratio[..., 0], (steady | (total == 0))[..., 0])


def subtract(score: Tensor, size: Tensor, seen: Tensor, scale: float) -> Rows:
    score, size, share = torch.where(seen, score, 0.0), torch.where(seen, size, 0.0), even(seen)
    weights = torch.where(seen, scale * share * (score - (share * score).sum(-1, keepdim=True)) + share, 0.0)
    return Rows(weights, 1 + abs(scale) * (share * size).sum(-1), torch.ones_like(seen[..., 0]))


def contrast(score: Tensor, size: Tensor, seen: Tensor, scale: float) -> Rows:
    score, size, share = torch.where(seen, score, 0.0), torch.where(seen, size, 0.0), even(seen)
    weights = torch.where(seen, scale * (score - (share * score).sum(-1, keepdim=True)) + share, 0.0)
    return Rows(weights, 1 + abs(scale) * size.sum(-1), torch.ones_like(seen[..., 0]))


def plain(score: Tensor, size: Tensor, seen: Tensor, scale: float) -> Rows:
    weights = torch.where(seen, scale * score, 0.0)
    return Rows(weights, abs(scale) * torch.where(seen, size, 0.0).sum(-1), torch.ones_like(seen[..., 0]))


# Features.


def unit(x: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    length = x.square().sum(dims, keepdim=True).sqrt()
    return torch.where(length > 0, x / torch.where(length > 0, length, 1.0), 0.0)


POSITIVE = ("elu", "exp", "softmax")  # a zero of theirs is an underflow


def features(phi: str | Callable[[Tensor], Tensor], x: Tensor, t: float, inputs: dict[str, Tensor]) -> Tensor:
    if callable(phi):
        return phi(x)
    if phi == "affine_relu":
        return (torch.einsum("hij,bhnj->bhni", inputs["weight"], x) + inputs["bias"][None, :, None]).clamp(min=0)
    return {
        "identity": x,
        "relu": x.clamp(min=0),
        "leaky_relu": torch.where(x > 0, x, 0.01 * x),
        "elu": x.clamp(min=0) + x.clamp(max=0).exp(),
        "exp": (t * x).exp(),
        "softmax": unit_sum((x - x.amax(-1, keepdim=True)).exp()),
    }[phi]


def unit_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def products(phi_q: Tensor, phi_k: Tensor) -> tuple[Tensor, Tensor]:
    """phi(q).phi(k), and the sum of its terms' magnitudes."""
    return phi_q @ phi_k.mT, phi_q.abs() @ phi_k.abs().mT


def log_products(log_q: Tensor, log_k: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The same for positive features known by their logarithm, in units of the row's largest."""
    logs = torch.where(seen, (log_q[..., :, None, :] + log_k[..., None, :, :]).logsumexp(-1), -math.inf)
    top = logs.amax(-1, keepdim=True)
    score = (logs - torch.where(top > -math.inf, top, 0.0)).exp()
    exponent = sum(x[x.isfinite()].abs().max() if x.isfinite().any() else 0.0 for x in (log_q, log_k))
    return score, score * (1 + exponent)


def exponents(q: Tensor, k: Tensor, t: float, phi: object, phi_k: object) -> float:
    """The largest exponent in phi(q) phi(k), 0 if there is none."""
    return t * sum(x.abs().max().item() for x, p in ((q, phi), (k, phi_k)) if p == "exp")


def level(phi_q: Tensor) -> Tensor:
    """Division cancels a query's length, so a row is judged at length one."""
    length = largest(phi_q)[..., None]
    return phi_q / torch.where(length > 0, length, 1.0)


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1)


# The mechanisms: (q, k, seen, limits, inputs, **options, scale, bias) -> Rows. k has as many heads as q.


class Limits(NamedTuple):
    """Of the dtype under test."""

    eps: float
    tiny: float


def softmax(q, k, seen, limits, inputs, confusion=None, scale=None, bias=0.0):
    q = q if confusion is None else unit(features(confusion, q, 1.0, inputs))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = torch.where(seen, scale * (q @ k.mT) + bias, -math.inf)
    top = s.amax(-1, keepdim=True)
    rows = divide((s - torch.where(top > -math.inf, top, 0.0)).exp(), seen.double(), seen, *limits)
    rounded = torch.where(seen, abs(scale) * (q.abs() @ k.abs().mT) + abs(bias), 0.0)
    return rows._replace(size=1 + rounded.amax(-1))


def general(q, k, seen, limits, inputs, sim):
    score = sim(q, k)
    return divide(score, sim(q.abs(), k.abs()), seen, *limits)


def linear(q, k, seen, limits, inputs, phi="elu", phi_k=None, t=1.0, normalize="divide", scale=1.0):
    phi_k = phi if phi_k is None else phi_k
    if normalize == "divide" and "exp" in (phi, phi_k):
        log_q, log_k = (t * x if p == "exp" else features(p, x, t, inputs).log() for p, x in ((phi, q), (phi_k, k)))
        return divide(*log_products(log_q, log_k, seen), seen, *limits)
    f_q, f_k = features(phi, q, t, inputs), features(phi_k, k, t, inputs)
    if normalize == "none":
        score, size = products(f_q, f_k)
        return plain(score, size * (1 + exponents(q, k, t, phi, phi_k)), seen, scale)
    score, size = products(level(f_q), f_k)
    rows = divide(score, size, seen, *limits)
    used_q, used_k = (f != 0 if p not in POSITIVE else torch.ones_like(f) for f, p in ((f_q, phi), (f_k, phi_k)))
    nothing = (used_q.double() @ used_k.double().mT * seen).sum(-1) == 0  # the row is zero, not merely underflowing
    tiny = (largest(f_q) < limits.tiny / limits.eps) | ((size * seen).sum(-1) == 0)
    return rows._replace(safe=rows.safe & (nothing | ~tiny))


def inline(q, k, seen, limits, inputs, phi="identity", phi_k=None, t=1.0, gain="mean", scale=None):
    phi_k = phi if phi_k is None else phi_k
    score, size = products(features(phi, q, t, inputs), features(phi_k, k, t, inputs))
    size = size * (1 + exponents(q, k, t, phi, phi_k))
    if gain == "sum":
        return contrast(score, size, seen, 1.0 if scale is None else scale)
    return subtract(score, size, seen, q.shape[-1] ** -0.5 if scale is None else scale)


def blend(q, k, seen, limits, inputs, phi="elu", phi_k=None, t=1.0, scale=None):
    """Each of the two ways adds to the mean of what is seen."""
    divided = linear(q, k, seen, limits, inputs, phi, phi_k, t)
    subtracted = inline(q, k, seen, limits, inputs, phi, phi_k, t, scale=scale)
    share, (a, b) = even(seen), (inputs[name][:, None, None] for name in ("divide", "subtract"))
    weights = share + a * (divided.weights - share) + b * (subtracted.weights - share)
    size = 1 + a[..., 0].abs() * divided.size + b[..., 0].abs() * subtracted.size
    return Rows(weights, size, divided.safe)


def regress(q, k, seen, limits, inputs, phi="identity", phi_k=None, scale=None, **options):
    """The ridge regression of each query, over the keys that it sees, by the inverse of its matrix.

    What is rounded: q - mean, k - mean, their product through A^-1, and A itself, whose error A^-1 multiplies twice.
    """
    f_q, f_k = features(phi, q, 1.0, inputs), features(phi if phi_k is None else phi_k, k, 1.0, inputs)
    learned = [name for name in ("ridge", "gain") if options.get(name) == "learned"]
    gain = 1.0 if options.get("gain") == "one" and scale is None else (q.shape[-1] ** -0.5 if scale is None else scale)
    per_head = {name: inputs[name][:, None] for name in learned}  # [H, 1]
    gain = gain * per_head.get("gain", torch.ones(()).double())
    ridge = (1 + per_head["ridge"].exp()).log() if "ridge" in learned else options.get("ridge", 0.1)
    share = by_mean_query(q, k, seen) if options.get("weighting") == "query" else even(seen)
    mean = share @ f_k  # [B, H, N, d]
    apart = torch.where(seen[..., None], f_k[..., None, :, :] - mean[..., None, :], 0.0)  # [B, H, N, M, d]
    spread = torch.einsum("bhnm,bhnmi,bhnmj->bhnij", share, apart, apart)
    variance, dim = spread.diagonal(dim1=-2, dim2=-1), f_k.shape[-1]
    r = ridge * (variance.mean(-1) if options.get("relative", True) else 1 / seen.double().sum(-1).clamp(min=1))
    least = (16 * limits.eps * largest(mean)).square()
    nothing = variance.amax(-1) <= least
    matrix = spread + r[..., None, None] * torch.eye(dim).double()
    inverse = torch.linalg.inv(torch.where(nothing[..., None, None], torch.eye(dim).double(), matrix))
    off = f_q - mean if options.get("center", True) else f_q
    x = torch.where(nothing[..., None], 0.0, torch.einsum("bhni,bhnij->bhnj", off, inverse))
    weights = share * (1 + gain[..., None] * torch.einsum("bhnd,bhnmd->bhnm", x, apart))

    terms = torch.where(seen[..., None], f_k.abs()[..., None, :, :] + mean.abs()[..., None, :], 0.0)
    second = torch.einsum("bhnm,bhnmi,bhnmj->bhnij", share, terms, terms)
    first = (share[..., None] * terms).sum(-2)
    twice = torch.einsum("bhni,bhnij,bhnj->bhn", x.abs(), second, (inverse.abs() @ first[..., None])[..., 0])
    once = (x.abs() * first).sum(-1) + ((f_q.abs() + mean.abs()) * (inverse.abs() @ first[..., None])[..., 0]).sum(-1)
    size = 1 + gain.abs() * torch.where(nothing, 0.0, once + twice)
    condition = second.diagonal(dim1=-2, dim2=-1).amax(-1) * inverse.abs().sum(-1).amax(-1)
    safe = nothing | ((limits.eps * condition <= 1e-2) & (variance.amax(-1) > 1e4 * least))
    return Rows(weights, size, safe & (nothing | (variance.amax(-1) >= limits.tiny / limits.eps)))


def by_mean_query(q, k, seen):
    """softmax_j of the mean query with key j; with as many queries as keys, hidden tokens ask nothing either."""
    real = seen[:, :, -1, :]
    asking = real.double() if q.shape[2] == k.shape[2] else torch.ones(q.shape[:3]).double()
    mean = (asking[..., None] * q).sum(2) / asking.sum(-1, keepdim=True).clamp(min=1)
    score = torch.where(real, (k @ mean[..., None])[..., 0] / q.shape[-1] ** 0.5, -math.inf)
    top = score.amax(-1, keepdim=True)
    share = (score - torch.where(top > -math.inf, top, 0.0)).exp()
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    return share[:, :, None].expand(*seen.shape)


def efficient(q, k, seen, limits, inputs):
    logs = torch.where(seen[..., None], k[..., None, :, :], -math.inf)  # [B, H, N, M, d]
    top = logs.amax(-2, keepdim=True)
    share = (logs - torch.where(top > -math.inf, top, 0.0)).exp()
    share = share / share.sum(-2, keepdim=True).clamp(min=1)  # one normalizer a channel, running if causal
    weights = (share * features("softmax", q, 1.0, {})[..., None, :]).sum(-1)
    return Rows(weights, (1 + q.abs().max() + k.abs().max()).expand(seen.shape[:3]), torch.ones_like(seen[..., 0]))


def taylor(q, k, seen, limits, inputs, order=1, normalize=None):
    if order == 1 or normalize:
        q, k = unit(q), unit(k)
    else:
        q = q * q.shape[-1] ** -0.5
    score, size = ((1 + a if order == 1 else 1 + a + a.square() / 2) for a in products(q, k))
    return divide(score, size, seen, *limits)


def hydra(q, k, seen, limits, inputs, scale=1.0):
    """One matrix a channel: weights [B, H d, N, M]."""
    q, k = (unit(x, (1, 3)).transpose(2, 3).flatten(1, 2) for x in (q, k))  # [B, H d, N]
    score = q[..., :, None] * k[..., None, :]
    return plain(score, score.abs(), seen[:, :1].expand(-1, q.shape[1], -1, -1), scale)


def angular(q, k, seen, limits, inputs, exact=False):
    score, size = products(unit(q), unit(k))
    constant = torch.full_like(score, 0.5)
    if not exact:  # 1/2 v_i, the query's own token only
        own = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] == torch.arange(k.shape[2])
        constant = constant * own
    return plain(constant + score / math.pi, constant + size / math.pi, seen, 1.0)


def focused(q, k, seen, limits, inputs, p=3.0, learned_scale=False):
    def phi(x: Tensor) -> Tensor:
        x = x.clamp(min=0) + 1e-6
        if learned_scale:
            x = x / (1 + inputs["scale"].exp()).log()[None, :, None]
        norm = [y.square().sum((1, 3), keepdim=True).sqrt() for y in (x, x**p)]  # over all H d channels
        return x**p * norm[0] / norm[1]

    return divide(*products(level(phi(q)), phi(k)), seen, *limits)


def threshold(q, k, seen, limits, inputs, tau=1.0, expansion="max", tail="drop", scale=None, bias=0.0):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s, size = scale * (q @ k.mT) + bias, abs(scale) * (q.abs() @ k.abs().mT) + abs(bias)
    top = torch.where(seen, s, -math.inf).amax(-1, keepdim=True)
    low = torch.where(seen, s, math.inf).amin(-1, keepdim=True)
    blind = ~seen.any(-1, keepdim=True)
    x, spread = torch.where(seen, s - top, -math.inf), torch.where(blind, 0.0, top - low)
    kept = seen & (x > -tau)
    if expansion == "max":
        line = 1 + x
    elif expansion == "mean":
        line = 1 + s - torch.where(kept, s, 0.0).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)
    else:
        rho = spread.clamp(max=tau)
        b = torch.where(rho > 0, -torch.expm1(-rho) / torch.where(rho > 0, rho, 1.0), 1.0)
        line = (1 + b - b * b.log()) / 2 + b * x
    gap = (spread - tau).clamp(min=0)  # (e^-tau - e^-R) / (R - tau), which tends to e^-tau
    rest = math.exp(-tau) * torch.where(gap > 0, -torch.expm1(-gap) / torch.where(gap > 0, gap, 1.0), 1.0)
    score = torch.where(kept, line, rest if tail == "mean" else 0.0)
    rows = divide(score, 1 + 2 * kept * torch.where(seen, size, 0.0).amax(-1, keepdim=True), seen, *limits)
    edge = (seen & ((x + tau).abs() <= 16 * limits.eps * (1 + size))).any(-1)
    return rows._replace(safe=rows.safe & ~edge)


# Those that count tokens. Padding is not counted: a key's place is the number of real keys up to it.


def places(q: Tensor, seen: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Of the queries [B, H, N] and the keys [B, H, M]. The last query sees every real key."""
    queries, keys = seen.shape[-2:]
    at_k = seen[..., -1, :].double().cumsum(-1)
    if not is_causal and queries != keys:
        return torch.arange(1, queries + 1).double().expand(*seen.shape[:3]), at_k
    own = torch.arange(queries) + keys - queries
    return torch.where(own >= 0, at_k[..., own.clamp(min=0)], 0), at_k


def cosformer(q, k, seen, limits, inputs, is_causal, length=None):
    at_q, at_k = places(q, seen, is_causal)
    if length is None:
        length = torch.maximum(at_q[..., -1], at_k[..., -1]).clamp(min=1)[..., None, None]
    cosine = (math.pi / 2 * (at_q[..., :, None] - at_k[..., None, :]) / length).cos()
    f_q, f_k = q.clamp(min=0), k.clamp(min=0)
    size = level(f_q) @ f_k.mT
    rows = divide(size * cosine, size, seen, *limits)
    nothing = ((f_q > 0).double() @ (f_k > 0).double().mT * seen).sum(-1) == 0
    tiny = (largest(f_q) < limits.tiny / limits.eps) | ((size * seen).sum(-1) == 0)
    return rows._replace(safe=rows.safe & (nothing | ~tiny))


def performer(q, k, seen, limits, inputs, kind="positive", features=None):
    def logs(x: Tensor) -> Tensor:
        x = x / x.shape[-1] ** 0.25
        along = x @ inputs["projection"].mT
        along = torch.cat([along, -along], -1) if kind == "hyperbolic" else along
        return along - x.square().sum(-1, keepdim=True) / 2 - math.log(along.shape[-1]) / 2

    score, size = log_products(logs(q), logs(k), seen)
    return divide(score, size, seen, *limits)


def nearfar(
    q, k, seen, limits, inputs, window=64, first=4, maps="shared", features=None, neighborhood=None, scale=None,
    is_causal=False, grid=None,
):  # fmt: skip
    """Pair by pair: is the key near, by its place among the real ones, and what does it weigh."""
    maps = [
        inputs[name] if name in inputs else inputs.get("map", torch.eye(q.shape[-1])[None].double())
        for name in ("map_q", "map_k")
    ]
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    (f_q, at_q), (f_k, at_k) = (_softmaxes(x, w) for x, w in zip((q, k), maps, strict=True))
    at, real = places(q, seen, is_causal)[1], seen[..., -1, :]
    own = torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]
    alive = torch.where(own >= 0, real[..., own.clamp(min=0)], False)
    here = at[..., own.clamp(min=0)]
    near = (here[..., :, None] - at[..., None, :]).abs() < window
    if neighborhood is not None:
        row, column = torch.arange(q.shape[2]) // grid[1], torch.arange(q.shape[2]) % grid[1]
        near = ((row[:, None] - row).abs() <= neighborhood // 2) & (
            (column[:, None] - column).abs() <= neighborhood // 2
        )
    seen = seen & alive[..., None]
    near = seen & (near | (at <= first)[..., None, :])
    top = torch.where(near, s, -math.inf).amax(-1, keepdim=True)
    some = near.any(-1, keepdim=True)
    far = f_q @ f_k.mT * torch.where(some, inputs["gain"].exp()[:, None, None], 1.0)
    score = torch.where(near, torch.where(near, s - top, -math.inf).exp(), torch.where(seen, far, 0.0))
    terms = (q.shape[-1] ** -0.5 if scale is None else abs(scale)) * (q.abs() @ k.abs().mT)
    rounded = torch.where(near, terms, torch.where(seen, at_q[..., :, None] + at_k[..., None, :], 0.0)).amax(-1)
    rows = divide(score, seen.double(), seen, *limits)
    none = score.sum(-1, keepdim=True) == 0
    safe = (
        rows.safe
        & (some | (score.sum(-1, keepdim=True) > limits.tiny / limits.eps) | ~seen.any(-1, keepdim=True))[..., 0]
    )
    return Rows(torch.where(none, 0.0, rows.weights), 1 + 2 * rounded + torch.where(near, terms, 0.0).amax(-1), safe)


def _softmaxes(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """sqrt(f/2) [softmax(W x), softmax(-W x)], and the largest magnitude that is added up in W x."""
    wx = torch.einsum("hij,bhnj->bhni", matrix.expand(x.shape[1], -1, -1), x)
    size = torch.einsum("hij,bhnj->bhni", matrix.expand(x.shape[1], -1, -1).abs(), x.abs()).amax(-1)
    both = torch.cat([features("softmax", wx, 1.0, {}), features("softmax", -wx, 1.0, {})], -1)
    return (matrix.shape[-2] / 2) ** 0.5 * both, size


# Those that change a memory, token by token. With one-hot values a memory's answer is the weights.


def through(q: Tensor, k: Tensor, seen: Tensor, step: Callable[[Tensor, int, Tensor], Tensor]) -> Tensor:
    """Weights [B, H, N, M] of q_i S_i, with S <- step(S, j, one-hot of j) for the real keys."""
    queries, keys = seen.shape[-2:]
    real, ones = seen[..., -1, :, None, None], torch.eye(keys, dtype=torch.float64)
    memory, rows = torch.zeros(*k.shape[:2], k.shape[3], keys, dtype=torch.float64), []
    for j in range(keys):
        memory = torch.where(real[..., j, :, :], step(memory, j, ones[j]), memory)
        if j + queries - keys >= 0:
            rows.append((q[..., j + queries - keys, :, None] * memory).sum(-2))
    blind = torch.zeros(*q.shape[:2], queries - len(rows), keys, dtype=torch.float64)
    return torch.cat([blind, torch.stack(rows, 2)], 2)


def corrected(q, k, seen, alpha, write, scale) -> Rows:
    """S - alpha k (k^T S - v^T). `write` is what a key adds at most, |alpha k|."""

    def step(memory: Tensor, j: int, value: Tensor) -> Tensor:
        key, rate = k[..., j, :, None], alpha[..., j, None, None]  # [B, H, d, 1], [B, H, 1, 1]
        return memory - rate * key * (key * memory).sum(-2, keepdim=True) + rate * key * value

    weights = scale * through(q, k, seen, step)
    size = abs(scale) * q.abs().sum(-1) * (seen * write[..., None, :]).sum(-1)
    return Rows(weights, size, torch.ones_like(seen[..., 0]))


def delta(q, k, seen, limits, inputs, scale=1.0):
    beta = inputs["beta"].repeat_interleave(q.shape[1] // inputs["beta"].shape[1], 1)
    return corrected(q, unit(k), seen, beta, beta, scale)


def efla(q, k, seen, limits, inputs, scale=1.0):
    beta, square = inputs["beta"].repeat_interleave(q.shape[1] // inputs["beta"].shape[1], 1), k.square().sum(-1)
    alpha = torch.where(square > 0, -torch.expm1(-beta * square) / torch.where(square > 0, square, 1.0), beta)
    return corrected(q, k, seen, alpha, alpha * square.sqrt(), scale)


def decay(q, k, seen, limits, inputs, slopes="lightning", factor=1.0, scale=1.0):
    heads = q.shape[1]
    rates = {
        "lightning": [2 ** (-8 * (h + 1) / heads) for h in range(heads)],
        "retention": [-math.log(1 - 2 ** (-5 - h)) for h in range(heads)],
    }[slopes]
    fade = torch.tensor([math.exp(-factor * rate) for rate in rates], dtype=torch.float64)[:, None, None]
    weights = scale * through(q, k, seen, lambda memory, j, value: fade * memory + k[..., j, :, None] * value)
    return Rows(weights, abs(scale) * (q.abs() @ k.abs().mT * seen).sum(-1), torch.ones_like(seen[..., 0]))


def transnormer(q, k, seen, limits, inputs, variant="t2"):
    f_q, f_k = (x.clamp(min=0) + x.clamp(max=0).exp() - float(variant == "t1") for x in (q, k))
    return plain(*products(f_q, f_k), seen, 1.0)


def diagonal(q, k, seen, limits, inputs, variant="t2", block=64, scale=None):
    real, own = seen[..., -1, :], torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]
    place = (real.cumsum(-1) - 1).clamp(min=0)
    home = torch.where(own >= 0, place[..., own.clamp(min=0)], -block)
    alive = real[..., own.clamp(min=0)] & (own >= 0)
    near = seen & alive[..., None] & (home[..., :, None] // block == place[..., None, :] // block)
    if variant == "t2":
        return softmax(q, k, near, limits, inputs, scale=scale)
    score, size = products(q, k)
    return plain(score.clamp(min=0), size, near, q.shape[-1] ** -0.5)


def mlla(q, k, seen, limits, inputs, grid):
    f_q, f_k = (x.clamp(min=0) + x.clamp(max=0).exp() for x in (q, k))
    tiny, f_q, (heads, dim) = largest(f_q) < limits.tiny / limits.eps, level(f_q), (q.shape[1], q.shape[3])
    turns = torch.zeros(q.shape[2], heads * dim // 2, dtype=torch.complex128)  # one complex number a pair of channels
    quarter = heads * dim // 4
    for token in range(q.shape[2]):
        row, column = divmod(token, grid[1])
        for t in range(quarter):
            theta = 10000 ** (-t / quarter)
            turns[token, t] = complex(math.cos(row * theta), math.sin(row * theta))
            turns[token, quarter + t] = complex(math.cos(column * theta), math.sin(column * theta))

    def turned(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1, 2).contiguous()
        flat = torch.view_as_real(torch.view_as_complex(flat) * turns)
        return flat.reshape(x.shape[0], x.shape[2], heads, dim).transpose(1, 2)

    score, (_, size) = turned(f_q) @ turned(f_k).mT, products(turned(f_q), turned(f_k))
    mass = torch.where(seen, f_q @ f_k.mT, 0.0).sum(-1, keepdim=True)
    score, total = torch.where(seen, score, 0.0), torch.where(seen, size, 0.0).sum(-1, keepdim=True)
    steady = (mass >= limits.tiny / limits.eps) | (~seen).all(-1, keepdim=True)
    score, total = (x / torch.where(mass > 0, mass, 1.0) for x in (score, total))
    return Rows(score, total[..., 0], steady[..., 0] & ~tiny)


def a2(q, k, seen, limits, inputs):
    gathered = efficient(q, k, seen, limits, inputs)
    return gathered._replace(weights=unit_sum((q - q.amax(-1, keepdim=True)).exp()) @ _over_tokens(k, seen))


def _over_tokens(k: Tensor, seen: Tensor) -> Tensor:
    """softmax of the real keys' channels over tokens, [B, H, d, M]."""
    logs = torch.where(seen[..., -1, :, None], k, -math.inf).mT
    top = logs.amax(-1, keepdim=True)
    share = (logs - torch.where(top > -math.inf, top, 0.0)).exp()
    return share / share.sum(-1, keepdim=True).clamp(min=1)


FORMULAS = {
    f.__name__: f
    for f in (
        *(softmax, general, linear, inline, blend, regress, efficient, taylor, hydra, angular, focused, threshold),
        *(nearfar, cosformer, performer, delta, efla, decay, transnormer, diagonal, mlla, a2),
    )
}
