"""The torch backend on a CUDA device: the numbers of the CPU, in every precision, every time."""

import pytest
import torch

import softless

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # said once in a thread by torch 2.11
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # its compiler imports it
]

MECHANISMS = ("softmax", "linear", "inline", "efficient", "taylor", "hydra", "angular", "focused", "threshold")
SCORED = {
    "topk": softless.mechanism("topk", k=9),
    "sparse": softless.mechanism("sparse", stride=13),
    "sparse fixed": softless.mechanism("sparse", pattern="fixed", stride=16),
    "longformer": softless.mechanism("longformer", window=11, global_tokens=2),
    "reformer": softless.mechanism("reformer", buckets=8, rounds=2, window=16),
    "nonlocal": softless.mechanism("nonlocal", pairing="dot"),
    "linformer": softless.mechanism("linformer", rank=16, length=200),
    "nystrom": softless.mechanism("nystrom", landmarks=8),
    "agent": softless.mechanism("agent", agents=8),
    "soft": softless.mechanism("soft", landmarks=8),
    "asymmetric_nonlocal": softless.mechanism("asymmetric_nonlocal"),
    "emanet": softless.mechanism("emanet", bases=8, detach=False),
}
CALLS = [(name, causal) for name, made in SCORED.items() for causal in (False, True) if made.lacks(causal) is None]
ULPS = 5  # R3: min(2 x eager, 4 ulp) + 1 ulp, and softmax's own kernels are the eager side here


def draw(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(2, 4, tokens, 32, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MECHANISMS)
def test_half_precision_is_within_ulps_of_the_float64_weights(name: str, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = draw(193, dtype)
    exact = softless.attention(q.double(), k.double(), v.double(), name, is_causal=is_causal, backend="reference")
    found = softless.attention(q.cuda(), k.cuda(), v.cuda(), name, is_causal=is_causal)
    assert found.dtype == dtype
    ulp = torch.finfo(dtype).eps * exact.abs().max()
    assert (found.cpu().double() - exact).abs().max() <= ULPS * ulp


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MECHANISMS)
def test_float64_gradients_equal_those_of_the_weights(name: str, is_causal: bool) -> None:
    leaves = [x.cuda().requires_grad_() for x in draw(131, torch.float64)]
    gradients = []
    for backend in ("torch", "reference"):
        out = softless.attention(*leaves, name, is_causal=is_causal, backend=backend)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for fast, exact in zip(*gradients, strict=True):
        assert (fast - exact).abs().max() <= 1e-10 * (1 + exact.abs().max())


@pytest.mark.parametrize(("name", "is_causal"), CALLS)
def test_scored_mechanisms_equal_their_weights(name: str, is_causal: bool) -> None:
    made = SCORED[name]
    shapes = made.input_shapes(4, 32)
    inputs = {name: torch.randn(shape, dtype=torch.float64).cuda() for name, shape in shapes.items()}
    leaves = [x.cuda().requires_grad_() for x in draw(131, torch.float64)]
    mask = torch.arange(131, device="cuda") < torch.tensor([[131], [100]], device="cuda")
    found = []
    for backend in ("torch", "reference"):
        out = softless.attention(*leaves, made, is_causal=is_causal, key_mask=mask, inputs=inputs, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for fast, exact in zip(*found, strict=True):
        assert (fast - exact).abs().max() <= 1e-10 * (1 + exact.abs().max())
    half = [x.detach().half() for x in leaves]
    small = softless.attention(*half, made, is_causal=is_causal, key_mask=mask, inputs=inputs)
    assert small.dtype == torch.float16
    assert small.isfinite().all()


@pytest.mark.parametrize("name", ["linear", "inline", "efficient"])
def test_a_hundred_repeats_are_bitwise_equal(name: str) -> None:
    leaves = [x.cuda().requires_grad_() for x in draw(257, torch.bfloat16)]

    def run() -> tuple[torch.Tensor, ...]:
        out = softless.attention(*leaves, name, is_causal=True)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    first = run()
    for _ in range(99):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("name", ["linear", "inline", "softmax"])
def test_the_compiled_call_equals_the_eager_one(name: str) -> None:
    q, k, v = (x.cuda() for x in draw(193, torch.float32))
    compiled = torch.compile(softless.attention, fullgraph=True)
    for is_causal in (False, True):
        eager = softless.attention(q, k, v, name, is_causal=is_causal)
        torch.testing.assert_close(compiled(q, k, v, name, is_causal=is_causal), eager, rtol=1e-4, atol=1e-4)
