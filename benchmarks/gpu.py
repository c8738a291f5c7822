"""Measure every GPU bar of softless in one run on one GPU, and write the results to a file.

    make gpu        or        python benchmarks/gpu.py [--only 1,5] [--json FILE]
    python benchmarks/gpu.py --warm          compile everything first, in as many processes as there are cores; with
                                             --only, what these bars need
    python benchmarks/gpu.py --page          no GPU needed: the table of docs/kernels.md from the newest evidence

    1  large calls run at the speed of a copy                   5  causal linear against fla's kernels
    2  vision shapes against SDPA                               6  one decode step at the speed of a copy of its state
    3  every length against SDPA                                7  memory beyond the output
    4  inline with its local residual against plain PyTorch     8  the first call, and compilations after it
    9  regress at the speed of a copy, and against inline

and of whole models, compiled:

   10  InLine-DeiT against timm's DeiT                         13  its memory against the softmax twin
   11  InLine-Swin and -PVT against plain PyTorch              14  models that regress against inline
   12  a training step against plain PyTorch

benchmarks/gpu_bars.py and model_bars.py say what each one measures. A case that raises is recorded with its error. A
whole run writes benchmarks/results/gpu-DATE.json, bar by bar; with --only, nothing but --json FILE is written. Exit
status 1 if a bar is missed.
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SCHEMA = "softless.gpu/1"
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
MARKS = ("<!-- gpu evidence: python benchmarks/gpu.py --page -->", "<!-- end of gpu evidence -->")
RIVALS, FRESH = 4, 7  # bars 5 and 8: those tuned for minutes, and what a fresh process takes
NO_EVIDENCE = "No GPU evidence of the kernels has been recorded yet: `make gpu` writes it."


def spoken(value: float | None, unit: str) -> str:
    if value is None:
        return "failed"
    forms = {"share": f"{value:.0%}", "x": f"{value:.3g}x", "s": f"{value:.2g} s", "kernels": f"{value:g}"}
    return forms[unit]


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The case furthest from its limit on the wrong side; one that failed is worse than any."""
    return min(
        rows, key=lambda row: -1e9 if row["value"] is None else row["value"] * (1 if row["sign"] == ">=" else -1)
    )


def line(row: dict[str, Any]) -> str:
    """One case as it is measured."""
    limit = f"bar {row['sign']} {spoken(row['limit'], row['unit'])}"
    measured = row.get("error") or f"{spoken(row['value'], row['unit'])}, {limit}"
    return f"{row['bar']}  {row['group']}: {row['what']}: {measured}{'' if row['holds'] else '   MISSED'}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the worst case of each group, as docs/kernels.md shows it."""
    lines = ["| measured | worst case | bar | cases that meet the bar |", "|---|---|---|---|"]
    for group in dict.fromkeys(row["group"] for row in rows):
        among = [row for row in rows if row["group"] == group]
        low, held = worst(among), sum(row["holds"] for row in among)
        value, limit = spoken(low["value"], low["unit"]), f"{low['sign']} {spoken(low['limit'], low['unit'])}"
        lines.append(f"| {group} | {value} ({low['what']}) | {limit} | {held} of {len(among)} |")
    return "\n".join(lines)


def newest(folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the newest complete evidence of this format, or None. Older files say "images a second"."""
    texts = (path.read_text() for path in sorted(folder.glob("gpu-*.json"), reverse=True))
    documents = (json.loads(text.replace("images a second", "images per second")) for text in texts)
    return next((document for document in documents if document.get("schema") == SCHEMA and document["whole"]), None)


def section(evidence: dict[str, Any] | None) -> str:
    """Return the text between the marks of docs/kernels.md: the table, and what it was measured on."""
    if evidence is None:
        return NO_EVIDENCE
    versions = evidence["versions"]
    about = f"{evidence['gpu']}, driver {evidence['driver']}, torch {versions['torch']}, triton {versions['triton']}"
    how = f"bfloat16, {evidence['date']}, copies {evidence['copy_bytes_per_second'] / 1e12:.2f} TB/s"
    return f"{table(evidence['rows'])}\n\n{about}; {how}; written by `make gpu`."


def fill(page: str, text: str, marks: tuple[str, str] = MARKS) -> str:
    """Return the page with the text put between its two marks."""
    before, start, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (start and end):
        raise ValueError(f"the page has no {' and '.join(marks)} to write between")
    return f"{before}{start}\n\n{text}\n\n{end}{after}"


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return f"for CUDA {torch._C._cuda_getDriverVersion()}"


def assembler() -> str:
    """The ptxas that the kernels' machine code is made by."""
    from triton.backends.nvidia.compiler import get_ptxas

    import softless.kernels.common.launch  # noqa: F401  it chooses one

    return str(get_ptxas(90).version)


def circumstances(rate: float, only: set[int] | None) -> dict[str, Any]:
    versions = {name: installed(name) for name in ("torch", "triton", "timm", "fla-core", "softless")}
    versions["ptxas"] = assembler()
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/gpu.py" + (f" --only {','.join(map(str, sorted(only)))}" if only else ""),
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "driver": driver(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions},
        "dtype": "bfloat16",
        "backend": "triton",
        "copy_bytes_per_second": rate,
    }


def measure_only(bar: int, index: int) -> None:
    """One case, for what it leaves in the caches of Triton, fla and PyTorch's compiler."""
    import model_bars
    from gpu_bars import BARS

    list((*BARS, *model_bars.BARS)[bar]())[index].row()
    torch.cuda.empty_cache()


def warm(only: set[int] | None) -> None:
    """Every case once, all at the same time: a run then takes minutes less. What rivals tune they tune again."""
    import model_bars
    from gpu_bars import BARS

    bars = (*BARS, *model_bars.BARS)
    chosen = [bar for bar in range(len(bars)) if bar != FRESH and (only is None or bar + 1 in only)]
    cases = [(bar, index) for bar in chosen for index in range(len(list(bars[bar]())))]
    order = sorted(cases, key=lambda case: (case[0] != RIVALS, case[0] < len(BARS)))  # what takes longest comes first
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 16)) as pool:
        pool.starmap(measure_only, order, chunksize=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the evidence goes; default benchmarks/results/gpu-DATE.json")
    parser.add_argument(
        "--only",
        type=lambda text: {int(part) for part in text.split(",")},
        metavar="1,5",
        help="measure only these bars",
    )
    parser.add_argument("--page", action="store_true", help="write the table of docs/kernels.md and measure nothing")
    parser.add_argument("--warm", action="store_true", help="fill the caches of what is compiled and measure nothing")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(fill(PAGE.read_text(), section(newest())))
        return 0
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
        return 3

    if arguments.warm:
        warm(arguments.only)
        return 0

    import model_bars
    from gpu_bars import BARS, rate

    bars = (*BARS, *model_bars.BARS)
    about, rows = circumstances(rate(), arguments.only), []
    target = arguments.json or (None if arguments.only else RESULTS / f"gpu-{about['date']}.json")
    for bar, cases in enumerate(bars, start=1):
        if arguments.only and bar not in arguments.only:
            continue
        for case in cases():
            rows.append(case.row())
            print(line(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        if target is not None:
            whole = bar == len(bars) and not arguments.only
            target.write_text(json.dumps(about | {"whole": whole, "rows": rows}, indent=2) + "\n")
    print(f"\n{table(rows)}")
    return int(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
