"""Every kernel compiles for every GPU in `limits.SHARED_MEMORY`, and fits into its shared memory.

The normal suite compiles the tightest kernels and those that differ between makers; `slow` compiles all.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from softless import Mechanism, mechanism
from softless.kernels.common import limits, tiles
from softless.kernels.common.limits import SHARED_MEMORY
from tests.kernels import ahead

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles, and the interpreter does not: unset TRITON_INTERPRET"
)

TENSOR_MEMORY = 512  # columns, of compute capability 10.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LINEAR, INLINE, TAYLOR, EFFICIENT = (mechanism(name) for name in ("linear", "inline", "taylor", "efficient"))
EXP = mechanism("linear", phi="exp")
BLEND, REGRESS, LEARNED = mechanism("blend"), mechanism("regress"), mechanism("regress", phi="elu", ridge="learned")


class Family(NamedTuple):
    """Kernels that one call launches, its backward pass included, for heads of a width."""

    call: Callable[[int, torch.dtype], None]
    names: set[str]  # of kernels that must be among them


def parallel(made: Mechanism, tokens: int, *, grid: tuple[int, int] | None = None, backward: bool = True) -> Callable:
    def call(width: int, dtype: torch.dtype) -> None:
        from softless.kernels.parallel.ops import attend_op

        qkv = torch.empty(2, tokens, 3, 3, width, dtype=dtype, requires_grad=backward)
        taps = None if grid is None else torch.empty(2, 3, 9, width, dtype=dtype, requires_grad=backward)
        picture = [0, 0, 0] if grid is None else [1, *grid]
        factors = torch.empty(3, 2, requires_grad=backward) if made.input_shapes(3, width) else None
        out, _ = attend_op(qkv, None, None, None, taps, factors, *made.kernel_spec(width**-0.5), picture)
        if backward:
            torch.autograd.grad(out, qkv, torch.empty_like(out))

    return call


def causal(made: Mechanism) -> Callable:
    """Two segments, forward and backward, then a decode step."""

    def call(width: int, dtype: torch.dtype) -> None:
        from softless.kernels.causal.ops import continued

        tokens, spec = 40 * max(width, 32), made.kernel_spec(width**-0.5)
        q, k, v = (torch.empty(1, 1, tokens, width, dtype=dtype, requires_grad=True) for _ in "qkv")
        out, state = continued(q, k, v, None, None, spec)
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        with torch.no_grad():
            continued(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, state, spec, step=True)

    return call


def exponential(width: int, dtype: torch.dtype) -> None:
    """Two segments, forward and backward, of both readers."""
    from softless.kernels.causal.ops import causal

    for made in (EFFICIENT, EXP):
        qkv = [torch.empty(1, 1, 40 * max(width, 32), width, dtype=dtype, requires_grad=True) for _ in "qkv"]
        out = causal(*qkv, None, made.kernel_spec(1.0))
        torch.autograd.grad(out, qkv, torch.empty_like(out))


def packed(made: Mechanism, longest: int, *, is_causal: bool = False) -> Callable:
    """Two sequences in one row, forward and backward."""

    def call(width: int, dtype: torch.dtype) -> None:
        from softless.kernels.causal.ops import NOTHING, causal_op
        from softless.kernels.parallel.ops import attend_op

        qkv = [torch.empty(1, 1, longest + 5, width, dtype=dtype, requires_grad=True) for _ in "qkv"]
        offsets, spec = torch.tensor([0, 5, longest + 5]), made.kernel_spec(width**-0.5)
        if is_causal:
            out = causal_op(*qkv, None, *NOTHING, *spec[:5], True, offsets, longest)[0]
        else:
            out = attend_op(*qkv, None, None, None, *spec, [0, 0, 0], offsets, offsets, longest, longest)[0]
        torch.autograd.grad(out, qkv, torch.empty_like(out))

    return call


def norm(width: int, dtype: torch.dtype) -> None:
    from softless.kernels.norm import layer_norm

    layer_norm(torch.empty(9, width, dtype=dtype), *torch.empty(2, width, dtype=dtype).unbind(), 1e-6)


def memory(width: int, dtype: torch.dtype) -> None:
    from softless.kernels.delta.ops import delta

    leaves = [torch.empty(1, 1, 200, width, dtype=dtype, requires_grad=True) for _ in "qkv"]
    leaves.append(torch.empty(1, 1, 200, dtype=dtype, requires_grad=True))
    out, _ = delta(*leaves, None, None, "efla", 1.0)
    torch.autograd.grad(out, leaves, torch.empty_like(out))


def near(width: int, dtype: torch.dtype) -> None:
    """Two segments, after a window and the first tokens of a call before."""
    from softless.kernels.near.ops import near_op, widest_with_gradient

    tokens, window, first = 2048, 64, 4
    held = [torch.empty(1, 1, size, width) for size in (window + tokens, window + tokens, first, first)]
    maps, gain, count = [torch.empty(2, width, width)] * 2, torch.empty(2), torch.zeros(1, dtype=torch.int64)
    sums = [torch.empty(1, 2, 2 * width, size) for size in (width, 1)]
    q = torch.empty(1, 2, tokens, width, dtype=dtype)
    q.requires_grad_(width <= widest_with_gradient(q.device, dtype))
    out = near_op(q, *held, *maps, gain, count, count, *sums, window, first, width**-0.5)[0]
    if out.requires_grad:
        torch.autograd.grad(out, q, torch.empty_like(out))


WALKS = {"segment_kernel", "prefix_kernel", "query_gradient_kernel", "sums_kernel", "later_kernel",
         "key_gradient_kernel", "decode_kernel"}  # fmt: skip
EXPONENTIAL = {f"exponential_{part}kernel" for part in ("", "sums_", "scan_", "query_", "later_", "key_")}
SOLVED = {"observe_kernel", "solve_kernel", "read_kernel", "solve_gradient_kernel", "key_gradient_kernel"}
FAMILIES = {
    "whole": Family(parallel(LINEAR, 197), set()),
    "whole inline": Family(parallel(INLINE, 197), set()),
    "short": Family(parallel(LINEAR, 100, backward=False), set()),
    "shorter": Family(parallel(INLINE, 49, backward=False), set()),
    "spans": Family(parallel(LINEAR, 1000), {"observe_kernel", "merge_kernel", "read_kernel", "key_gradient_kernel"}),
    "spans inline": Family(parallel(INLINE, 1000), {"query_gradient_kernel"}),
    "spans taylor": Family(parallel(TAYLOR, 1000), {"query_gradient_kernel"}),
    "spans efficient": Family(parallel(EFFICIENT, 1000), {"query_gradient_kernel"}),
    "local": Family(parallel(INLINE, 197, grid=(14, 14)), set()),
    "local spans": Family(parallel(INLINE, 1025, grid=(32, 32)), {"read_kernel", "key_gradient_kernel"}),
    "whole blend": Family(parallel(BLEND, 197), set()),
    "spans blend": Family(parallel(BLEND, 1000), {"query_gradient_kernel"}),
    "whole regress": Family(parallel(REGRESS, 197), set()),
    "fine": Family(parallel(INLINE, 65, grid=(8, 8)), {"residual_gradient_kernel"}),
    "fine regress": Family(parallel(REGRESS, 65, grid=(8, 8)), {"residual_gradient_kernel"}),
    "spans regress": Family(parallel(REGRESS, 1000), SOLVED),
    "few regress": Family(parallel(REGRESS, 300), SOLVED),  # keys per channel, for wide heads
    "learned regress": Family(parallel(LEARNED, 1000), SOLVED),
    "local regress": Family(parallel(REGRESS, 197, grid=(14, 14)), set()),
    "local spans regress": Family(parallel(REGRESS, 1025, grid=(32, 32)), SOLVED),
    "causal": Family(causal(LINEAR), WALKS),
    "causal inline": Family(causal(INLINE), WALKS | {"forward_kernel"}),
    "causal taylor": Family(causal(TAYLOR), WALKS | {"forward_kernel"}),
    "causal exponential": Family(exponential, EXPONENTIAL),
    "packed": Family(packed(LINEAR, 1000), {"observe_kernel", "read_kernel", "key_gradient_kernel"}),
    "packed whole": Family(packed(INLINE, 197), set()),
    "packed causal": Family(packed(LINEAR, 5200, is_causal=True), WALKS - {"decode_kernel"}),
    "near": Family(near, {"far_kernel", "near_kernel"}),
    "norm": Family(norm, {"norm_kernel"}),
    "delta": Family(memory, {"solve_kernel", "walk_kernel", "walk_back_kernel", "gradient_kernel"}),
}
every_target = pytest.mark.parametrize("target", ahead.TARGETS)


def assert_fits(target: str, family: Family, width: int, dtype: torch.dtype) -> None:
    gpu = ahead.TARGETS[target]
    with ahead.compiling(gpu) as built:
        family.call(width, dtype)
    assert family.names <= {each.name for each in built}
    for each in built:
        binary = each.kernel.asm["hsaco" if gpu.backend == "hip" else "cubin"]
        assert binary, f"{each.name} has no machine code"
        assert each.shared <= SHARED_MEMORY[gpu.arch], f"{each.name} needs {each.shared} bytes of shared memory"
        assert (getattr(each.kernel.metadata, "tmem_size", None) or 0) <= TENSOR_MEMORY, each.name


@every_target
def test_the_forward_pass_compiles_for_every_gpu(target):
    """With an exponential, which NVIDIA's kernels write in their own assembly language."""
    assert_fits(target, Family(parallel(LINEAR, 40, backward=False), {"whole_kernel"}), 32, torch.bfloat16)


@pytest.mark.parametrize(
    ("target", "dtype", "width", "family"),
    [("sm_86", "fp16", 128, "spans inline"), ("gfx942", "bf16", 64, "local spans"), ("sm_80", "bf16", 64, "packed"),
     ("sm_89", "bf16", 32, "packed causal"), ("gfx942", "bf16", 64, "norm"), ("gfx942", "bf16", 64, "near"),
     ("sm_86", "bf16", 32, "causal exponential"), ("sm_100", "bf16", 128, "spans regress")],
)  # fmt: skip
def test_a_selection_of_kernels_fits(target, dtype, width, family):
    assert_fits(target, FAMILIES[family], width, DTYPES[dtype])


@pytest.mark.slow
@every_target
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_compiles_for_every_gpu(target, dtype, width, family):
    if (
        width == 128
        and ("regress" in family or family == "near")
        and SHARED_MEMORY[ahead.TARGETS[target].arch] < 227 * 1024
    ):
        pytest.skip("wide heads are refused where their factors do not fit")
    assert_fits(target, FAMILIES[family], width, DTYPES[dtype])


KINDS = [(kind, side, dtype) for kind in (*tiles.BF16, *tiles.WHOLE_HEADS) for side in (32, 64, 128)
         for dtype in (*DTYPES.values(), tiles.PAIRS)]  # fmt: skip


def chosen(target: str) -> dict[tuple[str, int, torch.dtype], tiles.Tile]:
    """Return the tiles of non-causal attention on a GPU."""
    with ahead.compiling(ahead.TARGETS[target]):
        return {(kind, side, dtype): tiles.tile(kind, side, side, dtype) for kind, side, dtype in KINDS}


def test_an_h200_gets_the_tiles_that_it_was_measured_with(monkeypatch):
    """Tables for smaller shared memories change nothing there, nor in the interpreter."""
    measured, interpreted = chosen("sm_90"), {each: tiles.tile(*each[:2], *each[1:]) for each in KINDS}
    monkeypatch.setattr(tiles, "SMALLER", {})
    assert measured == interpreted == chosen("sm_90")


def test_tiles_depend_on_the_shared_memory_and_on_nothing_else_of_a_gpu():
    assert chosen("sm_86") == chosen("sm_89") == chosen("sm_120") != chosen("sm_90") == chosen("sm_100")


def test_every_entry_for_a_smaller_shared_memory_differs_from_that_of_an_h200():
    measured = chosen("sm_90")
    for table in tiles.SMALLER.values():
        for (kind, dtype, wide), cut in table.items():
            assert measured[kind, 128 if wide else 64, dtype] != cut


def test_an_unknown_gpu_gets_the_least_shared_memory():
    from triton.backends.compiler import GPUTarget

    with ahead.compiling(GPUTarget("cuda", 75, 32)):
        assert limits.shared_memory() == limits.LEAST == min(SHARED_MEMORY.values())


@pytest.mark.parametrize("target", ahead.TARGETS)
def test_heads_wider_than_128_need_163_kib(target):
    roomy = SHARED_MEMORY[ahead.TARGETS[target].arch] >= 163 * 1024
    with ahead.compiling(ahead.TARGETS[target]):
        assert limits.widest_heads(torch.device("cpu")) == (256 if roomy else 128)


@pytest.mark.parametrize("target", ahead.TARGETS)
def test_regress_with_heads_wider_than_64_needs_227_kib(target):
    roomy = SHARED_MEMORY[ahead.TARGETS[target].arch] >= 227 * 1024
    with ahead.compiling(ahead.TARGETS[target]):
        assert limits.widest_solved(torch.device("cpu")) == (128 if roomy else 64)


def test_launches_say_that_products_and_sums_are_fused():
    """What every precision was measured with; the compiler's default changes in Triton 3.10."""
    with ahead.compiling() as built:
        parallel(LINEAR, 40, backward=False)(32, torch.bfloat16)
    assert {each.kernel.metadata.enable_fp_fusion for each in built} == {True}


def test_amd_gets_no_limit_on_registers():
    assert all(cut.registers is None for cut in chosen("gfx942").values())
    assert any(cut.registers is not None for cut in chosen("sm_90").values())
