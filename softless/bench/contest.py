"""Time and memory of every contestant on the same tensors.

floor   q, k, v read and o written, 4 tensors; with the backward pass 11: again q, k, v and do, and dq, dk, dv
share   the floor at the machine's own copy rate / the seconds taken: 1 is a call as fast as a copy of its bytes.
        Tensors that fit in a cache can pass 1.
ratio   SDPA's seconds / own seconds
extra   most bytes held at once beyond what was there before and what the call gives: o, and dq, dk, dv
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from softless.bench.contestants import FREE_SHARE, OURS, Contestant, Terms, sentence
from softless.bench.memory import free_bytes, peak_bytes
from softless.bench.speed import REFERENCE
from softless.bench.stopwatch import Tick, Timing, time_calls
from softless.errors import ArgumentError, SoftlessError

LINEAR_COPIES = 24  # tensors of q's size alive at once in the hungriest linear call and its gradients

Job = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Trial:
    """One job: its time, and the most bytes it held at once beyond what was there before."""

    timing: Timing
    peak_bytes: int


@dataclass(frozen=True)
class Result:
    """What one contestant took; `skipped` says why there are no numbers."""

    label: str
    role: str
    mechanism: str | None
    timing: Timing | None = None
    ratio: float | None = None
    share: float | None = None
    extra_bytes: int | None = None
    extra_share: float | None = None
    skipped: str | None = None


def contest(
    everyone: Sequence[Contestant],
    terms: Terms,
    *,
    rate: float,
    backward: bool = False,
    repeats: int = 10,
    tick: Tick = lambda _: None,
) -> list[Result]:
    """Measure everyone. `rate` is the copy rate; `tick` is told each label `repeats + 1` times, to show progress."""
    q, k, v = tensors(terms)
    given = 2 * q.nbytes + k.nbytes + v.nbytes if backward else q.nbytes
    jobs = {
        each.label: str(each.absent) if each.call is None else make_job(each.call, _laid(each, q, k, v), backward)
        for each in everyone
    }
    roles = {each.label: each.role for each in everyone}
    where = f"at {terms.shape.queries} tokens"
    trials = try_all(jobs, roles, q.device, where=where, repeats=repeats, tick=tick)
    floor, reference = floor_bytes(terms, backward) / rate, trials.get(REFERENCE)

    def result(each: Contestant) -> Result:
        trial = trials[each.label]
        if isinstance(trial, str):
            return Result(each.label, each.role, each.mechanism, skipped=trial)
        seconds, extra = trial.timing.seconds, trial.peak_bytes - given
        ratio = reference.timing.seconds / seconds if isinstance(reference, Trial) else None
        shares = ratio, floor / seconds, extra, extra / given
        return Result(each.label, each.role, each.mechanism, trial.timing, *shares)

    return [result(each) for each in everyone]


def try_all(
    jobs: Mapping[str, Job | str],
    roles: Mapping[str, str],
    device: torch.device,
    *,
    where: str,
    repeats: int,
    tick: Tick = lambda _: None,
) -> dict[str, Trial | str]:
    """Memory, then time, of every job; a sentence for those that have none, or fail on the way."""
    found: dict[str, Trial | str] = {label: job for label, job in jobs.items() if isinstance(job, str)}
    ready: dict[str, Job] = {}
    peaks: dict[str, int] = {}
    for label, job in jobs.items():
        tick(label)
        if isinstance(job, str):
            continue
        try:
            job()  # what the first call allocates for good is not counted
            peaks[label] = peak_bytes(job, device)
        except Exception as error:  # noqa: BLE001 - compilers and other libraries fail in their own ways
            found[label] = _reason(error, roles[label], where)
        else:
            ready[label] = job
    for label in found:
        for _ in range(repeats):
            tick(label)
    timings = time_calls(ready, device, repeats=repeats, tick=tick)
    return found | {label: Trial(timing, peaks[label]) for label, timing in timings.items()}


def tensors(terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v, the same on every run."""
    shape, generator = terms.shape, torch.Generator(terms.device).manual_seed(0)

    def normal(heads: int, tokens: int) -> Tensor:
        size = (shape.batch, heads, tokens, shape.head_dim)
        return torch.randn(size, generator=generator, device=terms.device, dtype=terms.dtype)

    return (
        normal(shape.heads, shape.queries),
        normal(shape.kv_heads, shape.keys),
        normal(shape.kv_heads, shape.keys),
    )


def make_job(formula: Callable[..., Tensor], tensors: Sequence[Tensor], backward: bool) -> Job:
    """The call to time: o, or o and the gradients of all its tensors."""
    if not backward:
        return torch.no_grad()(lambda: (formula(*tensors),))
    leaves = [x.detach().requires_grad_() for x in tensors]
    cotangent = torch.randn_like(tensors[0])

    def job() -> tuple[Tensor, ...]:
        out = formula(*leaves)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    return job


def _laid(each: Contestant, *tensors: Tensor) -> Sequence[Tensor]:
    return tensors if each.lay is None else [each.lay(x) for x in tensors]


def floor_bytes(terms: Terms, backward: bool = False) -> int:
    """The least a call moves: 4 tensors forward, 11 with the backward pass."""
    shape = terms.shape
    of_queries, of_keys = (5, 6) if backward else (2, 2)
    rows = of_queries * shape.heads * shape.queries + of_keys * shape.kv_heads * shape.keys
    return shape.batch * rows * shape.head_dim * terms.dtype.itemsize


def check_memory(terms: Terms) -> None:
    """Refuse tensors that do not fit before any are made."""
    shape, free = terms.shape, free_bytes(torch.device(terms.device))
    rows = max(shape.heads * shape.queries, shape.kv_heads * shape.keys)
    needed = LINEAR_COPIES * shape.batch * rows * shape.head_dim * max(4, terms.dtype.itemsize)
    if free is not None and needed > FREE_SHARE * free:
        size = f"{shape.batch},{shape.heads},{shape.queries},{shape.head_dim}"
        raise ArgumentError(
            f"shape {size} with {shape.keys} keys needs about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        )


def _reason(error: Exception, role: str, where: str) -> str:
    """Why a contestant dropped out. What is wrong with our own call is raised: the user, or we, must hear of it."""
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return f"ran out of memory {where}"
    if role == OURS or isinstance(error, SoftlessError):
        raise error
    return sentence(error)
