"""What nearfar tends to at its limits, what its definition fixes, and which states it goes on from."""

import pytest
import torch
from torch import Tensor

from softless import NearState, State, attention, attention_weights, attention_with_state, mechanism
from softless.errors import ArgumentError, UnsupportedError
from softless.mechanisms import nearfar
from softless.mechanisms.nearfar import START
from softless.nn.inputs import Inputs

TOKENS, DIM = 70, 4
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
MASK = torch.arange(TOKENS).expand(2, TOKENS) % 7 != torch.tensor([[1], [5]])


def draw(tokens: int = TOKENS, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, DIM, generator=generator, dtype=torch.float64) for _ in "qkv")
    return q, k, v


def given(made, gain: float = 0.5, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = made.input_shapes(2, DIM)
    inputs = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return inputs | {"gain": torch.full((2,), gain, dtype=torch.float64)}


def hedgehog(x: Tensor) -> Tensor:
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_mask", [None, MASK], ids=["whole", "masked"])
def test_a_window_of_all_tokens_is_softmax(is_causal, key_mask):
    q, k, v = draw()
    made, real = mechanism("nearfar", window=TOKENS, first=3), torch.ones_like(MASK) if key_mask is None else MASK
    call = {"is_causal": is_causal, "key_mask": key_mask}
    found = attention(q, k, v, made, inputs=given(made), **call)
    rows = real[:, None, :, None].expand_as(found)
    torch.testing.assert_close(found[rows], attention(q, k, v, "softmax", **call)[rows], **CLOSE)
    assert not found[~rows].any()  # a hidden query gives zeros


def test_a_neighborhood_of_all_tokens_is_softmax():
    q, k, v = draw()
    made = mechanism("nearfar", neighborhood=21, first=0)
    found = attention(q, k, v, made, inputs=given(made), grid=(7, 10))
    torch.testing.assert_close(found, attention(q, k, v, "softmax"), **CLOSE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("gain", [-300.0, 0.0, 5.0])
def test_without_near_tokens_it_is_linear_attention_whatever_the_gain(is_causal, gain):
    q, k, v = draw()
    made = mechanism("nearfar", window=0, first=0, maps="identity")
    found = attention(q, k, v, made, is_causal=is_causal, inputs=given(made, gain))
    linear = mechanism("linear", phi=hedgehog)
    torch.testing.assert_close(found, attention(q, k, v, linear, is_causal=is_causal), **CLOSE)


def test_a_gain_of_zero_leaves_the_window_and_a_large_one_the_far_tokens():
    q, k, v = draw()
    made = mechanism("nearfar", window=5, first=0, maps="identity")
    window = attention(q, k, v, made, is_causal=True, inputs=given(made, -1000.0))
    apart = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    bias = torch.where((apart >= 0) & (apart < 5), 0.0, -torch.inf).double()
    torch.testing.assert_close(window, attention(q, k, v, "softmax", bias=bias), **CLOSE)
    far = attention_weights(q, k, made, is_causal=True, inputs=given(made, 60.0))[:, :, 5:]
    assert far.masked_fill(apart[5:] >= 5, 0.0).max() < 1e-20


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_all_scores_have_in_common_does_not_matter(is_causal):
    """Far tokens are weighed against the largest near score, wherever that is."""
    q, k, v = draw()
    made = mechanism("nearfar", window=5, first=2)
    inputs = given(made)
    found = attention(q, k, v, made, is_causal=is_causal, inputs=inputs)
    wide = {
        "gain": inputs["gain"],
        "map": torch.nn.functional.pad(inputs["map"], (0, 1)),
    }  # it does not see the constant
    made = mechanism("nearfar", window=5, first=2, features=DIM)
    q, k = torch.nn.functional.pad(q, (0, 1), value=1.0), torch.nn.functional.pad(k, (0, 1), value=40.0)
    shifted = attention(q, k, v, made, is_causal=is_causal, scale=DIM**-0.5, inputs=wide)
    torch.testing.assert_close(shifted, found, rtol=0, atol=1e-11)


def test_weights_of_four_tokens_are_those_by_hand():
    """One channel, the first token and the last one near: flat features, so a far token weighs e^gain."""
    k = torch.tensor([1.0, 5.0, 7.0, 2.0], dtype=torch.float64)[None, None, :, None]
    q, made = torch.ones_like(k), mechanism("nearfar", window=1, first=1)
    inputs = {"gain": torch.tensor([-1.0]).double(), "map": torch.zeros(1, 1, 1).double()}
    weights = attention_weights(q, k, made, is_causal=True, inputs=inputs)[0, 0, -1]
    e = torch.tensor(1.0).double().exp()
    right = torch.stack([1 / e, 1 / e, 1 / e, e / e])  # e^{1 - 2}, c, c, e^{2 - 2}
    torch.testing.assert_close(weights, right / right.sum(), **CLOSE)


def test_weights_that_all_underflow_give_zeros():
    """Two channels: the features of q and k have nothing in common, and no token is near."""
    q = torch.tensor([1e6, 0.0]).expand(1, 1, 3, 2)
    made = mechanism("nearfar", window=0, first=0, maps="identity")
    leaves = [x.clone().requires_grad_() for x in (q, q.flip(-1), torch.ones(1, 1, 3, 2))]
    for is_causal in (False, True):
        out = attention(*leaves, made, is_causal=is_causal, inputs={"gain": torch.zeros(1)})
        assert torch.equal(out, torch.zeros_like(out))
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("maps", ["shared", "separate"])
def test_learned_maps_start_as_the_identity(maps):
    inputs = Inputs(mechanism("nearfar", maps=maps, features=6), 8, 2, 2)
    for name in inputs.mechanism.inputs:
        x = getattr(inputs, name)
        right = torch.full((2,), START) if name == "gain" else torch.eye(4)[[0, 1, 2, 3, 0, 1]].expand(2, 6, 4)
        assert torch.equal(x, right), name


@pytest.mark.parametrize(
    "options", [{"window": 3, "first": 1}, {"neighborhood": 3, "first": 1, "features": 2}], ids=str
)
def test_gradients_are_those_of_the_formula(options):
    made = mechanism("nearfar", **options)
    q, k, v = (x[:1, :, :12, :2].clone().requires_grad_() for x in draw())
    learned = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in made.input_shapes(2, 2).values()
    ]
    form = {"grid": (3, 4)} if made.needs_grid else {"is_causal": True}

    def out(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return attention(q, k, v, made, inputs=dict(zip(made.inputs, learned, strict=True)), **form)

    assert torch.autograd.gradcheck(out, (q, k, v, *learned))


def test_a_state_holds_the_near_tokens_and_the_sums_of_the_far_ones():
    q, k, v = draw(20)
    made = mechanism("nearfar", window=5, first=2, maps="identity")
    _, state = attention_with_state(q, k, v, made, inputs=given(made))
    torch.testing.assert_close(state.keys, k[:, :, [0, 1, 15, 16, 17, 18, 19]], rtol=0, atol=0)
    torch.testing.assert_close(state.values, v[:, :, [0, 1, 15, 16, 17, 18, 19]], rtol=0, atol=0)
    torch.testing.assert_close(state.v_mean, v[:, :, 2:15].mean(2), **CLOSE)
    _, few = attention_with_state(q[:, :, :4], k[:, :, :4], v[:, :, :4], made, inputs=given(made))
    assert torch.equal(few.keys[:, :, :2], k[:, :, :2])
    assert torch.equal(few.keys[:, :, 5:], k[:, :, 2:4])
    assert not few.keys[:, :, 2:5].any()


def test_going_back_to_a_state_leaves_no_bit_of_what_came_after():
    q, k, v = draw(40)
    made = mechanism("nearfar", window=5, first=2)
    inputs = given(made)
    _, before = attention_with_state(q[:, :, :20], k[:, :, :20], v[:, :, :20], made, inputs=inputs)
    copy = NearState(*(part.clone() for part in before))
    attention_with_state(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], made, before, inputs=inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, copy, strict=True))


def test_a_state_of_the_other_kind_is_refused():
    q, k, v = draw()
    made = mechanism("nearfar", window=5)
    _, near = attention_with_state(q, k, v, made, inputs=given(made))
    _, plain = attention_with_state(q, k, v, "linear")
    for state, one, inputs, says in (
        (near, "linear", None, "the state is a NearState, and this mechanism goes on from a State"),
        (plain, made, given(made), "the state is a State, and this mechanism goes on from a NearState"),
    ):
        loaded = type(state)(*(part.clone() for part in state))  # as from a file: nothing says who made it
        with pytest.raises(ArgumentError, match=says):
            attention_with_state(q, k, v, one, loaded, inputs=inputs)
    assert isinstance(plain, State)
    with pytest.raises(ArgumentError, match=r"the state's keys is torch.float64 \[2, 2, 9, 4\], and these"):
        attention_with_state(
            q, k, v, mechanism("nearfar", window=6), NearState(*(x.clone() for x in near)), inputs=given(made)
        )


def test_a_neighborhood_has_no_order():
    q, k, v = draw()
    made = mechanism("nearfar", neighborhood=3)
    with pytest.raises(UnsupportedError, match="has neighborhood=3 of a picture, which has no order"):
        attention_with_state(q, k, v, made, inputs=given(made), grid=(7, 10))
    with pytest.raises(ArgumentError, match=r"'nearfar' needs grid=\(height, width\)"):
        attention(q, k, v, made, inputs=given(made))


@pytest.mark.parametrize("form", [{"is_causal": True}, {}, {"grid": (7, 10)}], ids=["causal", "sequence", "picture"])
@pytest.mark.parametrize("key_mask", [None, MASK], ids=["whole", "masked"])
def test_a_long_call_is_computed_in_pieces_and_is_the_weights(monkeypatch, form, key_mask):
    """With gradients it is computed at once."""
    monkeypatch.setattr(nearfar, "AT_ONCE", 13)
    monkeypatch.setattr(nearfar, "TILE", 2)
    monkeypatch.setattr(nearfar.NearFar, "chunk", 8)
    (q, _, _), (_, k, v) = draw(heads=2), draw(heads=1)
    made = mechanism("nearfar", first=3, **{"neighborhood": 5} if "grid" in form else {"window": 20})
    call = {"key_mask": key_mask, "inputs": given(made), **form}
    found = attention(q, k, v, made, **call)
    torch.testing.assert_close(found, attention_weights(q, k, made, **call) @ v, **CLOSE)
    at_once = attention(q.clone().requires_grad_(), k, v, made, **call)
    torch.testing.assert_close(found, at_once.detach(), **CLOSE)
