"""How time and memory grow with the tokens, for every mechanism that promises less than N^2.

    python benchmarks/scaling.py [--names linear performer] [--rounds 3] [--json benchmarks/results/scaling-DATE.json]

One forward call on one thread, [1, 4, N, 64], N = 2048 to 16,384, tensors that no near cache holds: processor seconds
and PyTorch's peak bytes, each over the same at half the tokens. The bar is a tenth more than the pairs grow: 2.2.

Processor seconds, and the fastest of several runs, because other programs are not growth: they take the processor, and
for seconds at a time its caches and memory. The four lengths take turns, and so do the mechanisms, in rounds: the
runs of one mechanism are minutes apart. A cost of the mechanism itself, such as fresh memory, shows in every run.

`sparse` is shown as it comes, and with each pattern. In its columns a query of a longer sequence sees more keys, so the
pairs grow by more than 2: by 2^1.5 = 2.83 at the paper's stride, sqrt(N), and at a fixed stride by ever more, up to 4.
Its bar for time is a tenth more than that, its bar for memory everyone's. Exit status 1 if a bar is missed.
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
from operator import le
from pathlib import Path

import torch
from cpu import keep_freed_memory

import softless
from softless.mechanisms import MECHANISMS, Mechanism
from softless.mechanisms.sparse import PATTERNS, Sparse
from softless.stopwatch import peak_bytes

TOKENS = (2048, 4096, 8192, 16384)
HEADS, DIM = 4, 64
SECONDS = 3  # in each round a mechanism runs once or more, for as long as this
MARGIN, BAR = 1.1, 2.2
LOCAL, COLUMNS = "sparse local", {f"sparse {each}, sqrt(N)": each for each in PATTERNS if each != "local"}
NAMES = [*(name for name, each in MECHANISMS.items() if "N^2" not in each.cost), LOCAL, *COLUMNS]


def mechanism_for(name: str, tokens: int) -> Mechanism:
    if name in COLUMNS:
        return softless.mechanism("sparse", pattern=COLUMNS[name], stride=round(tokens**0.5))
    if name == LOCAL:
        return softless.mechanism("sparse", pattern="local")
    return softless.mechanism(name, **({"length": TOKENS[-1]} if name == "linformer" else {}))


def pairs(name: str, tokens: int) -> int:
    """What time may grow with: the tokens, or the pairs that sparse's pattern has, counted at a query in the middle."""
    mechanism = mechanism_for(name, tokens)
    if not isinstance(mechanism, Sparse):
        return tokens
    return tokens * int(mechanism.gives(torch.tensor(tokens // 2), torch.arange(tokens)).sum())


def job(name: str, tokens: int) -> Callable[[], object]:
    """One call."""
    generator = torch.Generator().manual_seed(tokens)
    mechanism = mechanism_for(name, tokens)
    q, k, v = torch.randn(3, 1, HEADS, tokens, DIM, generator=generator).unbind()
    inputs = {key: torch.rand(shape, generator=generator) for key, shape in mechanism.needed(q, k).items()}
    for key in mechanism.input_shapes(HEADS, DIM):
        mechanism.initialize(key, inputs[key])  # larger ones would give weights too small for a processor to be quick
    inputs |= mechanism.draw(HEADS, DIM, generator)
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
    bars = [round(MARGIN * pairs(name, b) / pairs(name, a), 2) for a, b in pairwise(TOKENS)]
    holds = max(growth["memory"]) <= BAR and all(map(le, growth["time"], bars))
    return {"name": name, **growth, "milliseconds": round(1e3 * seconds[TOKENS[-1]], 1), "bars": bars, "holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", default=NAMES)
    parser.add_argument("--rounds", type=int, default=3, help="more on a machine that others use")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    seconds: dict[str, dict[int, float]] = {}
    for turn in range(arguments.rounds):
        print(f"round {turn + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        for name in arguments.names:
            now = fastest(name)
            seconds[name] = {tokens: min(now[tokens], seconds.get(name, now)[tokens]) for tokens in TOKENS}
    rows = []
    print(f"{'mechanism':32}{'time at 4k/2k, 8k/4k, 16k/8k':32}{'memory':24}{'ms at 16k':>10}")
    for name in arguments.names:
        rows.append(row(name, seconds[name]))
        show = {what: "  ".join(f"{ratio:.2f}" for ratio in rows[-1][what]) for what in ("time", "memory")}
        missed = "" if rows[-1]["holds"] else f"   over {rows[-1]['bars']} in time or {BAR} in memory"
        print(f"{name:32}{show['time']:32}{show['memory']:24}{rows[-1]['milliseconds']:>10}{missed}", flush=True)
    if arguments.json:
        about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": platform.machine(), "threads": 1}
        about |= {
            "torch": torch.__version__,
            "shape": [1, HEADS, "N", DIM],
            "tokens": TOKENS,
            "rounds": arguments.rounds,
        }
        arguments.json.write_text(
            json.dumps({**about, "command": "python benchmarks/scaling.py", "rows": rows}, indent=2) + "\n"
        )
    return 0 if all(each["holds"] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
