"""The kernels on a CUDA device: 500 cases a mechanism, many at a time, each held to R3 by itself.

A batch is a draw of cases: every sample has its own scale and its own offsets. The truth is the explicit weights in
float64; `eager` is the published formula in the dtype that comes in.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import softless
from softless.errors import SoftlessError
from tests.kernels.cases import CASES, FAMILIES, SIGN_CHANGING
from tests.kernels.test_layouts import LAYOUTS, laid_out
from tests.kernels.test_layouts import run as layout_run
from tests.kernels.test_transforms import TRANSFORMS, forward
from tests.numerics.budget import FORWARD, GRADIENT
from tests.numerics.eager import visible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # said once in a thread by torch 2.11
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # its compiler imports it
]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLES = 50  # of each of ten shapes; five widths, since every one is compiled anew
SHAPES = ((1, 16), (300, 16), (17, 20), (65, 20), (130, 33), (400, 33), (64, 64), (197, 64), (257, 64), (33, 128))
STABLE = [name for name in CASES if name not in SIGN_CHANGING]
CAUSAL = [name for name in STABLE if "exp" not in name or name in ("linear-exp", "linear-exp-half")]

every_half = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)


def cases(tokens: int, dim: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v [SAMPLES, 2, tokens, dim]: scales 0.01 to 3, offsets of 0, 1 and 20, one large first token in four."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator)

    def choice(*options: float) -> Tensor:
        picked = torch.randint(len(options), (SAMPLES, 1, 1, 1), device="cuda", generator=generator)
        return torch.tensor(options, device="cuda", dtype=torch.float64)[picked]

    shape = SAMPLES, 2, tokens, dim
    q, k, v = random(*shape) * choice(0.01, 0.3, 1, 3), random(*shape) * choice(0.1, 1), random(*shape)
    k[:, :, :1] *= choice(1, 1, 1, 30)
    offsets = choice(0, 1), choice(0, 1, 3), choice(0, 1, 20)
    return [(x + offset).to(dtype) for x, offset in zip((q, k, v), offsets, strict=True)]


def ulps(actual: Tensor, exact: Tensor) -> Tensor:
    """Largest error of each sample in units of eps * max |exact|; infinite where it is not finite."""
    size = torch.finfo(actual.dtype).eps * exact.abs().amax((1, 2, 3)).clamp(min=torch.finfo(actual.dtype).tiny)
    error = (actual.double() - exact).abs().amax((1, 2, 3)) / size
    return torch.where(error.isfinite(), error, torch.inf)


def resolved(float32: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether float32 can tell a sample to a quarter of an ulp of `dtype`; elsewhere the truth's terms cancel.

    They are up to about 1,000, so float64 itself does not tell less than 1e-10 from 0.
    """
    size = exact.abs().amax((1, 2, 3))
    error = (float32.double() - exact).abs().amax((1, 2, 3))
    broken = ~float32.isfinite().all(-1).all(-1).all(-1)
    return broken | (error <= 0.25 * torch.finfo(dtype).eps * size) & (size > 1e-10)


def hold(case: Any, qkv: list[Tensor], is_causal: bool, inputs: dict[str, Tensor] | None = None) -> list[str]:
    """What is out of budget, sample by sample."""
    made, plain = case.mechanism, case.plain
    upstream = torch.randn_like(qkv[2])
    found = []
    for dtype, backend in ((torch.float64, "reference"), (None, "triton"), (None, "plain"), (torch.float32, "torch")):
        parts = []
        for *some, given in zip(
            *(x.split(SAMPLES if backend == "triton" else 5) for x in (*qkv, upstream)), strict=True
        ):
            leaves = [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in some]
            learned = {name: x.to(leaves[0].dtype) for name, x in (inputs or {}).items()}
            if backend == "plain":
                out = plain(*leaves, visible(leaves[0], leaves[1], is_causal), learned)
            else:
                out = softless.attention(*leaves, made, is_causal=is_causal, inputs=learned or None, backend=backend)
            parts.append((out.detach(), *torch.autograd.grad(out, leaves, given.to(out.dtype))))
        found.append([torch.cat(each) for each in zip(*parts, strict=True)])
    fits, wrong = torch.ones(SAMPLES, dtype=torch.bool, device=upstream.device), []
    for name, exact, ours, theirs, float32 in zip(("o", "dq", "dk", "dv"), *found, strict=True):
        bar = FORWARD if name == "o" else GRADIENT
        fits = fits & (exact.abs().amax((1, 2, 3)) < torch.finfo(ours.dtype).max) & resolved(float32, exact, ours.dtype)
        error = ulps(ours, exact)
        allowed = torch.minimum(bar["ratio"] * ulps(theirs, exact), torch.tensor(bar["ulps"], device=error.device)) + 1
        wrong += [
            f"{name}[{sample}]: {error[sample]:.1f} ulp, allowed {allowed[sample]:.1f}"
            for sample in (fits & (error > allowed)).nonzero().flatten().tolist()
        ]
    return wrong


@every_half
@pytest.mark.parametrize("case", STABLE)
def test_500_random_calls_are_within_budget(case: str, dtype: torch.dtype) -> None:
    wrong = {}
    for seed, (tokens, dim) in enumerate(SHAPES):
        if found := hold(
            CASES[case], cases(min(tokens, 130) if case == "efficient" else tokens, dim, dtype, seed), False
        ):
            wrong[tokens, dim] = found
    assert not wrong, wrong


@every_half
@pytest.mark.parametrize("case", CAUSAL)
def test_500_random_causal_calls_are_within_budget(case: str, dtype: torch.dtype) -> None:
    wrong = {}
    for seed, (tokens, dim) in enumerate(SHAPES):
        if found := hold(
            CASES[case], cases(min(tokens, 130) if case == "efficient" else tokens, dim, dtype, seed), True
        ):
            wrong[tokens, dim] = found
    assert not wrong, wrong


def cancelling(tokens: int, dim: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Keys that oppose the query, by noise of 0.3 to 0.01, are nearly equal, equal or zero: a fifth of the samples each
    for two noises and the rest.
    """
    torch.manual_seed(seed)
    u = torch.randn(SAMPLES, 2, 1, dim, device="cuda", dtype=torch.float64)
    q, k, v = (torch.randn(SAMPLES, 2, tokens, dim, device="cuda", dtype=torch.float64) for _ in "qkv")
    kind = torch.arange(SAMPLES, device="cuda")[:, None, None, None] % 5
    noise = torch.tensor([0.3, 0.03, 1, 1, 1], device="cuda", dtype=torch.float64)[kind]
    size = torch.tensor([1, 1, 0.001, 0, 0], device="cuda", dtype=torch.float64)[kind]
    apart = torch.where(kind < 2, noise * k - u, torch.where(kind == 3, u, size * k))
    return [x.to(dtype) for x in (torch.where(kind < 2, u + noise * q, q), apart, v)]


@every_half
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "case", ["taylor", "linear-elu", "linear-softmax", "inline-identity", "inline-elu", "none-elu"]
)
def test_1000_calls_whose_mass_cancels_are_within_budget(case: str, is_causal: bool, dtype: torch.dtype) -> None:
    """R32, two seeds of every shape."""
    wrong = {}
    for seed, (tokens, dim) in enumerate(2 * SHAPES):
        if found := hold(CASES[case], cancelling(tokens, dim, dtype, seed), is_causal):
            wrong[tokens, dim, seed] = found
    assert not wrong, wrong


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (50, 2), (300, 64), (5000, 64)])
def test_taylor_reads_the_mean_where_every_key_opposes_the_query(tokens, dim, dtype, is_causal) -> None:
    u = torch.randint(1, 9, (2, 3, 1, dim), device="cuda") / 8
    powers = 2.0 ** torch.randint(-3, 4, (2, 2, 3, tokens, 1), device="cuda")
    v = torch.randn(2, 3, tokens, 32, device="cuda").to(dtype)
    found = softless.attention((u * powers[0]).to(dtype), (-u * powers[1]).to(dtype), v, "taylor", is_causal=is_causal)
    seen = torch.arange(1, tokens + 1, device="cuda")[:, None]
    mean = v.double().cumsum(2) / seen if is_causal else v.double().mean(2, True)
    assert (found - mean).abs().max() <= 4 * torch.finfo(dtype).eps * v.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("turn", range(len(LAYOUTS)))
def test_layouts_give_what_contiguous_copies_give(family: str, turn: int) -> None:
    """R31: inputs and the upstream gradient, each in another layout."""
    drawn = [x.cuda() for x in (torch.randn(2, 2, 6, 4), *FAMILIES[family].draw())]
    given = laid_out(drawn, turn)
    for mine, right in zip(
        layout_run(family, *given), layout_run(family, *(x.contiguous() for x in given)), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # as torch 2.11 says it
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_auto_gives_the_right_derivative_under_every_transform(family: str, transform: str) -> None:
    """R30: reverse mode on the kernels, all else on torch."""
    tensors, along = ([x.cuda() for x in FAMILIES[family].draw()] for _ in range(2))
    wide = [[x.double() for x in each] for each in (tensors, along)]
    right = TRANSFORMS[transform](forward(family, "torch"), *wide)
    for mine, exact in zip(TRANSFORMS[transform](forward(family, "auto"), tensors, along), right, strict=True):
        assert (mine - exact).abs().max() <= 1e-4 * (1 + exact.abs().max())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["linear", "inline", "taylor", "efficient"])
def test_float32_is_good_to_five_digits(name: str, is_causal: bool) -> None:
    qkv = [x.cuda() for x in torch.randn(3, 2, 3, 500, 48).unbind()]
    exact = softless.attention(*(x.double() for x in qkv), name, is_causal=is_causal, backend="reference")
    found = softless.attention(*qkv, name, is_causal=is_causal, backend="triton")
    assert (found - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["linear", "inline", "efficient"])
def test_65536_tokens_stay_within_budget(name: str, is_causal: bool) -> None:
    """Against torch in float64, which is linear too; values and keys have a mean."""
    qkv = [(torch.randn(1, 2, 65_536, 64, device="cuda") + offset).bfloat16() for offset in (0, 1, 20)]
    exact = softless.attention(*(x.double() for x in qkv), name, is_causal=is_causal, backend="torch")
    found = softless.attention(*qkv, name, is_causal=is_causal, backend="triton")
    assert ulps(found, exact).max() <= 5


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["linear", "inline", "efficient"])
@pytest.mark.parametrize(("batch", "tokens", "repeats"), [(64, 197, 250), (1, 5000, 100)])
def test_repeats_are_bitwise_equal(name: str, is_causal: bool, batch: int, tokens: int, repeats: int) -> None:
    leaves = [torch.randn(batch, 4, tokens, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def run() -> tuple[Tensor, ...]:
        out = softless.attention(*leaves, name, is_causal=is_causal, backend="triton")
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    first = run()
    for _ in range(repeats - 1):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_call_beyond_two_to_the_31_numbers_matches_its_halves(is_causal: bool) -> None:
    """R6: 528 x 16 heads x 4096 tokens x 64 is 2.2e9 numbers a tensor."""
    q, k, v = (torch.randn(528, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    whole = softless.attention(q, k, v, "linear", is_causal=is_causal, backend="triton")
    for half in (slice(0, 264), slice(264, 528)):
        part = softless.attention(q[half], k[half], v[half], "linear", is_causal=is_causal, backend="triton")
        assert torch.equal(whole[half], part)


def test_a_head_of_more_than_two_to_the_31_numbers_reads_its_last_token() -> None:
    """Keys and values are zero but for the last token: every sum is known."""
    tokens = 2**25 + 77
    k, v = (torch.zeros(1, 1, tokens, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.zeros_like(k)
    k[..., -1, :], v[..., -1, :], q[..., -1, :] = 1, 1, 1
    found = softless.attention(q, k, v, softless.mechanism("linear", phi="relu"), backend="triton")
    assert (found[..., -1, :] == 1).all()
    assert found[..., :-1, :].abs().max() < 1e-6  # they read the mean, 1 / tokens


@pytest.mark.parametrize("name", ["linear", "inline", "efficient"])
def test_the_compiled_call_equals_the_eager_one(name: str) -> None:
    leaves = [torch.randn(2, 4, 300, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    compiled = torch.compile(softless.attention, fullgraph=True)
    for is_causal in (False, True):
        outs = [run(*leaves, name, is_causal=is_causal, backend="triton") for run in (softless.attention, compiled)]
        grads = [torch.autograd.grad(out.float().square().sum(), leaves) for out in outs]
        assert torch.equal(*outs)
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_decode_step_continues_from_a_prompt() -> None:
    q, k, v = (torch.randn(3, 4, 100, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    whole = softless.attention(q.double(), k.double(), v.double(), "linear", is_causal=True, backend="reference")
    state, found = None, []
    for cut in (slice(0, 90), *(slice(i, i + 1) for i in range(90, 100))):
        out, state = softless.attention_with_state(
            q[:, :, cut], k[:, :, cut], v[:, :, cut], "linear", state, backend="triton"
        )
        found.append(out)
    assert ulps(torch.cat(found, 2), whole).max() <= 5


def test_bad_input_is_refused_and_never_faults() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, device="cuda") for _ in range(3))
    for bad in ((q.cpu(), k, v), (q.half(), k, v), (q, k[..., :8], v), (q[0], k, v)):
        with pytest.raises(SoftlessError):
            softless.attention(*bad, "linear", backend="triton")
    with pytest.raises(SoftlessError, match="256"):
        softless.attention(*(x.repeat(1, 1, 1, 17) for x in (q, k, v)), "linear", backend="triton")
    assert softless.attention(q[:0], k[:0], v[:0], "linear", backend="triton").shape == (0, 2, 40, 16)
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    assert torch.equal(
        softless.attention(*turned, "linear", backend="triton"), softless.attention(q, k, v, "linear", backend="triton")
    )
    torch.cuda.synchronize()
