"""A hundred updates of a tiny InLine-DeiT on the digits, in float32 on one CPU thread (R21).

    python tests/train/curve.py     writes tests/golden/curves/inline_deit.json anew, after a change that means to

Losses are kept as hexadecimal numbers, so that they are compared bit by bit.
"""

import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from softless.data import open_splits
from softless.train.devices import Devices
from softless.train.loop import Job, fit, seed_all
from softless.train.recipe import read_recipe
from softless.train.tasks.classify import Classification, build, image_loader
from tests.train.jobs import Quiet

KEPT = Path(__file__).parents[1] / "golden/curves/inline_deit.json"
UPDATES = 100


def machine() -> dict[str, str]:
    """What decides the bits, besides the code."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def losses(dtype: torch.dtype = torch.float32) -> list[float]:
    recipe = read_recipe("digits", [("lr", "4e-3"), ("model.dims", "24"), ("model.drop_path_rate", "0.1")])
    recipe = replace(recipe, batch=28, epochs=2, log_every=1, evaluate_every=2)
    devices, watch, parts = Devices("cpu"), Quiet(), open_splits("digits")
    train, test = (image_loader(part, recipe, 0, devices, train=part is parts[0]) for part in parts)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seed_all(0, -1, 0)
        model = build(recipe.model, recipe.image_size, 10).to(dtype)
        with tempfile.TemporaryDirectory() as folder:
            task = Classification(model, parts, train, test, recipe)
            fit(Job(task=task, recipe=recipe, folder=Path(folder), devices=devices, watch=watch, about={}))
    finally:
        torch.set_num_threads(threads)
    return [numbers["loss"] for _, numbers in watch.lines if "loss" in numbers][:UPDATES]


def alone() -> list[float]:
    """The losses from a process of their own: where memory lies decides last bits of some products."""
    command = [sys.executable, "-m", "tests.train.curve", "show"]
    root = Path(__file__).parents[2]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=250).stdout
    return [float.fromhex(text) for text in said.split()]


if __name__ == "__main__":
    found = [value.hex() for value in losses()]
    if sys.argv[1:] == ["show"]:
        sys.stdout.write(" ".join(found))
    else:
        KEPT.write_text(json.dumps({**machine(), "losses": found}, indent=1) + "\n")
