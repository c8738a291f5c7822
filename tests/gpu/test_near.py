"""The kernels of near and far tokens on a CUDA device. The truth is PyTorch in float64, held to weights by the laws."""

import pytest
import torch
from torch import Tensor

import softless
from softless import attention_with_state, mechanism
from tests.gpu.test_kernels import HALF, every_half, resolved, ulps
from tests.numerics.budget import FORWARD, GRADIENT
from tests.numerics.eager import nearfar, visible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # said once in a thread by torch 2.11
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # its compiler imports it
]

WINDOW, FIRST = 40, 3
MADE = mechanism("nearfar", window=WINDOW, first=FIRST)
SAMPLES = 50
SHAPES = ((1, 16), (63, 16), (65, 33), (200, 64), (129, 64))


def draw(samples: int, tokens: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v [samples, 2, tokens, dim], the gain and the maps: values of some samples have a mean."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator)

    q, k, v = (random(samples, 2, tokens, dim) for _ in "qkv")
    v[1::2] += 20
    learned = [random(*shape) / 2 for shape in MADE.input_shapes(2, dim).values()]
    return [x.to(dtype) for x in (q, k, v, *learned)]


def run(leaves: list[Tensor], backend: str) -> Tensor:
    q, k, v, *learned = leaves
    inputs = dict(zip(MADE.input_shapes(2, q.shape[3]), learned, strict=True))
    if backend == "plain":
        with torch.device("cuda"):
            return nearfar(WINDOW, FIRST)(q, k, v, visible(q, k, True), inputs)
    return softless.attention(q, k, v, MADE, is_causal=True, inputs=inputs, backend=backend)


@every_half
def test_250_random_calls_are_within_budget(dtype: torch.dtype) -> None:
    wrong = []
    for seed, (tokens, dim) in enumerate(SHAPES):
        given, found = draw(SAMPLES, tokens, dim, dtype, seed), []
        upstream = torch.randn_like(given[2])
        for kind, backend in (
            (torch.float64, "torch"), (dtype, "triton"), (dtype, "plain"), (torch.float32, "torch")
        ):  # fmt: skip
            leaves = [x.to(kind, copy=True).requires_grad_() for x in given]
            out = run(leaves, backend)
            found.append([out.detach(), *torch.autograd.grad(out, leaves[:3], upstream.to(out.dtype))])
        for name, exact, ours, theirs, float32 in zip(("o", "dq", "dk", "dv"), *found, strict=True):
            bar, error = FORWARD if name == "o" else GRADIENT, ulps(ours, exact)
            most = torch.tensor(bar["ulps"], device="cuda")
            allowed = torch.minimum(bar["ratio"] * ulps(theirs, exact), most) + 1
            failed = resolved(float32, exact, dtype) & (error > allowed)
            wrong += [
                f"{name} of {tokens} x {dim}: {error[i]:.1f} ulp, allowed {allowed[i]:.1f}"
                for i in failed.nonzero().flatten().tolist()
            ]
    assert not wrong, wrong


@pytest.mark.parametrize("dim", [16, 48, 64])
def test_float32_calls_are_good_to_five_digits(dim: int) -> None:
    given, found = draw(2, 3000, dim, torch.float32), []
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        out = run(leaves, backend)
        found.append([out.detach(), *torch.autograd.grad(out.sin().mean(), leaves)])
    for exact, ours in zip(*found, strict=True):
        assert (ours - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("dim", [64, 128])
def test_65536_tokens_stay_within_budget(kind: str, dim: int) -> None:
    given = draw(1, 65_536, dim, HALF[kind])
    with torch.no_grad():
        assert ulps(run(given, "triton"), run([x.double() for x in given], "torch")).max() <= 5


@pytest.mark.parametrize("kind", HALF)
def test_50_repeats_of_a_call_are_bitwise_equal(kind: str) -> None:
    leaves = [x.requires_grad_() for x in draw(8, 3000, 64, HALF[kind])]

    def once() -> tuple[Tensor, ...]:
        out = run(leaves, "triton")
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    first = once()
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_a_prompt_and_pieces_match_one_call() -> None:
    q, k, v, *learned = draw(2, 500, 64, torch.bfloat16)
    inputs, state, found = dict(zip(MADE.input_shapes(2, 64), learned, strict=True)), None, []
    with torch.no_grad():
        for start, stop in ((0, 400), (400, 499), (499, 500)):
            pieces = (x[:, :, start:stop] for x in (q, k, v))
            out, state = attention_with_state(*pieces, MADE, state, inputs=inputs, backend="triton")
            found.append(out)
        assert ulps(torch.cat(found, 2), run([x.double() for x in (q, k, v, *learned)], "torch")).max() <= 2
