"""The GPU bars: what is measured, and the limit it is held to. benchmarks/gpu.py runs them.

Measured by softless.bench.contest, as `softless bench` does: bfloat16, medians of CUDA-graph replays with the L2
flushed before each.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import softless
from softless.bench.contest import CallRow, contest, make_job
from softless.bench.contestants import RIVAL, RIVALS, Contestant, load, ours, sdpa
from softless.bench.cost import Shape, Terms
from softless.bench.formulas import plain
from softless.bench.formulas import plain_residual as grouped_convolution
from softless.functional import attention_with_residual
from softless.stopwatch import Timing, copy_rate, time_calls

ROOT = Path(__file__).parents[1]
DEVICE, REPEATS = torch.device("cuda"), 30
BACKEND = "triton"  # asked for by name: `auto` would not trust a device before it has evidence
NAMES, PASSES = ("linear", "inline"), {False: "forward", True: "forward + backward"}
LARGE = ((1, 16, 65536, 64), (4, 16, 16384, 128))
LENGTHS = (49, 64, 100, 197, 256, 400, 784, 1024, 3136, 4096, 16384)
CAUSAL = ((8, 16, 4096, 64), (2, 16, 16384, 64), (1, 16, 65536, 64))
# Every compilation leaves one cubin in an empty TRITON_CACHE_DIR: counting them is exact, and timing would not be.
# Regimes have kernels of their own, and lengths that fill their tiles have others than the rest (docs/kernels.md): one
# call of each comes before compilations are counted.
FIRST_CALL = """
import json, os, sys, time
from pathlib import Path
import torch, softless
x = torch.ones(2, device="cuda", requires_grad=True)
torch.autograd.grad(2 * x, x, x)  # PyTorch's own first gradient imports for seconds

def seconds(tokens):
    q, k, v, d = torch.randn(4, 2, 4, tokens, 64, device="cuda", dtype=torch.bfloat16).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = softless.attention(*leaves, sys.argv[1], is_causal=sys.argv[2] == "True", backend="triton")
    torch.cuda.synchronize()
    forward = time.perf_counter()
    torch.autograd.grad(out, leaves, d)
    torch.cuda.synchronize()
    return forward - start, time.perf_counter() - forward

def compiled():
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))

forward, backward = seconds(4096)
for tokens in (1000, 197, 100, 49):
    seconds(tokens)
first = compiled()
for tokens in (64, 127, 193, 256, 333, 1024, 4097, 16384, 65536):
    seconds(tokens)
print(json.dumps({"forward": forward, "backward": backward, "kernels": first, "compiled": compiled() - first}))
"""

Measured = tuple[float, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One number to measure and the limit it is held to. `unit`: share | x | s | kernels."""

    bar: int
    group: str
    what: str
    unit: str
    sign: str
    limit: float
    measure: Callable[[], Measured]

    def row(self) -> dict[str, Any]:
        about = {"bar": self.bar, "group": self.group, "what": self.what, "unit": self.unit}
        about |= {"sign": self.sign, "limit": self.limit}
        try:
            value, facts = self.measure()
        except Exception as error:  # noqa: BLE001 - the other cases are still to be measured
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            return about | {"value": None, "holds": False, "error": text}
        holds = value >= self.limit if self.sign == ">=" else value <= self.limit
        return about | {"value": value, "holds": holds, **facts}


@cache
def rate() -> float:
    return copy_rate(DEVICE)


def terms(shape: tuple[int, ...], is_causal: bool = False) -> Terms:
    batch, heads, tokens, dim = shape
    size = Shape(batch, heads, tokens, dim, tokens, heads)
    return Terms(shape=size, is_causal=is_causal, dtype=torch.bfloat16, device=DEVICE.type, backend=BACKEND)


@cache
def result(label: str, shape: tuple[int, ...], backward: bool, is_causal: bool = False) -> CallRow:
    """One contestant by itself: ours by the mechanism's name, SDPA, or a rival by its label."""
    where = terms(shape, is_causal)
    rival = next((each for each in RIVALS if each.label == label), None)
    if rival is not None:
        who = Contestant(label, RIVAL, call=load(rival, softless.mechanism("linear")), lay=rival.lay)
    else:
        who = sdpa(where) if label == "SDPA" else ours(label, softless.mechanism(label), where)
    (row,) = contest([who], where, rate=rate(), backward=backward, repeats=REPEATS)
    if row["skipped"]:
        raise RuntimeError(row["skipped"])
    return row


def facts(row: Any) -> dict[str, Any]:
    return {name: row[name] for name in ("ms", "timing", "eager_ms")}


def timed(timing: Timing) -> dict[str, Any]:
    eager = timing.eager_seconds
    return {"ms": timing.seconds * 1e3, "timing": timing.timing, "eager_ms": None if eager is None else eager * 1e3}


def share(name: str, shape: tuple[int, ...], backward: bool) -> Measured:
    row = result(name, shape, backward)
    return row["share"] or 0.0, facts(row)


def against(other: str, name: str, shape: tuple[int, ...], backward: bool, is_causal: bool = False) -> Measured:
    mine, theirs = (facts(result(each, shape, backward, is_causal)) for each in (name, other))
    return theirs["ms"] / mine["ms"], mine | {"against": other, "against_ms": theirs["ms"]}


def extra_memory(name: str, shape: tuple[int, ...], backward: bool, is_causal: bool) -> Measured:
    row = result(name, shape, backward, is_causal)
    return row["extra_share"] or 0.0, {"extra_bytes": row["extra_bytes"]}


def plain_residual(q: Tensor, k: Tensor, v: Tensor, taps: Tensor, side: int) -> Tensor:
    """inline and its 3x3 residual as its authors run them."""
    return plain(softless.mechanism("inline"))(q, k, v) + grouped_convolution(v, taps, (side, side))


def residual(batch: int = 64, heads: int = 3, side: int = 56, dim: int = 32) -> Measured:
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = [(batch, heads, side * side, dim)] * 3 + [(batch, heads, 9, dim)]
    inputs = [torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16) for size in sizes]
    fused = partial(attention_with_residual, mechanism="inline", grid=(side, side), backend=BACKEND)
    jobs = {
        "fused": make_job(fused, inputs, True),
        "plain": make_job(partial(plain_residual, side=side), inputs, True),
    }
    row = time_calls(jobs, DEVICE, repeats=REPEATS)
    mine, theirs = timed(row["fused"]), timed(row["plain"])
    return theirs["ms"] / mine["ms"], mine | {"against": "plain PyTorch", "against_ms": theirs["ms"]}


@torch.no_grad()
def decode(name: str) -> Measured:
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (3, 64, 16, 64, 64)
    q, k, v = torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16).unbind()
    _, state = softless.attention_with_state(q, k, v, name, backend=BACKEND)
    token = [x[:, :, :1] for x in (q, k, v)]
    step = torch.no_grad()(lambda: softless.attention_with_state(*token, name, state, backend=BACKEND))
    timing = time_calls({name: step}, DEVICE, repeats=REPEATS)[name]
    moved = 2 * sum(part.nbytes for part in state)
    return moved / rate() / timing.seconds, timed(timing) | {"bytes": moved}


@cache
def fresh(name: str, is_causal: bool) -> dict[str, Any]:
    """What a process that has compiled nothing yet takes, and what it still compiles after its first calls."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", FIRST_CALL, name, str(is_causal)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it failed without a word"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def from_fresh(key: str, name: str, is_causal: bool) -> Measured:
    row = fresh(name, is_causal)
    return row[key], {"kernels": row["kernels"]}


def copy_speed() -> Iterator[Case]:
    """1: large calls run at the speed of a copy."""
    for backward, word in PASSES.items():
        group, limit = f"non-causal {word}, share of the copy rate", 0.60 if backward else 0.75
        for shape in LARGE:
            for name in NAMES:
                yield Case(
                    1, group, f"{name} {list(shape)}", "share", ">=", limit, partial(share, name, shape, backward)
                )


def vision() -> Iterator[Case]:
    """2: the shapes of vision backbones against SDPA."""
    for shape, limit in (((256, 6, 197, 32), 2.5), ((128, 12, 49, 32), 2.0)):
        for name in NAMES:
            measure = partial(against, "SDPA", name, shape, False)
            yield Case(2, f"forward {list(shape)}, against SDPA", name, "x", ">=", limit, measure)


def every_length() -> Iterator[Case]:
    """3: about 2^18 tokens in all, cut into sequences of every length."""
    for backward, word in PASSES.items():
        for tokens in LENGTHS:
            for dim in (32, 64):
                shape = (max(1, round(2**18 / (16 * tokens))), 16, tokens, dim)
                for name in NAMES:
                    measure = partial(against, "SDPA", name, shape, backward)
                    what = f"{name} {list(shape)}"
                    yield Case(3, f"{word} at every N, against SDPA", what, "x", ">=", 1.0, measure)


def local_residual() -> Iterator[Case]:
    """4: inline with its local residual against plain PyTorch."""
    group = "inline with local residual, forward + backward, against plain PyTorch"
    yield Case(4, group, "[64, 3, 56 x 56, 32]", "x", ">=", 6.0, residual)


def causal() -> Iterator[Case]:
    """5: causal linear against fla's normalized kernel with elu+1, and its un-normalized kernel alone."""
    rows = (("fla chunk", 5.0, "elu+1 and normalized chunk"), ("fla fused_chunk alone", 1.0, "fused_chunk alone"))
    for label, limit, word in rows:
        for backward, way in PASSES.items():
            for shape in CAUSAL:
                measure = partial(against, label, "linear", shape, backward, is_causal=True)
                yield Case(5, f"causal linear {way}, against fla's {word}", str(list(shape)), "x", ">=", limit, measure)


def decoding() -> Iterator[Case]:
    """6: one decode step at the speed of a copy of its state."""
    for name in NAMES:
        group = "decode step [64, 16, 1, 64], share of the copy rate"
        yield Case(6, group, name, "share", ">=", 0.6, partial(decode, name))


def memory() -> Iterator[Case]:
    """7: memory beyond the output; with the backward pass, beyond the gradients too: a float32 copy of q is half."""
    for backward, is_causal, limit in (
        (False, False, 0.02),
        (False, True, 0.10),
        (True, False, 0.25),
        (True, True, 0.25),
    ):
        beyond = "the output and the gradients" if backward else "the output"
        group = f"{'causal' if is_causal else 'non-causal'} {PASSES[backward]}, memory beyond {beyond}"
        for shape in LARGE:
            for name in NAMES:
                measure = partial(extra_memory, name, shape, backward, is_causal)
                yield Case(7, group, f"{name} {list(shape)}", "share", "<=", limit, measure)


def first_calls() -> Iterator[Case]:
    """8: the first call, and compilations after it."""
    for key, group, unit, limit in (
        ("forward", "first forward in a fresh process", "s", 5.0),
        ("backward", "first backward in a fresh process", "s", 5.0),
        ("compiled", "kernels compiled for a new N", "kernels", 0.0),
    ):
        for name, is_causal in (("inline", False), ("linear", True), ("regress", False), ("efficient", True)):
            what = f"{name}, {'causal' if is_causal else 'non-causal'}"
            yield Case(8, group, what, unit, "<=", limit, partial(from_fresh, key, name, is_causal))


def regression() -> Iterator[Case]:
    """9: regress at the speed of a copy, and against inline where its solutions weigh most."""
    for backward, word in PASSES.items():
        for shape in ((8, 16, 4096, 64), (1, 16, 65536, 64)):
            group, limit = f"regress {word}, share of the copy rate", 0.50 if backward else 0.65
            measure = partial(share, "regress", shape, backward)
            yield Case(9, group, str(list(shape)), "share", ">=", limit, measure)
    group, shape = "regress forward, speed of inline's", (256, 6, 197, 32)
    measure = partial(against, "inline", "regress", shape, False)
    yield Case(9, group, str(list(shape)), "x", ">=", 1 / 1.5, measure)


BARS = (copy_speed, vision, every_length, local_residual, causal, decoding, memory, first_calls, regression)
