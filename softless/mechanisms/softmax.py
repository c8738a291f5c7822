"""Softmax attention (Vaswani et al. 2017), on PyTorch's own fused kernels.

    w_ij = e^{s_ij} / sum_j e^{s_ij},   s_ij = q_i.k_j / sqrt(d) + bias_ij

The yardstick: what every other mechanism is compared with.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.mechanisms.base import Call
from softless.mechanisms.scored import Scored


@dataclass(frozen=True)
class Softmax(Scored):
    name: ClassVar[str] = "softmax"
    formula: ClassVar[str] = "sum_j e^{q.k_j/sqrt(d)} v_j / sum_j e^{q.k_j/sqrt(d)}"
    fused_on_gpu: ClassVar[bool] = True

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
        return torch.where(visible, scores.softmax(-1), 0.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
        if call.key_mask is None and call.bias is None and (not call.is_causal or q.shape[2] == k.shape[2]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=call.is_causal, scale=call.scale, **grouped)
        seen = call.visible(q, k)
        blind = ~seen.any(-1, keepdim=True)  # SDPA would answer NaN: let such a row see all, then erase it
        mask = seen | blind
        if call.bias is not None:
            mask = torch.where(mask, call.bias, -torch.inf).to(q.dtype)
        mask = mask.expand(q.shape[0], -1, q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, **grouped)
        return torch.where(blind, 0.0, out)
