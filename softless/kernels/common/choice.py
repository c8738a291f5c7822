"""Which calls the kernels take. A refusal is a sentence: `auto` then runs torch, and `backend="triton"` raises it."""

import torch
from torch import Tensor

from softless.algebra.recipe import RULES, Recipe
from softless.kernels.common import assembler
from softless.kernels.common.arithmetic import INTERPRETED

WIDEST = 256
WIDEST_RULE = 128  # a memory stays in registers, and so does its gradient
# Compute capabilities whose evidence, written by `make gpu`, is in benchmarks/results: `auto` takes the kernels there.
TESTED: frozenset[tuple[int, int]] = frozenset({(9, 0)})


def refusal(
    recipe: Recipe | None, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, device: torch.device
) -> str | None:
    """Why the kernels cannot run this call on a device, or None."""
    if recipe is None:
        return f"no kernel computes mechanism '{name}' with these options"
    if device.type != "cuda" and not INTERPRETED.value:
        return f"Triton runs on {device.type} only in its interpreter (TRITON_INTERPRET=1)"
    if q.dtype == torch.float64:
        return "the kernels take float16, bfloat16 and float32, and q is torch.float64"
    widest = WIDEST_RULE if recipe.reader in RULES else WIDEST
    if max(q.shape[3], v.shape[3]) > widest:
        return f"the kernels take head dimensions up to {widest}, and q has {q.shape[3]}, v has {v.shape[3]}"
    if is_causal and "exp" in (recipe.phi_q, recipe.phi_k):
        return "the causal kernels have no running maximum for exponential features"
    if is_causal and q.shape[2] != k.shape[2]:
        return f"the causal kernels need as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():  # torch 2.11 says both of a compile
        return "exported programs use plain torch operators"
    return None


def untested(device: torch.device, reader: str) -> str | None:
    """Why `auto` leaves a device alone, or None."""
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device here to ask about"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) in TESTED:
        return _misassembled(reader)
    return f"the kernels have no recorded evidence on compute capability {major}.{minor}; backend='triton' runs them"


def _misassembled(reader: str) -> str | None:
    if reader not in RULES or assembler.FOUND is None or assembler.FOUND >= assembler.RIGHT:
        return None
    found, needed = (".".join(map(str, each)) for each in (assembler.FOUND, assembler.RIGHT))
    return (
        f"ptxas {found}, which TRITON_PTXAS_PATH names, assembles the {reader} rule's kernels wrong for some heads: "
        f"{needed} or later is needed; backend='triton' runs them"
    )
