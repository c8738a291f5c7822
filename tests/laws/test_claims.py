"""R13: what the papers claim, and what this library claims about them, as properties."""

import math

import pytest
import torch

import softless
from softless import attention, attention_weights, mechanism
from softless.bench.cost import Shape, Terms, flops
from tests.laws.cases import FORMS, TOLERANCE, Case, ask, every_form, true_answer, true_rows

DRAWS = 1000
COUNTS = [DRAWS, pytest.param(10 * DRAWS, marks=pytest.mark.slow)]
DO_NOT_SUM_TO_ONE = ("hydra", "angular", "delta", "efla", "decay", "transnormer", "mlla", "linformer", "soft", "emanet")
NEARLY = ("nystrom",)  # as far as its inverse has converged
OPTIONS_THAT_DO_NOT = {"normalize": ("none",), "variant": ("t1",), "pairing": ("dot", "concatenation")}
LINES = [(expansion, tail) for expansion in ("max", "mean", "minimax") for tail in ("drop", "mean")]


def sums_to_one(case: Case) -> bool:
    if any(case.options.get(option) in values for option, values in OPTIONS_THAT_DO_NOT.items()):
        return False
    return case.name not in (*DO_NOT_SUM_TO_ONE, *NEARLY)


@every_form
def test_rows_sum_to_one_where_the_mechanism_claims_it(case: Case, is_causal: bool):
    assert case.made.rows_sum_to_one == sums_to_one(case)
    at = ask(case, 40)
    rows = true_rows(case, at, is_causal=is_causal)
    sums = attention_weights(at.q, at.k, case.made, is_causal=is_causal, **at.extra).sum(-1)
    if sums_to_one(case):
        assert ((sums - 1).abs() <= TOLERANCE[torch.float64] * rows.size)[rows.safe].all()
    elif case.name not in NEARLY:
        assert ((sums - 1).abs() > 1e-3).float().mean() > 0.9


@pytest.mark.parametrize(("case", "is_causal"), [each for each in FORMS if sums_to_one(each.values[0])])
def test_a_constant_added_to_the_values_is_added_to_the_output(case: Case, is_causal: bool):
    at = ask(case, 40)
    shifted = at._replace(v=at.v + 5)
    here, there = (attention(*x[:3], case.made, is_causal=is_causal, **at.extra) for x in (at, shifted))
    true = true_answer(case, shifted, is_causal=is_causal)
    error = (there - here - 5).abs()
    assert (error <= 2 * TOLERANCE[torch.float64] * true.bound)[true.safe.expand_as(error)].all()


# Injectivity (InLine, propositions 2 and 3). Rows are compared as the paper does, by their weights.


def pairs_of_rows(made: softless.Mechanism, p: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """|w(p) - w(q)| for each draw: p, q [draws, d], k [draws, keys, d]."""
    weights = attention_weights(torch.stack([p, q], 1)[:, None], k[:, None], made)  # [draws, 1, 2, keys]
    return (weights[:, 0, 0] - weights[:, 0, 1]).norm(dim=-1)


def queries_and_keys(draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(draws, 4, dtype=torch.float64), torch.randn(draws, 9, 4, dtype=torch.float64)


@pytest.mark.parametrize("draws", COUNTS)
def test_divide_confuses_every_pair_of_collinear_queries(draws: int):
    q, k = queries_and_keys(draws)
    longer = q * torch.empty_like(q[:, :1]).uniform_(1.5, 20)
    collide = pairs_of_rows(mechanism("linear", phi="relu"), q, longer, k) <= 1e-12
    assert collide.sum() == draws


@pytest.mark.parametrize("draws", COUNTS)
def test_subtract_confuses_no_two_queries(draws: int):
    """With identity phi and keys of full rank, |w(p) - w(q)| >= (s/n) sigma |p - q| > 0.

    sigma is the smallest singular value of the centered keys.
    """
    q, k = queries_and_keys(draws)
    sigma = torch.linalg.svdvals(k - k.mean(1, keepdim=True))[:, -1]
    assert (sigma > 1e-3).all()  # full rank
    for other in (torch.randn_like(q), q * torch.empty_like(q[:, :1]).uniform_(1.5, 20), -q):
        apart, least = pairs_of_rows(mechanism("inline"), q, other, k), 4**-0.5 / 9 * sigma * (q - other).norm(dim=-1)
        assert (apart < (1 - 1e-9) * least).sum() == 0


@pytest.mark.parametrize("scale", [None, 0.3, -2.0])
def test_inline_with_a_sum_is_equation_4_as_printed(scale: float | None):
    """phi(q).phi(k_j) - mean_s phi(q).phi(k_s) + 1/N, without the factor s/N of the authors' code."""
    q, k = torch.randn(2, 2, 3, 40, 5, dtype=torch.float64).unbind()
    scores = (1.0 if scale is None else scale) * (q @ k.mT)
    printed = scores - scores.mean(-1, keepdim=True) + 1 / 40
    given = attention_weights(q, k, mechanism("inline", gain="sum"), scale=scale)
    torch.testing.assert_close(given, printed, rtol=1e-12, atol=1e-12)
    s = 5**-0.5 if scale is None else scale
    code = attention_weights(q, k, "inline", scale=scale)
    torch.testing.assert_close(attention_weights(q, k, mechanism("inline", gain="sum"), scale=s / 40), code)


def test_inline_has_no_other_gain_and_its_printed_form_no_kernel():
    with pytest.raises(softless.errors.ArgumentError, match="gain 'max' is not one of mean, sum"):
        mechanism("inline", gain="max")
    q, k, v = torch.randn(3, 1, 1, 4, 4).unbind()
    with pytest.raises(softless.errors.BackendError, match="no kernel computes mechanism 'inline' with these options"):
        attention(q, k, v, mechanism("inline", gain="sum"), backend="triton")


def test_subtract_with_relu_still_confuses_queries_without_features():
    """A phi that is not injective loses what it loses: relu(q) = 0 reads the mean."""
    q, k = queries_and_keys(DRAWS)
    apart = pairs_of_rows(mechanism("inline", phi="relu"), -q.abs(), -3 * q.abs() - 1, k)
    assert torch.equal(apart, torch.zeros_like(apart))


# The first-order exponential. With q = 1, d = 1 and scale 1 the scores are the keys.


def weights_of_scores(scores: torch.Tensor, **options: object) -> torch.Tensor:
    """Threshold weights of rows of scores [rows, keys]."""
    q, k = torch.ones(len(scores), 1, 1, 1, dtype=scores.dtype), scores[:, None, :, None]
    return attention_weights(q, k, mechanism("threshold", **options), scale=1.0)[:, 0, 0]


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("spread", [1e-3, 0.3, 1.0, 10.0])
def test_a_kept_weight_is_within_half_a_square_of_the_exponential(tau: float, spread: float):
    """|e^x - (1 + x)| <= x^2 / 2 for x <= 0; the row's maximum weighs 1, which fixes the unit."""
    scores = spread * torch.randn(DRAWS, 16, dtype=torch.float64)
    weights, x = weights_of_scores(scores, tau=tau), scores - scores.amax(-1, keepdim=True)
    unit = weights.gather(-1, scores.argmax(-1, keepdim=True))
    kept = (x > -tau) & (unit != 0)
    assert kept.any()
    assert ((weights / unit - x.exp()).abs() <= x.square() / 2 + 1e-12)[kept].all()
    assert torch.equal(weights[x <= -tau], torch.zeros_like(weights[x <= -tau]))


def best_line(rho: float) -> tuple[float, float]:
    """(a, b) that minimize max |e^x - a - b x| on [-rho, 0], by search alone."""
    x = torch.linspace(-rho, 0, 20001, dtype=torch.float64)

    def error(b: float) -> float:
        rest = x.exp() - b * x
        return (rest.max() - rest.min()).item() / 2

    low, high = 0.0, 1.0
    for _ in range(200):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if error(left) < error(right) else (left, high)
    rest = x.exp() - low * x
    return (rest.max() + rest.min()).item() / 2, low


@pytest.mark.parametrize(("tau", "spread"), [(1.0, 0.4), (1.0, 1.0), (1.0, 7.0), (2.5, 2.0), (2.5, 30.0)])
def test_minimax_is_the_best_line(tau: float, spread: float):
    """On [-rho, 0], rho = min(tau, R): no line has a smaller largest error, and the error takes its extreme
    value three times, alternating in sign: at both ends and once between."""
    rho = min(tau, spread)
    inside = torch.linspace(-rho * (1 - 1e-9), 0, 4001, dtype=torch.float64)
    scores = torch.cat([torch.tensor([-spread], dtype=torch.float64), inside])[None]
    weights = weights_of_scores(scores, tau=tau, expansion="minimax")[0, 1:]
    a, b = best_line(rho)
    line = weights / weights[-1] * a  # weights are known up to a factor; the maximum's is a
    slope = (line[-1] - line[1]) / (inside[-1] - inside[1])
    assert abs(slope - b) <= 1e-3 * b  # the search is as flat as an error's minimum
    error = line - inside.exp()
    exact = math.expm1(-rho) / -rho
    height = abs(1 + exact - exact * math.log(exact) - 2) / 2
    assert abs(error[0] - error[-1]) <= 1e-3 * height
    assert abs(error[0] + error.max()) <= 1e-3 * height
    assert abs(error.abs().max() - height) <= 1e-3 * height


@pytest.mark.parametrize(("tau", "spread"), [(1.0, 1.0), (1.0, 1.0 + 1e-9), (1.0, 1.5), (0.5, 4.0), (2.0, 50.0)])
def test_the_mean_tail_is_the_average_exponential_of_what_is_dropped(tau: float, spread: float):
    """Over [-R, -tau], and e^-tau where nothing lies between: with R = tau a score of exactly -tau is dropped."""
    scores = torch.tensor([[0.0, -spread]], dtype=torch.float64)
    top, dropped = weights_of_scores(scores, tau=tau, tail="mean")[0]
    points = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000  # the midpoint rule
    average = (-tau - (spread - tau) * points).exp().mean()
    assert abs(dropped / top - average) <= 1e-6 * average


@pytest.mark.parametrize(("expansion", "tail"), LINES)
@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
def test_up_to_tau_one_no_weight_is_negative(tau: float, expansion: str, tail: str):
    for spread in (1e-3, 0.3, 1.0, 10.0):
        weights = weights_of_scores(
            spread * torch.randn(DRAWS, 16, dtype=torch.float64), tau=tau, expansion=expansion, tail=tail
        )
        assert (weights >= 0).all()


def test_the_published_filter_is_worse_than_no_attention_and_the_best_line_is_better():
    """Independent normal scores of unit variance, 256 keys: |w - p| / |p| against the softmax weights p."""
    scores = torch.randn(400, 256, dtype=torch.float64)
    softmax = scores.softmax(-1)

    def error(weights: torch.Tensor) -> float:
        return ((weights - softmax).norm(dim=-1) / softmax.norm(dim=-1)).mean().item()

    published = error(weights_of_scores(scores))
    best = error(weights_of_scores(scores, expansion="minimax", tail="mean"))
    uniform = error(torch.full_like(scores, 1 / 256))
    assert published > uniform > best, f"published {published:.2f}, uniform {uniform:.2f}, minimax and mean {best:.2f}"


@pytest.mark.parametrize("name", ["performer", "efla", "decay", "cosformer", "transnormer", "diagonal", "mlla", "a2"])
def test_twice_the_tokens_cost_twice_the_products(name: str):
    one, n = mechanism(name), 2**11 if name in ("efla", "decay") else 2**14  # loops over chunks take long to count
    is_causal = one.lacks(False) is not None
    once, twice = (flops(one, Terms(shape=Shape(1, 2, n, 8, n, 2), is_causal=is_causal)) for n in (n, 2 * n))
    assert twice / once == pytest.approx(2, rel=0.05)


def test_the_exact_angular_kernel_is_the_angles_up_to_the_arcsines_third_term():
    """1 - theta/pi = 1/2 + arcsin(x)/pi, and |arcsin(x) - x| <= (pi/2 - 1) |x|^3."""
    q, k = torch.randn(2, 1, 1, 40, 3, dtype=torch.float64).unbind()
    cosine = torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    weights = attention_weights(q, k, mechanism("angular", exact=True))
    error = (weights - (1 - cosine.clamp(-1, 1).acos() / math.pi)).abs()
    assert (error <= (math.pi / 2 - 1) / math.pi * cosine.abs() ** 3 + 1e-12).all()
