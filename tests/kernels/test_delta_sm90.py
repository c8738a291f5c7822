"""What the delta rule's kernels take of an H200, compiled for it without one: registers that spill, shared memory, and
tensor cores of its own generation.
"""

import pytest
import torch
import triton

from softless.kernels.common.limits import SHARED_MEMORY
from softless.kernels.delta.ops import delta
from tests.kernels import ahead

SHARED = SHARED_MEMORY[90]
TARGET = triton.__version__.startswith("3.6.")  # what the GPU machine has: the numbers below are its compiler's
# Bytes a thread, by kernel and width: sums of 64 x width numbers, twice, and two of 64 x 64.
SPILLS = {("gradient_kernel", 64): 80, ("gradient_kernel", 128): 256}


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
def test_bf16_delta_kernels_fit_into_registers_and_shared_memory(width):
    leaves = [torch.empty(1, 1, 4096, width, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    leaves.append(torch.empty(1, 1, 4096, dtype=torch.bfloat16, requires_grad=True))
    with ahead.compiling() as built:
        out, _ = delta(*leaves, None, None, "efla", 1.0)
        torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert {each.name for each in built} == {"solve_kernel", "walk_kernel", "walk_back_kernel", "gradient_kernel"}
    for each in built:
        allowed, spilled = SPILLS.get((each.name, width), 0), ahead.resources(each).spilled
        assert spilled <= allowed or not TARGET, f"{each.name} spills {spilled} bytes"
        assert each.shared <= SHARED, f"{each.name} needs {each.shared} bytes of shared memory"
        assert "wgmma.mma_async" in each.kernel.asm["ptx"], f"{each.name} has no product of Hopper's tensor cores"
        assert "mma.sync" not in each.kernel.asm["ptx"], f"{each.name} has products of an older generation"


def test_the_forward_pass_of_the_delta_rule_compiles():
    """The quickest of all: what a compiler refuses and the interpreter does not."""
    q, k, v = (torch.empty(1, 1, 100, 16) for _ in "qkv")
    with ahead.compiling() as built, torch.no_grad():
        delta(q, k, v, torch.empty(1, 1, 100), None, None, "efla", 1.0)
    assert [each.name for each in built[-2:]] == ["solve_kernel", "walk_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float32, 16),
        (torch.float32, 128),
        (torch.float16, 33),
        (torch.float16, 128),
    ],
)
def test_delta_kernels_of_the_other_dtypes_compile(dtype, width):
    """With a mask, a memory that comes in, and two query heads a key head."""
    q, k, v = (torch.empty(1, heads, 100, width, dtype=dtype, requires_grad=True) for heads in (2, 1, 1))
    beta, mask = torch.empty(1, 1, 100, requires_grad=True), torch.ones(1, 100, dtype=torch.bool)
    memory = torch.empty(1, 1, width, width, requires_grad=True)
    with ahead.compiling() as built:
        out, after, *_ = torch.ops.softless.delta(q, k, v, beta, mask, memory, "delta", 1.0)
        torch.autograd.grad((out, after), (q, k, v, beta, memory), (torch.empty_like(out), torch.empty_like(after)))
    assert len(built) >= 5
    for each in built:
        assert each.shared <= SHARED, f"{each.name} needs {each.shared} bytes of shared memory"
