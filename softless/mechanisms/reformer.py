"""Reformer's LSH attention (Kitaev et al. 2020, arXiv 2001.04451): softmax over keys that hash alike.

    bucket_r(j) = argmax [x R_r, -x R_r],  x = k_j         R_r [d, buckets / 2] Gaussian, one for each round
    S_i  = the j != i that share i's bucket in some round and are among the `window` next to i there, in time
    w_ij = softmax over S_i of q_i.k_j / |k_j|;            a token whose S_i is empty reads itself

It is meant for k = q, as published: a module uses one projection for both. Sorted by (bucket, time), a round is a
window along the sequence. Each pair counts only in the first round that finds it; the paper divides by the number of
rounds that find it instead. Rounds are joined by the logarithms of their masses. The authors cut the sorted sequence
into chunks, and later tokens move the edges of the chunks. A window has no such edges, so is_causal=True is causal.
Padding has a bucket of its own. The rotations are an input: a module draws them once, so equal calls give equal
outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from softless.algebra.feature_maps import unit
from softless.errors import ArgumentError
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.pieces import Blocks, Piece, join, read
from softless.mechanisms.scored import MOST_STAND_INS, MOST_STEPS, Scored, biased, check_count, check_square, softmax


@dataclass(frozen=True)
class Reformer(Scored):
    name: ClassVar[str] = "reformer"
    formula: ClassVar[str] = "softmax of q.k/|k| over the nearby keys of i's buckets, some rounds of them"
    cost: ClassVar[str] = "O(N w r d)"
    paper: ClassVar[str] = "Kitaev et al. 2020, arXiv 2001.04451"
    form: ClassVar[str] = "blocks"
    shares_keys: ClassVar[bool] = True
    pairs_tokens: ClassVar[bool] = True

    buckets: int = 32
    rounds: int = 4
    window: int = 64

    def __post_init__(self) -> None:
        check_count("buckets", self.buckets, most=MOST_STAND_INS)
        check_count("rounds", self.rounds, most=MOST_STEPS)
        check_count("window", self.window)
        if self.buckets % 2:
            raise ArgumentError(
                f"buckets {self.buckets} is odd, and each direction makes two buckets, one at either end"
            )

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"rotations": (heads, self.rounds, head_dim, self.buckets // 2)}

    def draw(self, heads: int, head_dim: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return random directions, all equally likely."""
        shape = self.input_shapes(heads, head_dim)["rotations"]
        return {"rotations": torch.randn(shape, generator=generator)}

    def default_scale(self, head_dim: int) -> float | None:
        return 1.0

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        check_square(self.name, q, k, call)

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        k = repeat_heads(k, q.shape[1])
        met = torch.stack([hashed.met(self.window) for hashed in self.sort(k, call)]).any(0)  # [B, H, M, M]
        queries, keys = q.shape[2], k.shape[2]
        own = torch.eye(keys, dtype=torch.bool, device=q.device)
        met, own = (F.pad(x, (0, 0, max(queries - keys, 0), 0))[..., -queries:, :] for x in (met & ~own, own))
        scores, visible = biased(call.scale * (q @ unit(k).mT), call.visible(q, k), call.bias)
        alone = ~(visible & met).any(-1, keepdim=True) & own & visible
        return softmax(scores, visible & met) + alone.to(q.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.bias is not None:
            return super().attend(q, k, v, call)
        early = max(q.shape[2] - k.shape[2], 0)  # queries before the first key
        k, v, late = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), q[:, :, early:]
        tokens = F.pad(call.scale * late, (0, 0, k.shape[2] - late.shape[2], 0))
        rounds = self.sort(k, call)
        lots = [self._lot(tokens, unit(k), v, r, rounds, call.is_causal) for r in range(self.rounds)]
        met = torch.stack([lot.log_mass > -torch.inf for lot in lots]).any(0)
        out = torch.where(met, join(lots), v)[:, :, k.shape[2] - late.shape[2] :]
        return F.pad(out, (0, 0, early, 0))

    def sort(self, k: Tensor, call: Call) -> list["Round"]:
        """Sort the tokens of each round by bucket, and by time within a bucket."""
        turned = torch.einsum("bhmd,hrdc->rbhmc", k.detach(), call.inputs["rotations"].to(k.dtype))
        bucket = 1 + torch.cat([turned, -turned], -1).argmax(-1)  # [rounds, B, H, M]
        if call.key_mask is not None:
            bucket = torch.where(call.key_mask[:, None], bucket, 0)
        order = (bucket * k.shape[2] + torch.arange(k.shape[2], device=k.device)).argsort(-1)
        return [Round(*parts) for parts in zip(bucket, order, order.argsort(-1), strict=True)]

    def _lot(self, q: Tensor, k: Tensor, v: Tensor, r: int, rounds: Sequence["Round"], is_causal: bool) -> Piece:
        """Attend to the pairs that round r is the first to find, as a window along its order."""
        near = min(self.window, k.shape[2])
        here, cut = rounds[r], Blocks(k.shape[2], near, 0 if is_causal else near)

        def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
            """Return a number per token [B, H, M] for the queries [..., size, 1] and for their keys [..., 1, W]."""
            x = x.gather(-1, here.order)[..., None]
            return cut.queries(x), cut.keys(x).mT

        def same(hashed: Round) -> Tensor:
            mine, theirs = pairs(hashed.bucket)
            return (mine == theirs) & (theirs > 0)

        mine, theirs = pairs(here.rank)
        visible = cut.near(q.device) & same(here) & (mine != theirs)
        for before in rounds[:r]:
            mine, theirs = pairs(before.rank)
            visible = visible & ~(same(before) & ((mine - theirs).abs() <= self.window))
        q, k, v = (_take(x, here.order) for x in (q, k, v))
        out, log_mass = read(cut.queries(q) @ cut.keys(k).mT, visible, cut.keys(v))
        return Piece(_take(cut.back(out), here.rank), _take(cut.back(log_mass), here.rank))


class Round(NamedTuple):
    """One hashing of M tokens, each [B, H, M]."""

    bucket: Tensor  # from 1; 0 is padding's
    order: Tensor  # the tokens, sorted by (bucket, time)
    rank: Tensor  # where in that order a token stands

    def met(self, window: int) -> Tensor:
        """Return which pairs share a bucket and are near each other in it [B, H, M, M]."""
        near = (self.rank[..., :, None] - self.rank[..., None, :]).abs() <= window
        return near & (self.bucket[..., :, None] == self.bucket[..., None, :])


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Return x [B, H, M, d] in the order of places [B, H, M]."""
    return x.gather(2, places[..., None].expand_as(x))
