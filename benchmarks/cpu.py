"""Speed on this CPU, as ratios in one run, each beside its bar.

    make bench        or        python benchmarks/cpu.py [--json benchmarks/results/cpu-DATE.json]

    forward      parallel linear and inline against SDPA at N = 4096, d = 64, and their growth per doubling of N
    training     one causal forward + backward, chunked, against SDPA causal at N = 4096
    decode       one token with a state: its time after 64 tokens and after 65,536

Interleaved repeats on 2 threads: medians, and for growth the fastest. Exit status 1 if a bar is missed.
"""

import argparse
import ctypes
import json
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F

import softless
from softless.stopwatch import seconds_per_call

HEADS, DIM = 1, 64
NAMES = ("linear", "inline")


def keep_freed_memory() -> None:
    """Let the C allocator reuse freed memory. Otherwise every large tensor pays for new pages from the kernel."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def qkv(tokens: int, *, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, HEADS, tokens, DIM, generator=generator).requires_grad_(grad) for _ in range(3)]


def timed(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run of each job, in turns, so that a slow moment of the machine affects all jobs."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            times[name].append(seconds_per_call(job))
    return {name: taken[1:] for name, taken in times.items()}


def medians(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    return {name: statistics.median(taken) for name, taken in timed(jobs, repeats).items()}


def forward_jobs(tokens: int) -> dict[str, Callable[[], object]]:
    q, k, v = qkv(tokens)
    jobs: dict[str, Callable[[], object]] = {
        f"{name} {tokens}": lambda name=name: softless.attention(q, k, v, name) for name in NAMES
    }
    return jobs | {f"sdpa {tokens}": lambda: F.scaled_dot_product_attention(q, k, v)}


def training_jobs(tokens: int) -> dict[str, Callable[[], object]]:
    q, k, v = qkv(tokens, grad=True)
    cotangent = torch.randn_like(v)

    def step(attend: Callable[[], torch.Tensor]) -> None:
        torch.autograd.grad(attend(), (q, k, v), cotangent)

    jobs: dict[str, Callable[[], object]] = {
        name: lambda name=name: step(lambda: softless.attention(q, k, v, name, is_causal=True)) for name in NAMES
    }
    return jobs | {"sdpa": lambda: step(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))}


def decode_jobs(name: str) -> dict[str, Callable[[], object]]:
    jobs: dict[str, Callable[[], object]] = {}
    q, k, v = qkv(1)
    for tokens in (64, 65_536):
        _, state = softless.attention_with_state(*qkv(tokens), name)
        jobs[f"after {tokens}"] = lambda state=state: softless.attention_with_state(q, k, v, name, state)
    return jobs


@torch.no_grad()
def forward_rows(repeats: int) -> list[dict[str, object]]:
    """Medians against SDPA; for growth the fastest runs, since another program's noise is not growth."""
    at_4096 = medians(forward_jobs(4096), repeats)
    lengths = {name: job for tokens in (2048, 4096, 8192) for name, job in forward_jobs(tokens).items()}
    fastest = {
        name: min(taken)
        for name, taken in timed({n: j for n, j in lengths.items() if "sdpa" not in n}, 3 * repeats).items()
    }
    rows: list[dict[str, object]] = []
    for name in NAMES:
        faster = at_4096["sdpa 4096"] / at_4096[f"{name} 4096"]
        rows.append(row(f"{name} forward, N = 4096, against SDPA", faster, ">=", 5.0))
        for small, large in ((2048, 4096), (4096, 8192)):
            growth = fastest[f"{name} {large}"] / fastest[f"{name} {small}"]
            rows.append(row(f"{name} forward, time at N = {large} over N = {small}", growth, "<=", 2.1))
    return rows


def training_rows(repeats: int) -> list[dict[str, object]]:
    times = medians(training_jobs(4096), repeats)
    return [
        row(f"{name} causal training step, N = 4096, against SDPA", times["sdpa"] / times[name], ">=", 1.0)
        for name in NAMES
    ]


@torch.no_grad()
def decode_rows(repeats: int) -> list[dict[str, object]]:
    rows = []
    for name in NAMES:
        times = medians(decode_jobs(name), repeats)
        ratio = times["after 65536"] / times["after 64"]
        rows.append(row(f"{name} decode step, after 65,536 tokens over after 64", ratio, "<=", 1.1))
    return rows


def row(what: str, ratio: float, sign: str, bar: float) -> dict[str, object]:
    holds = ratio >= bar if sign == ">=" else ratio <= bar
    return {"what": what, "ratio": round(ratio, 2), "bar": f"{sign} {bar:g}", "holds": holds}


def table(rows: list[dict[str, object]]) -> str:
    """Return the table that docs/bench.md shows."""
    lines = ["| measured | ratio | bar |", "|---|---|---|"]
    return "\n".join(lines + [f"| {each['what']} | {each['ratio']}x | {each['bar']} |" for each in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    keep_freed_memory()
    rows = []
    for measure, repeats in ((forward_rows, 15), (training_rows, 7), (decode_rows, 1001)):
        for each in measure(repeats):
            rows.append(each)
            print(f"{each['what']:<62} {each['ratio']:>7}x   bar {each['bar']:<7} {'' if each['holds'] else 'MISSED'}")
    if arguments.json:
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "shape": [1, HEADS, "N", DIM],
            "command": "python benchmarks/cpu.py",
        }
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
    return int(not all(each["holds"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
