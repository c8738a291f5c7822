"""Which ptxas turns Triton's kernels into machine code for Hopper.

Triton 3.6 calls ptxas 12.8 there, which reads registers that it never wrote: the delta rule's walk back adds up wrong
rows for heads of 33, 40 and 63 in bfloat16. The same Triton has ptxas 12.9 for later chips, which makes the kernel
right, and later Tritons use that one for Hopper too. So it is used here, unless TRITON_PTXAS_PATH names another one.
The choice is the process's: kernels of others are assembled by it as well.
"""

import os

import triton

RIGHT = 12, 9


def version() -> tuple[int, ...] | None:
    """That of the ptxas in use, or None where Triton has none."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return tuple(map(int, get_ptxas(90).version.split(".")))
    except (ImportError, RuntimeError, OSError):
        return None


def use_right_one() -> None:
    """Before anything is compiled: Triton asks for the version once, for the names in its cache."""
    if "TRITON_PTXAS_PATH" not in os.environ and (version() or RIGHT) < RIGHT:
        triton.knobs.nvidia.ptxas = triton.knobs.nvidia.ptxas_blackwell.path


use_right_one()
FOUND = version()
