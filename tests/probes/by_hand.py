"""Attention written by hand in many ways, for tests of what `capture` makes of them.

A way takes q, k, v [B, H, N, d] and gives the output and the matrix that it multiplied v with. Those in `CAPTURED` are
captured, those in `MISSED` do something that has no place in softmax(scale q k^T + bias) v.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, TOKENS, DIM = 2, 3, 6, 4
INF = float("inf")
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def scored(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * DIM**-0.5


def changed(change: Callable[[Tensor], object]) -> Way:
    """The plain way, with scores that are changed in place, or replaced by what the change returns."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = scored(q, k)
        result = change(scores)
        weights = (scores if result is None else result).softmax(-1)
        return weights @ v, weights

    return way


def regarded(change: Callable[[Tensor], object]) -> Way:
    """The plain way, with weights that are changed in place, or replaced by what the change returns."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = scored(q, k).softmax(-1)
        result = change(weights)
        weights = weights if result is None else result
        return weights @ v, weights

    return way


def fused(**options: object) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return F.scaled_dot_product_attention(q, k, v, **options), matrix(q, k, **options)

    return way


def matrix(q: Tensor, k: Tensor, **options: object) -> Tensor:
    """What fused attention multiplies v with, unseen by a capture."""
    with torch._C.DisableTorchFunction():
        one = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
        return F.scaled_dot_product_attention(q, k, one, **options)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def set_mask(scores: Tensor) -> None:
    scores[..., LATER] = -INF


def set_columns(scores: Tensor) -> None:
    scores[:, :, :, 4:] = torch.finfo(scores.dtype).min


def fill_view(scores: Tensor) -> None:
    scores[..., 4:].fill_(-INF)


def add_to_part(scores: Tensor) -> None:
    scores[:, :, 1:, 1:] += drawn(HEADS, TOKENS - 1, TOKENS - 1)


def set_positions(scores: Tensor) -> None:
    part = scores[:, :, 1:, 1:]
    scores[:, :, 1:, 1:] = (part.reshape(BATCH, HEADS, -1) + drawn((TOKENS - 1) ** 2)).view_as(part)


def clamp_part(scores: Tensor) -> None:
    scores[:, :, 1:].clamp_(-0.1, 0.1)


def scale_rows(scores: Tensor) -> None:
    scores *= drawn(TOKENS, 1).abs()


def gate(weights: Tensor) -> None:
    weights *= drawn(HEADS, 1, TOKENS).sigmoid()


def set_weights(weights: Tensor) -> None:
    weights[..., 0] = 0.0


def change_view(weights: Tensor) -> None:
    weights.view(-1)[::2].zero_()


def unseen_change(weights: Tensor) -> None:
    weights.data.clamp_(max=0.2)


def three_dimensional(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    weights = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(DIM)).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (BATCH, HEADS)), weights.unflatten(0, (BATCH, HEADS))


def three_dimensional_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).softmax(-1)
    out = torch.bmm(weights.reshape(-1, TOKENS, TOKENS), v.reshape(-1, TOKENS, DIM))
    return out.view(BATCH, HEADS, TOKENS, DIM), weights


def masked_as_four(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    scores = torch.bmm(q, k.mT).view(BATCH, HEADS, TOKENS, TOKENS).masked_fill(LATER, -INF)
    weights = F.softmax(scores.view(-1, TOKENS, TOKENS), dim=-1)
    return torch.bmm(weights, v).unflatten(0, (BATCH, HEADS)), weights.unflatten(0, (BATCH, HEADS))


def added_product(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = drawn(BATCH * HEADS, TOKENS, TOKENS).to(q.dtype)
    weights = torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=DIM**-0.5).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (BATCH, HEADS)), weights.unflatten(0, (BATCH, HEADS))


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bhid, bhjd -> bhij", q * DIM**-0.5, k).softmax(dim=-1)
    return torch.einsum("bhij,bhje->bhie", weights, v), weights


def by_einsum_of_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(DIM)).softmax(dim=-1)
    return torch.einsum("bhqk,bkhe->bqhe", weights, v).transpose(1, 2), weights


def by_einsum_with_an_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (torch.einsum("...qd,...kd->...qk", q, k) * DIM**-0.5).softmax(dim=-1)
    return torch.einsum("...qk,...ke->...qe", weights, v), weights


def biased(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return fused(attn_mask=drawn(HEADS, TOKENS, TOKENS).to(q.dtype))(q, k, v)


def five_dimensional(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=~LATER)
    return out[:, 0], matrix(q, k, attn_mask=~LATER)


def broadcast_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = k[:1, :1], v[:1, :1]
    return F.scaled_dot_product_attention(q, k, v), matrix(q, k.expand_as(q))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = k[:, :1], v[:, :1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), matrix(q, k.expand_as(q))


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k[:, :1]).softmax(-1)
    return weights @ v[:, :1], weights


def turned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).softmax(-1)
    return (v.mT @ weights.transpose(-2, -1)).mT, weights


def both_scaled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = ((q * DIM**-0.25) @ (k * DIM**-0.25).transpose(-2, -1)).softmax(-1)
    return weights @ v, weights


def flattened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).flatten(2).softmax(-1).view(BATCH, HEADS, TOKENS, TOKENS)
    return weights @ v, weights


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).softmax(-2)
    return weights @ v, weights


def by_logarithms(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.log_softmax(scored(q, k), dim=-1).exp()
    return weights @ v, weights


def by_exponentials(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = scored(q, k)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = powers / powers.sum(-1, keepdim=True)
    return weights @ v, weights


def temperature(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT / torch.sqrt(torch.tensor(float(DIM)))).softmax(-1)
    return weights @ v, weights


def temperature_per_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * drawn(HEADS, 1, 1).to(q.dtype)).softmax(-1)
    return weights @ v, weights


def talking_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mixed = (scored(q, k).permute(0, 2, 3, 1) @ drawn(HEADS, HEADS).to(q.dtype)).permute(0, 3, 1, 2)
    weights = mixed.softmax(-1)
    return weights @ v, weights


def talking_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bhij,hg->bgij", scored(q, k).softmax(-1), drawn(HEADS, HEADS).to(q.dtype))
    return weights @ v, weights


def in_chunks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = [scored(part, k).softmax(-1) for part in q.split(4, dim=2)]
    return torch.cat([each @ v for each in weights], 2), torch.cat(weights, 2)


def chunks_of_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = [part.softmax(-1) for part in scored(q, k).split(4, dim=2)]
    return torch.cat([each @ v for each in weights], 2), torch.cat(weights, 2)


def first_query_alone(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).softmax(-1)
    return (weights[:, :, :1] @ v).expand_as(v), weights[:, :, :1].expand_as(weights)


def summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).softmax(-1)
    return (weights[..., None] * v[:, :, None]).sum(-2), weights


def in_double(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(scored(q, k), dim=-1, dtype=torch.float64).to(q.dtype)
    return weights @ v, weights


def values_in_double(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).softmax(-1).double()
    return (weights @ v.double()).to(q.dtype), weights.to(q.dtype)


def buffered(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights, out = scored(q, k).softmax(-1), torch.empty_like(q)
    torch.matmul(weights, v, out=out)
    return out, weights


def reused_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = scored(q, k).masked_fill(LATER, -INF)
    weights = scores.softmax(-1)
    scores.zero_()
    return weights @ v, weights


def changed_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q = q.clone()
    weights = scored(q, k).softmax(-1)
    q.mul_(2)
    return weights @ v, weights


def changed_afterwards(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights, v = scored(q, k).softmax(-1), v.clone()
    return weights @ v + v.zero_(), weights


def two_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scored(q, k).softmax(-1)
    return weights @ v + weights @ v, 2 * weights


CAPTURED: dict[str, Way] = {
    "plain": changed(lambda scores: scores),
    "einsum": by_einsum,
    "einsum, tokens before heads": by_einsum_of_tokens_first,
    "einsum with an ellipsis": by_einsum_with_an_ellipsis,
    "bmm of three dimensions": three_dimensional,
    "weights of three dimensions": three_dimensional_weights,
    "masked as four dimensions": masked_as_four,
    "baddbmm": added_product,
    "fused": fused(),
    "fused, a mask": fused(attn_mask=~LATER),
    "fused, a bias": biased,
    "fused, causal": fused(is_causal=True),
    "fused, a scale": fused(scale=0.3),
    "fused, grouped queries": grouped,
    "fused, five dimensions": five_dimensional,
    "fused, broadcast keys": broadcast_keys,
    "one key head": one_key_head,
    "weights turned over": turned,
    "q and k scaled": both_scaled,
    "a mask set": changed(set_mask),
    "columns set": changed(set_columns),
    "a view filled": changed(fill_view),
    "a part added to": changed(add_to_part),
    "positions set": changed(set_positions),
    "masked_fill_": changed(lambda scores: scores.masked_fill_(LATER, -1e4)),
    "a bias added in place": changed(lambda scores: scores.add_(drawn(HEADS, TOKENS, TOKENS))),
    "a bias first": changed(lambda scores: drawn(HEADS, TOKENS, TOKENS).to(scores.dtype) + scores),
    "where": changed(lambda scores: torch.where(LATER, -INF, scores)),
    "the maximum subtracted in place": changed(lambda scores: scores.sub_(scores.amax(-1, keepdim=True))),
    "scaled in place": changed(lambda scores: scores.mul_(0.5)),
    "a temperature": temperature,
    "by logarithms": by_logarithms,
    "in double": in_double,
    "values in double": values_in_double,
    "in chunks of queries": in_chunks,
    "dropout at rest": regarded(lambda weights: F.dropout(weights, 0.5, training=False)),
    "two values": two_values,
}
MISSED: dict[str, Way] = {
    "clamp_": changed(lambda scores: scores.clamp_(-0.1, 0.1)),
    "a part clamped": changed(clamp_part),
    "tril_": changed(lambda scores: scores.tril_()),
    "rows scaled in place": changed(scale_rows),
    "tanh": changed(lambda scores: scores.tanh()),
    "a temperature per head": temperature_per_head,
    "talking heads": talking_heads,
    "talking weights": talking_weights,
    "flattened": flattened,
    "over queries": over_queries,
    "by exponentials": by_exponentials,
    "a gate in place": regarded(gate),
    "a gate": regarded(lambda weights: weights * drawn(HEADS, 1, TOKENS).to(weights.dtype)),
    "weights set": regarded(set_weights),
    "weights masked in place": regarded(lambda weights: weights.masked_fill_(LATER, 0.0)),
    "weights through data": regarded(unseen_change),
    "weights through a view": regarded(change_view),
    "dropout in training": regarded(lambda weights: F.dropout(weights, 0.5, training=True)),
    "fused, dropout in training": lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), q @ k.mT),
    "chunks of scores": chunks_of_scores,
    "the first query alone": first_query_alone,
    "summed, not multiplied": summed,
    "an output buffer": buffered,
    "scores used again": reused_scores,
    "queries changed": changed_queries,
}
EVERY = CAPTURED | MISSED
