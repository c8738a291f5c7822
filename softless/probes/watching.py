"""Recognize softmax attention in any model by the PyTorch calls that it makes.

    F.scaled_dot_product_attention(q, k, v, ...)                one call with q, k and v
    softmax(scale q k^T + bias) v                               written out: products, *, +, masks, softmax

timm and Hugging Face use both, the second where fused attention is turned off. If attention is written out, every step
from the first product to the last is followed (`trails`), and the bias is scores - scale q.k. A layer is missed, rather
than captured wrongly, if its trail ends or if its weights are not those that the model used.

A mask is reduced to its simplest form:

    visible_ij = j <= i                    is_causal
    visible_ij = key_mask_j                key_mask, the same for every query
    visible_ij = both                      both
    anything else, or scores added to      bias

A bias below -800 counts as minus infinity, because e^-800 is 0 even in float64 and libraries use such numbers. A query
that sees no key gets zero weights here and equal weights in those libraries: it is padding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from softless.algebra.precision import widen
from softless.algebra.state import causal
from softless.mechanisms import mechanism
from softless.probes.layer import Captured, Keep, Layer
from softless.probes.products import Product, operands, scores_product, turned_product, weights_product
from softless.probes.trails import WEIGHTS, Operation, Trail, Trails, is_soft, lost, version_of

FAR = -800.0
EMPTY = -3e4  # a query whose keys all have a lower bias sees none; half precision reaches -65504
TRANSPOSE = Tensor.mT.__get__  # type: ignore[attr-defined]


class Visibility(NamedTuple):
    """Which keys each query sees, in the form that `Layer` has."""

    bias: Float[Tensor, "#b #h #n #m"] | None = None
    key_mask: Bool[Tensor, "b m"] | None = None
    is_causal: bool = False


class AttentionWatcher(TorchFunctionMode):
    """Give every softmax attention outside of our own layers to `keep`."""

    def __init__(self, keep: Keep, captured: Captured):
        super().__init__()
        self.keep, self.captured, self.trails = keep, captured, Trails()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.captured.watched():
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
        elif before and self.trails.follow(call, before, self.captured.module()):
            self.captured.miss(self.trails.softmaxes)  # until its weights meet values
        return out

    def multiplied(self, call: Operation, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Read a product: weights times values is attention, others begin a trail or end one."""
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
        """Read baddbmm(bias, a, b) = beta bias + alpha a b."""
        a, b = call.args[1:3] if len(call.args) > 2 else (call.kwargs["batch1"], call.kwargs["batch2"])
        if (product := scores_product("bmm", call.args, (a, b))) is not None and "out" not in call.kwargs:
            self.begin(call.out, product, scale=float(call.kwargs.get("alpha", 1)), shifted=True)

    def begin(self, out: Tensor, product: Product, *, scale: float = 1.0, shifted: bool = False) -> None:
        """Begin a trail at q k^T."""
        q, k = product.left, product.right.mT
        eps, versions = torch.finfo(out.dtype).eps, (version_of(q), version_of(k))
        self.trails.put(out, Trail(q, k, tuple(out.shape[:-2]), self.captured.module(), eps, versions, scale, shifted))

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
        """Read a call of F.scaled_dot_product_attention."""
        if dropout_p > 0 or query.is_nested:
            self.trails.softmaxes += 1
            self.captured.miss(self.trails.softmaxes)
            return out
        lead = tuple(out.shape[:-2])
        grouped = enable_gqa and key.ndim > 2 and key.shape[-3] != query.shape[-3]
        of_keys = (*lead[:-1], key.shape[-3]) if grouped else lead
        q, k, v = _as_four(query, lead), _as_four(key, of_keys), _as_four(value, of_keys)
        queries, keys = q.shape[2], k.shape[2]
        if is_causal:  # aligned at the top left, as PyTorch has it
            attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
        visibility = Visibility()
        if attn_mask is not None:
            mask = attn_mask.expand(*attn_mask.shape[:-1], keys)
            mask = _as_four(mask, lead if mask.shape[:-2].numel() > 1 else (1, 1))
            visibility = (_from_visible if mask.dtype == torch.bool else _from_bias)(mask, q.shape[0], queries)
        edited = self.keep(self.layer(q, k, v, scale, visibility))
        return out if edited is None else _laid_as(out, edited.reshape(out.shape))

    def written_out(self, trail: Trail, product: Product | None, out: Tensor) -> Tensor:
        """Read weights v. The softmax counts as missed if the weights are not what the trail says."""
        if product is None or not trail.is_fresh():
            return out
        weights, values = product.left, product.right
        of_weights = weights.shape[:-2]
        lead = torch.broadcast_shapes(of_weights, values.shape[:-2])
        folded = trail.lead if lead == of_weights else tuple(lead)
        of_scores = torch.broadcast_shapes(trail.q.shape[:-2], trail.k.shape[:-2])

        def laid(x: Tensor, now: Sequence[int]) -> Tensor:
            """Expand x to the leading dimensions of the weights, then of the output, then fold them to [B, H]."""
            inner = x.shape[-2:]
            x = x.expand(*now, *inner).reshape(*of_weights, *inner).expand(*lead, *inner)
            return _as_four(x.reshape(*folded, *inner), folded)

        q, k = laid(trail.q, of_scores), laid(trail.k, of_scores)
        v = _as_four(values.expand(*lead, *values.shape[-2:]).reshape(*folded, *values.shape[-2:]), folded)
        visibility, eps = Visibility(), _rounding(trail, q)
        if trail.shifted and trail.scores is not None:
            scores = laid(trail.scores, trail.scores.shape[:-2])
            visibility = _from_scores(scores, q, k, trail.scale, eps)
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        layer = self.layer(q.to(dtype), k.to(dtype), v.to(dtype), trail.scale, visibility)
        if not _same_weights(layer, laid(weights, of_weights), eps):
            return out
        self.captured.find(trail.number)
        edited = self.keep(layer)
        if edited is None:
            return out
        return _laid_as(out, product.arrange(edited.reshape(*lead, *edited.shape[-2:])))

    def layer(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, visibility: Visibility) -> Layer:
        name, grid, prefix = self.captured.place(q.shape[2] if q.shape[2] == k.shape[2] else -1)
        return Layer(name, q, k, v, mechanism("softmax"), scale, *visibility, grid=grid, prefix=prefix)


@torch.no_grad()
def _same_weights(layer: Layer, weights: Tensor, eps: float) -> bool:
    """Return whether the layer's weights are those that ran, up to rounding; a query without a key may have any."""
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
    """Return the coarsest rounding unit on the way; GPUs may multiply float32 in a lower precision."""
    coarse = q.is_cuda and torch.get_float32_matmul_precision() != "highest" and q.dtype == torch.float32
    return max(trail.eps, torch.finfo(q.dtype).eps, 2.0**-10 if coarse else 0.0)


def _laid_as(out: Tensor, edited: Tensor) -> Tensor:
    """Return `edited` in the dtype and memory layout of `out`, so that the model can view it the same way."""
    return torch.empty_like(out, requires_grad=False).copy_(edited)


def _as_four(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Return [B, H, n, m]: leading dimensions broadcast to `lead`, the last of them the heads, the others the batch."""
    heads = lead[-1] if len(lead) > 1 else 1
    x = x.expand(*lead, *x.shape[-2:])
    batch = x.shape[:-2].numel() // max(heads, 1)
    return x.reshape(batch, heads, *x.shape[-2:])


def _from_bias(bias: Float[Tensor, "#b #h #n #m"], batch: int, queries: int) -> Visibility:
    """Read a bias that is added to scores."""
    bias = torch.where(bias < FAR, -torch.inf, bias)
    seen = bias > -torch.inf
    if torch.where(seen, bias, 0.0).any():
        keys = seen.any(2).any(1)  # [b, M]
        return Visibility(bias, key_mask=None if keys.all() else keys.expand(batch, bias.shape[3]))
    return _from_visible(seen, batch, queries)


def _from_scores(
    scores: Float[Tensor, "b h n m"], q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], scale: float, eps: float
) -> Visibility:
    """Read the scores that reached a softmax and were computed with the rounding unit `eps`.

    The bias, scores - scale q.k, is known up to the rounding of both. A constant for all keys of a query changes no
    weight, so a bias that is one up to rounding is dropped.
    """
    if not scores.numel():
        return Visibility()
    q, k, scores = widen(q), widen(k), widen(scores)
    plain = scale * (q @ k.mT)
    bias = scores - plain
    top, most = bias.amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
    masked = (bias - top < FAR).any() | (top < EMPTY)  # otherwise a low number that all keys share hides none of them
    top = torch.where(masked & (top < FAR) & (most < FAR), 0.0, top)  # a query that sees no key
    seen = bias - top >= FAR
    least = torch.where(seen, bias, torch.inf).amin(-1, keepdim=True)
    middle = torch.where(seen.any(-1, keepdim=True), (top + least) / 2, 0.0)
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    noise = 4 * eps * (scores.abs() + plain.abs()) + q.shape[-1] * torch.finfo(q.dtype).eps * abs(scale) * size
    noise = torch.where(seen, noise, 0.0)
    from_zero, from_middle = (torch.where(seen, x, 0.0).abs() for x in (bias, bias - middle))
    largest = noise.amax(-1, keepdim=True)  # the middle may be off by as much
    if ((from_zero <= noise).all(-1) | (from_middle <= 2 * largest).all(-1)).all():
        return _from_visible(seen, q.shape[0], q.shape[2])
    bias = torch.where(middle < FAR / 2, bias - middle, bias)
    return _from_bias(torch.where(seen, bias, -torch.inf), q.shape[0], q.shape[2])


def _from_visible(seen: Bool[Tensor, "#b #h #n m"], batch: int, queries: int) -> Visibility:
    """Read a mask that is True where a query sees a key."""
    if seen.all():
        return Visibility()
    keys = seen.any(2).any(1)  # [b, M]
    key_mask = None if keys.all() else keys.expand(batch, -1)
    rest, order = keys[:, None, None, :], causal(queries, seen.shape[3], seen.device)
    if (seen == rest).all():
        return Visibility(key_mask=key_mask)
    if (seen == rest & order).all():
        return Visibility(key_mask=key_mask, is_causal=True)
    return Visibility(torch.where(seen, 0.0, -torch.inf))
