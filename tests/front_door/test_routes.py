"""Routes (`softless.routes`): a call is checked once for its kind, and anything else about it is checked anew."""

import pytest
import torch

import softless
from softless import routes, validation
from softless.errors import SoftlessError

Q, K, V = torch.randn(3, 2, 4, 6, 8).unbind()


@pytest.fixture
def checked(monkeypatch):
    """Counts how often arguments are checked."""
    calls, prepare = [], validation.prepare
    monkeypatch.setattr(validation, "prepare", lambda *args, **options: calls.append(args) or prepare(*args, **options))
    return calls


def test_a_second_call_of_the_same_kind_is_not_checked_again(checked):
    for _ in range(3):
        softless.attention(torch.randn_like(Q), K, V)
    assert len(checked) == 1


def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert softless.attention(Q, K, V).dtype == torch.bfloat16


CHANGES = {
    "shape": lambda: softless.attention(Q[:, :, :5], K, V),
    "dtype": lambda: softless.attention(Q.double(), K.double(), V.double()),
    "mechanism": lambda: softless.attention(Q, K, V, "linear"),
    "options": lambda: softless.attention(Q, K, V, softless.mechanism("inline", gain="sum")),
    "is_causal": lambda: softless.attention(Q, K, V, is_causal=True),
    "key_mask": lambda: softless.attention(Q, K, V, key_mask=torch.ones(2, 6).bool()),
    "scale": lambda: softless.attention(Q, K, V, scale=1.0),
    "backend": lambda: softless.attention(Q, K, V, backend="reference"),
    "autocast": autocast,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_of_another_kind_is_checked(change, checked):
    softless.attention(Q, K, V)
    CHANGES[change]()
    assert len(checked) == 2


BAD = {
    "another dtype": lambda: softless.attention(Q, K.double(), V),
    "another device": lambda: softless.attention(Q, K.to("meta"), V),
    "another number of keys": lambda: softless.attention(Q, K[:, :, :5], V),
    "1 for True": lambda: softless.attention(Q, K, V, is_causal=1),
    "a mask of numbers": lambda: softless.attention(Q, K, V, key_mask=torch.ones(2, 6)),
    "a mask of another size": lambda: softless.attention(Q, K, V, key_mask=torch.ones(2, 5).bool()),
    "sparse keys": lambda: softless.attention(Q, K.to_sparse(), V),
    "a list": lambda: softless.attention(Q, K, V, ["inline"]),
    "a scale that is no number": lambda: softless.attention(Q, K, V, scale="1"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_after_good_input_of_nearly_the_same_kind(bad):
    softless.attention(Q, K, V)
    softless.attention(Q, K, V, is_causal=True)
    softless.attention(Q, K, V, key_mask=torch.ones(2, 6).bool())
    for _ in range(2):
        with pytest.raises(SoftlessError):
            BAD[bad]()


def test_a_route_keeps_no_tensor():
    softless.attention(Q, K, V, "linear", key_mask=torch.ones(2, 6).bool())
    softless.attention(Q, K, V, "softmax", bias=torch.zeros(6, 6))
    for route in routes.ROUTES.values():
        assert (route.call.key_mask, route.call.bias, dict(route.call.inputs)) == (None, None, {})


def test_a_new_mask_of_the_same_shape_is_used():
    for hidden in range(6):
        mask = torch.arange(6).expand(2, 6) != hidden
        exact = softless.attention(Q, K, V, key_mask=mask, backend="reference")
        torch.testing.assert_close(softless.attention(Q, K, V, key_mask=mask), exact, atol=1e-5, rtol=1e-5)


def test_a_state_of_another_mechanism_is_refused_where_its_own_was_taken():
    _, state = softless.attention_with_state(Q, K, V, "linear")
    _, other = softless.attention_with_state(Q, K, V, softless.mechanism("linear", phi="relu"))
    softless.attention_with_state(Q, K, V, "linear", state)
    with pytest.raises(SoftlessError, match="was made by 'linear'"):
        softless.attention_with_state(Q, K, V, "linear", other)


def test_old_routes_give_way(monkeypatch):
    monkeypatch.setattr(routes, "MOST", 3)
    for tokens in range(1, 7):
        softless.attention(Q[:, :, :tokens], K, V)
    assert len(routes.ROUTES) == 3
