"""How time and memory grow with the tokens, for every mechanism that promises less than N^2.

    python benchmarks/scaling.py [--names linear performer] [--rounds 3] [--json benchmarks/results/scaling-DATE.json]

One forward call on one thread, [1, 4, N, 64], N = 2048 to 16,384, tensors that no near cache holds: processor seconds
and PyTorch's peak bytes, each over the same at half the tokens. The bar is 2.2.

Processor seconds, and the fastest of several runs, because other programs are not growth: they take the processor, and
for seconds at a time its caches and memory. The four lengths take turns, and so do the mechanisms, in rounds: the
runs of one mechanism are minutes apart. What is slow in itself, as fresh memory is, is slow in every run and counts.

`sparse` has its local pattern; its strided one, whose best stride is sqrt(N), costs N^1.5 and is shown beside a bar of
2.2 sqrt(2). Exit status 1 if a bar is missed.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from cpu import keep_freed_memory

import softless
from softless.mechanisms import MECHANISMS, Mechanism
from softless.probes.memory import peak_bytes

TOKENS = (2048, 4096, 8192, 16384)
HEADS, DIM = 4, 64
SECONDS = 3  # in each round a mechanism runs once or more, for as long as this
BAR, STRIDED_BAR = 2.2, 2.2 * 2**0.5
STRIDED = "sparse, stride sqrt(N)"
OPTIONS = {"sparse": {"pattern": "local"}, "linformer": {"length": TOKENS[-1]}}
NAMES = [name for name, each in MECHANISMS.items() if "N^2" not in each.cost] + [STRIDED]


def made(name: str, tokens: int) -> Mechanism:
    if name == STRIDED:
        return softless.mechanism("sparse", pattern="local+strided", stride=round(tokens**0.5))
    return softless.mechanism(name, **OPTIONS.get(name, {}))


def job(name: str, tokens: int) -> Callable[[], object]:
    """One call."""
    generator = torch.Generator().manual_seed(tokens)
    mechanism = made(name, tokens)
    q, k, v = torch.randn(3, 1, HEADS, tokens, DIM, generator=generator).unbind()
    inputs = {key: torch.rand(shape, generator=generator) for key, shape in mechanism.needed(q, k).items()}
    return partial(
        softless.attention,
        *(q, k, v, mechanism),
        is_causal=mechanism.lacks(False) is not None,
        inputs=inputs,
        grid=(tokens // 32, 32) if mechanism.needs_grid else None,
    )


def fastest(name: str) -> dict[int, float]:
    """Processor seconds of the fastest run at each length; the first runs warm up."""
    jobs = {tokens: job(name, tokens) for tokens in TOKENS}
    times: dict[int, list[float]] = {tokens: [] for tokens in jobs}
    began = time.monotonic()
    while len(times[TOKENS[-1]]) < 2 or time.monotonic() - began < SECONDS:
        for tokens, call in jobs.items():
            start = time.process_time()
            call()
            times[tokens].append(time.process_time() - start)
    return {tokens: min(taken[1:]) for tokens, taken in times.items()}


def row(name: str, seconds: dict[int, float]) -> dict[str, object]:
    peaks = {tokens: peak_bytes(job(name, tokens), torch.device("cpu")) for tokens in TOKENS}
    growth = {
        what: [round(values[b] / values[a], 2) for a, b in pairwise(TOKENS)]
        for what, values in (("time", seconds), ("memory", peaks))
    }
    bar = STRIDED_BAR if name == STRIDED else BAR
    holds = max(growth["time"] + growth["memory"]) <= bar
    return {"name": name, **growth, "milliseconds": round(1e3 * seconds[TOKENS[-1]], 1), "bar": bar, "holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", default=NAMES)
    parser.add_argument("--rounds", type=int, default=3, help="more on a machine that others use")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    seconds: dict[str, dict[int, float]] = {}
    for turn in range(given.rounds):
        print(f"round {turn + 1} of {given.rounds}", file=sys.stderr, flush=True)
        for name in given.names:
            now = fastest(name)
            seconds[name] = {tokens: min(now[tokens], seconds.get(name, now)[tokens]) for tokens in TOKENS}
    rows = []
    print(f"{'mechanism':24}{'time at 4k/2k, 8k/4k, 16k/8k':32}{'memory':24}{'ms at 16k':>10}")
    for name in given.names:
        rows.append(row(name, seconds[name]))
        show = {what: "  ".join(f"{ratio:.2f}" for ratio in rows[-1][what]) for what in ("time", "memory")}
        missed = "" if rows[-1]["holds"] else f"   over {rows[-1]['bar']:.2f}"
        print(f"{name:24}{show['time']:32}{show['memory']:24}{rows[-1]['milliseconds']:>10}{missed}", flush=True)
    if given.json:
        about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": platform.machine(), "threads": 1}
        about |= {"torch": torch.__version__, "shape": [1, HEADS, "N", DIM], "tokens": TOKENS, "rounds": given.rounds}
        given.json.write_text(
            json.dumps({**about, "command": "python benchmarks/scaling.py", "rows": rows}, indent=2) + "\n"
        )
    return 0 if all(each["holds"] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
