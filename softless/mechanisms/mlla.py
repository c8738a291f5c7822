"""MLLA's attention (Han et al. 2024, arXiv 2405.16605): linear attention whose numerator depends on positions.

    o_i = sum_j R(phi(q_i)).R(phi(k_j)) v_j / sum_j phi(q_i).phi(k_j)          phi(x) = elu(x) + 1

R rotates the pair of channels (2t, 2t + 1) of all C = H d channels, before they are split into heads, by

    row theta_t             for t < C/4
    column theta_{t - C/4}  for the others              theta_t = 10000^(-t / (C/4))

so heads differ in their frequencies. Tokens are a picture, grid=(height, width). The denominator is not rotated, so
weights may be negative and need not sum to one. The depthwise convolution of v in the published block is a layer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from softless.algebra.direct import blocks
from softless.algebra.feature_maps import elu
from softless.algebra.modes import recording
from softless.algebra.readers import level, quotient
from softless.algebra.state import keep
from softless.errors import UnsupportedError
from softless.mechanisms.base import Call, Mechanism, repeat_heads
from softless.mechanisms.kernelized import BLOCK, is_long


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
        if is_long(q, k, v) and not recording(q, k, v):
            return self._in_blocks(q, k, v, call)
        (plain_q, plain_k), (q, k) = self._features(q, k, call)
        mass = plain_q @ plain_k.sum(-2)[..., None]
        return quotient(q @ (k.mT @ repeat_heads(v, q.shape[1])), mass)

    def _features(self, q: Tensor, k: Tensor, call: Call) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return phi(q) and phi(k), plain and rotated. The division cancels the size of a query."""
        plain = level(elu(q)), _keys(k, q.shape[1], call.key_mask)
        angles = _angles(q, _places(q, call))
        return plain, (_turned(plain[0], angles), _turned(plain[1], angles))

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Return the output without gradients, with features of one block of tokens at a time."""
        heads, places = q.shape[1], _places(q, call)
        total: Any = 0
        moment: Any = 0
        for at in blocks(k.shape[2], BLOCK // 2):
            plain = _keys(k[:, :, at], heads, None if call.key_mask is None else call.key_mask[:, at])
            total = total + plain.sum(-2)[..., None]
            moment = moment + _turned(plain, _angles(q, places[at])).mT @ repeat_heads(v[:, :, at], heads)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for at in blocks(q.shape[2], BLOCK // 2):
            plain = level(elu(q[:, :, at]))
            out[:, :, at] = quotient(_turned(plain, _angles(q, places[at])) @ moment, plain @ total)
        return out


def _keys(k: Tensor, heads: int, key_mask: Tensor | None) -> Tensor:
    return keep(elu(repeat_heads(k, heads)), None if key_mask is None else key_mask[:, None])


def _places(q: Tensor, call: Call) -> Tensor:
    """Return the place of each token in the picture [N, 2]: its row and its column."""
    assert call.grid is not None
    place = torch.arange(q.shape[2], device=q.device)
    return torch.stack([place // call.grid[1], place % call.grid[1]], -1)


def _angles(q: Tensor, places: Tensor) -> Tensor:
    """Return the angle of each pair of channels at each of these places [n, C/2]: first by row, then by column."""
    quarter = q.shape[1] * q.shape[3] // 4
    theta = 10000 ** (-torch.arange(quarter, device=q.device, dtype=torch.float64) / quarter)
    return (places[..., None] * theta).flatten(-2)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return R(x) for x [B, H, N, d]."""
    first, second = x.transpose(1, 2).flatten(2).unflatten(-1, (-1, 2)).unbind(-1)  # [B, N, C/2] each
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return turned.flatten(-2).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
