"""Weights that anyone can make again, and the outputs the authors' modules and models gave for them.

A parameter is drawn by name. Its seed is the first eight bytes, little endian, of sha256("a:<case>:<key>"), for a whole
model sha256("a:<key>"); n is standard_normal of PCG64 with that seed, float64, in C order. Then, rounded to float32:

    two or more dimensions, called weight      n / sqrt(fan in), the product of all dimensions but the first
    two or more dimensions, called otherwise   n / 2
    one dimension, called weight               1 + n / 10
    one dimension, called otherwise            n / 10

attn/<case>.npz holds float64 inputs `in_*`, the output `out`, sizes in `meta_json`, and in `keys_json` the
names, shapes and dtypes of the module's parameters. models/<name>.npz holds `logits64` for two images, n of the name
"input" at `image_size`, rounded to float32, and `keys_json`.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent
DERIVED = ("relative_position_index", "attn_mask")  # made from sizes, not drawn


class Golden(NamedTuple):
    sizes: dict[str, Any]
    inputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    output: Tensor


class GoldenModel(NamedTuple):
    shapes: dict[str, list[int]]
    images: Tensor
    logits: Tensor


def normal(name: str, shape: list[int]) -> np.ndarray:
    digest = hashlib.sha256(f"a:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little"))).standard_normal(shape)


def parameter(case: str, key: str, shape: list[int]) -> Tensor:
    draw = normal(f"{case}:{key}" if case else key, shape)
    is_weight = key.endswith(".weight")
    if len(shape) >= 2:
        draw = draw / math.sqrt(math.prod(shape[1:])) if is_weight else draw / 2
    else:
        draw = 1 + draw / 10 if is_weight else draw / 10
    return torch.from_numpy(draw.astype(np.float32)).double()


def weights(case: str, shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Every parameter; what is derived is there too, with numbers that no one may read."""
    return {
        key: torch.full(shape, torch.nan) if key.rpartition(".")[2] in DERIVED else parameter(case, key, shape)
        for key, shape in shapes.items()
    }


def load(case: str) -> Golden:
    with np.load(FOLDER / "attn" / f"{case}.npz", allow_pickle=False) as stored:
        sizes, keys = (json.loads(bytes(stored[name])) for name in ("meta_json", "keys_json"))
        inputs = {name[3:]: torch.from_numpy(stored[name]) for name in stored.files if name.startswith("in_")}
        output = torch.from_numpy(stored["out"])
    return Golden(sizes, inputs, weights(case, {key: shape for key, shape, _ in keys}), output)


def load_model(name: str) -> GoldenModel:
    with np.load(FOLDER / "models" / f"{name}.npz", allow_pickle=False) as stored:
        logits, side = torch.from_numpy(stored["logits64"]), int(stored["image_size"])
        shapes = {key: shape for key, shape, _ in json.loads(bytes(stored["keys_json"]))}
    images = normal("input", [2, 3, side, side]).astype(np.float32)
    return GoldenModel(shapes, torch.from_numpy(images), logits)
