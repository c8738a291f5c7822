"""Feature maps are their formulas, at the ends of the range and at the kink too."""

from math import exp, inf

import pytest
import torch

from softless import attention, mechanism
from softless.algebra.feature_maps import elu, unit


@pytest.mark.parametrize("x", [-87.0, -17.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 1e30])
def test_elu_is_its_formula_and_its_slope_is_continuous(x: float) -> None:
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    value = elu(at)
    (slope,) = torch.autograd.grad(value, at)
    assert value.item() == pytest.approx(x + 1 if x > 0 else exp(x), rel=1e-15)
    assert slope.item() == pytest.approx(1.0 if x > 0 else exp(x), rel=1e-15)


def test_elu_of_minus_infinity_is_zero() -> None:
    assert elu(torch.tensor(-inf)).item() == 0


@pytest.mark.parametrize("length", [1e-30, 1e-3, 1.0, 1e3, 1e30])
def test_a_unit_vector_has_length_one_however_long_it_was(length: float) -> None:
    x = torch.randn(5, 7) * length
    found = unit(x)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(5))
    torch.testing.assert_close(found, (x.double() / x.double().norm(dim=-1, keepdim=True)).float())


def test_the_unit_of_the_zero_vector_is_zero_with_a_finite_slope() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    found = unit(x)
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert not found.any()
    assert slope.isfinite().all()


@pytest.mark.parametrize("name", ["linear", "inline"])
def test_exponential_queries_read_keys_whose_mean_is_zero(name: str) -> None:
    """Such a channel has covariance all the same."""
    q, v = torch.randn(2, 1, 1, 4, 3, dtype=torch.float64).unbind()
    k = torch.tensor([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0], [3.0, 0.5, 0.0], [-3.0, 0.5, 0.0]], dtype=torch.float64)[
        None, None
    ]
    made = mechanism(name, phi="exp", phi_k="identity")
    torch.testing.assert_close(attention(q, k, v, made), attention(q, k, v, made, backend="reference"))
