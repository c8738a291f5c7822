"""The State: everything a query needs to know about the tokens it may see.

    n         how many tokens
    k_mean    mean of phi(k)
    v_mean    mean of v
    comoment  sum_j (phi(k_j) - k_mean)(v_j - v_mean)^T
    shift     the features are stored divided by e^shift, channel by channel

The state holds means and a co-moment, not raw sums: subtracting two large raw sums loses up to 31 bf16 ulps when
keys and values have a mean; this form loses less than one. `merge` (Chan, Golub, LeVeque 1979) is associative, so
one law gives every form: chunked and recurrent merge as they go, and sequence parallelism merges across ranks.

Float32 throughout, float64 where the input is float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softless.errors import ArgumentError


class Log(NamedTuple):
    """Features given by their logarithm, phi = exp(value). They are formed only relative to a shift.

    >>> import torch
    >>> from softless.algebra import Log, observe
    >>> logs, v = torch.full((2, 4, 10, 16), 1000.0), torch.randn(2, 4, 10, 8)  # [B, H, N, d], [B, H, N, e]
    >>> state = observe(Log(logs), v)                                           # e^1000 itself is no float32
    >>> state.k_mean.max(), state.shift.max()
    (tensor(1.), tensor(1000.))
    """

    value: Float[Tensor, "*b n d"]


class State(NamedTuple):
    """A summary of tokens. A tuple of tensors: `_asdict()` saves it, gradients flow through it.

    >>> import torch, softless
    >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()                 # [batch, heads, tokens, dim]
    >>> _, state = softless.attention_with_state(q, k, v, "linear")
    >>> state.comoment.shape, state.n                                   # without a mask, one count for all rows
    (torch.Size([2, 4, 16, 16]), tensor([[10]]))
    >>> state.rows(torch.tensor([1, 1, 0])).comoment.shape              # three beams, two of them from row 1
    torch.Size([3, 4, 16, 16])
    """

    n: Int[Tensor, "*b"]
    k_mean: Float[Tensor, "*b d"]
    v_mean: Float[Tensor, "*b m"]
    comoment: Float[Tensor, "*b d m"]
    shift: Float[Tensor, "*b d"]

    def rows(self, index: Int[Tensor, " rows"]) -> "State":
        """Return the state of these rows of the batch, in this order; a row may appear several times."""
        return State(*_rows(self, index))


class NearState(NamedTuple):
    """A summary of the far tokens, and the near tokens as they are: the state of mechanism `nearfar`.

    >>> import torch, softless
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()                # [batch, heads, tokens, dim]
    >>> made = softless.mechanism("nearfar", window=32, first=4, maps="identity")
    >>> _, state = softless.attention_with_state(q, k, v, made, inputs={"gain": torch.zeros(4)})
    >>> state.keys.shape, state.comoment.shape, state.n
    (torch.Size([2, 4, 36, 16]), torch.Size([2, 4, 32, 16]), tensor([[100]]))

    The means and the co-moment are those of the far tokens, and n counts all tokens. `keys` and `values` are the first
    tokens of the sequence, and after them the last ones. Places without a token are zero.
    """

    n: Int[Tensor, "*b"]
    k_mean: Float[Tensor, "*b d"]
    v_mean: Float[Tensor, "*b m"]
    comoment: Float[Tensor, "*b d m"]
    keys: Float[Tensor, "*b near c"]
    values: Float[Tensor, "*b near m"]

    def rows(self, index: Int[Tensor, " rows"]) -> "NearState":
        """Return the state of these rows of the batch, in this order; a row may appear several times."""
        return NearState(*_rows(self, index))


AnyState = State | NearState


def _rows(state: AnyState, index: Tensor) -> list[Tensor]:
    n = state.n if state.n.shape[0] == 1 else state.n[index]
    return [n, *(part[index] for part in state[1:])]


def causal(queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "n m"]:
    """Return True where key j is not after query i. The last query is aligned with the last key and sees every key.

    >>> causal(2, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    rows = torch.arange(queries, device=device)[:, None] + (keys - queries)
    return torch.arange(keys, device=device) <= rows


def visible(
    queries: int,
    keys: int,
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "b m"] | None,
    device: torch.device | None = None,
) -> Bool[Tensor, "#b 1 #n m"]:
    """Return which key each query may see, by causality and by the key mask, broadcastable to [B, H, N, M]."""
    if is_causal:
        seen = causal(queries, keys, device)[None, None]
    else:
        seen = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


def keep(x: Tensor, mask: Bool[Tensor, "*#b n"] | None, other: float = 0.0) -> Tensor:
    """Replace what the mask hides. Multiplying by zero would let a NaN in the padding through."""
    return x if mask is None else torch.where(mask[..., None], x, other)


def observe(
    phi_k: Float[Tensor, "*#b n d"] | Log, v: Float[Tensor, "*#b n m"], mask: Bool[Tensor, "*#b n"] | None = None
) -> State:
    """Summarize the tokens of a block that the mask keeps.

    >>> import torch
    >>> from softless.algebra import observe
    >>> phi_k, v = torch.rand(2, 4, 10, 16), torch.randn(2, 4, 10, 8)           # [B, H, N, d], [B, H, N, e]
    >>> mask = torch.arange(10) < torch.tensor([[10], [7]])                     # [B, N]
    >>> state = observe(phi_k, v, mask[:, None])
    >>> state.comoment.shape, state.n[:, 0]                                     # [B, H, d, e]
    (torch.Size([2, 4, 16, 8]), tensor([10,  7]))
    """
    k, shift = _unlog(phi_k, mask) if isinstance(phi_k, Log) else (keep(phi_k, mask), None)
    n = torch.full((1,) * (v.ndim - 2), v.shape[-2], device=v.device) if mask is None else mask.sum(-1)
    tokens, v = n.clamp(min=1)[..., None], keep(v, mask)
    k_mean, v_mean = k.sum(-2) / tokens, v.sum(-2) / tokens
    deviation = keep(k - k_mean[..., None, :], mask)
    comoment = deviation.mT @ (v - v_mean[..., None, :])
    return State(n, k_mean, v_mean, comoment, torch.zeros_like(k_mean) if shift is None else shift)


def merge(a: State, b: State) -> State:
    """Return the state of two blocks one after the other. A state of no tokens is the identity, bit for bit.

    >>> import torch
    >>> from softless.algebra import merge, observe
    >>> phi_k, v = torch.rand(2, 4, 10, 16), torch.randn(2, 4, 10, 8)           # [B, H, N, d], [B, H, N, e]
    >>> both = merge(observe(phi_k[:, :, :6], v[:, :, :6]), observe(phi_k[:, :, 6:], v[:, :, 6:]))
    >>> torch.allclose(both.comoment, observe(phi_k, v).comoment, atol=1e-5), both.n
    (True, tensor([[10]]))
    """
    n = a.n + b.n
    share = (b.n / n.clamp(min=1).to(b.k_mean.dtype))[..., None]  # [*b, 1]
    shift = torch.maximum(a.shift, b.shift)
    a_units, b_units = rescale(a.shift, shift), rescale(b.shift, shift)
    k_step, v_step = b.k_mean * b_units - a.k_mean * a_units, b.v_mean - a.v_mean
    between = (a.n[..., None] * share * k_step)[..., :, None] * v_step[..., None, :]  # [*b, d, m]
    return State(
        n,
        a.k_mean * a_units + share * k_step,
        a.v_mean + share * v_step,
        a.comoment * a_units[..., None] + b.comoment * b_units[..., None] + between,
        shift,
    )


def check_continues(state: AnyState | None, seen: AnyState) -> None:
    """Raise if the parts of a state do not have the shapes and dtypes that these tokens need."""
    if state is None:
        return
    if type(state) is not type(seen):
        raise ArgumentError(
            f"the state is a {type(state).__name__}, and this mechanism goes on from a {type(seen).__name__}"
        )
    batch = seen.comoment.shape[:-2]
    for name in ("comoment", *seen._fields[1:3], *seen._fields[4:], "n"):
        part, needed = getattr(state, name), getattr(seen, name)
        fits = part.shape == needed.shape and part.dtype == needed.dtype
        if name == "n":
            fits = part.ndim == len(batch) and all(a in (1, b) for a, b in zip(part.shape, batch, strict=True))
        if not fits:
            raise ArgumentError(
                f"the state's {name} is {part.dtype} {list(part.shape)}, and these q, k, v continue one of "
                f"{needed.dtype} {list(batch if name == 'n' else needed.shape)}"
            )


def rescale(old: Float[Tensor, "*b d"], new: Float[Tensor, "*#b #d"]) -> Float[Tensor, "*b d"]:
    """Return e^(old - new), the factor that takes features from units of e^old to units of e^new >= e^old."""
    return torch.where(old == new, 0.0, old - new).exp()


def _unlog(phi: Log, mask: Bool[Tensor, "*#b n"] | None) -> tuple[Tensor, Tensor]:
    """Return (features / e^shift, shift), with shift the largest logarithm of each channel, so no feature exceeds 1.

    The shift cancels wherever it is used, so it needs no gradient.
    """
    logs = keep(phi.value, mask, -torch.inf)
    shift = logs.detach().amax(-2) if logs.shape[-2] else logs.new_full(logs.sum(-2).shape, -torch.inf)
    return (logs - shift.clamp(min=torch.finfo(logs.dtype).min)[..., None, :]).exp(), shift
