"""Softmax attention (Vaswani et al. 2017), on PyTorch's own fused kernels.

    w_ij = e^{s_ij} / sum_j e^{s_ij},   s_ij = f(q_i).k_j / sqrt(d) + bias_ij

All other mechanisms are compared with this one. f is the identity, or a map that makes softmax confuse queries as
linear attention does, to measure what injectivity is worth (Han et al. 2024, table 1):

    relu          f(q) = ReLU(q) / |ReLU(q)|
    affine_relu   f(q) = ReLU(A q + b) / |ReLU(A q + b)|           one learned A and b per head

A query whose ReLU is zero stays zero and gives all keys the same weight.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.feature_maps import apply, unit
from softless.algebra.modes import in_forward_mode
from softless.errors import check_choice
from softless.mechanisms.base import Call
from softless.mechanisms.scored import Scored, softmax


@dataclass(frozen=True)
class Softmax(Scored):
    name: ClassVar[str] = "softmax"
    formula: ClassVar[str] = "sum_j e^{q.k_j/sqrt(d)} v_j / sum_j e^{q.k_j/sqrt(d)}"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv 1706.03762"
    form: ClassVar[str] = "SDPA"
    fused_on_gpu: ClassVar[bool] = True

    confusion: str | None = None  # relu | affine_relu

    def __post_init__(self) -> None:
        check_choice("confusion", self.confusion, (None, "relu", "affine_relu"))

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        if self.confusion != "affine_relu":
            return {}
        return {"weight": (heads, head_dim, head_dim), "bias": (heads, head_dim)}

    def confused(self, q: Tensor, call: Call) -> Tensor:
        if self.confusion is None:
            return q
        wide = q if q.dtype == torch.float64 else q.float()
        features = apply(self.confusion, wide, inputs=call.inputs)
        assert isinstance(features, Tensor)
        return unit(features).to(q.dtype)

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().weights(self.confused(q, call), k, call)

    def rule(self, scores: Tensor, visible: Tensor) -> Tensor:
        return softmax(scores, visible)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if in_forward_mode():  # SDPA has no tangents
            wide_q, wide_k, wide_v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
            return super().attend(wide_q, wide_k, wide_v, call).to(q.dtype)
        q, scale = _positive(self.confused(q, call), call.scale)
        grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
        if call.key_mask is None and call.bias is None and (not call.is_causal or q.shape[2] == k.shape[2]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=call.is_causal, scale=scale, **grouped)
        seen = call.visible(q, k)
        if call.bias is not None:
            seen = seen & (call.bias != -torch.inf)
        blind = ~seen.any(-1, keepdim=True)  # SDPA would answer NaN: let such a row see all, then erase it
        mask = seen | blind
        if call.bias is not None:
            mask = torch.where(seen, call.bias, torch.where(blind, 0.0, -torch.inf)).to(q.dtype)
        mask = mask.expand(q.shape[0], -1, q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **grouped)
        return torch.where(blind, 0.0, out)


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a scale with the same scores, where SDPA can take the scale.

    SDPA hides a key by -inf and then multiplies by the scale, or takes the largest score before it does. A scale that
    is negative, or zero in float32, gives NaN there, so its sign or all of it goes to q.
    """
    smallest = torch.finfo(torch.float32).tiny
    if scale >= smallest:
        return q, scale
    return (-q, -scale) if scale <= -smallest else (q * scale, 1.0)
