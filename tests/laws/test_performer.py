"""What FAVOR+ promises: orthogonal rows, Gaussian lengths, and softmax in expectation."""

import pytest
import torch
from torch import Tensor

from softless import attention, attention_weights, mechanism

KINDS = ("positive", "hyperbolic")


def drawn(features: int, dim: int, seed: int = 0) -> Tensor:
    made = mechanism("performer", features=features)
    return made.draw(1, dim, torch.Generator().manual_seed(seed))["projection"].double()


@pytest.mark.parametrize(("features", "dim"), [(4, 4), (10, 4), (3, 7), (1, 1), (300, 64)])
def test_rows_are_orthogonal_in_blocks(features: int, dim: int):
    rows = drawn(features, dim)
    assert rows.shape == (features, dim)
    for block in rows.split(dim):
        angles = torch.nn.functional.normalize(block) @ torch.nn.functional.normalize(block).mT
        torch.testing.assert_close(angles, torch.eye(len(block), dtype=torch.float64), rtol=0, atol=1e-5)


def test_each_row_of_the_projection_is_distributed_as_a_gaussian_vector():
    """Mean 0, covariance I, and a squared length of mean d and variance 2d: each within 5 standard errors."""
    rows = drawn(40_000, 4)
    assert (rows.mean(0).abs() <= 5 * 40_000**-0.5).all()
    assert ((rows.mT @ rows / 40_000 - torch.eye(4)).abs() <= 5 * (2 / 40_000) ** 0.5).all()
    squares = rows.square().sum(-1)
    assert abs(squares.mean() - 4) <= 5 * (8 / 40_000) ** 0.5
    assert abs(squares.var() / 8 - 1) <= 0.1


def test_a_seed_makes_the_projection_again():
    assert torch.equal(drawn(10, 4, seed=3), drawn(10, 4, seed=3))
    assert not torch.equal(drawn(10, 4, seed=3), drawn(10, 4, seed=4))


def test_there_are_d_ln_d_features_unless_said_otherwise():
    assert mechanism("performer").input_shapes(3, 64) == {"projection": (266, 64)}
    assert mechanism("performer").input_shapes(3, 2) == {"projection": (2, 2)}
    assert mechanism("performer", features=5).input_shapes(3, 64) == {"projection": (5, 64)}


def error(kind: str, features: int) -> float:
    """|w - softmax| / |softmax|, the root mean square over 20 draws."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 1, 1, 12, 4, generator=generator, dtype=torch.float64) / 2).unbind()
    exact, squares = attention_weights(q, k, "softmax"), []
    for seed in range(20):
        made = mechanism("performer", kind=kind, features=features)
        weights = attention_weights(q, k, made, inputs={"projection": drawn(features, 4, seed)})
        squares.append(((weights - exact).norm() / exact.norm()).square())
    return torch.stack(squares).mean().sqrt().item()


@pytest.mark.parametrize("kind", KINDS)
def test_more_features_come_closer_to_softmax(kind: str):
    """The variance of a mean: 64 times the features have about an eighth of the error."""
    few, many = error(kind, 64), error(kind, 4096)
    assert many <= 0.05
    assert 4 <= few / many <= 16


def test_hyperbolic_features_vary_less():
    """Lemma 2: of each kernel value, half the variance or less."""
    assert error("hyperbolic", 256) < error("positive", 256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_keys_neither_vanish_nor_overflow(kind: str, is_causal: bool):
    """|k| = 100: as written the features underflow to 0/0, and in expectation the nearest key takes all."""
    k = torch.nn.functional.one_hot(torch.arange(4)).float()[None, None] * 100
    v = torch.eye(4)[None, None]
    out = attention(k, k, v, mechanism("performer", kind=kind), is_causal=is_causal, inputs={"projection": drawn(5, 4)})
    assert out.isfinite().all()
    torch.testing.assert_close(out.sum(-1), torch.ones(1, 1, 4))
