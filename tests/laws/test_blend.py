"""Blend at its corners is linear attention, InLine and magnitude-aware linear attention."""

import pytest
import torch
from torch import Tensor

from softless import attention, attention_weights, mechanism
from softless.nn import Attention

CLOSE = {"rtol": 0, "atol": 1e-13}
CORNERS = {"linear": (1.0, 0.0), "inline": (0.0, 1.0)}


def draw(heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 9, 5), (2, heads, 9, 5), (2, heads, 9, 3)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def gains(divide: float, subtract: float) -> dict[str, Tensor]:
    return {"divide": torch.full((4,), divide).double(), "subtract": torch.full((4,), subtract).double()}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("heads", [4, 2], ids=["alike", "grouped"])
@pytest.mark.parametrize("phi", ["elu", "relu", "exp"])
@pytest.mark.parametrize("corner", CORNERS)
def test_a_corner_is_the_mechanism_itself(corner, phi, heads, is_causal):
    q, k, v = draw(heads)
    given, corner = mechanism("blend", phi=phi), mechanism(corner, phi=phi)
    call = {"is_causal": is_causal, "key_mask": torch.arange(9) < torch.tensor([[9], [6]])}
    inputs = gains(*CORNERS[corner.name])
    torch.testing.assert_close(
        attention(q, k, v, given, inputs=inputs, **call), attention(q, k, v, corner, **call), **CLOSE
    )
    torch.testing.assert_close(
        attention_weights(q, k, given, inputs=inputs, **call), attention_weights(q, k, corner, **call), **CLOSE
    )


def magnitude_aware(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """MALA: beta phi(q).phi(k) - gamma with beta = 1 + 1/z and gamma = z / n, where z is the sum of phi(q).phi(k)."""
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    score = scale * (q @ k.mT)
    z = score.sum(-1, keepdim=True)
    return ((1 + 1 / z) * score - z / k.shape[2]) @ v


def test_it_starts_as_magnitude_aware_linear_attention():
    """With scores of s/n as in InLine; with the scores themselves, `scale` is the number of keys."""
    q, k, v = draw()
    for scale in (None, 9.0):
        found = attention(q, k, v, "blend", inputs=gains(1.0, 1.0), scale=scale)
        s = (5**-0.5 if scale is None else scale) / 9
        torch.testing.assert_close(found, magnitude_aware(q, k, v, s), **CLOSE)
    layer = Attention(20, 4, "blend")
    assert all(bool((getattr(layer.inputs, name) == 1).all()) for name in ("divide", "subtract"))


def test_every_head_has_gains_of_its_own():
    q, k, v = draw(2)
    a, b = (torch.randn(4, dtype=torch.float64) for _ in "ab")
    found = attention(q, k, v, "blend", inputs={"divide": a, "subtract": b})
    for head in range(4):
        one, its = slice(head, head + 1), slice(head // 2, head // 2 + 1)
        alone = attention(q[:, one], k[:, its], v[:, its], "blend", inputs={"divide": a[one], "subtract": b[one]})
        torch.testing.assert_close(found[:, one], alone, **CLOSE)
