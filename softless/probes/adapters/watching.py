"""Softmax attention as any other model computes it: PyTorch's calls are watched while the model runs.

    F.scaled_dot_product_attention(q, k, v, ...)                one call, q, k and v in it
    softmax(scale q k^T + bias) v                               written out: matmul, *, +, softmax, matmul

timm and Hugging Face use both, the second where fused attention is turned off. Written out, every step from the first
product to the last is followed; the bias is what lies between scale q.k and that which reached the softmax. A step that
is not known ends the trail: such a layer is not captured, rather than captured wrongly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from softless.mechanisms import mechanism
from softless.probes.adapters.masks import Hidden, from_bias, from_visible
from softless.probes.adapters.ours import Keep, as_four
from softless.probes.layer import Layer

PRODUCT = {"matmul", "__matmul__", "bmm"}
SCALED = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__", "div_", "__itruediv__"}
SHIFTED = {"add", "__add__", "__radd__", "add_", "__iadd__", "masked_fill", "masked_fill_"}
SAME = {"view", "reshape", "unsqueeze", "squeeze", "contiguous", "clone", "to", "float", "half", "type_as", "dropout"}


@dataclass(frozen=True)
class Trail:
    """How a tensor came from q k^T."""

    q: Tensor
    k: Tensor
    scale: float = 1.0
    shifted: bool = False
    scores: Tensor | None = None  # what reached the softmax, once it has


class Watch(TorchFunctionMode):
    """Within, every attention that `allowed` is kept; `where` names it and places its tokens."""

    def __init__(self, keep: Keep, allowed: Callable[[], bool], where: Callable[[int], dict[str, Any]]):
        super().__init__()
        self.keep, self.allowed, self.where = keep, allowed, where
        self.trails: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.allowed():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            edited = self.fused(*args, **kwargs)
            return func(*args, **kwargs) if edited is None else edited
        trail = self.trails.get(args[0]) if args and isinstance(args[0], Tensor) else None
        name = getattr(func, "__name__", "")
        if name in PRODUCT and trail is not None and trail.scores is not None:
            edited = self.written_out(trail, args[1])
            return func(*args, **kwargs) if edited is None else edited
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and (after := _followed(trail, name, args, kwargs)) is not None:
            self.trails[out] = after
        return out

    def fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        q, k, v = (_heads(x) for x in (query, key, value))
        queries, keys = q.shape[2], k.shape[2]
        if is_causal:  # aligned at the top left, as PyTorch has it
            attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
        if attn_mask is None:
            hidden = Hidden()
        else:
            mask = _heads(attn_mask) if attn_mask.ndim == query.ndim else as_four(attn_mask)
            assert mask is not None
            hidden = (from_visible if mask.dtype == torch.bool else from_bias)(mask, q.shape[0], queries)
        return self.kept(q, k, v, scale, hidden, query.ndim)

    def written_out(self, trail: Trail, value: Tensor) -> Tensor | None:
        q, k, v = (_heads(x) for x in (trail.q, trail.k, value))
        hidden = Hidden()
        if trail.shifted and trail.scores is not None:
            plain = trail.scale * (q @ k.mT)
            hidden = from_bias(trail.scores.view(plain.shape) - plain, q.shape[0], q.shape[2])
        return self.kept(q, k, v, trail.scale, hidden, trail.q.ndim)

    def kept(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, hidden: Hidden, dimensions: int
    ) -> Tensor | None:
        tokens = q.shape[2] if q.shape[2] == k.shape[2] else -1
        placed = self.where(tokens)
        layer = Layer(q=q, k=k, v=v, mechanism=mechanism("softmax"), scale=scale, **hidden._asdict(), **placed)
        edited = self.keep(layer)
        return edited if edited is None or dimensions == 4 else edited[:, 0]


def _followed(trail: Trail | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Trail | None:
    """What is known of the result of a step, if anything."""
    if name in PRODUCT and len(args) == 2 and args[0].ndim == args[1].ndim in (3, 4):
        return Trail(args[0], args[1].mT)
    if trail is None or name in SAME:
        return trail
    if name == "softmax" and trail.scores is None:
        last = args[0].ndim - 1
        return (
            replace(trail, scores=args[0])
            if kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, last)
            else None
        )
    if name in SHIFTED and trail.scores is None:
        return replace(trail, shifted=True)
    if name in SCALED and trail.scores is None and isinstance(args[1], int | float):
        factor = 1 / args[1] if "div" in name else args[1]
        return replace(trail, scale=trail.scale * factor)
    return None


def _heads(x: Tensor) -> Tensor:
    """[B, H, N, d], also of heads that were folded into the batch."""
    return x if x.ndim == 4 else x[:, None]
