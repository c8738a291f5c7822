"""The delta rule and nearfar on a GPU: milliseconds of their kernels beside PyTorch, fla's kernels and SDPA.

    python benchmarks/causal.py [--json FILE] [--mechanism nearfar ...] [--shape 8,16,4096,64 ...]

bfloat16, medians of CUDA-graph replays with the L2 flushed before each; a call that cannot be captured is timed with
events. fla's delta rule is left out if it is not installed. It takes unit keys: PyTorch makes them, and fla's time
includes that. SDPA is causal softmax, the rival of nearfar, and computes something else. The first output of all others
is compared with PyTorch in float64 before it is timed: the largest error is printed in ulps.
"""

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import softless
from softless.bench.contest import make_job
from softless.stopwatch import copy_rate, time_calls

SHAPES = "8,16,4096,64", "2,16,16384,64", "4,16,4096,128"
MECHANISMS, PASSES = ("delta", "efla", "nearfar"), {False: "forward", True: "forward + backward"}
Formula = Callable[..., Tensor]
SDPA = "SDPA, causal softmax"


def ours(mechanism: str, backend: str) -> Formula:
    def formula(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        inputs = dict(zip(softless.mechanism(mechanism).inputs, learned, strict=True))
        return softless.attention(q, k, v, mechanism, is_causal=True, inputs=inputs, backend=backend)

    return formula


def fla() -> Formula:
    from fla.ops.delta_rule import chunk_delta_rule

    def formula(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, F.normalize(k, dim=-1), v, beta))  # [B, T, H, D]
        return chunk_delta_rule(*turned, scale=1.0)[0].transpose(1, 2)

    return formula


def sdpa(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) + 0 * sum(x.sum() for x in learned)


def contestants(mechanism: str) -> dict[str, Formula]:
    formulas = {"kernels": ours(mechanism, "triton"), "torch": ours(mechanism, "torch")}
    if mechanism == "nearfar":
        return formulas | {SDPA: sdpa}
    return formulas | ({"fla chunk_delta_rule": fla()} if mechanism == "delta" and find_spec("fla") else {})


def draw(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    """q, k, v and what the mechanism learns, or beta."""
    generator, mechanism = torch.Generator("cuda").manual_seed(0), softless.mechanism(name)
    qkv = [torch.randn(shape, generator=generator, device="cuda") for _ in range(3)]
    shapes = mechanism.needed(qkv[0], qkv[1]).values()
    return [x.bfloat16() for x in (*qkv, *(torch.rand(size, generator=generator, device="cuda") for size in shapes))]


def error(formula: Formula, mechanism: str, tensors: list[Tensor]) -> float:
    """Ulps of bfloat16, on one sample."""
    of_tokens = 3 + len(softless.mechanism(mechanism).token_inputs)
    first = [*(x[:1] for x in tensors[:of_tokens]), *tensors[of_tokens:]]
    exact = ours(mechanism, "torch")(*(x.double() for x in first))
    return ((formula(*first).double() - exact).abs().max() / exact.abs().max() / torch.finfo(torch.bfloat16).eps).item()


def measure(mechanism: str, shape: tuple[int, ...], backward: bool, rate: float) -> list[dict[str, Any]]:
    tensors, rows = draw(mechanism, shape), []
    floor = (11 if backward else 4) * tensors[0].nbytes / rate
    for label, formula in contestants(mechanism).items():
        row: dict[str, Any] = {
            "mechanism": mechanism,
            "shape": list(shape),
            "pass": PASSES[backward],
            "contestant": label,
        }
        try:
            row["ulps"] = None if label == SDPA else error(formula, mechanism, tensors)
            time = time_calls({label: make_job(formula, tensors, backward)}, torch.device("cuda"), repeats=30)[label]
            row |= {"ms": 1e3 * time.seconds, "eager_ms": 1e3 * (time.eager_seconds or time.seconds)}
            row |= {"timing": time.timing, "share_of_copy": floor / time.seconds}
        except Exception as problem:  # noqa: BLE001  (a rival's failure is a result)
            row["error"] = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    about = f"{row['mechanism']} {row['shape']} {row['pass']}, {row['contestant']}: "
    if "error" in row:
        return about + row["error"]
    ulps = "" if row["ulps"] is None else f", {row['ulps']:.1f} ulp"
    return f"{about}{row['ms']:.3f} ms ({row['timing']}), {row['share_of_copy']:.0%} of a copy{ulps}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--mechanism", action="append", choices=MECHANISMS, help="default: all")
    parser.add_argument("--shape", action="append", help=f"batch,heads,tokens,dim; default {' '.join(SHAPES)}")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
        return 3
    rate, rows = copy_rate(torch.device("cuda")), []
    for shape in (tuple(map(int, text.split(","))) for text in arguments.shape or SHAPES):
        for mechanism in arguments.mechanism or MECHANISMS:
            for backward in PASSES:
                for row in measure(mechanism, shape, backward, rate):
                    rows.append(row)
                    print(line(row), flush=True)
                torch.cuda.empty_cache()
    if arguments.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_second": rate}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
    return int(any("error" in row for row in rows if row["contestant"] == "kernels"))


if __name__ == "__main__":
    sys.exit(main())
