"""Exact exponential features: phi = exp(logs) is only formed relative to a running maximum.

In the causal form a maximum over later tokens would leak the future, and a large later key would
erase the past. So query i works in units of what it has seen:

    u_i = max_{j <= i} log phi(k_j)       channel by channel, as far as query i may know
    q_i -> phi(q_i) e^{u_i} / e^{top_i}   no product with a visible key exceeds 1

A chunk reads its past as one state in running units, and its own tokens by halves: the right half
of every span reads the left half, span by span, so each product has its own exact reference.
Shifts cancel wherever they are used; they carry no gradient.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.chunks import before, first_kept, fold, incoming, relative, unfold, view
from softless.algebra.readers import View, level, shares
from softless.algebra.state import Log, State, keep

CENTERED = ("subtract", "contrast")  # readers that take a mean off the keys
GROUP = 64  # chunks whose pairwise decays are held at once


def view_chunks(
    phi_q: Float[Tensor, "*#b n d"] | Log,
    phi_k: Log,
    v: Float[Tensor, "*#b n e"],
    reader: str,
    mask: Bool[Tensor, "*#b n"] | None,
    state: State | None,
    chunk: int,
) -> View:
    """Return what each query sees of the tokens up to its own, for `forms.chunked`; `chunk` is a power of two."""
    floor = torch.finfo(v.dtype).min / 4  # below every logarithm, and finite: floor - floor is 0
    logs = keep(phi_k.value, mask, floor)
    v_ref, v = relative(v, mask, state)
    origin = _origin(logs, mask, state) if reader in CENTERED else torch.full_like(logs[..., :1, :], floor)
    value, exponent, log_gain = _query(phi_q, logs, origin, reader, state, chunk)
    logs_c, v_c, origin = fold(logs, chunk, floor), fold(v, chunk), origin[..., None, :, :]  # origin: [*b, 1, 1, d]
    value_c, exponent_c = fold(value, chunk), fold(exponent, chunk, floor)

    units = torch.maximum(logs_c.detach().amax(-2), origin.squeeze(-2))  # [*b, c, d]
    blocks = _features(logs_c, origin, units[..., None, :]).mT @ v_c  # [*b, c, d, e + 1]
    first = None if state is None else incoming(state, centered=reader in CENTERED)
    units, past = running_sum(*_with_incoming(units, blocks, state, first, floor))
    sums = (value_c * (exponent_c + units[..., None, :]).exp()) @ past
    own = (exponent_c + logs_c).exp() - (exponent_c + origin).exp()
    sums = sums + (value_c * own).sum(-1, keepdim=True) * v_c
    half = 1
    while half < chunk:
        sums = sums + _right_reads_left(value_c, exponent_c, logs_c, origin[..., None, :, :], v_c, half)
        half *= 2
    return view(unfold(sums, v.shape[-2]), v, v_ref, state, log_gain)


def _origin(logs: Tensor, mask: Tensor | None, state: State | None) -> Float[Tensor, "*b 1 d"]:
    """Return the point that keys are centered on: the mean of the incoming state, or the first token kept.

    Every query may know this point. A subtraction multiplies what is left by e^top, so equal keys must cancel exactly.
    """
    first = first_kept(logs, mask)
    if state is None:
        return first
    mean = state.k_mean.detach().clamp(min=torch.finfo(logs.dtype).tiny).log() + state.shift
    mean = mean.clamp(min=torch.finfo(logs.dtype).min / 4)
    return torch.where(state.n[..., None, None] > 0, mean[..., None, :], first)


def _features(logs: Tensor, origin: Tensor, units: Tensor) -> Tensor:
    """Return features relative to the origin, in units no smaller than either."""
    return (logs - units).exp() - (origin - units).exp()


def _query(
    phi_q: Tensor | Log, logs: Tensor, origin: Tensor, reader: str, state: State | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (value, exponent, log_gain) with phi(q) e^-log_gain = value e^exponent. No visible product exceeds 1."""
    if reader == "channel":
        units, total = running_total(logs, state, chunk)
        return shares(phi_q) / total, -units, None
    seen = torch.maximum(logs.detach().cummax(-2).values, origin)  # [*b, n, d]
    if state is not None:
        seen = torch.maximum(seen, state.shift[..., None, :])
    if isinstance(phi_q, Log):
        top = (phi_q.value.detach() + seen).amax(-1, keepdim=True)
        return torch.ones_like(top), phi_q.value - top, top
    q = level(phi_q) if reader == "divide" else phi_q
    top = torch.where(q != 0, seen, torch.finfo(seen.dtype).min / 4).amax(-1, keepdim=True)
    return q, torch.where(q != 0, -top, torch.finfo(seen.dtype).min / 4), top


def running_total(
    logs: Float[Tensor, "*b n d"], state: State | None, chunk: int
) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n d"]]:
    """Return (units, total) with sum_{j <= i} e^{logs_j} = total e^units, channel by channel."""
    floor = torch.finfo(logs.dtype).min / 4
    folded = fold(logs, chunk, floor)
    units = folded.detach()
    total = (folded - units).exp()
    step = 1
    while step < chunk:
        earlier = F.pad(units, (0, 0, step, -step), value=floor), F.pad(total, (0, 0, step, -step))
        units, total = _add(units, total, *earlier)
        step *= 2
    first = None if state is None else incoming(state)[..., -1:]
    last = _with_incoming(units[..., -1, :], total[..., -1, :, None], state, first, floor)
    past_units, past = running_sum(*last)
    units, total = _add(units, total, past_units[..., None, :], past.mT)
    return unfold(units, logs.shape[-2]), unfold(total, logs.shape[-2])


def _add(units: Tensor, total: Tensor, other_units: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of total e^units and other e^other_units, in the larger units."""
    top = torch.maximum(units, other_units)
    return top, total * (units - top).exp() + other * (other_units - top).exp()


def _with_incoming(
    units: Tensor, blocks: Tensor, state: State | None, sums: Tensor | None, floor: float
) -> tuple[Tensor, Tensor]:
    """Return what comes before each chunk: the incoming state with its sums, then every chunk but the last."""
    if state is None or sums is None:
        first, start = torch.zeros_like(blocks[..., :1, :, :]), torch.full_like(units[..., :1, :], floor)
    else:
        first = sums[..., None, :, :].expand_as(blocks[..., :1, :, :])
        start = state.shift.clamp(min=floor)[..., None, :].expand_as(units[..., :1, :])
    return before(start, units, -2), before(first, blocks, -3)


def running_sum(
    units: Float[Tensor, "*b c d"], blocks: Float[Tensor, "*b c d e"]
) -> tuple[Float[Tensor, "*b c d"], Float[Tensor, "*b c d e"]]:
    """Return the running sum of blocks in units of the running maximum: groups of chunks, then sums of groups."""
    count, group = units.shape[-2], min(GROUP, units.shape[-2])
    floor = torch.finfo(units.dtype).min / 4
    groups = (count + group - 1) // group
    spare = groups * group - count
    units = F.pad(units, (0, 0, 0, spare), value=floor).unflatten(-2, (groups, group))  # [*b, g, k, d]
    blocks = F.pad(blocks, (0, 0, 0, 0, 0, spare)).unflatten(-3, (groups, group))  # [*b, g, k, d, e]
    inner_units, inner = _decayed_sum(units, blocks)
    totals = _decayed_sum(inner_units[..., -1, :], inner[..., -1, :, :])
    outer_units = before(torch.full_like(totals[0][..., :1, :], floor), totals[0], -2)[..., None, :]
    outer = before(torch.zeros_like(totals[1][..., :1, :, :]), totals[1], -3)[..., None, :, :]
    units = torch.maximum(inner_units, outer_units)
    total = inner * (inner_units - units).exp()[..., None] + outer * (outer_units - units).exp()[..., None]
    return units.flatten(-3, -2)[..., :count, :], total.flatten(-4, -3)[..., :count, :, :]


def _decayed_sum(units: Float[Tensor, "*b k d"], blocks: Float[Tensor, "*b k d e"]) -> tuple[Tensor, Tensor]:
    """Return m and sum_{j <= i} e^{u_j - m_i} block_j, where m is the running maximum of u.

    This is one triangular product per channel. Its zeros do not hide a NaN in a later block, because 0 NaN is NaN. So
    numbers that are not finite are added apart, from their own block on.
    """
    running = units.cummax(-2).values
    decay = (units.mT[..., None, :] - running.mT[..., :, None]).exp().tril()  # [*b, d, k, k]
    finite, broken = torch.where(blocks.isfinite(), blocks, 0.0), (0 * blocks.detach()).cumsum(-3)
    return running, (decay @ finite.transpose(-3, -2)).transpose(-3, -2) + broken


def _right_reads_left(value: Tensor, exponent: Tensor, logs: Tensor, origin: Tensor, v: Tensor, half: int) -> Tensor:
    """Return what the right half of every span of 2 `half` tokens reads from the left half."""
    right = [x.unflatten(-2, (-1, 2, half))[..., 1, :, :] for x in (value, exponent)]
    left, v_left = (x.unflatten(-2, (-1, 2, half))[..., 0, :, :] for x in (logs, v))
    units = torch.maximum(left.detach().amax(-2, keepdim=True), origin)
    score = (right[0] * (right[1] + units).exp()) @ _features(left, origin, units).mT  # [*b, c, spans, half, half]
    out = score @ v_left
    return torch.stack([torch.zeros_like(out), out], -3).flatten(-4, -2)  # [*b, c, l, e + 1]


def scores(
    phi_q: Tensor | Log, phi_k: Tensor | Log, visible: Bool[Tensor, "*#b #n m"]
) -> tuple[Float[Tensor, "*b n m"], Float[Tensor, "*#b #n 1"]]:
    """Return (score, log_gain) with phi(q).phi(k) = score e^log_gain, if either is exponential.

    The largest visible score of a row is near 1.
    """
    if isinstance(phi_q, Log) and isinstance(phi_k, Log):
        logs = (phi_q.value[..., :, None, :] + phi_k.value[..., None, :, :]).logsumexp(-1)
        sign = torch.ones_like(logs)
    else:
        sign, logs = _signed(phi_q, phi_k)
    floor = torch.finfo(logs.dtype).min / 4
    logs = torch.where(visible, logs, floor)
    log_gain = logs.detach().amax(-1, keepdim=True)
    return torch.where(visible, sign * (logs - log_gain).exp(), 0.0), log_gain


def _signed(phi_q: Tensor | Log, phi_k: Tensor | Log) -> tuple[Float[Tensor, "*b n m"], Float[Tensor, "*b n m"]]:
    """Return (rest, logs) with phi(q).phi(k) = rest e^logs, if one of them is exponential. Zeros are left out."""
    if isinstance(phi_q, Log):
        assert isinstance(phi_k, Tensor)
        logs, plain = phi_q.value[..., :, None, :], phi_k[..., None, :, :]
    else:
        assert isinstance(phi_k, Log)
        logs, plain = phi_k.value[..., None, :, :], phi_q[..., :, None, :]
    logs = torch.where(plain != 0, logs, torch.finfo(logs.dtype).min / 4)  # [*b, n, m, d]
    top = logs.detach().amax(-1, keepdim=True)
    return ((logs - top).exp() * plain).sum(-1), top.squeeze(-1)


def token_softmax(phi_k: Tensor | Log, visible: Bool[Tensor, "*#b #n m"]) -> Float[Tensor, "*b n m d"]:
    """Return phi(k_j) / sum_j phi(k_j) over the visible keys, per channel; equal weights if all features are 0."""
    seen = visible[..., None]
    if isinstance(phi_k, Log):
        logs = torch.where(seen, phi_k.value[..., None, :, :], torch.finfo(phi_k.value.dtype).min / 4)
        return torch.where(seen, logs.softmax(-2), 0.0)
    k = torch.where(seen, phi_k[..., None, :, :], 0.0)
    total = k.sum(-2, keepdim=True)
    even = seen / seen.sum(-2, keepdim=True).clamp(min=1).to(k.dtype)
    return torch.where(total != 0, k / torch.where(total != 0, total, 1.0), even)
