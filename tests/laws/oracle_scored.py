"""The scored family from its formulas, as oracle.py does it: which pairs count is asked pair by pair."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.laws import oracle
from tests.laws.oracle import Rows
from tests.variants import ALWAYS, WITH_EXAMPLES

CASES: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"k": 5}),
    ("sparse", {"pattern": "local", "stride": 5, "waits": ALWAYS}),
    ("sparse", {"pattern": "strided", "stride": 4, "waits": ALWAYS}),
    ("sparse", {"pattern": "local+strided", "stride": 7}),
    ("sparse", {"pattern": "fixed", "stride": 6, "summary": 2, "waits": ALWAYS}),
    ("longformer", {"window": 4, "global_tokens": 2, "waits": WITH_EXAMPLES}),
    ("linformer", {"rank": 5, "length": 300}),
    ("linformer", {"rank": 4, "length": 257, "share": "none", "waits": ALWAYS}),
    ("nystrom", {"landmarks": 6}),
    ("agent", {"agents": 5, "waits": WITH_EXAMPLES}),
    ("soft", {"landmarks": 4, "waits": WITH_EXAMPLES}),
    ("nonlocal", {"pairing": "dot", "waits": WITH_EXAMPLES}),
    ("nonlocal", {"pairing": "concatenation", "waits": ALWAYS}),
    ("asymmetric_nonlocal", {"pyramid": (1, 3, 6), "waits": WITH_EXAMPLES}),
    ("reformer", {"buckets": 4, "rounds": 2, "window": 3}),
    ("emanet", {"bases": 4, "detach": False, "largest": 10.0}),
]
NOT_CAUSAL = ("linformer", "nystrom", "agent", "soft", "asymmetric_nonlocal", "emanet")
INPUTS = {  # by the case's id, for 2 heads of 4 channels
    "linformer rank=5 length=300": {"e": [5, 300]},
    "linformer rank=4 length=257 share=none": {"e": [2, 4, 257], "f": [2, 4, 257]},
    "reformer buckets=4 rounds=2 window=3": {"rotations": [2, 2, 4, 2]},
    "nonlocal pairing=concatenation": {"weight": [2, 8]},
    "emanet bases=4 detach=False": {"bases": [2, 4, 4]},
}


def topk(q, keys, seen, limits, inputs, k, scale=None, bias=0.0):
    """Rows in which rounding decides who is the k-th are not judged."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = torch.where(seen, scale * (q @ keys.mT) + bias, -math.inf)
    least = s.sort(-1, descending=True).values[..., min(k, s.shape[-1]) - 1, None]
    size = abs(scale) * (q.abs() @ keys.abs().mT) + abs(bias)
    edge = (seen & (s != least) & ((s - least).abs() <= 16 * limits.eps * (1 + size))).any(-1)
    rows = oracle.softmax(q, keys, seen & (s >= least), limits, inputs, scale=scale, bias=bias)
    return rows._replace(safe=rows.safe & ~edge)


def sparse_pair(i: int, j: int, pattern: str, stride: int, summary: int = 4) -> bool:
    local, strided = abs(i - j) < stride, (i - j) % stride == 0
    own_group, last = i // stride == j // stride, j % stride >= stride - summary
    return {
        "local": local,
        "strided": strided,
        "local+strided": local or strided,
        "fixed": own_group or last,
    }[pattern]


def longformer_pair(i: int, j: int, window: int, global_tokens: int) -> bool:
    return abs(i - j) <= window or j < global_tokens or i < global_tokens


@cache
def allowed(pair: Callable[..., bool], queries: int, keys: int, options: tuple[tuple[str, Any], ...]) -> Tensor:
    """[N, M]; the last query stands at the last key."""
    chosen, behind = dict(options), keys - queries
    return torch.tensor([[pair(i + behind, j, **chosen) for j in range(keys)] for i in range(queries)])


def restricted(pair: Callable[..., bool]) -> Callable[..., Rows]:
    def formula(q, k, seen, limits, inputs, scale=None, bias=0.0, **options):
        given = allowed(pair, q.shape[2], k.shape[2], tuple(options.items()))
        return oracle.softmax(q, k, seen & given, limits, inputs, scale=scale, bias=bias)

    return formula


def reformer(q, k, seen, limits, inputs, buckets, rounds, window, scale=1.0, bias=0.0):
    """Bucket by bucket, in lists. Rows in which rounding decides a bucket are not judged."""
    turned = torch.einsum("bhmd,hrdc->bhrmc", k, inputs["rotations"])
    ends = torch.cat([turned, -turned], -1)
    top = ends.topk(2, -1).values
    terms = torch.einsum("bhmd,hrdc->bhrmc", k.abs(), inputs["rotations"].abs()).amax(-1)
    torn = ((top[..., 0] - top[..., 1]) <= 16 * limits.eps * terms) & (top[..., 0] > 0)
    queries, keys = q.shape[2], k.shape[2]
    met = np.zeros((*q.shape[:2], keys, keys), dtype=bool)
    real, best = seen.any(-2).tolist(), ends.argmax(-1).tolist()  # a key that no query sees is in no list
    for b, h, r in [(b, h, r) for b in range(len(q)) for h in range(q.shape[1]) for r in range(rounds)]:
        lists: dict[int, list[int]] = {}
        for j in range(keys):
            if real[b][h][j]:
                lists.setdefault(best[b][h][r][j], []).append(j)
        for members in lists.values():
            for place, i in enumerate(members):
                met[b, h, i, members[max(place - window, 0) : place + window + 1]] = True
    met = torch.from_numpy(met)
    own = torch.eye(keys, dtype=torch.bool)
    met, own = ((x.new_zeros(*x.shape[:-2], queries, keys)) | _last_rows(x, queries) for x in (met & ~own, own))
    rows = oracle.softmax(q, oracle.unit(k), seen & met, limits, inputs, scale=scale, bias=bias)
    alone = ~(seen & met).any(-1, keepdim=True) & own & seen
    return rows._replace(weights=rows.weights + alone.double(), safe=rows.safe & ~torn.any(-1).any(-1)[..., None])


def _last_rows(x: Tensor, queries: int) -> Tensor:
    """The last N of M rows; rows before the first key are empty."""
    missing = max(queries - x.shape[-2], 0)
    return torch.cat([x.new_zeros(*x.shape[:-2], missing, x.shape[-1]), x], -2)[..., -queries:, :]


def rounded(scale: float, q: Tensor, k: Tensor) -> Tensor:
    """How large the terms of the scores get: [B, H, N, M]."""
    return abs(scale) * (q.abs() @ k.abs().mT)


def always(rows: Tensor) -> Tensor:
    return torch.ones(rows.shape[:3], dtype=torch.bool)


def share(scores: Tensor, used: Tensor) -> Tensor:
    """Softmax over what is used; zeros where nothing is."""
    scores = torch.where(used, scores, -math.inf)
    top = scores.amax(-1, keepdim=True)
    e = (scores - torch.where(top > -math.inf, top, 0.0)).exp()
    return e / e.sum(-1, keepdim=True).clamp(min=1)


def means(real: Tensor, count: int) -> Tensor:
    """[B, 1, count, N]: of n real tokens the r-th is in run floor(r count / n). Token by token."""
    out = torch.zeros(len(real), 1, count, real.shape[1], dtype=torch.float64)
    for b, row in enumerate(real.tolist()):
        tokens = [j for j, yes in enumerate(row) if yes]
        for run in range(count):
            members = [j for r, j in enumerate(tokens) if r * count // len(tokens) == run]
            for j in members:
                out[b, 0, run, j] = 1 / len(members)
    return out


def real_tokens(q: Tensor, k: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Which queries and keys stand for something; as many queries as keys are the same tokens."""
    keys = seen[:, 0, 0]
    return (keys if q.shape[2] == k.shape[2] else torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)), keys


def linformer(q, k, seen, limits, inputs, rank, length, share="kv", scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    e, f = (inputs[name][..., : k.shape[2]] for name in ("e", "e" if share == "kv" else "f"))
    projected, size = e @ k, e.abs() @ k.abs()
    top = (scale * (q @ projected.mT)).softmax(-1)
    hidden = torch.where(seen[:, :, :1], f, 0.0)
    return Rows(top @ hidden, (1 + rounded(scale, q, size).amax(-1)) * (top @ hidden.abs()).sum(-1), always(q))


def nystrom(q, k, seen, limits, inputs, landmarks, scale=None):
    """An error of A reaches the product through Z twice, and each score brings its own rounding."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    real_q, real_k = real_tokens(q, k, seen)
    of_q, of_k = means(real_q, landmarks), means(real_k, landmarks)
    used_q, used_k = of_q.sum(-1) > 0, of_k.sum(-1) > 0  # [B, 1, m]
    marks_q, marks_k = of_q @ q, of_k @ k
    left = share(scale * (q @ marks_k.mT), used_k[..., None, :].expand(-1, q.shape[1], q.shape[2], -1))
    a = share(scale * (marks_q @ marks_k.mT), used_k[..., None, :] & used_q[..., None])
    right = share(scale * (marks_q @ k.mT), seen[:, :1, :1] & used_q[..., None])
    column = a.sum(-2).amax(-1)[..., None, None]
    z, eye = a.mT / torch.where(column > 0, column, 1.0), torch.eye(landmarks, dtype=torch.float64)
    for _ in range(6):
        z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
    few = (real_k.sum(-1) <= landmarks)[:, None, None, None]
    weights = torch.where(few, share(scale * (q @ k.mT), seen), left @ z @ right)
    norm = torch.where(few, 1.0, z).abs().sum(-1).amax(-1)[..., None]
    scores = rounded(scale, q, k).amax((-1, -2))[..., None]
    return Rows(weights, ((1 + scores) * (1 + norm).square()).expand(q.shape[:3]), always(q))


def agent(q, k, seen, limits, inputs, agents, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    of_q = means(real_tokens(q, k, seen)[0], agents)
    used, asked = of_q.sum(-1) > 0, of_q @ q
    down = share(scale * (q @ asked.mT), used[..., None, :].expand(-1, q.shape[1], q.shape[2], -1))
    up = share(scale * (asked @ k.mT), used[..., None] & seen[:, :1, :1])
    size = 1 + rounded(scale, q, of_q @ q.abs()).amax(-1) + rounded(scale, of_q @ q.abs(), k).amax((-1, -2))[..., None]
    return Rows(down @ up, size, always(q))


def soft(q, k, seen, limits, inputs, landmarks, scale=None):
    """The inverse passes errors on as much as its condition allows."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    of_k = means(real_tokens(q, k, seen)[1], landmarks)
    used, marks = of_k.sum(-1) > 0, of_k @ k

    def gaussian(a: Tensor, b: Tensor) -> Tensor:
        return (-scale * (a[..., :, None, :] - b[..., None, :, :]).square().sum(-1) / 2).exp()

    eye = torch.eye(landmarks, dtype=torch.float64)
    center = torch.where(used[..., None] & used[..., None, :], gaussian(marks, marks), eye) + 0.01 * eye
    left = gaussian(q, marks) * used[..., None, :]
    right = gaussian(marks, k) * used[..., None] * seen[:, :1, :1]
    inverse = torch.linalg.inv(center)
    squares = 1 + scale * (q.square().sum(-1).amax(-1) + 2 * k.square().sum(-1).amax(-1))
    condition = center.abs().sum(-1).amax(-1) * inverse.abs().sum(-1).amax(-1)
    size = (inverse.abs().sum(-1).amax(-1) * landmarks * k.shape[2] * squares * condition)[..., None]
    return Rows(left @ inverse @ right, size.expand(q.shape[:3]), always(q))


def non_local(q, k, seen, limits, inputs, pairing="softmax", scale=None, bias=0.0):
    if pairing == "softmax":
        return oracle.softmax(q, k, seen, limits, inputs, scale=scale, bias=bias)
    scale = 1.0 if scale is None else scale
    if pairing == "dot":
        score, size = scale * (q @ k.mT), rounded(scale, q, k)
    else:
        d, w = q.shape[-1], inputs["weight"][:, None]  # [H, 1, 2 d]
        terms = [(q * w[..., :d])[..., :, None, :], (k * w[..., d:])[..., None, :, :]]
        score = scale * sum(x.sum(-1) for x in terms).clamp(min=0)
        size = abs(scale) * sum(x.abs().sum(-1) for x in terms)
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    weights = torch.where(seen, score + bias, 0.0) / count
    return Rows(weights, (torch.where(seen, size + abs(bias), 0.0) / count).sum(-1), always(q))


def asymmetric_nonlocal(q, k, seen, limits, inputs, pyramid, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    of_k = torch.cat([means(real_tokens(q, k, seen)[1], level) for level in pyramid], -2)
    used = (of_k.sum(-1) > 0)[..., None, :].expand(-1, q.shape[1], q.shape[2], -1)
    top = share(scale * (q @ (of_k @ k).mT), used)
    return Rows(top @ of_k, 1 + rounded(scale, q, of_k @ k.abs()).amax(-1), always(q))


def emanet(q, k, seen, limits, inputs, bases, detach, scale=1.0):
    """Each round brings the rounding of its scores, and that of a mean whose terms may cancel."""
    mu, hidden, growth = inputs["bases"].expand(len(q), -1, -1, -1), ~seen[:, :, :1], torch.ones(q.shape[:2]).double()
    for _ in range(3):
        z = (scale * (mu @ k.mT)).log_softmax(-2)  # [B, H, bases, M]
        belongs = share(z, ~hidden.expand_as(z))
        used, mean = mu, belongs @ k
        length = mean.norm(dim=-1, keepdim=True)
        mu = torch.where(length > 0, mean / torch.where(length > 0, length, 1.0), 0.0)
        lost = (belongs @ k.norm(dim=-1, keepdim=True)) / torch.where(length > 0, length, 1.0)
        growth = growth * (1 + rounded(scale, used, k).amax((-1, -2))) * (1 + lost.amax((-1, -2)))
    z = (scale * (q @ used.mT)).softmax(-1)
    gain = torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0)
    weights = z @ (gain * belongs)
    return Rows(
        weights, growth[..., None] * (1 + rounded(scale, q, used).amax(-1)) * gain.amax((-1, -2))[..., None], always(q)
    )


FORMULAS: dict[str, Callable[..., Rows]] = {
    "topk": topk,
    "sparse": restricted(sparse_pair),
    "longformer": restricted(longformer_pair),
    "linformer": linformer,
    "nystrom": nystrom,
    "agent": agent,
    "soft": soft,
    "nonlocal": non_local,
    "asymmetric_nonlocal": asymmetric_nonlocal,
    "emanet": emanet,
    "reformer": reformer,
}
