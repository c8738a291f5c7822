"""Modules: attention with the mechanism left open, and what else makes a long sequence cheap."""

from softless.nn.attention import Attention
from softless.nn.elimination import EliminationEncoder, Survivors, significance
from softless.nn.funnel import FunnelDecoder, Funneled, FunnelEncoder
from softless.nn.local_residual import LocalResidual
from softless.nn.longformer import LongformerAttention
from softless.nn.pooling import Tokens, pool_tokens, repeat_tokens
from softless.nn.reversible import PreNorm, Reversible
from softless.nn.strided import StridedFeedForward

__all__ = [
    "Attention",
    "EliminationEncoder",
    "FunnelDecoder",
    "FunnelEncoder",
    "Funneled",
    "LocalResidual",
    "LongformerAttention",
    "PreNorm",
    "Reversible",
    "StridedFeedForward",
    "Survivors",
    "Tokens",
    "pool_tokens",
    "repeat_tokens",
    "significance",
]
