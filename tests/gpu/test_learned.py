"""Blend and regress on a CUDA device: 500 random calls each, also with the residual, many tokens, repeats, compiled."""

import pytest
import torch
from torch import Tensor

import softless
from softless.functional import attention_with_residual
from tests.gpu.test_kernels import SAMPLES, SHAPES, cases, every_half, hold, resolved, ulps
from tests.kernels.cases import REGIMES, regime
from tests.kernels.test_learned import CASES
from tests.numerics.budget import FORWARD, GRADIENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # said once in a thread by torch 2.11
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # its compiler imports it
]
READERS = "blend", "regress", "regress-learned"
# Grids, tokens before them, and widths of heads. The tiles of up to 128 tokens differ from those of more.
PICTURES = (
    ((8, 8), 1, 32), ((7, 7), 0, 32), ((4, 5), 1, 20), ((11, 11), 1, 32), ((9, 14), 2, 16), ((8, 8), 1, 64),
    ((8, 17), 0, 32), ((14, 14), 1, 32), ((14, 14), 1, 64), ((17, 20), 1, 48),
)  # fmt: skip


def inputs_of(case: str, heads: int) -> dict[str, Tensor]:
    """One number per head, of either sign."""
    shapes = CASES[case].mechanism.input_shapes(heads, 1)
    torch.manual_seed(0)
    return {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}


@every_half
@pytest.mark.parametrize("case", [name for name in CASES if CASES[name].plain is not None])
def test_500_random_calls_are_within_budget(case: str, dtype: torch.dtype) -> None:
    wrong = {}
    for seed, (tokens, dim) in enumerate(SHAPES):
        if found := hold(CASES[case], cases(tokens, dim, dtype, seed), False, inputs_of(case, 2)):
            wrong[tokens, dim] = found
    assert not wrong, wrong


@pytest.mark.parametrize("cut", REGIMES)
@pytest.mark.parametrize("case", CASES)
def test_float32_is_good_to_five_digits(case: str, cut: str) -> None:
    """Outputs and gradients, also of the numbers per head, with key heads that are shared."""
    torch.manual_seed(0)
    given = [torch.randn(2, heads, 200, 48, device="cuda") for heads in (4, 2, 2)] + list(inputs_of(case, 4).values())
    upstream = torch.randn_like(given[0])

    def run(kind: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(kind, copy=True).requires_grad_() for x in given]
        inputs = dict(zip(inputs_of(case, 4), leaves[3:], strict=True))
        out = softless.attention(*leaves[:3], CASES[case].mechanism, inputs=inputs, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(kind))]

    with regime(cut):
        found = run(torch.float32, "triton")
    for at, (mine, exact) in enumerate(zip(found, run(torch.float64, "reference"), strict=True)):
        assert (mine - exact).abs().max() <= 1e-5 * (1 + exact.abs().max()), f"result {at}"


@pytest.mark.parametrize("case", READERS)
def test_65536_tokens_stay_within_budget(case: str) -> None:
    """Against torch in float64, which is linear too; values and keys have a mean."""
    qkv = [(torch.randn(1, 2, 65_536, 64, device="cuda") + offset).bfloat16() for offset in (0, 1, 20)]
    made, inputs = CASES[case].mechanism, inputs_of(case, 2)
    exact = softless.attention(
        *(x.double() for x in qkv), made, inputs={name: x.double() for name, x in inputs.items()}, backend="torch"
    )
    found = softless.attention(*qkv, made, inputs=inputs, backend="triton")
    assert ulps(found, exact).max() <= 5


@pytest.mark.parametrize("case", READERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("batch", "tokens", "dim"), [(64, 197, 32), (64, 197, 64), (1, 5000, 64), (1, 900, 128)])
def test_repeats_are_bitwise_equal(case: str, dtype: torch.dtype, batch: int, tokens: int, dim: int) -> None:
    leaves = [torch.randn(batch, 4, tokens, dim, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    learned = {name: x.requires_grad_() for name, x in inputs_of(case, 4).items()}
    upstream = torch.randn_like(leaves[0])

    def run() -> tuple[Tensor, ...]:
        out = softless.attention(*leaves, CASES[case].mechanism, inputs=learned, backend="triton")
        return out, *torch.autograd.grad(out, [*leaves, *learned.values()], upstream)

    first = run()
    for _ in range(99):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("case", READERS)
@pytest.mark.parametrize(("grid", "prefix"), [((14, 14), 1), ((30, 20), 0)], ids=str)
def test_the_local_residual_matches_the_reference(case: str, grid: tuple[int, int], prefix: int) -> None:
    torch.manual_seed(0)
    tokens, made = prefix + grid[0] * grid[1], CASES[case].mechanism
    given = [torch.randn(2, 3, rows, 32, device="cuda") for rows in (tokens, tokens, tokens, 9)]
    upstream = torch.randn_like(given[0])

    def run(kind: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(kind, copy=True).requires_grad_() for x in given]
        inputs = {name: x.to(kind) for name, x in inputs_of(case, 3).items()}
        out = attention_with_residual(*leaves, made, grid=grid, prefix=prefix, inputs=inputs, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(kind))]

    for at, pair in enumerate(zip(run(torch.float32, "triton"), run(torch.float64, "reference"), strict=True)):
        mine, exact = pair
        assert (mine - exact).abs().max() <= 1e-5 * (1 + exact.abs().max()), f"result {at}"


@every_half
@pytest.mark.parametrize("case", ["inline", "linear", *READERS])
def test_500_random_calls_with_the_residual_are_within_budget(case: str, dtype: torch.dtype) -> None:
    made = CASES[case].mechanism if case in CASES else softless.mechanism(case)
    learned = inputs_of(case, 2) if case in CASES else {}
    wrong = {}
    for seed, (grid, prefix, dim) in enumerate(PICTURES):
        qkv = cases(prefix + grid[0] * grid[1], dim, dtype, seed)
        given = [*qkv, torch.randn(SAMPLES, 2, 9, dim, device="cuda").to(dtype), torch.randn_like(qkv[2])]

        def run(kind: torch.dtype, backend: str) -> list[Tensor]:
            *leaves, upstream = (x.to(kind, copy=True) for x in given)  # noqa: B023  runs in this round
            leaves = [x.requires_grad_() for x in leaves]
            inputs = {name: x.to(kind) for name, x in learned.items()}
            out = attention_with_residual(*leaves, made, grid=grid, prefix=prefix, inputs=inputs, backend=backend)  # noqa: B023
            return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

        found = run(dtype, "triton"), run(torch.float64, "reference"), run(torch.float32, "torch")
        for name, ours, exact, float32 in zip(("o", "dq", "dk", "dv", "taps"), *found, strict=True):
            allowed = (FORWARD if name == "o" else GRADIENT)["ulps"] + 1
            error = torch.where(resolved(float32, exact, dtype), ulps(ours, exact), 0.0)
            if error.max() > allowed:
                wrong[grid, prefix, dim, name] = f"{error.max():.1f} ulp, {int((error > allowed).sum())} samples"
    assert not wrong, wrong


@pytest.mark.parametrize("case", READERS)
def test_the_compiled_call_equals_the_eager_one(case: str) -> None:
    leaves = [torch.randn(2, 4, 300, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    learned = {name: x.requires_grad_() for name, x in inputs_of(case, 4).items()}
    compiled = torch.compile(softless.attention, fullgraph=True)
    outs = [
        run(*leaves, CASES[case].mechanism, inputs=learned, backend="triton") for run in (softless.attention, compiled)
    ]
    grads = [torch.autograd.grad(out.float().square().sum(), [*leaves, *learned.values()]) for out in outs]
    assert torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
