"""The check of the kernels on a GPU without recorded evidence: a dozen calls, forward and backward, against float64.

    ulp      eps(dtype) max |exact|
    budget   min(2 E, 4 ulp) + 1 ulp for outputs, min(3 E, 8 ulp) + 1 ulp for gradients
    E        the error of the plain formula, typed out in the same dtype

float32 is held to 1e-5 (1 + max |exact|). The gradient of a number that a whole head shares is one sum over all
outputs, whose terms cancel. In float32 it may be off by 3 E, and that of nearfar's gain by 1e-5 (1 + the sum of |terms|
of the exact result). For the same reason, a result in half precision is not judged if float32 cannot tell it to a
quarter of an ulp. The verdict holds for an operator (feature maps, reader, causal or not) and a dtype. It is kept in
the user's cache folder until the GPU, its driver, triton or softless changes.

The check runs in threads of its own, so no mode, transform or autocast of the caller reaches it. It waits for the GPU,
so it cannot run while a CUDA graph is captured, nor while torch.compile traces: `recall` never runs it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from softless.algebra import delta as rule
from softless.algebra.feature_maps import unit
from softless.algebra.kernel_spec import NEAR, RULES, KernelSpec
from softless.algebra.neighbors import local_residual
from softless.algebra.state import State
from softless.kernels.causal.ops import causal, continued
from softless.kernels.common.features import may_cancel
from softless.kernels.common.limits import widest_solved
from softless.kernels.common.plan import IN_THREADS, on
from softless.kernels.delta.ops import delta
from softless.kernels.near import check as near_check
from softless.kernels.near.ops import widest_with_gradient
from softless.kernels.parallel.ops import attend_op
from softless.machine import driver, installed_version, timestamp

FORWARD, GRADIENT = (2.0, 4.0), (3.0, 8.0)  # (how often E, how many ulp)
OF_FACTORS, OF_GAIN = "the gradient of the numbers of heads", "the gradient of the gain"


class SampleCall(NamedTuple):
    """A call with two query heads and a batch of two; with `step`, the last token continues from a state."""

    queries: int
    keys: int
    d: int
    e: int
    groups: int = 2
    masked: bool = False
    grid: tuple[int, int] | None = None  # of the local residual, after one class token
    step: bool = False


# Every width is compiled anew: one that fills no tile, with a mask and shared keys, and those that models use most.
PARALLEL = (
    *(SampleCall(n, m, 40, 24, groups=1, masked=True) for n, m in ((7, 5), (130, 200), (300, 290))),
    *(SampleCall(n, m, 64, 64) for n, m in ((17, 33), (100, 100), (197, 197), (257, 650), (333, 333))),
    *(SampleCall(1 + h * w, 1 + h * w, 64, 64, grid=(h, w)) for h, w in ((7, 9), (19, 17))),
    SampleCall(65, 65, 32, 32, grid=(8, 8)),  # short and narrow heads have finer tiles
    *(SampleCall(n, n, 128, 128) for n in (33, 300)),
)
# Two segments from 640 tokens on with 16 channels, and from 2,560 tokens on with 64.
CAUSAL = (
    *(SampleCall(n, n, 16, 24, groups=1, masked=True) for n in (7, 70, 200, 700)),
    *(SampleCall(n, n, 64, 64) for n in (17, 64, 130, 333, 2600)),
    SampleCall(66, 66, 64, 64, step=True),
    *(SampleCall(n, n, 128, 128) for n in (100, 300)),
)
MEMORY = (
    *(SampleCall(n, n, 40, 24, groups=1, masked=True) for n in (3, 63, 65, 150)),
    *(SampleCall(n, n, 64, 64) for n in (17, 64, 100, 129)),
    SampleCall(66, 66, 64, 64, step=True),
    *(SampleCall(n, n, 128, 128) for n in (33, 64, 100)),
)


class OperatorKind(NamedTuple):
    """What a verdict is about. Head dimension, scale and temperature are no part of it."""

    phi_q: str
    phi_k: str
    reader: str
    constant: bool
    is_causal: bool
    dtype: str

    @classmethod
    def of(cls, spec: KernelSpec, is_causal: bool, dtype: torch.dtype) -> "OperatorKind":
        return cls(*spec[:4], is_causal, str(dtype).removeprefix("torch."))

    def spec(self) -> KernelSpec:
        return KernelSpec(*self[:4], scale=0.125, ridge=0.1)

    def has_factors(self, case: SampleCall) -> bool:
        """Whether heads have numbers of their own: those of blend always, and those of regress in some cases."""
        return self.reader == "blend" or (self.reader == "regress" and case.masked)

    def cases(self) -> tuple[SampleCall, ...]:
        cases = MEMORY if self.reader in RULES else CAUSAL if self.is_causal else PARALLEL
        return tuple(case for case in cases if not (case.step and (self.reader == NEAR or "exp" in self[:2])))

    def widest(self, device: torch.device) -> int:
        """Return the widest heads that have gradients on a device."""
        if self.reader == NEAR:
            return widest_with_gradient(device, getattr(torch, self.dtype))
        return widest_solved(device) if self.reader == "regress" else 128


class Verdict(NamedTuple):
    """How the check ended, and when. A reason is there only if it failed."""

    passed: bool
    date: str
    reason: str = ""


VERDICTS: dict[tuple[str, OperatorKind], Verdict] = {}
LOCK = Lock()


def verdict(device: torch.device, operator: OperatorKind) -> Verdict | None:
    """Return the verdict on an operator, after checking it if nothing is known yet; None if memory is short now."""
    with LOCK:
        earlier = known(device, operator)
        if earlier is not None:
            return earlier
        try:
            reason = failure(device, operator)
        except torch.OutOfMemoryError:
            return None
        key = machine(device), operator
        VERDICTS[key] = Verdict(reason is None, timestamp(), reason or "")
        _write(*key, VERDICTS[key])
        return VERDICTS[key]


def known(device: torch.device, operator: OperatorKind) -> Verdict | None:
    """Return the verdict of an earlier check, in this process or on disk; None if there is none."""
    key = machine(device), operator
    if key not in VERDICTS and (stored := _read(*key)) is not None:
        VERDICTS[key] = stored
    return VERDICTS.get(key)


def recall(
    device: torch.device, phi_q: str, phi_k: str, reader: str, constant: bool, is_causal: bool, dtype: torch.dtype
) -> Verdict | None:
    """Return what is `known`. While torch.compile traces, this runs as it is: so its arguments are plain values."""
    return known(device, OperatorKind.of(KernelSpec(phi_q, phi_k, reader, constant), is_causal, dtype))


# What `torch.compiler.assume_constant_result` does, which imports PyTorch's compiler first. That takes seconds.
recall._dynamo_marked_constant = True  # type: ignore[attr-defined]


def machine(device: torch.device) -> str:
    """Return the GPU and the versions that a verdict depends on."""
    versions = f"driver {driver()}, triton {triton.__version__}, softless {installed_version()}"
    return f"{torch.cuda.get_device_name(device)}, {versions}"


def failure(device: torch.device, operator: OperatorKind) -> str | None:
    """Run the cases of an operator; return what was out of budget, or None. Each width has a thread, to compile in."""
    taken = [case for case in operator.cases() if case.d <= operator.widest(device)]
    widths = [list(cases) for _, cases in groupby(taken, lambda case: case.d)]
    with ThreadPoolExecutor(len(widths) if IN_THREADS else 1) as threads:
        reasons = threads.map(partial(_first_failure, device, operator), widths)
        return next((reason for reason in reasons if reason is not None), None)


def _first_failure(device: torch.device, operator: OperatorKind, cases: Sequence[SampleCall]) -> str | None:
    with on(device), torch.autograd.set_multithreading_enabled(False):  # one thread for both passes
        for seed, case in enumerate(cases):
            try:
                wrong = out_of_budget(operator, case, device, seed)
            except torch.OutOfMemoryError:
                raise  # says nothing about the kernels
            except Exception as error:  # noqa: BLE001  whatever the compiler or the driver raises
                wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if wrong is not None:
                shape = f"{case.queries} queries, {case.keys} keys, heads of {case.d} and {case.e}"
                return f"{wrong} with {shape} in {operator.dtype}"
    return None


def out_of_budget(operator: OperatorKind, case: SampleCall, device: torch.device, seed: int) -> str | None:
    """Say which result of a case is too far from float64, or return None."""
    dtype: torch.dtype = getattr(torch, operator.dtype)
    tensors, mask, upstream = draw(operator, case, dtype, device, seed)
    ours = _results(_on_kernels, operator, case, tensors, mask, upstream)
    exact, single, plain = (
        _results(_typed, operator, case, [x.to(kind) for x in tensors], mask, upstream.to(kind))
        for kind in (torch.float64, torch.float32, dtype)
    )
    for name, mine, right, float32, theirs in zip(_names(case, operator), ours, exact, single, plain, strict=True):
        error, size = _worst(mine, right), right.abs().max().item()
        ulp = torch.finfo(dtype).eps * max(size, torch.finfo(dtype).smallest_normal)
        if dtype == torch.float32:
            allowed = 1e-5 * (1 + size)
            if name == OF_FACTORS:
                allowed = max(allowed, GRADIENT[0] * _worst(theirs, right))
            elif name == OF_GAIN:
                allowed = 1e-5 * (1 + near_check.terms_of_gain(tensors, mask, operator.spec().scale, upstream))
        elif _worst(float32, right) > 0.25 * ulp:
            continue
        else:
            ratio, ulps = FORWARD if name == "the output" else GRADIENT
            allowed = min(ratio * _worst(theirs, right), ulps * ulp) + ulp
        if not error <= allowed:
            return f"{name} was off by {error / ulp:.1f} ulp where {allowed / ulp:.1f} are allowed"
    return None


def draw(
    operator: OperatorKind, case: SampleCall, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Return q, k, v, then what else is given or learned; the key mask; and the gradient of the output.

    Keys and values have a mean. Where a mass could cancel, all features have one sign: a lost mass is no error.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    q, k = normal(2, case.queries, case.d), normal(case.groups, case.keys, case.d) + seed % 2
    tensors = [q, k, normal(case.groups, case.keys, case.e) + seed % 3]
    if may_cancel(operator.spec()):
        tensors[:2] = q.abs(), k.abs()
    if operator.reader in RULES:
        tensors.append(normal(case.groups, case.keys).sigmoid())
    if case.grid is not None:
        tensors.append(normal(2, 9, case.e))
    if operator.reader == NEAR:
        tensors += near_check.learned(operator.phi_k, case.d, generator)
    if operator.has_factors(case):
        tensors.append(torch.rand(2, 2, generator=generator, dtype=torch.float64) + 0.1)
    mask = None
    if case.masked:  # the first sample is padded on the left, the second is whole
        mask = (torch.arange(case.keys) >= torch.tensor([[case.keys // 3], [0]])).to(device)
    upstream = normal(2, case.queries, case.e)[:, :, -1 if case.step else 0 :]
    return [x.to(device, dtype) for x in tensors], mask, upstream.to(device, dtype)


def _results(
    run: Any, operator: OperatorKind, case: SampleCall, tensors: Sequence[Tensor], mask: Any, upstream: Tensor
) -> Any:
    """Return the output, then the gradients of all tensors; a step has none."""
    leaves = [x.detach().requires_grad_(not case.step) for x in tensors]
    out = run(operator, case, leaves, mask)
    return [out.detach(), *(() if case.step else torch.autograd.grad(out, leaves, upstream))]


def _names(case: SampleCall, operator: OperatorKind) -> Iterator[str]:
    yield "the output"
    if not case.step:
        last = ["beta"] if operator.reader in RULES else ["the taps"] if case.grid else []
        last = near_check.names(operator.phi_k) if operator.reader == NEAR else last
        yield from (f"the gradient of {name}" for name in ("q", "k", "v", *last))
        if operator.has_factors(case):
            yield OF_FACTORS


def _worst(actual: Tensor, exact: Tensor) -> float:
    error = (actual.double() - exact).abs()
    return torch.where(error.isfinite(), error, torch.inf).max().item()


def _on_kernels(operator: OperatorKind, case: SampleCall, leaves: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    spec, (q, k, v, *last) = operator.spec(), leaves
    if operator.reader == NEAR:
        return near_check.on_kernels(q, k, v, mask, spec.scale, *last)
    if operator.reader not in RULES and not operator.is_causal:
        picture = (0, 0, 0) if case.grid is None else (1, *case.grid)
        factors = last.pop().float() if operator.has_factors(case) else None
        return attend_op(q, k, v, mask, last[0] if last else None, factors, *spec, list(picture))[0]
    if not case.step and operator.reader not in RULES:
        return causal(q, k, v, mask, spec)
    state: State | None = None
    out = q
    cuts = (slice(0, -1), slice(-1, None)) if case.step else (slice(None),)
    for cut in cuts:
        q, k, v, *last = (x[:, :, cut] for x in leaves)
        if operator.reader in RULES:
            out, state = delta(q, k, v, last[0], mask, state, operator.reader, spec.scale)
        else:
            out, state = continued(q, k, v, mask, state, spec, step=state is not None)
    return out


def _typed(operator: OperatorKind, case: SampleCall, leaves: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Compute the published formula in the dtype of the tensors, with explicit weights or token by token."""
    spec, (q, k, v, *last) = operator.spec(), leaves
    factors = last.pop() if operator.has_factors(case) else None
    if operator.reader == NEAR:
        return near_check.typed(q, k, v, mask, spec.scale, *last)
    k, v, *rest = (x.repeat_interleave(2 // case.groups, 1) for x in (k, v, *last))
    seen = k.new_ones(2, 1, case.queries, case.keys) if mask is None else mask[:, None, None].to(k.dtype)
    if operator.reader in RULES:
        out = _remembered(operator, q, k, v, rest[0][..., None], seen[:, :, -1, :, None]) * spec.scale
    else:
        seen = seen.expand(2, 1, case.queries, case.keys)
        out = _weights(spec, q, k, seen.tril() if operator.is_causal else seen, factors) @ v
    if case.grid is not None:
        out = out + local_residual(v, last[0], case.grid, prefix=1)
    return out[:, :, -1:] if case.step else out


def _weights(spec: KernelSpec, q: Tensor, k: Tensor, seen: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return the weights [2, 2, N, M] of every reader but the rules."""
    a, b = _features(spec.phi_q, q, spec.t), _features(spec.phi_k, k, spec.t)
    if spec.reader == "channel":
        mass = seen @ b
        return (a / torch.where(mass != 0, mass, 1)) @ b.mT * seen
    n = seen.sum(-1, keepdim=True).clamp(min=1)
    first, second = (spec.ridge, 1.0) if factors is None else factors.T[..., None, None].unbind()
    if spec.reader == "regress":
        share = (seen / n)[:, :, :1]  # [2, 1, 1, M]
        a, b = a - share @ b, b - share @ b
        spread = (share.mT * b).mT @ b
        matrix = spread + first * spread.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(
            b.shape[-1], dtype=b.dtype, device=b.device
        )
        inverse = matrix.to(torch.promote_types(b.dtype, torch.float32)).inverse().to(b.dtype)
        return share * (1 + spec.scale * second * (a @ inverse @ b.mT))
    score = (a @ b.mT + spec.constant) * seen
    if spec.reader == "divide":
        mass = score.sum(-1, keepdim=True)
        return torch.where(mass != 0, score, seen / n) / torch.where(mass != 0, mass, 1)
    if spec.reader == "blend":
        gain = first / score.sum(-1, keepdim=True) + spec.scale * second / n
        return (1 / n + gain * (score - score.sum(-1, keepdim=True) / n)) * seen
    if spec.reader == "subtract":
        return (spec.scale * (score - score.sum(-1, keepdim=True) / n) + 1) / n * seen
    return spec.scale * score


def _features(phi: str, x: Tensor, t: float) -> Tensor:
    maps = {"identity": x, "relu": x.relu(), "leaky_relu": F.leaky_relu(x), "elu": F.elu(x) + 1}
    if phi in maps:
        return maps[phi]
    return (t * x).exp() if phi == "exp" else x.softmax(-1) if phi == "softmax" else unit(x)


def _remembered(operator: OperatorKind, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, seen: Tensor) -> Tensor:
    """Apply a rule token by token. A hidden token neither erases nor writes."""
    if operator.reader == "delta":
        key, strength = unit(k), beta
    else:
        square = k.square().sum(-1, keepdim=True)
        key, strength = k, (1 - (-beta * square).exp()) / square
    strength = strength * seen
    return rule.recurrent(q, key, strength * v, strength, q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]))[0]


def folder() -> Path:
    """Return where verdicts are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softless" / "self-check"


def _file(where: str, operator: OperatorKind) -> Path:
    return folder() / f"{hashlib.sha256(repr((where, operator)).encode()).hexdigest()[:24]}.json"


def _read(where: str, operator: OperatorKind) -> Verdict | None:
    """Return a verdict on disk. A file that is missing, damaged or about something else counts as none."""
    try:
        document = json.loads(_file(where, operator).read_text(encoding="utf-8"))
        if document["machine"] != where or document["operator"] != operator._asdict():
            return None
        stored = Verdict(document["passed"], document["date"], document["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return stored if isinstance(stored.passed, bool) and isinstance(stored.date, str) else None


def _write(where: str, operator: OperatorKind, result: Verdict) -> None:
    """Replace the file of a verdict in one step. A folder that cannot be written is no error."""
    path = _file(where, operator)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    document = {"machine": where, "operator": operator._asdict(), **result._asdict()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
