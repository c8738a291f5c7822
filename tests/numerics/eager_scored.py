"""The scored family as anyone would type it, in the dtype that comes in: see eager.py."""

from collections.abc import Callable

import torch
from torch import Tensor

Formula = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


def softmax_over(score: Tensor, pairs: Tensor, v: Tensor) -> Tensor:
    return score.masked_fill(pairs == 0, -torch.inf).softmax(-1) @ v


def topk(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    score = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(seen == 0, -torch.inf)
    least = score.topk(min(2, score.shape[-1]), -1).values[..., -1:]
    return score.masked_fill(score < least, -torch.inf).softmax(-1) @ v


def restricted(pair: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
        places = torch.arange(k.shape[2])
        return softmax_over(q @ k.mT * q.shape[-1] ** -0.5, seen * pair(places[:, None], places), v)

    return formula


def linformer(q: Tensor, k: Tensor, v: Tensor, _seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    e = inputs["e"][:, : k.shape[2]]
    return (q @ (e @ k).mT * q.shape[-1] ** -0.5).softmax(-1) @ (e @ v)


def mean_matrix(x: Tensor, count: int) -> Tensor:
    """[count, N]: token r is in run floor(r count / N); of fewer tokens than runs, each is a run."""
    count = min(count, x.shape[2])
    member = torch.arange(x.shape[2]) * count // x.shape[2] == torch.arange(count)[:, None]
    return member.to(x.dtype) / member.sum(-1, keepdim=True)


def nystrom(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    scale = q.shape[-1] ** -0.5
    if k.shape[2] <= 3:
        return softmax_over(q @ k.mT * scale, seen, v)
    q_marks, k_marks = mean_matrix(q, 3) @ q, mean_matrix(k, 3) @ k
    left, a, right = ((x @ y.mT * scale).softmax(-1) for x, y in ((q, k_marks), (q_marks, k_marks), (q_marks, k)))
    z, eye = a.mT / a.sum(-2).amax(-1)[..., None, None], torch.eye(3, dtype=q.dtype)
    for _ in range(6):
        z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
    return left @ (z @ (right @ v))


def agent(q: Tensor, k: Tensor, v: Tensor, _seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    scale, agents = q.shape[-1] ** -0.5, mean_matrix(q, 4) @ q
    return (q @ agents.mT * scale).softmax(-1) @ ((agents @ k.mT * scale).softmax(-1) @ v)


def soft(q: Tensor, k: Tensor, v: Tensor, _seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    def gaussian(a: Tensor, b: Tensor) -> Tensor:
        return (-0.5 * q.shape[-1] ** -0.5 * (a[..., :, None, :] - b[..., None, :, :]).square().sum(-1)).exp()

    marks = mean_matrix(k, 4) @ k
    center = gaussian(marks, marks) + 0.01 * torch.eye(marks.shape[2], dtype=q.dtype)
    inverse = torch.linalg.inv(center.to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)  # has no half
    return gaussian(q, marks) @ (inverse @ (gaussian(marks, k) @ v))


def dot(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    return (q @ k.mT * seen / seen.sum(-1, keepdim=True)) @ v


def concatenation(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    pairs = torch.cat(torch.broadcast_tensors(q[..., :, None, :], k[..., None, :, :]), -1)  # [B, H, N, M, 2 d]
    scores = (pairs * inputs["weight"][:, None, None]).sum(-1).relu()
    return (scores * seen / seen.sum(-1, keepdim=True)) @ v


def asymmetric_nonlocal(q: Tensor, k: Tensor, v: Tensor, _seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    means = torch.cat([mean_matrix(k, 1), mean_matrix(k, 4)])
    return (q @ (means @ k).mT * q.shape[-1] ** -0.5).softmax(-1) @ (means @ v)


def emanet(q: Tensor, k: Tensor, v: Tensor, _seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mu = inputs["bases"]
    for _ in range(3):
        used, z = mu, (k @ mu.mT).softmax(-1)
        mean = (z / z.sum(-2, keepdim=True)).mT @ k
        mu = mean / mean.norm(dim=-1, keepdim=True)
    values = (z / z.sum(-2, keepdim=True)).mT @ v
    return (q @ used.mT).softmax(-1) @ (values / mean.norm(dim=-1, keepdim=True))


def reformer(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    turned = torch.einsum("bhmd,hrdc->rbhmc", k.float(), inputs["rotations"].float())
    bucket = torch.cat([turned, -turned], -1).argmax(-1)  # [rounds, B, H, M]
    same = bucket[..., :, None] == bucket[..., None, :]
    place = (same & torch.ones_like(same).tril()).sum(-1)  # how many of its bucket came before
    met = (same & ((place[..., :, None] - place[..., None, :]).abs() <= 5)).any(0)
    own = torch.eye(k.shape[2], dtype=torch.bool)
    met = met & ~own & (seen > 0)
    met = met | (own & ~met.any(-1, keepdim=True))
    return softmax_over(q @ (k / k.norm(dim=-1, keepdim=True)).mT, met, v)


FORMULAS: dict[str, Formula] = {
    "topk": topk,
    "sparse": restricted(lambda i, j: ((i - j).abs() < 5) | ((i - j) % 5 == 0)),
    "sparse-fixed": restricted(lambda i, j: (i // 6 == j // 6) | (j % 6 >= 4)),
    "linformer": linformer,
    "nystrom": nystrom,
    "agent": agent,
    "soft": soft,
    "nonlocal-dot": dot,
    "nonlocal-concatenation": concatenation,
    "asymmetric_nonlocal": asymmetric_nonlocal,
    "emanet": emanet,
    "reformer": reformer,
    "longformer": restricted(lambda i, j: ((i - j).abs() <= 4) | (i < 2) | (j < 2)),
}
