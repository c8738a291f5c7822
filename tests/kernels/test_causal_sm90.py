"""What the causal kernels take of an H200, compiled for it without one: registers that spill, and shared memory."""

import pytest
import torch
import triton

from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.causal import tiles as causal_tiles
from softless.kernels.causal.ops import continued
from softless.kernels.common.limits import SHARED_MEMORY
from tests.kernels import ahead

SHARED = SHARED_MEMORY[90]
TARGET = triton.__version__.startswith("3.6.")  # what the GPU machine has: the numbers below are its compiler's
# Bytes a thread by kernel and width, where timing on an H200 chose a tile that does not quite fit: what spills stays in
# the first-level cache, and tiles that spill less took longer.
SPILLS = {
    ("query_gradient_kernel", 64): 600,
    ("query_gradient_kernel", 128): 640,
    ("segment_kernel", 128): 32,
    ("key_gradient_kernel", 64): 256,
    ("key_gradient_kernel", 128): 96,
}


@pytest.mark.parametrize("width", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("reader", "phi"), [("divide", "elu"), pytest.param("subtract", "identity", marks=pytest.mark.slow)]
)
def test_bf16_causal_kernels_fit_into_registers_and_shared_memory(monkeypatch, width, reader, phi):
    monkeypatch.setattr(causal_tiles, "cut", lambda tokens, *_: (2, tokens // 2))
    q, k, v = (torch.empty(1, 1, 4096, width, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    spec = KernelSpec(phi, phi, reader, scale=0.125)
    with ahead.compiling() as built:
        out, state = continued(q, k, v, None, None, spec)
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        with torch.no_grad():
            continued(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, state, spec, step=True)
    names = {each.name for each in built}
    assert names == {
        "segment_kernel", "prefix_kernel", "plain_kernel" if reader == "divide" else "forward_kernel",
        "query_gradient_kernel", "sums_kernel", "later_kernel", "key_gradient_kernel", "decode_kernel",
    }  # fmt: skip
    for each in built:
        allowed, spilled = SPILLS.get((each.name, width), 0), ahead.resources(each).spilled
        assert spilled <= allowed or not TARGET, f"{each.name} spills {spilled} bytes"
        assert each.shared <= SHARED, f"{each.name} needs {each.shared} bytes of shared memory"
