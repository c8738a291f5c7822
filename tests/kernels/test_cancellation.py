"""What cancels is defined: R32.

Keys that oppose the query, lie on one line, are equal or zero, and scales of any sign and size, for every reader of the
kernels: the mean where the mass is lost in rounding, R3's budget elsewhere. The truth is the explicit weights in
float64. Numbers are held to the budget where float32 can tell them to a quarter of an ulp. Elsewhere the truth is a
difference that float32 does not resolve, and results are finite.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from softless import attention, attention_weights, attention_with_state
from tests.kernels.cases import CASES, INLINE_ELU, LINEAR_SOFTMAX, SIGN_CHANGING, Outcome, run, truth
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget, worst
from tests.numerics.eager import visible
from tests.numerics.test_precision import fits, resolved

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
]

READERS = ("linear-elu", "linear-relu", "linear-identity", LINEAR_SOFTMAX, "taylor", "efficient", "none-elu")
READERS = (*READERS, "inline-identity", INLINE_ELU, "linear-exp", "inline-softmax")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS, WIDTH = 20, 16
KEYS = ("opposed", "nearly opposed", "collinear", "equal", "nearly equal", "zero")
SCALES = (-2.0, 0.0, 1e4)


def draw(keys: str) -> list[Tensor]:
    """float64 q, k, v; the common direction has four bits a channel, so collinear keys are exact in every dtype."""
    u = torch.randint(-8, 9, (1, 1, 1, WIDTH)).double() / 8
    q, k, v = torch.randn(3, 1, 1, TOKENS, WIDTH, dtype=torch.float64).unbind()
    powers = 2.0 ** torch.randint(-3, 4, (2, 1, 1, TOKENS, 1))
    noise = 0.3 if keys == "opposed" else 0.03
    return {
        "opposed": [u + noise * q, -u + noise * k, v],
        "nearly opposed": [u + noise * q, -u + noise * k, v],
        "collinear": [u * powers[0], -u * powers[1], v],
        "equal": [q, u.expand_as(k), v],
        "nearly equal": [q, 0.001 * k, v],
        "zero": [q, torch.zeros_like(k), v],
    }[keys]


def judged(case: str, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """Rows whose denominator keeps away from zero, or is exactly zero; R3 exempts what lies between."""
    weights = attention_weights(q.double(), k.double(), CASES[case].mechanism, is_causal=is_causal)
    return weights.abs().sum(-1) <= 10 if case in SIGN_CHANGING else weights[..., 0].isfinite()


def plain(case: str, qkv: list[Tensor], upstream: Tensor, is_causal: bool) -> Outcome:
    """The published formula, typed out, in the dtype of its inputs."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = CASES[case].plain(*leaves, visible(leaves[0], leaves[1], is_causal), {})
    return Outcome(out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def hold(case: str, qkv: list[Tensor], is_causal: bool, **call: float) -> None:
    dtype = qkv[0].dtype
    rows = judged(case, *qkv[:2], is_causal)[..., None]
    upstream = (torch.randn(qkv[2].shape) * rows).to(dtype)
    exact = truth(case, qkv, upstream, is_causal=is_causal, **call)
    if not all(fits(x, dtype) for x in exact):
        return
    ours = run(case, qkv, upstream, is_causal=is_causal, **call)
    single = run(case, [x.float() for x in qkv], upstream, "torch", is_causal=is_causal, **call)
    ours, exact, single = (Outcome(x.out * rows, *x[1:]) for x in (ours, exact, single))
    if dtype == torch.float32:
        for name, mine, right, theirs in zip(Outcome._fields, ours, exact, single, strict=True):
            allowed = 4 * worst(theirs, right) + 1e-5 * (1 + right.abs().max().item())
            assert worst(mine, right) <= allowed, f"{name}: off by {worst(mine, right):.1e}, allowed {allowed:.1e}"
        return
    eager = single._replace(**dict.fromkeys(Outcome._fields, torch.tensor(torch.nan)))
    if not call:
        eager = plain(case, qkv, upstream, is_causal)
        eager = eager._replace(out=eager.out * rows)
    for name, mine, right, theirs, float32 in zip(Outcome._fields, ours, exact, eager, single, strict=True):
        assert mine.isfinite().all(), name
        if resolved(float32, right, dtype):
            assert_within_budget(mine, right, theirs, **(FORWARD if name == "out" else GRADIENT), name=name)


def forms(case: str) -> tuple[bool, ...]:
    return (False,) if "exp" in case or case == "efficient" else (False, True)


def every_cell() -> Iterator[object]:
    """Dtypes and forms in turn, taylor's forms both; make slow takes all, from five seeds."""
    turn = 0
    for case in READERS:
        for keys in KEYS:
            turn += 1
            for is_causal in forms(case):
                for i, dtype in enumerate(DTYPES):
                    chosen = i == (turn + is_causal) % 3 and (
                        case == "taylor" or len(forms(case)) == 1 or turn % 2 == is_causal
                    )
                    marks = [] if chosen else [pytest.mark.slow]
                    form = "causal" if is_causal else "all"
                    yield pytest.param(case, keys, is_causal, dtype, id=f"{case}-{keys}-{form}-{dtype}", marks=marks)


@pytest.mark.parametrize(("case", "keys", "is_causal", "dtype"), list(every_cell()))
def test_keys_that_cancel_stay_within_the_budget(request, case, keys, is_causal, dtype):
    slow = request.node.get_closest_marker("slow") is not None
    for seed in range(5 if slow else 1):
        torch.manual_seed(seed)
        hold(case, [x.to(DTYPES[dtype]) for x in draw(keys)], is_causal)


@pytest.mark.parametrize("case", ["inline-identity", INLINE_ELU, "none-elu"])
@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_of_any_sign_and_size_stays_within_the_budget(case, scale):
    is_causal = scale < 0 if case == "inline-identity" else scale >= 0
    hold(case, [x.to(torch.bfloat16) for x in draw("opposed")], is_causal, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (7, 2), (20, 16)])
def test_taylor_reads_the_mean_where_every_key_opposes_the_query(dtype, is_causal, tokens, width):
    u = torch.randint(1, 9, (1, 1, 1, width)) / 8
    powers = 2.0 ** torch.randint(-3, 4, (2, 1, 1, tokens, 1))
    q, k, v = (x.to(DTYPES[dtype]) for x in (u * powers[0], -u * powers[1], torch.randn(1, 1, tokens, 3)))
    found = attention(q, k, v, "taylor", is_causal=is_causal, backend="triton")
    mean = v.double().cumsum(2) / torch.arange(1, tokens + 1)[:, None] if is_causal else v.double().mean(2, True)
    assert worst(found, mean.expand(v.shape)) <= torch.finfo(DTYPES[dtype]).eps * 4 * v.abs().max()


def test_a_decoded_token_reads_the_mean_where_every_key_opposes_the_query():
    u = torch.tensor([3.0, -1.0, 2.0])
    k, v = -u.expand(1, 1, 6, 3), torch.randn(1, 1, 6, 3)
    _, state = attention_with_state(k[:, :, :5], k[:, :, :5], v[:, :, :5], "taylor", backend="triton")
    found, _ = attention_with_state(
        2 * u.expand(1, 1, 1, 3), k[:, :, 5:], v[:, :, 5:], "taylor", state, backend="triton"
    )
    assert worst(found, v.double().mean(2, True)) <= 1e-6


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_identity_query_orthogonal_to_every_key_reads_the_mean(is_causal):
    """Its mass, a sum over channels, is nothing but rounding: 0.1 * 0.3 - 0.3 * 0.1 and the like."""
    q = torch.tensor([0.1, 0.7, 0.3]).expand(1, 1, 5, 3)
    k = torch.tensor([0.7, -0.1, 0.0]).expand(1, 1, 5, 3) * (1 + torch.arange(5.0))[:, None]
    v = torch.randn(1, 1, 5, 3)
    mean = v.double().cumsum(2) / torch.arange(1, 6)[:, None] if is_causal else v.double().mean(2, True).expand(v.shape)
    for backend in ("triton", "torch", "reference"):
        made = CASES["linear-identity"].mechanism
        assert worst(attention(q, k, v, made, is_causal=is_causal, backend=backend), mean) <= 1e-5
