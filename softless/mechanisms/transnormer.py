"""The two attentions of TransNormer (Qin et al. 2022, arXiv 2210.10340).

    transnormer   o_i = norm(sum_j phi(q_i).phi(k_j) v_j)       norm(x) = sqrt(C) x/|x| over all C = H e channels
                  t1  phi(x) = elu(x)          t2  phi(x) = elu(x) + 1

    diagonal      o_i = sum_j rule(q_i.k_j/sqrt(d)) v_j         over the j in the same block of 64 tokens as i
                  t1  norm of relu, as ReLA    t2  softmax

The published network uses `diagonal` in the first half of its layers and `transnormer` in the second half.

transnormer is linear attention with a norm instead of the denominator. Its explicit weights are those before the norm,
and a zero row stays zero.

diagonal counts its blocks in real tokens, so padding moves no border. A query whose own key is hidden reads zero. The
published causal form adds its mask to the scores as ones and zeros, and so sees the future. The form here does not.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.chunks import fold, unfold
from softless.algebra.feature_maps import elu, unit
from softless.algebra.state import State
from softless.errors import check_choice
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.kernelized import Kernelized, token_by_token
from softless.mechanisms.scored import Scored, check_count, check_square, softmax


def norm(x: Tensor) -> Tensor:
    """Scale each token to mean square 1 over its heads and channels."""
    return unit(x, (1, 3)) * (x.shape[1] * x.shape[3]) ** 0.5


@dataclass(frozen=True)
class TransNormer(Kernelized):
    name: ClassVar[str] = "transnormer"
    formula: ClassVar[str] = "norm(sum_j phi(q).phi(k_j) v_j), phi(x) = elu(x) or elu(x) + 1"
    paper: ClassVar[str] = "Qin et al. 2022, arXiv 2210.10340"
    reader: ClassVar[str] = "none"

    variant: str = "t2"  # t1 | t2

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, ("t1", "t2"))

    def default_scale(self, head_dim: int) -> None:
        return None

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        return elu(q) if self.variant == "t2" else F.elu(q)

    def combine(self, weights: Tensor, v: Tensor, call: Call) -> Tensor:
        return norm(super().combine(weights, v, call))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return token_by_token(norm, super().attend(q, k, v, call))

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        out, state = super().attend_with_state(q, k, v, state, call)
        return norm(out), state

    def attend_to_state(self, q: Tensor, k: Tensor, v: Tensor, state: State, call: Call) -> Tensor:
        return norm(super().attend_to_state(q, k, v, state, call))


@dataclass(frozen=True)
class Diagonal(Scored):
    name: ClassVar[str] = "diagonal"
    formula: ClassVar[str] = "softmax attention within blocks of tokens (t1: norm of relu)"
    cost: ClassVar[str] = "O(N w d)"
    paper: ClassVar[str] = "Qin et al. 2022, arXiv 2210.10340"
    form: ClassVar[str] = "blocks"
    takes_bias: ClassVar[bool] = False
    pairs_tokens: ClassVar[bool] = True

    variant: str = "t2"  # t1 | t2
    block: int = 64

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, ("t1", "t2"))
        check_count("block", self.block)

    @property
    def rows_sum_to_one(self) -> bool:  # type: ignore[override]
        return self.variant == "t2"

    def default_scale(self, head_dim: int) -> float | None:
        return super().default_scale(head_dim) if self.variant == "t2" else None

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        check_square(self.name, q, k, call)

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        return softmax(scores, visible) if self.variant == "t2" else torch.where(visible, scores.relu(), 0.0)

    def _scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Return the scores. For t1 a norm cancels any scale, so call.scale is not used."""
        return (call.scale if self.variant == "t2" else q.shape[-1] ** -0.5) * (q @ k.mT)

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        real = torch.ones_like(k[:1, 0, :, 0], dtype=torch.bool) if call.key_mask is None else call.key_mask
        home = torch.where(real, (real.cumsum(-1) - 1) // self.block, -1)  # [b, M], the block of each real key
        own = F.pad(home, (queries - keys, 0), value=-1) if queries > keys else home[:, keys - queries :]
        same = (own[:, :, None] == home[:, None, :]) & real[:, None, :]
        return self.rule(self._scores(q, repeat_heads(k, q.shape[1]), call), same[:, None] & call.visible(q, k))

    def combine(self, weights: Tensor, v: Tensor, call: Call) -> Tensor:
        out = super().combine(weights, v, call)
        return out if self.variant == "t2" else norm(out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Move the real tokens together, then attend block by block: no N x N matrix is formed."""
        queries, keys = q.shape[2], k.shape[2]
        missing, real = keys - queries, call.key_mask
        if missing > 0:
            q = F.pad(q, (0, 0, missing, 0))
        elif missing < 0:
            k, v = (F.pad(x, (0, 0, -missing, 0)) for x in (k, v))
            real = F.pad(k.new_ones(k.shape[0], keys).bool() if real is None else real, (-missing, 0), value=False)
        if real is None:
            out = self._blocks(q, k, v, torch.ones_like(k[:1, 0, :, 0], dtype=torch.bool), call)
        else:
            order = (~real).long().argsort(dim=-1, stable=True)
            q, k, v = (_taken(x, order) for x in (q, k, v))
            out = _taken(self._blocks(q, k, v, real.gather(-1, order), call), order.argsort(-1))
            out = torch.where(real[:, None, :, None], out, 0.0)
        out = out[:, :, out.shape[2] - queries :]
        return out if self.variant == "t2" else norm(out)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, call: Call) -> Tensor:
        """Attend within blocks of consecutive tokens; real [b, N] is True for real keys."""
        k, v, tokens = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), k.shape[2]
        block = min(self.block, tokens)
        q, k, v = (fold(x, block) for x in (q, k, v))  # [B, H, blocks, l, .]
        seen = fold(real[:, None, :, None].to(q.dtype), block).mT > 0  # [b, 1, blocks, 1, l]
        if call.is_causal:
            seen = seen & torch.ones(block, block, dtype=torch.bool, device=q.device).tril()
        return unfold(self.rule(self._scores(q, k, call), seen) @ v, tokens)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Return the tokens of x [B, H, N, d] in another order [B, N]."""
    return x.gather(2, order[:, None, :, None].expand_as(x))
