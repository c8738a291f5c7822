"""What the tests of bad input share: tensors, masks and layouts, and `refuses`, which reads the error."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import softless
from softless import mechanism
from softless.errors import SoftlessError

ROOT = Path(__file__).parents[2]

NAN, INF = float("nan"), float("inf")
ALL = softless.list_mechanisms()
KERNELIZED = ["linear", "inline", "efficient", "taylor", "hydra", "angular", "focused"]
SCORED = ["softmax", "general", "threshold", "topk", "sparse", "longformer", "nonlocal", "reformer"]
MIXERS = ["linformer", "nystrom", "agent", "soft", "asymmetric_nonlocal", "emanet"]


def made(name: str) -> softless.Mechanism:
    return mechanism("general", sim=lambda q, k: (q @ k.mT).exp()) if name == "general" else mechanism(name)


PICTURES = ["mlla"]  # they read a grid: tests/laws has what they do with one
ANY_FORM = [
    (name, form) for name in ALL if name not in PICTURES for form in (False, True) if made(name).lacks(form) is None
]
every_form = pytest.mark.parametrize(("name", "is_causal"), ANY_FORM)


def inputs(name: str, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Whatever it needs beyond q, k and v."""
    return {each: torch.rand(shape, generator=torch.Generator()) for each, shape in made(name).needed(q, k).items()}


def some(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def refuses(call, *words: object) -> str:
    """The text of the error, which must name each of `words`."""
    with pytest.raises(SoftlessError) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, ValueError), f"{type(caught.value).__name__} is no ValueError"
    assert [word for word in words if str(word) not in text] == [], text
    assert "\n" not in text
    return text


MASKS = {
    "float": (torch.ones(2, 5), ["float32", "bool"]),
    "NaN": (torch.full((2, 5), NAN), ["float32", "bool"]),
    "integer": (torch.ones(2, 5, dtype=torch.int64), ["int64", "bool"]),
    "list": ([[True] * 5] * 2, ["list", "bool"]),
    "per head": (torch.ones(2, 4, 5, dtype=torch.bool), [[2, 4, 5], [2, 5]]),
    "for queries": (torch.ones(2, 3, dtype=torch.bool), [[2, 3], [2, 5]]),
    "without batch": (torch.ones(5, dtype=torch.bool), [[5], [2, 5]]),
    "broadcast": (torch.ones(1, 5, dtype=torch.bool), [[1, 5], [2, 5]]),
    "on meta": (torch.ones(2, 5, dtype=torch.bool, device="meta"), ["meta", "cpu"]),
}


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x))


LAYOUTS = {
    "sparse": (Tensor.to_sparse, ["sparse_coo", "dense"]),
    "mkldnn": (Tensor.to_mkldnn, ["mkldnn", "dense"]),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), ["qint8"]),
    "complex": (lambda x: x.cfloat(), ["complex64"]),
    "nested": (nested, ["nested"]),
    "rows": (lambda x: x.flatten(0, -2).to_sparse_csr(), ["sparse_csr", "dense"]),
}


def inputs_of(one: softless.Mechanism, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    return {each: torch.rand(shape) for each, shape in one.needed(q, k).items()}
