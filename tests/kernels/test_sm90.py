"""What the non-causal kernels take of an H200, compiled for one without it: few spills, no length compiled twice."""

import os

import pytest
import torch
import triton

from softless import mechanism
from softless.kernels.common.limits import SHARED_MEMORY
from tests.kernels import ahead

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles, and the interpreter does not: unset TRITON_INTERPRET"
)

SHARED = SHARED_MEMORY[90]
TARGET = triton.__version__.startswith("3.6.")  # what the GPU machine has: the numbers below are its compiler's
# Bytes a thread by kernel and width, where timing on an H200 chose a tile that does not quite fit; the rest is 0.
SPILLS = {
    ("whole_kernel", 64): 40,
    ("whole_gradient_kernel", 32): 112,  # of 168 registers: a fifth more programs at the same time
    ("whole_gradient_kernel", 64): 168,
    ("whole_regress_kernel", 32): 224,  # of 168 registers, so that twelve heads fit on a multiprocessor
    ("whole_regress_kernel", 64): 24,
    ("whole_regress_gradient_kernel", 32): 128,
    ("whole_regress_gradient_kernel", 64): 128,
    ("observe_kernel", 128): 24,
    ("query_gradient_kernel", 128): 520,
    ("key_gradient_kernel", 128): 64,
}
MECHANISMS = {"elu": mechanism("linear"), "inline": mechanism("inline"), "taylor": mechanism("taylor"),
              "blend": mechanism("blend"), "regress": mechanism("regress")}  # fmt: skip
WHOLE = {"whole_kernel", "whole_gradient_kernel"}
SOLVED = {"whole_regress_kernel", "whole_regress_gradient_kernel"}
SPANS = {"observe_kernel", "merge_kernel", "read_kernel", "query_gradient_kernel", "key_gradient_kernel"}


def build(name: str, dim: int, tokens: int, *, grid: tuple[int, int] | None = None) -> list[ahead.Built]:
    """Forward and backward of a bf16 packed projection."""
    from softless.kernels.parallel.ops import attend_op

    qkv = torch.empty(2, tokens, 3, 3, dim, dtype=torch.bfloat16, requires_grad=True)
    taps = None if grid is None else torch.empty(2, 3, 9, dim, dtype=torch.bfloat16, requires_grad=True)
    factors = torch.empty(3, 2) if MECHANISMS[name].input_shapes(3, dim) else None
    with ahead.compiling() as built:
        out, _ = attend_op(
            qkv, None, None, None, taps, factors, *MECHANISMS[name].kernel_spec(dim**-0.5), [1, *(grid or (0, 0))]
        )
        torch.autograd.grad(out, qkv, torch.empty_like(out))
    return built


def assert_fits(built: list[ahead.Built], names: set[str], dim: int) -> None:
    assert {each.name for each in built} == names
    for each in built:
        allowed, spilled = SPILLS.get((each.name, dim), 0), ahead.resources(each).spilled
        assert spilled <= allowed or not TARGET, f"{each.name} spills {spilled} bytes a thread"
        assert each.shared <= SHARED, f"{each.name} needs {each.shared} bytes of shared memory"


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        pytest.param("elu", 32, marks=pytest.mark.slow),
        ("elu", 64),
        pytest.param("inline", 64, marks=pytest.mark.slow),
        ("regress", 32),
        pytest.param("regress", 64, marks=pytest.mark.slow),
    ],
)
def test_kernels_for_short_sequences_fit_into_registers_and_shared_memory(name, dim):
    assert_fits(build(name, dim, 197), SOLVED if name == "regress" else WHOLE, dim)


@pytest.mark.parametrize(
    ("name", "dim", "tokens"),
    [
        pytest.param("inline", 32, 1000, marks=pytest.mark.slow),
        ("elu", 64, 1000),
        pytest.param("elu", 128, 1000, marks=pytest.mark.slow),
        pytest.param("inline", 128, 197, marks=pytest.mark.slow),
        pytest.param("blend", 64, 1000, marks=pytest.mark.slow),
        ("regress", 64, 1000),
        pytest.param("regress", 128, 1000, marks=pytest.mark.slow),
    ],
)
def test_spans_fit_into_registers_and_shared_memory(name, dim, tokens):
    """A division of wide heads reads its queries twice. Of narrow heads that regress, one program merges and solves."""
    more = {"query_sums_kernel"} if name == "elu" and dim == 128 else set()
    more |= {"solve_kernel", "solve_gradient_kernel"} if name == "regress" else set()
    fewer = {"merge_kernel"} if name == "regress" and dim <= 64 else set()
    assert_fits(build(name, dim, tokens), (SPANS | more) - fewer, dim)


@pytest.mark.parametrize(
    ("name", "dim", "grid"),
    [
        pytest.param("inline", 64, (14, 14), marks=pytest.mark.slow),
        ("inline", 32, (8, 8)),
        ("regress", 32, (8, 8)),
    ],
)
def test_the_residual_fits_into_registers_and_shared_memory(name, dim, grid):
    names = (SOLVED if name == "regress" else WHOLE) | {"residual_gradient_kernel"}
    assert_fits(build(name, dim, 1 + grid[0] * grid[1], grid=grid), names, dim)


@pytest.mark.slow
def test_the_residual_beside_a_mass_that_may_cancel_fits_into_shared_memory():
    """Taylor attention multiplies pairs of factors, which take twice the room."""
    built = build("taylor", 64, 325, grid=(18, 18))
    assert {each.name for each in built} == SPANS
    assert max(each.shared for each in built) <= SHARED


def hashes(tokens: int) -> set[str]:
    """Of the kernels; an operator's first call in a process asks for each twice, to compile them at the same time."""
    return {each.kernel.hash for each in build("inline", 32, tokens)}


def test_a_new_length_needs_no_new_compilation():
    """Two kinds of length: those that fill their tiles, and all others."""
    ragged, full = hashes(1000), hashes(1024)
    assert len(ragged) == len(full) == len(SPANS)
    assert hashes(1003) == ragged
    assert hashes(960) == full
