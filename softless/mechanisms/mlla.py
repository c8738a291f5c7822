"""MLLA's attention (Han et al. 2024, arXiv 2405.16605): linear attention whose numerator depends on positions.

    o_i = sum_j R(phi(q_i)).R(phi(k_j)) v_j / sum_j phi(q_i).phi(k_j)          phi(x) = elu(x) + 1

R rotates the pair of channels (2t, 2t + 1) of all C = H d channels, before they are split into heads, by

    row theta_t             for t < C/4
    column theta_{t - C/4}  for the others              theta_t = 10000^(-t / (C/4))

so heads differ in their frequencies. Tokens are a picture, grid=(height, width). The denominator is not rotated, so
weights may be negative and need not sum to one. The depthwise convolution of v in the published block is a layer.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.algebra.feature_maps import elu
from softless.algebra.readers import level, quotient
from softless.algebra.state import keep
from softless.errors import UnsupportedError
from softless.mechanisms.base import Call, Mechanism, repeat_heads


@dataclass(frozen=True)
class Mlla(Mechanism):
    name: ClassVar[str] = "mlla"
    family: ClassVar[str] = "kernelized"
    formula: ClassVar[str] = "sum_j R(phi(q)).R(phi(k_j)) v_j / sum_j phi(q).phi(k_j), R a rotation by place"
    cost: ClassVar[str] = "O(N d^2)"
    paper: ClassVar[str] = "Han et al. 2024, arXiv 2405.16605"
    reads_grid: ClassVar[bool] = True
    needs_grid: ClassVar[bool] = True
    rows_sum_to_one: ClassVar[bool] = False

    def lacks(self, is_causal: bool) -> str | None:
        return "reads tokens as a picture, which has no order" if is_causal else None

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        if q.shape[1] * q.shape[3] % 4:
            raise UnsupportedError(
                f"mlla turns channels in pairs, by row and by column: {q.shape[1]} heads of {q.shape[3]} channels are "
                f"not a multiple of 4"
            )

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        (plain_q, plain_k), (q, k) = self._features(q, k, call)
        visible = call.visible(q, k)
        return quotient(torch.where(visible, q @ k.mT, 0.0), (plain_q @ plain_k.mT * visible).sum(-1, keepdim=True))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        (plain_q, plain_k), (q, k) = self._features(q, k, call)
        mass = plain_q @ plain_k.sum(-2)[..., None]
        return quotient(q @ (k.mT @ repeat_heads(v, q.shape[1])), mass)

    def _features(self, q: Tensor, k: Tensor, call: Call) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return phi(q) and phi(k), plain and rotated. The division cancels the size of a query."""
        mask = None if call.key_mask is None else call.key_mask[:, None]
        plain = level(elu(q)), keep(elu(repeat_heads(k, q.shape[1])), mask)
        assert call.grid is not None
        angles = _angles(call.grid, q)
        return plain, (_turned(plain[0], angles), _turned(plain[1], angles))


def _angles(grid: tuple[int, int], q: Tensor) -> Tensor:
    """Return the angle of each pair of channels at each token [N, C/2]: first by row, then by column."""
    height, width = grid
    quarter = q.shape[1] * q.shape[3] // 4
    theta = 10000 ** (-torch.arange(quarter, device=q.device, dtype=torch.float64) / quarter)
    rows = torch.arange(height, device=q.device)[:, None, None] * theta  # [height, 1, C/4]
    columns = torch.arange(width, device=q.device)[:, None] * theta  # [width, C/4]
    both = torch.cat([rows.expand(height, width, -1), columns.expand(height, width, -1)], -1)
    return both.flatten(0, 1)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return R(x) for x [B, H, N, d]."""
    first, second = x.transpose(1, 2).flatten(2).unflatten(-1, (-1, 2)).unbind(-1)  # [B, N, C/2] each
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return turned.flatten(-2).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
