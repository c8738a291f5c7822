"""What transformers calls: one attention function for all layers, and one mask for all of them.

    mask          bool [B, M] of the keys, True for a real token; None without padding
                  [B, 1, N, M] for a static cache, whose memory is longer than its tokens
    give_inputs   before an attention module: its mechanism, the inputs and the state of this layer
    give_pack     before the model: where sequences begin, if several are packed in a row
    no_weights    before the model: refuses a call that wants attention weights
    attend        the attention itself

What `give_inputs` and `give_pack` add reaches `attend` as keyword arguments: transformers hands them down unread.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

from softless.errors import ArgumentError, UnsupportedError
from softless.functional import attention
from softless.mechanisms import Mechanism, mechanism
from softless.transformers.cache import StateLayer, state_layer

IMPLEMENTATION = "softless"


class Turn(NamedTuple):
    """What an attention module computes with."""

    mechanism: Mechanism
    inputs: Mapping[str, Tensor]
    state: StateLayer | None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **how: Any,
) -> Tensor | None:
    """Return the mask of one call of the model."""
    if attention_mask is not None and attention_mask.ndim != 2:
        raise _wrong_rank(attention_mask)
    if isinstance(q_offset, Tensor) or kv_length != q_offset - kv_offset + q_length:
        kv_offset = kv_offset if attention_mask is None else int(kv_offset)
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            attention_mask=attention_mask, **how | {"allow_is_causal_skip": False},
        )  # fmt: skip
    if attention_mask is None:
        return None
    tokens = kv_offset + kv_length
    if tuple(attention_mask.shape) != (batch_size, tokens):
        raise ArgumentError(
            f"attention_mask has shape {list(attention_mask.shape)} and must be [batch, tokens] = "
            f"{[batch_size, tokens]}, the tokens in the cache included"
        )
    attention_mask = attention_mask[:, -kv_length:].bool()
    return None if not torch.compiler.is_compiling() and attention_mask.all() else attention_mask


def give_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add the `Turn` of an attention module to its arguments."""
    inputs: Any = module._modules.get("softless")
    if inputs is None or module.config._attn_implementation != IMPLEMENTATION:  # type: ignore[union-attr]
        return None
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))  # the latter in GPT-NeoX
    x = args[0] if args else kwargs["hidden_states"]
    state = None if cache is None else state_layer(cache, module.layer_idx, inputs.mechanism)  # type: ignore[arg-type]
    return args, kwargs | {"softless": Turn(inputs.mechanism, inputs(x), state)}


def give_pack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add `softless_pack` to the arguments of a model: int64 [sequences + 1], where sequences begin in all tokens.

    Sequences come as transformers' collators pack them: by `cu_seq_lens_q`, or by `position_ids` that begin again.
    """
    offsets, places, past = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), kwargs.get("past_key_values")
    if module.config._attn_implementation != IMPLEMENTATION or kwargs.get("attention_mask") is not None:  # type: ignore[union-attr]
        return None
    if offsets is not None:
        _check_offsets(offsets, kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None)))
    else:
        if places is None or places.ndim != 2 or places.shape[1] < 2:
            return None
        begins = torch.ones_like(places, dtype=torch.bool)
        begins[:, 1:] = places[:, 1:] != places[:, :-1] + 1
        if not begins[:, 1:].any():
            return None
        ends = torch.tensor([begins.numel()], device=places.device)
        offsets = torch.cat([begins.flatten().nonzero().flatten(), ends])
    if past is not None and past.get_seq_length() > 0:
        raise UnsupportedError(
            "position_ids begin again inside a row, and a cache with tokens goes on with one sequence"
        )
    return args, kwargs | {"softless_pack": offsets.long()}


def _check_offsets(offsets: Tensor, tokens: Tensor | None) -> None:
    """Raise unless sequences begin at 0, follow one another, and end with the last token."""
    if tokens is None or torch.compiler.is_compiling():
        return
    count, ends = tokens.shape[0] * tokens.shape[1], offsets.tolist()
    if ends[:1] != [0] or ends[-1:] != [count] or any(end < begin for begin, end in pairwise(ends)):
        raise ArgumentError(f"cu_seq_lens_q is {ends} and must rise from 0 to the number of tokens, {count}")


def no_weights(module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where attention weights are asked for: they would be missing without a word."""
    if kwargs.get("output_attentions") and module.config._attn_implementation == IMPLEMENTATION:  # type: ignore[union-attr]
        raise UnsupportedError(
            "output_attentions is True, and softless returns no attention weights in a model of transformers: "
            "softless.attention_weights computes those of a mechanism from q and k"
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softless: Turn | None = None,
    softless_pack: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output [B, N, H, d] of an attention module, and no weights."""
    causal = bool(module.is_causal if is_causal is None else is_causal)
    if softless is None and softless_pack is not None and dropout == 0 and sliding_window is None:
        out = packed(Turn(mechanism("softmax"), {}, None), query, key, value, softless_pack, causal, scaling)
    elif softless is None:
        seen = visible(query, key, attention_mask, causal, sliding_window, softless_pack)
        plain = seen is None and causal and query.shape[2] > 1
        out = F.scaled_dot_product_attention(
            query, key, value, seen, dropout, plain, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    elif softless_pack is not None:
        out = packed(softless, query, key, value, softless_pack, causal)
    else:
        key_mask = of_new_tokens(attention_mask, key.shape[2], softless.state)
        if softless.state is not None and causal:
            out = softless.state.attend(query, key, value, key_mask, softless.inputs)
        else:
            chosen, inputs = softless.mechanism, softless.inputs
            out = attention(query, key, value, chosen, is_causal=causal, key_mask=key_mask, inputs=inputs)
    return out.transpose(1, 2), None


def of_new_tokens(attention_mask: Tensor | None, count: int, state: StateLayer | None) -> Tensor | None:
    """Return the mask of this call's tokens, bool [B, count]."""
    if attention_mask is None:
        return None
    if attention_mask.ndim == 2:
        return attention_mask[:, -count:].bool()
    if state is None or not state.is_compileable:
        raise _wrong_rank(attention_mask)
    new = torch.arange(count, device=attention_mask.device)
    places = torch.minimum(state.seen - count + new, attention_mask.shape[-1] - count + new)  # a window ends with them
    return attention_mask[:, 0, -1].index_select(1, places)


def _wrong_rank(attention_mask: Tensor) -> ArgumentError:
    return ArgumentError(
        f"attention_mask has shape {list(attention_mask.shape)}, and linear layers need one of [batch, tokens]"
    )


def visible(
    q: Tensor, k: Tensor, attention_mask: Tensor | None, causal: bool, window: int | None, offsets: Tensor | None
) -> Tensor | None:
    """Return which key each query of a softmax layer sees, bool [B or 1, 1, N, M]; None if order alone decides.

    Queries are the last of the keys. A query of the padding sees everything: it is read by nobody, and is finite.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask
    queries, keys = q.shape[2], k.shape[2]
    window = window if causal and window is not None and window < keys else None
    if attention_mask is None and offsets is None and window is None and (not causal or queries in (1, keys)):
        return None
    i, j = torch.arange(keys - queries, keys, device=q.device)[:, None], torch.arange(keys, device=q.device)
    seen = (j <= i if causal else (j >= 0).expand(queries, keys))[None, None]
    if window is not None:
        seen = seen & (i - j < window)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, -keys:].bool()
    if offsets is not None:
        tokens = torch.arange(q.shape[0] * keys, device=q.device)
        number = torch.searchsorted(offsets, tokens, right=True).view(q.shape[0], keys)
        seen = seen & (number[:, None, :, None] == number[:, None, None, :])
    return seen | ~seen.any(-1, keepdim=True)


def packed(
    turn: Turn, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, causal: bool, scale: float | None = None
) -> Tensor:
    """Return the output of rows in which several sequences follow one another."""
    if turn.state is not None:
        turn.state.refuse("it was filled with packed sequences, which have no common past")

    def as_sequences(x: Tensor) -> Tensor:  # [B, H, T, ...] -> [sequences, H, j, ...]
        tokens = x.transpose(1, 2).flatten(0, 1)
        return torch.nested.nested_tensor_from_jagged(tokens, offsets).transpose(1, 2)

    names = turn.mechanism.token_inputs
    inputs = {name: as_sequences(x) if name in names else x for name, x in turn.inputs.items()}
    q_, k_, v_ = map(as_sequences, (q, k, v))
    out = attention(q_, k_, v_, turn.mechanism, is_causal=causal, scale=scale, inputs=inputs)
    return out.transpose(1, 2).values().view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)
