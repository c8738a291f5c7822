"""Modules: attention with the mechanism left open, and InLine's local residual."""

from softless.nn.attention import Attention
from softless.nn.local_residual import LocalResidual

__all__ = ["Attention", "LocalResidual"]
