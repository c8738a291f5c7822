"""Torch or the fused kernels: `auto` decides, and an explicit backend that cannot run says why.

`auto` takes the kernels for CUDA tensors they support, on devices whose evidence is recorded, and torch otherwise.
Under `torch.func` transforms and forward-mode differentiation it always takes torch.
Nothing here imports triton until CUDA tensors, or backend="triton", ask for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softless.algebra.kernel_spec import RULES, KernelSpec
from softless.algebra.state import State, check_continues
from softless.errors import BackendError
from softless.mechanisms import Call, Mechanism
from softless.mechanisms.base import in_forward_mode


def fused(
    made: Mechanism, call: Call, q: Tensor, k: Tensor, v: Tensor, backend: str, *more: Tensor | None
) -> KernelSpec | None:
    """The spec to run on the kernels, or None for torch. `more` is what the call reads besides: taps, a state."""
    if backend in ("reference", "torch") or (backend == "auto" and not on_gpu(q)):
        return None
    reason = transform_refusal(q, k, v, *call.inputs.values(), *more)
    reason = reason or refusal(made, call, q, k, v, q.device, ask=backend == "triton")
    if reason and backend == "triton":
        raise BackendError(f"backend 'triton' was asked for and cannot run: {reason}; 'auto' runs torch here")
    empty = 0 in (q.shape[2], k.shape[2], v.shape[3])
    return None if reason or empty else made.kernel_spec(call.scale)


def on_gpu(q: Tensor) -> bool:
    """Whether `auto` considers the kernels at all."""
    return q.is_cuda


def transform_refusal(*tensors: Tensor | None) -> str | None:
    """Why the kernels cannot be differentiated or mapped as this call is, or None. They know reverse mode alone."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms (grad, vjp, jvp, jacrev, vmap) cannot see into a kernel"
    duals = tensors if in_forward_mode() else ()
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in duals):
        return "the kernels have no forward-mode derivative"
    return None


def refusal(
    made: Mechanism, call: Call, q: Tensor, k: Tensor, v: Tensor, device: torch.device, *, ask: bool = False
) -> str | None:
    """Why the kernels do not run this call on a device, or None; `ask` is for a user who insists on them."""
    try:
        from softless.kernels.common import choice
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    spec = made.kernel_spec(call.scale)
    cannot = choice.refusal(spec, made.name, q, k, v, call.is_causal, device)
    return cannot or (None if ask or spec is None else choice.untested(device, spec.reader))


def run(
    qkv: Sequence[Tensor],
    spec: KernelSpec,
    call: Call,
    taps: Tensor | None = None,
    picture: tuple[int, ...] = (0, 0, 0),
) -> Tensor:
    """[q, k, v], or a packed [qkv], on the kernels."""
    if call.is_causal:
        q, k, v = qkv
        if spec.reader in RULES:
            return run_with_state(q, k, v, None, spec, call)[0]
        from softless.kernels.causal.ops import causal

        return causal(q, k, v, call.key_mask, None, spec)[0]
    from softless.kernels.parallel.ops import attend_op

    parts = qkv if len(qkv) == 3 else (qkv[0], None, None)
    return attend_op(*parts, call.key_mask, taps, *spec, list(picture))[0]


def run_with_state(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, spec: KernelSpec, call: Call
) -> tuple[Tensor, State]:
    """The causal kernels; a single token that needs no gradient takes the decode step."""
    check_continues(state, _state_like(q, k, v, spec))
    if spec.reader in RULES:
        from softless.kernels.delta.ops import delta

        return delta(q, k, v, call.inputs["beta"], call.key_mask, state, spec.reader, spec.scale)
    from softless.kernels.causal.ops import causal, decode

    recording = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *(state or ())))
    step = decode if q.shape[2] == k.shape[2] == 1 and state is not None and not recording else causal
    return step(q, k, v, call.key_mask, state, spec)


def _state_like(q: Tensor, k: Tensor, v: Tensor, spec: KernelSpec) -> State:
    """The shapes of the state that these tokens give, without data."""
    heads = k.shape[:2] if k.shape[1] == q.shape[1] else (*k.shape[:2], 1)
    d, e = q.shape[3] + spec.constant, v.shape[3]
    shapes = heads, (*heads, d), (*heads, e), (*heads, d, e), (*heads, d)
    return State(*(torch.empty(shape, device="meta") for shape in shapes))
