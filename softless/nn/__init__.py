"""Modules: attention with the mechanism left open, Longformer's two projections, and InLine's local residual."""

from softless.nn.attention import Attention
from softless.nn.local_residual import LocalResidual
from softless.nn.longformer import LongformerAttention

__all__ = ["Attention", "LocalResidual", "LongformerAttention"]
