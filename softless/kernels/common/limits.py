"""What a program may use on a GPU: a fixed number per architecture, never timing, so a GPU always runs the same code.

Tables of tiles ask here while a plan is recorded. The GPU of the plan is then the current device.
"""

from contextlib import nullcontext

import torch
from triton.language.target_info import current_target

from softless.kernels.common.plan import on

KIB = 1024
# Shared memory that one program may have, by compute capability and by AMD's name.
SHARED_MEMORY: dict[int | str, int] = {
    80: 163 * KIB,  # A100
    86: 99 * KIB,  # A10, A40, RTX 30
    89: 99 * KIB,  # L4, L40, RTX 40
    90: 227 * KIB,  # H100, H200: every tile was chosen for them
    100: 227 * KIB,  # B200
    120: 99 * KIB,  # RTX 50
    "gfx942": 64 * KIB,  # MI300
}
LEAST = 64 * KIB  # of any GPU that Triton compiles for


def shared_memory() -> int:
    """Return the bytes of shared memory that one program may have. The interpreter, without a GPU, is an H200."""
    target = current_target()
    return SHARED_MEMORY[90] if target is None else SHARED_MEMORY.get(target.arch, LEAST)


def limits_registers() -> bool:
    """Return whether the compiler takes a limit on registers. AMD's has none."""
    target = current_target()
    return target is None or target.backend == "cuda"


def widest_heads(device: torch.device) -> int:
    """Return the widest heads whose factors fit. A device that is not here is an H200."""
    with on(device) if torch.cuda.is_available() else nullcontext():
        return 256 if shared_memory() >= 163 * KIB else 128


def widest_solved(device: torch.device) -> int:
    """Return the widest heads of regression, whose keys have a gradient with one more factor."""
    with on(device) if torch.cuda.is_available() else nullcontext():
        return 128 if shared_memory() >= 227 * KIB else 64


# What `torch.compiler.assume_constant_result` does, which imports PyTorch's compiler first. That takes seconds.
widest_heads._dynamo_marked_constant = True  # type: ignore[attr-defined]
widest_solved._dynamo_marked_constant = True  # type: ignore[attr-defined]
