"""Weights that anyone can make again, and the outputs the authors' modules gave for them.

A parameter is drawn by name. Its seed is the first eight bytes, little endian, of sha256("a:<case>:<key>");
n is standard_normal of PCG64 with that seed, float64, in C order. Then, rounded to float32:

    two or more dimensions, called weight      n / sqrt(fan in), the product of all dimensions but the first
    two or more dimensions, called otherwise   n / 2
    one dimension, called weight               1 + n / 10
    one dimension, called otherwise            n / 10

attn/<case>.npz holds float64 inputs `in_*`, the output `out`, sizes in `meta_json`, and in `keys_json` the
names, shapes and dtypes of the module's parameters.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "attn"


class Golden(NamedTuple):
    sizes: dict[str, Any]
    inputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    output: Tensor


def parameter(case: str, key: str, shape: list[int]) -> Tensor:
    digest = hashlib.sha256(f"a:{case}:{key}".encode()).digest()
    draw = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little"))).standard_normal(shape)
    is_weight = key.endswith(".weight")
    if len(shape) >= 2:
        draw = draw / math.sqrt(math.prod(shape[1:])) if is_weight else draw / 2
    else:
        draw = 1 + draw / 10 if is_weight else draw / 10
    return torch.from_numpy(draw.astype(np.float32)).double()


def load(case: str) -> Golden:
    with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as stored:
        sizes, keys = (json.loads(bytes(stored[name])) for name in ("meta_json", "keys_json"))
        inputs = {name[3:]: torch.from_numpy(stored[name]) for name in stored.files if name.startswith("in_")}
        output = torch.from_numpy(stored["out"])
    return Golden(sizes, inputs, {key: parameter(case, key, shape) for key, shape, _ in keys}, output)
