"""The kernels in half precision are as good as the dtype allows (R3), finite (R4) and repeatable (R10).

`tests/numerics/budget.py` has the bars, `tests/numerics/eager.py` the formulas as anyone would type them.
"""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import CASES, CHOSEN, REGIMES, Outcome, assert_same, draw, judged, regime, run, truth
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget
from tests.numerics.test_finite import DTYPES, SCALES, representable
from tests.numerics.test_precision import HALF, fits, resolved

pytestmark = [
    pytest.mark.kernels,
    # numpy says it where a GPU says nothing: in branches not taken, and where the true answer overflows.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


def outlier(x: Tensor) -> Tensor:
    return torch.cat([100 * x[:, :, :1], x[:, :, 1:]], 2)


def sink(x: Tensor) -> Tensor:
    """Its exponential is 22,000 times the others': the output is nearly one token's value, and far from the mean."""
    return torch.cat([x[:, :, :1] + 10, x[:, :, 1:]], 2)


FAMILIES = {
    "plain": lambda q, k, v: (q, k, v),
    "values with a mean": lambda q, k, v: (q, k, v + 20),
    "keys with a mean": lambda q, k, v: (q, k + 20, v),
    "keys and values with a mean": lambda q, k, v: (q, k + 20, v + 20),
    "an outlier first": lambda q, k, v: (q, outlier(k), outlier(v)),
    "a key that dominates": lambda q, k, v: (q, sink(k), v),
    "small": lambda q, k, v: (q / 100, k / 100, v / 100),
    "large": lambda q, k, v: (10 * q, 10 * k, 10 * v),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_case = pytest.mark.parametrize("case", CASES)
both_halves = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)


def plain(case: str, qkv: list[Tensor], upstream: Tensor) -> Outcome:
    """The published formula, typed out, in the dtype of its inputs."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in qkv]
    out = CASES[case].plain(q, k, v, q.new_ones(q.shape[2], k.shape[2]), {})
    return Outcome(out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def question(case: str, family: str, dtype: torch.dtype, tokens: int, dims: tuple[int, int]) -> list[Tensor]:
    """A draw of the family, q and k halved until the true output fits the dtype: e^k overflows where k has mean 20."""
    q, k, v = FAMILIES[family](*draw(tokens, dims=dims))
    while True:
        asked = [x.to(dtype) for x in (q, k, v)]
        rows = judged(case, *asked[:2])
        exact = truth(case, asked, torch.zeros(*q.shape[:3], v.shape[3]))
        if rows.any() and fits(8 * exact.out[rows], dtype):
            return asked
        q, k = (q / 2, k / 2) if rows.any() else draw(tokens, dims=dims)[:2]


def hold_to_budget(case: str, qkv: list[Tensor]) -> None:
    """R3 for the output and, where float32 can tell them to a quarter of an ulp, the gradients."""
    dtype, rows = qkv[0].dtype, judged(case, *qkv[:2])
    upstream = (torch.randn(*qkv[0].shape[:3], qkv[2].shape[3]) * rows[..., None]).to(dtype)
    exact, ours, eager = truth(case, qkv, upstream), run(case, qkv, upstream), plain(case, qkv, upstream)
    single = run(case, [x.float() for x in qkv], upstream, "torch")
    assert ours.out.dtype == dtype
    assert_within_budget(ours.out[rows], exact.out[rows], eager.out[rows], **FORWARD, name="output")
    every = (x[1:] for x in (Outcome._fields, exact, ours, eager, single))
    for name, right, mine, theirs, float32 in zip(*every, strict=True):
        assert mine.dtype == dtype
        if fits(right, dtype) and normal(right, dtype) and resolved(float32, right, dtype):
            assert_within_budget(mine, right, theirs, **GRADIENT, name=name)


def normal(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether an ulp of the largest is a number: below this, float16 is a fixed-point format."""
    return x.abs().max().item() >= torch.finfo(dtype).tiny


HARDEST = ("keys and values with a mean", "an outlier first")


def pairs() -> Iterator[object]:
    """The hardest families and half of the others for a chosen case, one of the hardest for another; dtypes in turn.

    Make slow takes all pairs, in both dtypes and every regime.
    """
    for (i, case), (j, family) in product(enumerate(CASES), enumerate(FAMILIES)):
        if family in HARDEST:
            taken = case in CHOSEN or family == HARDEST[i // 2 % 2]
        else:
            taken = case in CHOSEN and (i + j) % 4 < 2
        if taken:
            dtype = list(HALF)[(i + j) % 2]
            yield pytest.param(case, family, HALF[dtype], id=f"{case}-{family}-{dtype}")


@pytest.mark.parametrize(("case", "family", "dtype"), list(pairs()))
def test_half_precision_stays_within_budget(case, family, dtype):
    hold_to_budget(case, question(case, family, dtype, 48, (8, 5)))


@pytest.mark.parametrize(("case", "dtype"), [("linear-elu", torch.bfloat16), ("inline-identity", torch.float16)])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # the plain formula's, on an old CPU
def test_half_precision_stays_within_budget_beyond_whole_heads(case, dtype):
    hold_to_budget(case, question(case, "keys and values with a mean", dtype, 257, (32, 32)))


@pytest.mark.slow
@every_case
@every_family
@both_halves
@pytest.mark.parametrize("cut", REGIMES)
@pytest.mark.parametrize(("tokens", "dims"), [(70, (8, 5)), (200, (64, 64)), (33, (20, 200))])
def test_half_precision_stays_within_budget_in_every_regime(case, family, dtype, cut, tokens, dims):
    with regime(cut):
        hold_to_budget(case, question(case, family, dtype, tokens, dims))


def cells(chosen: Tensor, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """One sample a cell of R4's grid: q, k in {0, 1e-4, 1, 1e4}, v in {0, 1, 1e4}."""
    qkv = (torch.randn(len(chosen), 1, tokens, 3, dtype=torch.float64) for _ in "qkv")
    return [(x * size[:, None, None, None]).to(dtype) for x, size in zip(qkv, chosen.T, strict=True)]


def hold_finite(case: str, chosen: Tensor, tokens: int, dtype: torch.dtype) -> None:
    """Finite unless the truth overflows; an output that overflows has no use for gradients."""
    qkv = cells(chosen, tokens, dtype)
    rows = judged(case, *qkv[:2])[..., None]
    exact = truth(case, qkv, torch.zeros(qkv[0].shape)).out
    fit = (representable(exact, dtype) | ~rows).flatten(1).all(1)[:, None, None, None]
    upstream = torch.randn(exact.shape) * (rows & fit)
    right, ours = truth(case, qkv, upstream), run(case, qkv, upstream)
    bad = rows & representable(exact, dtype) & ~ours.out.isfinite()
    assert not bad.any(), f"output of {tokens} tokens {said(bad, chosen)}"
    for name, mine, theirs in zip(("q", "k", "v"), ours[1:], right[1:], strict=True):
        bad = fit & representable(theirs, dtype) & ~mine.isfinite()
        assert not bad.any(), f"gradient of {name}, {tokens} tokens, {said(bad, chosen)}"


def said(bad: Tensor, chosen: Tensor) -> str:
    return f"not finite at (q, k, v) scales {chosen[bad.flatten(1).any(1)].tolist()}"


CORNERS = torch.tensor([[1e4, 1e4, 1e4], [1e4, 0.0, 1e4]], dtype=torch.float64)


@every_case
def test_outputs_and_gradients_are_finite_unless_the_truth_overflows(case):
    """The corners of the grid; lengths and dtypes in turn."""
    turn = list(CASES).index(case)
    hold_finite(case, CORNERS, (17, 2, 1)[turn % 3], list(DTYPES.values())[turn // 3 % 3])


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_outputs_and_gradients_of_every_case_are_finite_unless_the_truth_overflows(case, tokens, dtype):
    hold_finite(case, SCALES, tokens, dtype)


@pytest.mark.parametrize(("low", "reach"), [(-88, 1), (-100, 4), (-1000, 1)])
@pytest.mark.parametrize("far", ["q", "k", "both"])
def test_elu_of_very_negative_numbers_is_finite_with_finite_gradients(low, reach, far):
    """e^-100 is a subnormal float32: neither it nor its reciprocal may turn into an infinity."""
    q, k, v = draw(9, dims=(4, 3))
    q = low + reach * q if far != "k" else q
    k = low + reach * k if far != "q" else k
    assert all(x.isfinite().all() for x in run("linear-elu", (q, k, v), torch.randn_like(v)))


@pytest.mark.parametrize("case", ["none-exp", "inline-exp"])
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_keys_gradient_is_finite_beside_a_key_whose_exponential_is_near_the_largest_number(case, cut):
    """e^84, and a small value of its token: the others' v.d(comoment) overflow; times e^(k - 84) they do not."""
    q, k, v = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2), torch.full((1, 1, 5, 2), 2e3)
    k[:, :, 0], v[:, :, 0], v[:, :, 2::2] = 84, 1e-3, -2e3
    upstream = torch.ones(1, 1, 5, 2)
    with regime(cut):
        ours, exact = run(case, (q, k, v), upstream), truth(case, (q, k, v), upstream)
    assert all(representable(x, torch.float32).all() for x in exact)
    assert all(x.isfinite().all() for x in ours)


def test_repeats_are_bitwise_equal():
    """R10: twenty times, forward and backward."""
    qkv, upstream = draw(3, 5, dims=(3, 2), dtype=torch.float16), torch.randn(1, 1, 3, 2)
    with regime("spans"):
        first = run("efficient", qkv, upstream)
        for _ in range(19):
            assert_same(run("efficient", qkv, upstream), first)


@pytest.mark.parametrize("case", ["linear-elu", "inline-exp-relu", "efficient"])
def test_a_row_does_not_depend_on_its_neighbors(case):
    """R7: a sample alone gives, bit for bit, what it gives in a batch."""
    qkv, upstream = draw(5, 7, batch=2, dims=(3, 2)), torch.randn(2, 1, 5, 2)
    whole, alone = run(case, qkv, upstream), run(case, [x[1:] for x in qkv], upstream[1:])
    assert_same([x[1:] for x in whole], alone)


@both_halves
def test_sums_of_ones_do_not_stall(dtype):
    """In bfloat16 256 + 1 is 256: sums must not be kept in it. elu(1) + 1 is 2, and 4 * 400 has few bits."""
    qkv = [torch.ones(1, 1, tokens, 1).to(dtype) for tokens in (1, 400, 400)]
    assert run("none-elu", qkv, torch.ones(1, 1, 1, 1)).out.item() == 1600
