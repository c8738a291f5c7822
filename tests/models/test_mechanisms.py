"""Every mechanism by its name in every backbone and in nn.Attention: it fits, or one sentence says why not."""

import pytest
import torch

import softless
from softless.errors import SoftlessError
from softless.nn import Attention
from tests.models.cases import FAMILIES, images, small
from tests.numerics.cases import CASES

NAMES = [name for name in softless.list_mechanisms() if name != "general"]  # general needs a function
ORDERED = ("delta", "efla", "decay")


def refusal(name: str, family: str) -> str | None:
    if name in ORDERED:
        return f"pictures have no order of tokens, and mechanism '{name}' goes through tokens in their order"
    if name == "mlla" and family == "deit":  # a class token is in no picture
        return "'mlla' needs tokens that form a picture, and DeiT has a class token beside them"
    return None


# At every change DeiT, which has a class token; test_ablations.py has Swin.
ALL = [family if family == "deit" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("name", NAMES)
def test_a_backbone_takes_every_mechanism_or_says_why_not(name: str, family: str):
    """What it gives for an image depends on that image alone."""
    chosen, x = {"mechanism": name, "img_size": 32}, images(2, 3, 32, 32)
    if reason := refusal(name, family):
        with pytest.raises(SoftlessError, match=reason):
            small(f"inline_{family}_tiny", **chosen)
        return
    model = small(f"inline_{family}_tiny", **chosen).double()
    with torch.no_grad():
        out, alone = model(x), model(x[:1])
    assert out.shape == (2, 5)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:1], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_takes_every_mechanism_by_name(name: str):
    layer, x = Attention(16, 2, name), torch.randn(2, 8, 16)
    call = {"is_causal": name in ORDERED, "grid": (2, 4)}
    assert layer(x, **call).isfinite().all()


def test_a_module_without_its_picture_or_with_an_unknown_name_says_so():
    with pytest.raises(SoftlessError, match=r"'mlla' needs grid=\(height, width\) .* and got None"):
        Attention(16, 2, "mlla")(torch.randn(2, 8, 16))
    with pytest.raises(SoftlessError, match="'unheard_of' is not one of softmax, general"):
        Attention(16, 2, "unheard_of")


def test_the_other_tests_of_modules_and_models_have_every_mechanism():
    assert {made.name for made in CASES.values()} == set(softless.list_mechanisms())
