"""Measure the time and memory of all contestants on the same tensors.

floor   bytes that every call must move: softless.bench.cost defines them
share   the floor at the machine's own copy rate / the seconds taken: 1 is a call as fast as a copy of its bytes.
        The share can exceed 1 if the tensors fit in a cache.
ratio   SDPA's seconds / own seconds
extra   most bytes held at once, beyond those held before the call and those of its results: o, and dq, dk, dv
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from softless.bench.contestants import OURS, Contestant, sentence
from softless.bench.cost import Terms, floor_bytes
from softless.bench.scaling import REFERENCE
from softless.errors import ArgumentError, SoftlessError
from softless.stopwatch import Tick, Timing, peak_bytes, shortage, time_calls

LINEAR_COPIES = 24  # tensors of q's size alive at once in the hungriest linear call and its gradients

Job = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Trial:
    """The time of one job, and the most bytes it held at once beyond those held before."""

    timing: Timing
    peak_bytes: int


class TimingRow(TypedDict):
    """One timing as the documents have it. The numbers are None if nothing was timed."""

    ms: float | None
    fastest_ms: float | None
    repeats: int
    timing: str | None  # graph | events | clock: softless.stopwatch defines them


class CallRow(TimingRow):
    """The measurements of one contestant; `skipped` is the reason if there are none."""

    label: str
    role: str  # ours | sdpa | plain | compiled | rival
    mechanism: str | None
    eager_ms: float | None  # CUDA: wall clock of an ordinary call, launches included
    ratio: float | None
    share: float | None
    extra_bytes: int | None
    extra_share: float | None  # as a share of the results of the call
    skipped: str | None


def contest(
    everyone: Sequence[Contestant],
    terms: Terms,
    *,
    rate: float,
    backward: bool = False,
    repeats: int = 10,
    tick: Tick = lambda _: None,
) -> list[CallRow]:
    """Measure every contestant. `rate` is the copy rate; `tick` gets each label `repeats + 1` times."""
    q, k, v = tensors(terms)
    results_bytes = 2 * q.nbytes + k.nbytes + v.nbytes if backward else q.nbytes

    def job(contestant: Contestant) -> Job | str:
        if contestant.call is None:
            return str(contestant.absent)
        laid = (q, k, v) if contestant.lay is None else [contestant.lay(x) for x in (q, k, v)]
        return make_job(contestant.call, laid, backward)

    jobs = {contestant.label: job(contestant) for contestant in everyone}
    roles = {contestant.label: contestant.role for contestant in everyone}
    where = f"at {terms.shape.queries} tokens"
    trials = try_all(jobs, roles, q.device, where=where, repeats=repeats, tick=tick)
    floor, reference = floor_bytes(terms, backward=backward) / rate, trials.get(REFERENCE)

    def row(contestant: Contestant) -> CallRow:
        trial = trials[contestant.label]
        timing = trial.timing if isinstance(trial, Trial) else None
        eager = None if timing is None else timing.eager_seconds
        extra = trial.peak_bytes - results_bytes if isinstance(trial, Trial) else None
        return {
            "label": contestant.label,
            "role": contestant.role,
            "mechanism": contestant.mechanism,
            **times(timing),
            "eager_ms": None if eager is None else eager * 1e3,
            "ratio": reference.timing.seconds / timing.seconds if timing and isinstance(reference, Trial) else None,
            "share": None if timing is None else floor / timing.seconds,
            "extra_bytes": extra,
            "extra_share": None if extra is None else extra / results_bytes,
            "skipped": trial if isinstance(trial, str) else None,
        }

    return [row(contestant) for contestant in everyone]


def try_all(
    jobs: Mapping[str, Job | str],
    roles: Mapping[str, str],
    device: torch.device,
    *,
    where: str,
    repeats: int,
    tick: Tick = lambda _: None,
) -> dict[str, Trial | str]:
    """Measure memory, then time, of every job. A job that is a sentence, or that fails, ends as a sentence."""
    skipped: dict[str, Trial | str] = {label: job for label, job in jobs.items() if isinstance(job, str)}
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
            skipped[label] = _reason(error, roles[label], where)
        else:
            ready[label] = job
    for label in skipped:
        for _ in range(repeats):
            tick(label)
    timings = time_calls(ready, device, repeats=repeats, tick=tick)
    return skipped | {label: Trial(timing, peaks[label]) for label, timing in timings.items()}


def times(timing: Timing | None) -> TimingRow:
    """Return a timing as the documents have it."""
    if timing is None:
        return {"ms": None, "fastest_ms": None, "repeats": 0, "timing": None}
    ms, fastest = timing.seconds * 1e3, timing.fastest * 1e3
    return {"ms": ms, "fastest_ms": fastest, "repeats": timing.repeats, "timing": timing.timing}


def tensors(terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Return normal q, k and v, the same in every run."""
    generator, (of_queries, of_keys) = torch.Generator(terms.device).manual_seed(0), terms.shape.sizes

    def normal(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=generator, device=terms.device, dtype=terms.dtype)

    return normal(of_queries), normal(of_keys), normal(of_keys)


def make_job(formula: Callable[..., Tensor], tensors: Sequence[Tensor], backward: bool) -> Job:
    """Return the call to time. It gives o, or o and the gradients of all its tensors."""
    if not backward:
        return torch.no_grad()(lambda: (formula(*tensors),))
    leaves = [x.detach().requires_grad_() for x in tensors]
    cotangent = torch.randn_like(tensors[0])

    def job() -> tuple[Tensor, ...]:
        out = formula(*leaves)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    return job


def check_memory(terms: Terms) -> None:
    """Refuse tensors that do not fit in memory, before any are made."""
    shape = terms.shape
    rows = max(shape.heads * shape.queries, shape.kv_heads * shape.keys)
    needed = LINEAR_COPIES * shape.batch * rows * shape.head_dim * max(4, terms.dtype.itemsize)
    if missing := shortage(needed, terms.device):
        raise ArgumentError(f"{shape} needs about {missing}")


def _reason(error: Exception, role: str, where: str) -> str:
    """Return why a contestant has no numbers. Errors of our own calls are raised: they need the user or a fix."""
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return f"ran out of memory {where}"
    if role == OURS or isinstance(error, SoftlessError):
        raise error
    return sentence(error)
