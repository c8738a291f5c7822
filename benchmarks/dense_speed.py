"""The table of speed of docs/results-dense.md: backbones alone and in heads, with attention and without.

The numbers are those of `softless bench-model NAME --task TASK --head HEAD --bound --train`: a row is a model with or
without attention, in a head or as a classifier, forward or forward and backward. On a GPU, the images per second are
those of ordinary calls, launches included. OUT/speed.json has the rows, so that a call goes on where the last stopped.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from dense_page import BACKBONES, HEADS, SCHEMA, TIMED, TWINS
from packed_runs import LAST, write

from softless.bench.documents import PASSES
from softless.bench.model_contest import Setting, bound, model_contest, ours
from softless.machine import circumstances

SIZE, BATCH = (1024, 2048), 6  # as many images as softless bench-model takes
TINY_MODEL = {"dims": [16, 32], "depths": [1, 1], "heads": [1, 2]}  # of the toy


def speed(out: Path, device: str, minutes: float | None, *, small: bool) -> int:
    """Time all models until the time is over, and return how many measurements are left."""
    path, ends = out / "speed.json", time.monotonic() + (60 * minutes if minutes else math.inf)
    size, batch, dtype = ((64, 128), 1, torch.float32) if small else (SIZE, BATCH, torch.bfloat16)
    setting = {"image_size": list(size), "batch": batch, "dtype": str(dtype).removeprefix("torch.")}
    document: dict[str, Any] = {"schema": SCHEMA, **circumstances(device), **setting, "rows": []}
    if path.exists():
        document = json.loads(path.read_bytes())
    known = [{key: row[key] for key in ("backbone", "attends", "head", "trains")} for row in document["rows"]]
    cases: list[dict[str, Any]] = [
        {"backbone": each, "attends": attends, "head": head, "trains": trains}
        for backbone, heads in TIMED.items() for head in heads for trains in (False, True)
        for attends in (True, False) for each in (backbone, TWINS[backbone])
    ]  # fmt: skip
    waiting = [case for case in cases if case not in known]
    while waiting and time.monotonic() < ends - LAST:
        case = waiting.pop(0)
        head = case["head"] or None
        place = Setting(image_size=size, batch=batch, dtype=dtype, device=device, head=head)
        document["rows"].append(case | timing(case, place, TINY_MODEL if small else {}))
        write(path, document)
        print(told(document["rows"][-1]), flush=True)
    return len(waiting)


def told(row: dict[str, Any]) -> str:
    """Return one line on a measurement."""
    words = [BACKBONES[row["backbone"]][0], "" if row["attends"] else "without attention", HEADS[row["head"]]]
    label = f"{', '.join(filter(None, words))}, {PASSES[row['trains']]}"
    if row["skipped"]:
        return f"{label}: {row['skipped']}"
    return f"{label}: {row['images_per_second']:.3g} images/s, {row['memory_bytes'] / 1e9:.3g} GB"


def timing(case: dict[str, Any], setting: Setting, options: dict[str, Any]) -> dict[str, Any]:
    """Return images per second of ordinary calls, and the most bytes held at once."""
    make = ours if case["attends"] else bound
    entrant = make(BACKBONES[case["backbone"]][1], options, setting)
    (row,) = model_contest([entrant], setting, train=case["trains"], repeats=1 if setting.device == "cpu" else 5)
    rate = row["eager_images_per_second"] if setting.device == "cuda" else row["images_per_second"]
    return {"images_per_second": rate, "memory_bytes": row["memory_bytes"], "parameters": row["parameters"],
            "skipped": row["skipped"]}  # fmt: skip
