"""Time and memory of every contestant on the same tensors.

floor   q, k, v read and o written, 4 tensors; with the backward pass 11: again q, k, v and do, and dq, dk, dv
share   the floor at the machine's own copy rate / the seconds taken: 1 is a call as fast as a copy of its bytes.
        Tensors that fit in a cache can pass 1.
ratio   SDPA's seconds / own seconds
extra   most bytes held at once beyond what was there before and what the call gives: o, and dq, dk, dv
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from softless.errors import ArgumentError, SoftlessError
from softless.probes.contestants import FREE_SHARE, OURS, Contestant, Terms, sentence
from softless.probes.memory import free_bytes, peak_bytes
from softless.probes.speed import REFERENCE
from softless.probes.stopwatch import Tick, Timing, time_calls

LINEAR_COPIES = 24  # tensors of q's size alive at once in the hungriest linear call and its gradients

Job = Callable[[], tuple[Tensor, ...]]


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
    jobs: dict[str, Job] = {}
    extras: dict[str, int] = {}
    absent = {each.label: each.absent for each in everyone}
    for each in everyone:
        tick(each.label)
        if each.call is None:
            continue
        job = make_job(each.call, (q, k, v), backward)
        try:
            job()  # what the first call allocates for good is not counted
            extras[each.label] = peak_bytes(job, q.device) - given
        except Exception as error:  # noqa: BLE001 - compilers and other libraries fail in their own ways
            absent[each.label] = _reason(error, each, terms)
        else:
            jobs[each.label] = job
    for label in (each.label for each in everyone if each.label not in jobs):
        for _ in range(repeats):
            tick(label)
    timings = time_calls(jobs, q.device, repeats=repeats, tick=tick)
    floor, reference = floor_bytes(terms, backward) / rate, timings.get(REFERENCE)

    def result(each: Contestant) -> Result:
        timing = timings.get(each.label)
        if timing is None:
            return Result(each.label, each.role, each.mechanism, skipped=absent[each.label])
        ratio = None if reference is None else reference.seconds / timing.seconds
        extra = extras[each.label]
        return Result(
            each.label, each.role, each.mechanism, timing, ratio, floor / timing.seconds, extra, extra / given
        )

    return [result(each) for each in everyone]


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


def _reason(error: Exception, each: Contestant, terms: Terms) -> str:
    """Why a contestant dropped out. What is wrong with our own call is raised: the user, or we, must hear of it."""
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return f"ran out of memory at {terms.shape.queries} tokens"
    if each.role == OURS or isinstance(error, SoftlessError):
        raise error
    return sentence(error)
