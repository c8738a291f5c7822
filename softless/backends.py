"""Run a validated call in torch or on the fused kernels.

With backend "auto", the kernels run CUDA tensors that they support, on devices with recorded evidence or a passed
check. torch runs everything else, and everything under `torch.func` transforms and forward-mode differentiation. An
explicit backend that cannot run raises and says why. Nothing here imports triton before CUDA tensors, or
backend="triton", need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softless.algebra.kernel_spec import NEAR, RULES, KernelSpec
from softless.algebra.modes import in_forward_mode, recording, starts_at_once
from softless.algebra.neighbors import local_residual
from softless.algebra.precision import HALVES, full_precision, widen
from softless.algebra.state import AnyState, State, keep
from softless.errors import BackendError
from softless.mechanisms import Call, Mechanism
from softless.mechanisms.base import repeat_heads

LARGEST_TILE = 64  # tokens that a kernel takes at once: if it divides all lengths, no tile needs a mask


@dataclass(slots=True)
class Route:
    """How a kind of call runs. `softless.routes` finds it."""

    mechanism: Mechanism
    call: Call  # without tensors
    backend: str
    spec: KernelSpec | None  # what the kernels run; None for torch
    picture: tuple[int, int, int]  # prefix, height and width, for the local residual
    signature: str  # of the mechanism, for the states it makes
    plan: Any = None  # the kernels' steps, after the first call without gradients
    steps: Any = None  # what a short call without gradients runs on a CPU


def attend(
    route: Route, call: Call, q: Tensor, k: Tensor | None, v: Tensor | None, taps: Tensor | None = None
) -> Tensor:
    """Compute attention, plus the local residual if there are taps. q may be packed: see `heads_of`."""
    if route.plan is not None and starts_at_once(q, k, v, taps, *call.inputs.values()):
        factors = route.mechanism.kernel_factors(call) if call.inputs else None
        return route.plan([x for x in (q, k, v, call.key_mask, taps, factors) if x is not None])[0]
    if route.steps is not None and starts_at_once(q, k, v) and (out := route.steps(q, k, v)) is not None:
        return out
    if route.spec is not None and not _refused(route, call, q, k, v, taps):
        return _run(route, route.spec, call, q, k, v, taps)
    if k is None or v is None:
        q, k, v = heads_of(q)
    if torch._C._is_any_autocast_enabled():
        with full_precision(q):
            return _compute(route, call, q, k, v, taps)
    return _compute(route, call, q, k, v, taps)


def packed_operator(
    route: Route,
    qkv: Sequence[Tensor],
    offsets: tuple[Tensor, Tensor],
    lengths: tuple[Sequence[int], Sequence[int]],
    *,
    recorded: bool,
) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the kernels' operator for sequences in q, k, v [1, H, T, d], and its arguments; None where torch runs.

    `offsets` and `lengths` are those of the queries and of the keys.
    """
    spec = route.spec
    if spec is None or spec.reader in (NEAR, *RULES) or transformed(route.backend, *qkv):
        return None
    if route.call.is_causal:
        from softless.kernels.causal.ops import NOTHING, causal_op, exponential_op

        if spec.phi_k == "exp":
            return exponential_op, (*qkv, None, spec.reader, spec.t, offsets[1], max(lengths[1]))
        return causal_op, (*qkv, None, *NOTHING, *spec[:5], recorded, offsets[1], max(lengths[1]))
    from softless.kernels.parallel.ops import attend_op

    full = all(n % LARGEST_TILE == 0 for each in lengths for n in each)
    of_lengths = *map(max, lengths), LARGEST_TILE if full else 1
    return attend_op, (*qkv, None, None, None, *spec, list(route.picture), *offsets, *of_lengths)


def _compute(route: Route, call: Call, q: Tensor, k: Tensor, v: Tensor, taps: Tensor | None) -> Tensor:
    """Compute attention, plus the local residual if there are taps, in plain torch."""
    mechanism, backend, (prefix, *grid) = route.mechanism, route.backend, route.picture
    half = q.dtype if q.dtype in HALVES else None
    if half and (backend == "reference" or q.is_cpu or not mechanism.fused_on_gpu):
        q, k, v = q.float(), k.float(), v.float()
    if call.key_mask is not None:
        k, v = hide(k, call.key_mask), hide(v, call.key_mask)
    if q.shape[2] == 0 or k.shape[2] == 0:
        out = (q @ repeat_heads(k, q.shape[1]).mT) @ repeat_heads(v, q.shape[1])
    elif backend == "reference":
        out = mechanism.combine(mechanism.weights(q, k, call), v, call)
    else:
        out = mechanism.attend(q, k, v, call)
    if taps is not None:
        out = out + local_residual(widen(v), widen(taps), (grid[0], grid[1]), prefix)
    return out.to(half) if half else out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """Normalize tokens on a kernel, or return None where torch is needed: for gradients, autocast and other GPUs."""
    if not x.is_cuda or not starts_at_once(x, weight, bias) or torch._C._is_any_autocast_enabled():
        return None
    alike = all(each is None or each.dtype == x.dtype for each in (weight, bias))
    if not alike or x.dtype == torch.float64 or not x.is_contiguous() or not has_evidence(x.device):
        return None
    from softless.kernels import norm

    return norm.layer_norm(x, weight, bias, eps)[0] if x.numel() and x.shape[-1] <= norm.WIDEST else None


@cache
def has_evidence(device: torch.device) -> bool:
    """Whether the kernels were measured on a GPU like this one."""
    try:
        from softless.kernels.common import choice
    except ImportError:
        return False
    return choice.is_recorded(device)


def heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [B, H, N, d] of a packed projection [B, N, 3, H, d]."""
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # in this order, the gradient of qkv is contiguous
    return q, k, v


def attend_with_state(
    route: Route, call: Call, q: Tensor, k: Tensor, v: Tensor, state: AnyState | None
) -> tuple[Tensor, AnyState]:
    """Compute causal attention that continues from a state."""
    if isinstance(state, State) and route.plan is not None and starts_at_once(q, k, v, *state):
        mask = () if call.key_mask is None else (call.key_mask,)
        out, *after = route.plan([q, k, v, *mask, *state[:4]])
        return out, State._make((*after, state.shift))
    if carries_state(route) and not _refused(route, call, q, k, v, *(state or ())):
        assert route.spec is not None
        if route.spec.reader == NEAR:
            return _run_near(route, call, q, k, v, state)
        assert state is None or isinstance(state, State)
        return _run_with_state(route, route.spec, call, q, k, v, state)
    k, v = hide(k, call.key_mask), hide(v, call.key_mask)
    with full_precision(q):
        out, state = route.mechanism.attend_with_state(widen(q), widen(k), widen(v), state, call)
    return out.to(q.dtype), state


def carries_state(route: Route) -> bool:
    """Return whether the kernels carry the state of this mechanism."""
    if route.spec is None or "exp" not in (route.spec.phi_q, route.spec.phi_k):
        return route.spec is not None
    if route.backend == "triton":
        raise cannot_run("the kernels carry no state of exponential features")
    return False


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Set hidden tokens to zero, so that a NaN in them reaches no output and no gradient."""
    return keep(x, None if key_mask is None else key_mask[:, None])


def choose(mechanism: Mechanism, call: Call, q: Tensor, k: Tensor, v: Tensor, backend: str) -> KernelSpec | None:
    """Return the spec to run on the kernels, or None for torch."""
    if backend in ("reference", "torch") or (backend == "auto" and not on_gpu(q)):
        return None
    reason = refusal(mechanism, call, q, k, v, q.device, ask=backend == "triton")
    if reason and backend == "triton":
        raise cannot_run(reason)
    empty = 0 in (q.shape[2], k.shape[2], v.shape[3])
    return None if reason or empty else mechanism.kernel_spec(call.scale)


def cannot_run(reason: str) -> BackendError:
    return BackendError(f"backend 'triton' was asked for and cannot run: {reason}; 'auto' runs torch here")


def on_gpu(q: Tensor) -> bool:
    """Return whether `auto` may use the kernels."""
    return q.is_cuda


def transformed(backend: str, *tensors: Tensor | None) -> bool:
    """Return whether torch must run, because this call is transformed: the kernels support reverse mode only."""
    reason = None
    if torch._C._are_functorch_transforms_active():
        reason = "torch.func transforms (grad, vjp, jvp, jacrev, vmap) cannot see into a kernel"
    elif in_forward_mode() and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        reason = "the kernels have no forward-mode derivative"
    if reason and backend == "triton":
        raise cannot_run(reason)
    return reason is not None


def _refused(route: Route, call: Call, q: Tensor, k: Tensor | None, v: Tensor | None, *more: Tensor | None) -> bool:
    """Return whether torch must run these tensors after all."""
    tensors = q, k, v, *more, *call.inputs.values()
    if route.spec is not None and route.spec.reader == NEAR:
        from softless.kernels.near.ops import lacks_gradient

        reason = lacks_gradient(tensors, call.inputs)
        if reason and route.backend == "triton":
            raise cannot_run(reason)
        if reason or torch.compiler.is_compiling():
            return True
    return transformed(route.backend, *tensors)


def refusal(
    mechanism: Mechanism, call: Call, q: Tensor, k: Tensor, v: Tensor, device: torch.device, *, ask: bool = False
) -> str | None:
    """Say why the kernels do not run this call on a device, or None. With `ask`, untested devices are allowed.

    Tensors without data only ask: they make no device check its kernels.
    """
    try:
        from softless.kernels.common import choice
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    spec = mechanism.kernel_spec(call.scale)
    cannot = choice.refusal(spec, mechanism.name, q, k, v, call.is_causal, device)
    if cannot or ask or spec is None:
        return cannot
    return choice.untested(device, spec, call.is_causal, q.dtype, explained=q.is_meta)


def evidence(mechanism: Mechanism, call: Call, dtype: torch.dtype, device: torch.device) -> str:
    """Say what is known about the kernels on a device where `refusal` gives no reason."""
    from softless.kernels.common import choice

    spec = mechanism.kernel_spec(call.scale)
    assert spec is not None
    return choice.evidence(device, spec, call.is_causal, dtype)


def _run(route: Route, spec: KernelSpec, call: Call, q: Tensor, k: Any, v: Any, taps: Tensor | None) -> Tensor:
    """Run the kernels on q, k and v, or on a packed projection, with None for k and v."""
    if call.is_causal:
        if spec.reader in RULES:
            return _run_with_state(route, spec, call, q, k, v, None)[0]
        if spec.reader == NEAR:
            return _run_near(route, call, q, k, v)
        from softless.kernels.causal.ops import causal, plan_of_causal

        if starts_at_once(q, k, v):
            route.plan = plan_of_causal(q, k, v, call.key_mask, spec)
        return causal(q, k, v, call.key_mask, spec)
    from softless.kernels.parallel.ops import attend_op

    arguments = q, k, v, call.key_mask, taps, route.mechanism.kernel_factors(call), *spec, list(route.picture)
    if starts_at_once(q, k, v, taps, *call.inputs.values()):
        route.plan = attend_op.planned.plan(*arguments)
    return attend_op(*arguments)[0]


def _run_with_state(
    route: Route, spec: KernelSpec, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """Run the causal kernels. A single token that needs no gradient takes the decode step."""
    if spec.reader in RULES:
        from softless.kernels.delta.ops import delta

        return delta(q, k, v, call.inputs["beta"], call.key_mask, state, spec.reader, spec.scale)
    from softless.kernels.causal.ops import continued, plan_of_step

    step = q.shape[2] == k.shape[2] == 1 and state is not None and not recording(q, k, v, *state)
    if step and state is not None and starts_at_once(q, k, v, *state):
        route.plan = plan_of_step(q, k, v, call.key_mask, state, spec)
    return continued(q, k, v, call.key_mask, state, spec, step)


def _run_near(route: Route, call: Call, q: Tensor, k: Tensor, v: Tensor, *state: AnyState | None) -> Any:
    """Run nearfar in torch, with kernels that read; given a state, or None for one, return the state after it too."""
    from softless.kernels.near.ops import near

    call = call._replace(near=near)
    k, v = widen(hide(k, call.key_mask)), widen(hide(v, call.key_mask))
    with full_precision(q):
        if state:
            return route.mechanism.attend_with_state(q, k, v, state[0], call)
        return route.mechanism.attend(q, k, v, call)


def state_like(q: Tensor, k: Tensor, v: Tensor, spec: KernelSpec) -> State:
    """Return the shapes of the state that these tokens give, without data."""
    heads = k.shape[:2] if k.shape[1] == q.shape[1] else (*k.shape[:2], 1)
    d, e = q.shape[3] + spec.constant, v.shape[3]
    shapes = heads, (*heads, d), (*heads, e), (*heads, d, e), (*heads, d)
    return State(*(torch.empty(shape, device="meta") for shape in shapes))
