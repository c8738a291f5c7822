"""The delta rule's kernels on a CUDA device: many cases at a time, each held to R3 by itself.

The truth is the chunked form in float64, which the laws hold to explicit weights; `eager` is the rule typed token by
token in the dtype that comes in.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import softless
from softless.errors import SoftlessError
from tests.gpu.test_kernels import HALF, every_half, resolved, ulps
from tests.numerics.budget import FORWARD, GRADIENT
from tests.numerics.eager import FORMULAS, visible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # said once in a thread by torch 2.11
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # its compiler imports it
]

RULES = ("delta", "efla")
SAMPLES = 50  # of each shape: 250 a rule and dtype; four widths, since every one is compiled anew
SHAPES = ((1, 16), (63, 16), (65, 33), (200, 64), (129, 128))
every_rule = pytest.mark.parametrize("rule", RULES)


def cases(tokens: int, dim: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v [SAMPLES, 2, tokens, dim] and beta: keys from unlike to nearly equal, values with and without a mean, one
    large first key in four, and a beta of 1 for a third.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator)

    def choice(*options: float) -> Tensor:
        picked = torch.randint(len(options), (SAMPLES, 1, 1, 1), device="cuda", generator=generator)
        return torch.tensor(options, device="cuda", dtype=torch.float64)[picked]

    shape = SAMPLES, 2, tokens, dim
    q, k, v = random(*shape) * choice(0.01, 0.3, 1), random(*shape) * choice(0.1, 1), random(*shape)
    k[:, :, :1] *= choice(1, 1, 1, 30)
    offsets = choice(0, 1), choice(0, 1, 3), choice(0, 1, 20)
    beta = torch.rand(shape[:3], device="cuda", dtype=torch.float64, generator=generator)
    beta = torch.where(choice(0, 0, 1)[..., 0] > 0, 1.0, beta)
    return [*((x + offset).to(dtype) for x, offset in zip((q, k, v), offsets, strict=True)), beta.to(dtype)]


def run(rule: str, leaves: list[Tensor], backend: str, **call: Any) -> Tensor:
    q, k, v, beta = leaves
    if backend == "plain":
        return FORMULAS[rule](q, k, v, visible(q, k, True), {"beta": beta})
    return softless.attention(q, k, v, rule, is_causal=True, inputs={"beta": beta}, backend=backend, **call)


def hold(rule: str, given: list[Tensor]) -> list[str]:
    """What is out of budget, sample by sample."""
    upstream, found, dtype = torch.randn_like(given[2]), [], given[0].dtype
    ways = ((torch.float64, "torch"), (dtype, "triton"), (dtype, "plain"), (torch.float32, "torch"))
    for kind, backend in ways:
        leaves = [x.to(kind, copy=True).requires_grad_() for x in given]
        out = run(rule, leaves, backend)
        grads = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
        found.append([out.detach(), *grads[:3], grads[3][..., None]])
    fits, wrong = torch.ones(SAMPLES, dtype=torch.bool, device="cuda"), []
    for name, exact, ours, theirs, float32 in zip(("o", "dq", "dk", "dv", "dbeta"), *found, strict=True):
        bar = FORWARD if name == "o" else GRADIENT
        small = exact.abs().amax((1, 2, 3)) < torch.finfo(dtype).max
        fits, error = fits & small, ulps(ours, exact)
        allowed = torch.minimum(bar["ratio"] * ulps(theirs, exact), torch.tensor(bar["ulps"], device="cuda")) + 1
        failed = fits & resolved(float32, exact, dtype) & (error > allowed)
        wrong += [
            f"{name}[{sample}]: {error[sample]:.1f} ulp, allowed {allowed[sample]:.1f}"
            for sample in failed.nonzero().flatten().tolist()
        ]
    return wrong


@every_half
@every_rule
def test_250_random_delta_calls_are_within_budget(rule: str, dtype: torch.dtype) -> None:
    wrong = {}
    for seed, (tokens, dim) in enumerate(SHAPES):
        if found := hold(rule, cases(tokens, dim, dtype, seed)):
            wrong[tokens, dim] = found
    assert not wrong, wrong


@every_rule
@pytest.mark.parametrize("dim", [16, 48, 128])
def test_float32_delta_calls_are_good_to_five_digits(rule: str, dim: int) -> None:
    shapes = (4, 300, dim), (2, 300, dim), (2, 300, dim), (2, 300)
    given = [torch.randn(2, *shape, device="cuda") for shape in shapes[:3]]
    given.append(torch.rand(2, *shapes[3], device="cuda"))
    mask = torch.arange(300, device="cuda") >= torch.tensor([[70], [0]], device="cuda")
    found = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        out = run(rule, leaves, backend, key_mask=mask)
        found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    for exact, ours in zip(*found, strict=True):
        assert (ours - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@every_rule
@pytest.mark.parametrize("kind", HALF)
def test_65536_tokens_of_the_delta_rule_stay_within_budget(rule: str, kind: str) -> None:
    given = [torch.randn(1, 2, 65_536, 64, device="cuda") for _ in range(3)]
    given = [x.to(HALF[kind]) for x in (*given, torch.rand(1, 2, 65_536, device="cuda"))]
    exact = run(rule, [x.double() for x in given], "torch")
    assert ulps(run(rule, given, "triton"), exact).max() <= 5


@every_rule
@pytest.mark.parametrize("kind", HALF)
def test_100_repeats_of_a_delta_call_are_bitwise_equal(rule: str, kind: str) -> None:
    shape = 8, 4, 1000, 64
    given = [torch.randn(shape, device="cuda") for _ in range(3)]
    leaves = [x.to(HALF[kind]).requires_grad_() for x in (*given, torch.rand(shape[:3], device="cuda"))]

    def once() -> tuple[Tensor, ...]:
        out = run(rule, leaves, "triton")
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    first = once()
    for _ in range(99):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@every_rule
def test_a_delta_state_continues_anywhere_and_carries_gradients(rule: str) -> None:
    """Cut at 90 and then token by token, against the whole in float64."""
    given = [torch.randn(3, heads, 96, 32, device="cuda").bfloat16() for heads in (4, 2, 2)]
    given.append(torch.rand(3, 2, 96, device="cuda").bfloat16())
    wide = [x.double().requires_grad_() for x in given]
    leaves = [x.requires_grad_() for x in given]
    whole = run(rule, wide, "torch")
    state, parts = None, []
    for cut in (slice(0, 90), *(slice(i, i + 1) for i in range(90, 96))):
        q, k, v, beta = (x[:, :, cut] for x in leaves)
        out, state = softless.attention_with_state(q, k, v, rule, state, inputs={"beta": beta}, backend="triton")
        parts.append(out)
    out = torch.cat(parts, 2)
    assert state is not None
    assert state.n.flatten().tolist() == [96]
    assert ulps(out.detach(), whole.detach()).max() <= 5
    grads = [torch.autograd.grad(x, y, torch.ones_like(x)) for x, y in ((out, leaves), (whole, wide))]
    for ours, exact in zip(*grads, strict=True):
        assert (ours - exact).abs().max() <= 9 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_a_delta_call_beyond_two_to_the_31_numbers_matches_its_halves() -> None:
    """R6: 528 x 16 heads x 4096 tokens x 64 is 2.2e9 numbers a tensor."""
    q, k, v = (torch.randn(528, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    beta = torch.rand(528, 16, 4096, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    whole = run("delta", [q, k, v, beta], "triton")
    for half in (slice(0, 264), slice(264, 528)):
        assert torch.equal(whole[half], run("delta", [x[half] for x in (q, k, v, beta)], "triton"))


@every_rule
def test_a_compiled_delta_call_equals_the_eager_one(rule: str) -> None:
    leaves = [torch.randn(2, 4, 300, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    leaves.append(torch.rand(2, 4, 300, device="cuda").requires_grad_())
    outs = [f(rule, leaves, "triton") for f in (run, torch.compile(run, fullgraph=True))]
    grads = [torch.autograd.grad(out.float().square().sum(), leaves) for out in outs]
    assert torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_auto_runs_the_delta_kernels_and_backend_triton_says_why_it_cannot() -> None:
    q, k, v = (torch.randn(1, 2, 70, 32, device="cuda").bfloat16() for _ in range(3))
    beta = torch.rand(1, 2, 70, device="cuda")
    assert torch.equal(run("efla", [q, k, v, beta], "auto"), run("efla", [q, k, v, beta], "triton"))
    wide = torch.randn(1, 2, 70, 129, device="cuda")
    with pytest.raises(SoftlessError, match="up to 128"):
        run("delta", [wide, wide, wide, beta], "triton")
    assert run("delta", [wide, wide, wide, beta], "auto").shape == wide.shape
    torch.cuda.synchronize()
