"""Softmax attention as any other model computes it: PyTorch's calls are watched while the model runs.

    F.scaled_dot_product_attention(q, k, v, ...)                one call, q, k and v in it
    softmax(scale q k^T + bias) v                               written out: products, *, +, masks, softmax

timm and Hugging Face use both, the second where fused attention is turned off. Written out, every step from the first
product to the last is followed (`trails`); the bias is what lies between scale q.k and that which reached the softmax.
A layer whose trail ends, or whose weights are not those that ran, is missed, rather than captured wrongly.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from softless.backends import widen
from softless.mechanisms import mechanism
from softless.probes.adapters.masks import Hidden, from_bias, from_scores, from_visible
from softless.probes.adapters.ours import Keep
from softless.probes.adapters.products import (
    Product,
    broadcast,
    operands,
    scores_product,
    turned_product,
    weights_product,
)
from softless.probes.adapters.trails import WEIGHTS, Operation, Trail, Trails, is_soft, lost, version_of
from softless.probes.layer import Layer

TRANSPOSE = Tensor.mT.__get__  # type: ignore[attr-defined]


@runtime_checkable
class Scene(Protocol):
    """Where in the model a call happens, and what was missed there."""

    def watched(self) -> bool: ...
    def module(self) -> str: ...
    def where(self, tokens: int) -> dict[str, Any]: ...
    def miss(self, softmax: int) -> None: ...
    def find(self, softmax: int) -> None: ...


class Watch(TorchFunctionMode):
    """Within, every attention where the scene is watched is kept."""

    def __init__(self, keep: Keep, scene: Scene):
        super().__init__()
        self.keep, self.scene, self.trails = keep, scene, Trails()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.scene.watched():
            return func(*args, **kwargs)
        name = "mT" if func == TRANSPOSE else getattr(func, "__name__", "")
        before = self.trails.among((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        call = Operation(name, args, kwargs, out)
        if func is F.scaled_dot_product_attention:
            return self.fused(out, *args, **kwargs)
        if isinstance(out, Tensor) and (pair := operands(name, args, kwargs)) is not None:
            return self.multiplied(call, pair)
        if name == "baddbmm" and isinstance(out, Tensor):
            self.added_product(call)
        elif before and self.trails.follow(call, before, self.scene.module()):
            self.scene.miss(self.trails.softmaxes)  # until its weights meet values
        return out

    def multiplied(self, call: Operation, pair: tuple[Tensor, Tensor]) -> Tensor:
        """A product: of weights and values, which is attention, or the beginning of a trail, or the end of one."""
        meanings = [self.trails.of(x) for x in pair]
        for at, trail in enumerate(meanings):
            if isinstance(trail, Trail) and trail.stage == WEIGHTS:
                if trail.turned:
                    product = turned_product(pair) if at == 1 and call.name != "einsum" else None
                else:
                    product = weights_product(call.name, call.args, pair, at)
                return self.written_out(trail, None if call.kwargs.get("out") is not None else product, call.out)
        known = [meaning for meaning in meanings if meaning is not None]
        if known:
            if not any(map(is_soft, known)):
                self.trails.put(call.out, lost(known[0]))
        elif (product := scores_product(call.name, call.args, pair)) is not None and "out" not in call.kwargs:
            self.begin(call.out, product)
        return call.out

    def added_product(self, call: Operation) -> None:
        """baddbmm(bias, a, b): beta bias + alpha a b."""
        a, b = call.args[1:3] if len(call.args) > 2 else (call.kwargs["batch1"], call.kwargs["batch2"])
        if (product := scores_product("bmm", call.args, (a, b))) is not None and "out" not in call.kwargs:
            self.begin(call.out, product, scale=float(call.kwargs.get("alpha", 1)), shifted=True)

    def begin(self, out: Tensor, product: Product, **known: Any) -> None:
        q, k = product.left, product.right.mT
        eps, stamp = torch.finfo(out.dtype).eps, (version_of(q), version_of(k))
        self.trails.put(out, Trail(q, k, tuple(out.shape[:-2]), self.scene.module(), eps, stamp, **known))

    def fused(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p > 0 or query.is_nested:
            self.trails.softmaxes += 1
            self.scene.miss(self.trails.softmaxes)
            return out
        lead = tuple(out.shape[:-2])
        grouped = enable_gqa and key.ndim > 2 and key.shape[-3] != query.shape[-3]
        of_keys = (*lead[:-1], key.shape[-3]) if grouped else lead
        q, k, v = _as_four(query, lead), _as_four(key, of_keys), _as_four(value, of_keys)
        queries, keys = q.shape[2], k.shape[2]
        if is_causal:  # aligned at the top left, as PyTorch has it
            attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
        hidden = Hidden()
        if attn_mask is not None:
            mask = attn_mask.expand(*attn_mask.shape[:-1], keys)
            mask = _as_four(mask, lead if mask.shape[:-2].numel() > 1 else (1, 1))
            hidden = (from_visible if mask.dtype == torch.bool else from_bias)(mask, q.shape[0], queries)
        edited = self.keep(self.layer(q, k, v, scale, hidden))
        return out if edited is None else _laid_as(out, edited.reshape(out.shape))

    def written_out(self, trail: Trail, product: Product | None, out: Tensor) -> Tensor:
        """weights v, as far as the weights are what the trail says; otherwise the softmax counts as missed."""
        if product is None or not trail.is_fresh():
            return out
        weights, values = product.left, product.right
        lead, of_weights = broadcast(weights.shape[:-2], values.shape[:-2]), weights.shape[:-2]
        folded = trail.lead if lead == tuple(of_weights) else lead
        of_scores = broadcast(trail.q.shape[:-2], trail.k.shape[:-2])

        def laid(x: Tensor, now: tuple[int, ...]) -> Tensor:
            """With all leading dimensions, then as the weights' are, then as two of them."""
            inner = x.shape[-2:]
            x = x.expand(*now, *inner).reshape(*of_weights, *inner).expand(*lead, *inner)
            return _as_four(x.reshape(*folded, *inner), folded)

        q, k = laid(trail.q, of_scores), laid(trail.k, of_scores)
        v = _as_four(values.expand(*lead, *values.shape[-2:]).reshape(*folded, *values.shape[-2:]), folded)
        hidden = Hidden()
        if trail.shifted and trail.scores is not None:
            scores = laid(trail.scores, tuple(trail.scores.shape[:-2]))
            hidden = from_scores(scores, q, k, trail.scale, _rounding(trail, q))
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        layer = self.layer(q.to(dtype), k.to(dtype), v.to(dtype), trail.scale, hidden)
        if not ran(layer, laid(weights, tuple(of_weights)), _rounding(trail, q)):
            return out
        self.scene.find(trail.number)
        edited = self.keep(layer)
        if edited is None:
            return out
        return _laid_as(out, product.arrange(edited.reshape(*lead, *edited.shape[-2:])))

    def layer(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, hidden: Hidden) -> Layer:
        placed = self.scene.where(q.shape[2] if q.shape[2] == k.shape[2] else -1)
        return Layer(q=q, k=k, v=v, mechanism=mechanism("softmax"), scale=scale, **hidden._asdict(), **placed)


@torch.no_grad()
def ran(layer: Layer, weights: Tensor, eps: float) -> bool:
    """Whether the layer's weights are those that ran, to rounding; a query that sees no key may have any."""
    ours, scores, weights = widen(layer.weights()), layer.scores(), widen(weights)
    if not torch.isfinite(ours).all():
        return False
    seen = scores > -torch.inf
    reach = torch.where(seen, scores, 0.0).abs().max() if scores.numel() else 0.0
    sizes = widen(layer.q).norm(dim=-1).max() * widen(layer.k).norm(dim=-1).max() if scores.numel() else 0.0
    inner = layer.q.shape[-1] * torch.finfo(ours.dtype).eps * abs(layer.scale or 1.0) * sizes
    least = torch.finfo(torch.float16 if eps > 1e-6 else ours.dtype).tiny
    allowed = (8 * eps * (1 + reach) + inner) * ours + least
    wrong = (ours - weights).abs() > allowed
    return not bool((wrong | weights.isnan())[seen.any(-1)].any())


def _rounding(trail: Trail, q: Tensor) -> float:
    """The unit of rounding on the way; GPUs may multiply float32 in less."""
    coarse = q.is_cuda and torch.get_float32_matmul_precision() != "highest" and q.dtype == torch.float32
    return max(trail.eps, torch.finfo(q.dtype).eps, 2.0**-10 if coarse else 0.0)


def _laid_as(out: Tensor, edited: Tensor) -> Tensor:
    """In the dtype and the memory layout of `out`: a model may view it as it could view that."""
    return torch.empty_like(out, requires_grad=False).copy_(edited)


def _as_four(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[B, H, n, m]: leading dimensions broadcast to `lead`, the last of them the heads, the others the batch."""
    heads = lead[-1] if len(lead) > 1 else 1
    x = x.expand(*lead, *x.shape[-2:])
    batch = x.shape[:-2].numel() // max(heads, 1)
    return x.reshape(batch, heads, *x.shape[-2:])
