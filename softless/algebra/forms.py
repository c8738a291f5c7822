"""The four forms of one function: explicit weights, parallel, chunked, recurrent.

    weights     w_ij, an N x M matrix to look at; the specification of the other three
    parallel    read(phi(q), observe(phi(k), v))               every query sees every token
    recurrent   merge a token, read, merge the next            query i sees tokens j <= i
    chunked     the same, a chunk at a time, no loop over tokens and memory O(N d)

They agree up to rounding; the tests compare each form with the weights.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra import direct, exponential
from softless.algebra.chunks import before, fold, incoming, relative, unfold, view
from softless.algebra.readers import (
    Gains,
    View,
    answer,
    empty,
    grow,
    level,
    parts,
    per_channel,
    quotient,
    read,
    rounding,
    settle,
    shares,
)
from softless.algebra.state import Log, State, keep, merge, observe
from softless.errors import ArgumentError

CHUNK = 64  # as long as a head is wide: the N/64 states then take the room of the N keys


def weights(
    phi_q: Float[Tensor, "*#b n d"] | Log,
    phi_k: Float[Tensor, "*#b m d"] | Log,
    reader: str,
    scale: float | Gains,
    visible: Bool[Tensor, "*#b #n m"],
    *,
    signed: bool = False,
) -> Float[Tensor, "*b n m"]:
    """Return the explicit weights; a key that is not visible has weight 0. `signed` is as in `read`.

    >>> import torch
    >>> from softless.algebra import weights
    >>> phi_q, phi_k = torch.rand(2, 4, 5, 16), torch.rand(2, 4, 10, 16)        # [B, H, N, d], [B, H, M, d]
    >>> visible = torch.arange(10) < 7
    >>> w = weights(phi_q, phi_k, "divide", 1.0, visible[None])                 # [B, H, N, M]
    >>> w.shape, w[..., 7:].any().item(), torch.allclose(w.sum(-1), torch.ones(2, 4, 5))
    (torch.Size([2, 4, 5, 10]), False, True)
    """
    n = visible.sum(-1, keepdim=True)
    if isinstance(scale, Gains):
        even = visible / n.clamp(min=1).to(scale.divide.dtype)
        divided = weights(phi_q, phi_k, "divide", 1.0, visible, signed=signed) - even
        subtracted = weights(phi_q, phi_k, "subtract", 1.0, visible) - even
        return even + scale.divide * divided + scale.subtract * subtracted
    if reader == "channel":
        by_token = exponential.token_softmax(phi_k, visible)  # [*b, n, m, d]
        return (by_token @ shares(phi_q)[..., None]).squeeze(-1)
    score, log_gain = _scores(phi_q, phi_k, reader, visible)
    mass = score.sum(-1, keepdim=True)
    even = visible / n.clamp(min=1).to(score.dtype)
    if reader == "divide":
        lost = None
        if signed and isinstance(phi_q, Tensor) and isinstance(phi_k, Tensor):
            finite = torch.where(phi_k.isfinite(), phi_k, 0.0)  # an infinite key of the future must have no effect
            lost = _lost(phi_q, visible.to(score.dtype) @ finite, n)
        return torch.where(empty(mass, lost), even, quotient(score, mass, lost))
    if reader == "subtract":
        return even + grow(torch.where(visible, scale * (score - mass * even) / n.clamp(min=1), 0.0), log_gain)
    if reader == "contrast":
        return even + grow(torch.where(visible, scale * (score - mass * even), 0.0), log_gain)
    return grow(scale * score, log_gain)


def _lost(phi_q: Tensor, total: Float[Tensor, "*#b #n d"], n: Tensor) -> Float[Tensor, "*b n 1"]:
    """Return the bound below which a mass counts as 0. `total` is the sum of phi(k) that each query sees."""
    terms = (level(phi_q).detach() * total.detach()).abs().sum(-1, keepdim=True)
    return rounding(terms, n, phi_q.shape[-1])


def _scores(
    phi_q: Tensor | Log, phi_k: Tensor | Log, reader: str, visible: Tensor
) -> tuple[Float[Tensor, "*b n m"], Float[Tensor, "*#b #n 1"]]:
    """Return (phi(q).phi(k) e^-log_gain, 0 for hidden keys; log_gain)."""
    if isinstance(phi_q, Log) or isinstance(phi_k, Log):
        return exponential.scores(phi_q, phi_k, visible)
    phi_q = level(phi_q) if reader == "divide" else phi_q
    return torch.where(visible, phi_q @ phi_k.mT, 0.0), phi_q.new_zeros((1,) * phi_q.ndim)


def parallel(
    phi_q: Float[Tensor, "*#b n d"] | Log,
    phi_k: Float[Tensor, "*#b m d"] | Log,
    v: Float[Tensor, "*#b m e"],
    reader: str,
    scale: float | Gains = 1.0,
    mask: Bool[Tensor, "*#b m"] | None = None,
    *,
    signed: bool = False,
) -> Float[Tensor, "*b n e"]:
    """Return the output where every query reads the state of all tokens.

    >>> import torch
    >>> from softless.algebra import parallel
    >>> phi_k, v = torch.rand(2, 4, 10, 16), torch.randn(2, 4, 10, 8)           # [B, H, M, d], [B, H, M, e]
    >>> parallel(torch.rand(2, 4, 5, 16), phi_k, v, "divide").shape             # [B, H, N, e]
    torch.Size([2, 4, 5, 8])
    """
    if mask is None and not isinstance(scale, Gains):
        out = direct.parallel(phi_q, phi_k, v, reader, scale, signed=signed)
        if out is not None:
            return out
    return read(phi_q, observe(phi_k, v, mask), reader, scale, shifted=isinstance(phi_k, Log), signed=signed)


def recurrent(
    phi_q: Float[Tensor, "*#b n d"] | Log,
    phi_k: Float[Tensor, "*#b n d"] | Log,
    v: Float[Tensor, "*#b n e"],
    reader: str,
    scale: float | Gains = 1.0,
    mask: Bool[Tensor, "*#b n"] | None = None,
    state: State | None = None,
    *,
    signed: bool = False,
) -> tuple[Float[Tensor, "*b n e"], State]:
    """Merge and read token by token. Cost and memory do not depend on the number of earlier tokens.

    >>> import torch
    >>> from softless.algebra import recurrent
    >>> phi_q, phi_k, v = torch.rand(3, 2, 4, 10, 16).unbind()                  # [B, H, N, d], v [B, H, N, e]
    >>> out, state = recurrent(phi_q, phi_k, v, "divide")
    >>> out.shape, torch.allclose(out[:, :, 0], v[:, :, 0]), state.n            # the first query sees its own token
    (torch.Size([2, 4, 10, 16]), True, tensor([[10]]))
    """
    outputs = []
    for i in range(v.shape[-2]):
        here = slice(i, i + 1)
        seen = observe(_tokens(phi_k, here), v[..., here, :], None if mask is None else mask[..., here])
        state = seen if state is None else merge(state, seen)
        outputs.append(read(_tokens(phi_q, here), state, reader, scale, signed=signed))
    if state is None or not outputs:
        raise ArgumentError(f"recurrent needs at least one token, got v {list(v.shape)}")
    return torch.cat(outputs, -2), state


def chunked(
    phi_q: Float[Tensor, "*#b n d"] | Log,
    phi_k: Float[Tensor, "*#b n d"] | Log,
    v: Float[Tensor, "*#b n e"],
    reader: str,
    scale: float | Gains = 1.0,
    mask: Bool[Tensor, "*#b n"] | None = None,
    state: State | None = None,
    chunk: int = CHUNK,
    *,
    signed: bool = False,
) -> Float[Tensor, "*b n e"]:
    """Return the causal output for training: a triangular product within a chunk, and a sum over earlier chunks.

    >>> import torch
    >>> from softless.algebra import chunked, recurrent
    >>> phi_q, phi_k, v = torch.rand(3, 2, 4, 100, 16).unbind()                 # [B, H, N, d], v [B, H, N, e]
    >>> torch.allclose(chunked(phi_q, phi_k, v, "divide"), recurrent(phi_q, phi_k, v, "divide")[0], atol=1e-5)
    True

        [x, mass] = tril(q k^T) V + q (sum over earlier chunks of k^T V)          V as `chunks` defines it

    Keys are not centered, so every mass is a sum over what the query sees, and nothing large cancels.
    """
    if isinstance(phi_k, Log):
        views = [exponential.view_chunks(phi_q, phi_k, v, each, mask, state, chunk) for each in parts(reader)]
    else:
        views = [_view_chunks(phi_q, phi_k, v, each, mask, state, chunk, signed) for each in parts(reader)]
    return answer(*views, reader=reader, scale=scale)


def _view_chunks(
    phi_q: Tensor | Log,
    phi_k: Tensor,
    v: Tensor,
    reader: str,
    mask: Tensor | None,
    state: State | None,
    chunk: int,
    signed: bool,
) -> View:
    """Return what each query sees of the tokens up to its own."""
    k, log_gain = keep(phi_k, mask), None
    v_ref, v = relative(v, mask, state)
    if reader == "channel":
        q = per_channel(shares(phi_q), _running(k, state))
    elif isinstance(phi_q, Log):
        q, log_gain = settle(phi_q.value, _running(k.detach().abs(), state))
    else:
        q = level(phi_q) if reader == "divide" else phi_q

    q_c, k_c, v_c = (fold(x, chunk) for x in (q, k, v))  # [*b, c, chunk, .]
    blocks = k_c.mT @ v_c  # [*b, c, d, e + 1]
    first = torch.zeros_like(blocks[..., :1, :, :])
    if state is not None:
        first = first + incoming(state)[..., None, :, :]
    past = before(first, blocks, -3).cumsum(-3)
    sums = unfold((q_c @ k_c.mT).tril() @ v_c + q_c @ past, v.shape[-2])  # [*b, n, e + 1]
    seen = view(sums, v, v_ref, state, log_gain)
    if signed and reader == "divide" and isinstance(phi_q, Tensor):
        seen = seen._replace(lost=_lost(phi_q, _running(k, state), seen.n))
    return seen


def _running(k: Float[Tensor, "*b n d"], state: State | None) -> Float[Tensor, "*b n d"]:
    """Return sum_{j <= i} phi(k_j), with the incoming state; the sum is taken in chunks, which rounds less often."""
    own = fold(k, CHUNK).cumsum(-2)  # [*b, c, chunk, d]
    last = own[..., -1:, :]
    total = unfold(own + before(torch.zeros_like(last[..., :1, :, :]), last, -3).cumsum(-3), k.shape[-2])
    return total if state is None else total + (state.n[..., None] * state.k_mean)[..., None, :]


def _tokens(phi: Tensor | Log, here: slice) -> Tensor | Log:
    return Log(phi.value[..., here, :]) if isinstance(phi, Log) else phi[..., here, :]
