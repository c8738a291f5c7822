"""The torch backend on this GPU against SDPA, and the evidence file that says so.

    make gpu        or        python benchmarks/gpu.py [--json FILE]

CUDA-event medians with the L2 cache flushed before each run, bf16, forward. `floor` is the time to copy the bytes of
q, k, v and o at this machine's own measured copy rate.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import softless

SHAPES = ((256, 6, 197, 32), (64, 3, 3136, 32), (8, 16, 4096, 64), (1, 16, 65536, 64))
COPY_BYTES = 1 << 30


def milliseconds(job: Callable[[], object], repeats: int = 20) -> float:
    """Median over runs that each start with a cold L2."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        job()
    taken = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        job()
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop))
    return statistics.median(taken)


def copy_rate() -> float:
    """Bytes a millisecond that this machine copies, read and write counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / milliseconds(lambda: target.copy_(source))


@torch.no_grad()
def rows() -> list[dict[str, object]]:
    rate, found = copy_rate(), []
    for shape in SHAPES:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        floor = 4 * q.nbytes / rate
        for is_causal in (False, True):
            sdpa = milliseconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=is_causal))
            for name in ("linear", "inline"):
                ours = milliseconds(partial(softless.attention, q, k, v, name, is_causal=is_causal))
                found.append(
                    {
                        "shape": list(shape),
                        "causal": is_causal,
                        "mechanism": name,
                        "ms": round(ours, 3),
                        "floor_ms": round(floor, 3),
                        "sdpa_ms": round(sdpa, 3),
                        "times_faster_than_sdpa": round(sdpa / ours, 2),
                    }
                )
                print(json.dumps(found[-1]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the evidence goes; default benchmarks/results/gpu-DATE.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
        return 3
    today = datetime.now(UTC).date().isoformat()
    target = arguments.json or Path(__file__).parent / "results" / f"gpu-{today}.json"
    about = {
        "date": today,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backend": "torch",
        "command": "python benchmarks/gpu.py",
        "rows": rows(),
    }
    target.write_text(json.dumps(about, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
