"""Modules: attention with any mechanism, and other layers that make long sequences cheap."""

from softless.nn.attention import Attention
from softless.nn.beyond.elimination import EliminationEncoder, Survivors, significance
from softless.nn.beyond.funnel import FunnelDecoder, Funneled, FunnelEncoder
from softless.nn.beyond.reversible import PreNorm, Reversible
from softless.nn.beyond.strided import StridedFeedForward
from softless.nn.global_tokens import LongformerAttention
from softless.nn.local_residual import LocalResidual
from softless.nn.multihead import MultiheadAttention
from softless.nn.pooling import Tokens, pool_tokens, repeat_tokens

__all__ = [
    "Attention",
    "EliminationEncoder",
    "FunnelDecoder",
    "FunnelEncoder",
    "Funneled",
    "LocalResidual",
    "LongformerAttention",
    "MultiheadAttention",
    "PreNorm",
    "Reversible",
    "StridedFeedForward",
    "Survivors",
    "Tokens",
    "pool_tokens",
    "repeat_tokens",
    "significance",
]
