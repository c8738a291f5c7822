"""Mask-out: hidden keys, rows that still sum to one, and a model that is asked again."""

import pytest
import torch
from torch import nn

import softless
from softless.errors import ArgumentError, UnsupportedError
from softless.probes.capture import capture
from softless.probes.layer import Layer
from softless.probes.masking import MASKS, Local, Random, hide, mask_out, without

GRID, PREFIX = (5, 6), 1
TOKENS = PREFIX + 30
MECHANISMS = ["softmax", "inline", "linear", "hydra", softless.mechanism("linear", phi="relu")]


def tiny(mechanism="inline", **options):
    options = {"img_size": 8, "patch_size": 2, "dims": 16, "depths": 2, "heads": 2, "num_classes": 3, **options}
    return softless.create_model("inline_deit_tiny", mechanism=mechanism, **options).eval()


def layer(mechanism, *, samples=2, **more):
    q, k, v = torch.randn(3, samples, 2, TOKENS, 8, dtype=torch.float64).unbind()
    made = softless.mechanism(mechanism) if isinstance(mechanism, str) else mechanism
    return Layer("layer", q, k, v, made, grid=GRID, prefix=PREFIX, **more)


def distance(i, j):
    (a, b), (c, d) = divmod(i, GRID[1]), divmod(j, GRID[1])
    return max(abs(a - c), abs(b - d))


@pytest.mark.parametrize("side", [1, 3, 5, 7])
def test_a_local_mask_hides_the_window_around_each_query(side):
    hidden = Local(side).hidden(GRID, 0, "layer")
    assert hidden.tolist() == [[distance(i, j) <= side // 2 for j in range(30)] for i in range(30)]


@pytest.mark.parametrize("tokens", [0, 9, 18, 30])
def test_a_random_mask_hides_so_many_outside_of_the_3x3(tokens):
    hidden = Random(tokens).hidden(GRID, 0, "layer")
    for i in range(30):
        far = [distance(i, j) > 1 for j in range(30)]
        assert hidden[i].sum().item() == min(tokens, sum(far))
        assert all(far[j] for j in hidden[i].nonzero().flatten())


def test_a_random_mask_is_drawn_once_for_each_layer_and_seed():
    def draw(seed, name):
        return Random(9).hidden(GRID, seed, name).tolist()

    assert draw(0, "a") == draw(0, "a")
    assert draw(0, "a") != draw(0, "b")
    assert draw(0, "a") != draw(1, "a")


@pytest.mark.parametrize("mask", [Local(3), Random(9)], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_rows_sum_to_one_and_hidden_keys_weigh_nothing(mechanism, mask):
    each = layer(mechanism)
    weights = each.weights()
    edited = hide(mask)(each, weights)
    hidden = mask.hidden(GRID, 0, "layer")
    assert (edited[:, :, PREFIX:, PREFIX:][..., hidden] == 0).all()
    assert torch.equal(edited[:, :, :PREFIX], weights[:, :, :PREFIX])
    if each.mechanism.rows_sum_to_one:
        torch.testing.assert_close(edited.sum(-1), torch.ones_like(edited.sum(-1)))
    else:
        torch.testing.assert_close(
            edited[:, :, PREFIX:, PREFIX:][..., ~hidden], weights[:, :, PREFIX:, PREFIX:][..., ~hidden]
        )


@pytest.mark.parametrize("mechanism", ["softmax", "inline", softless.mechanism("linear", phi="elu")], ids=str)
def test_the_rest_is_what_the_mechanism_gives_without_the_hidden_keys(mechanism):
    """Query by query, attention over the keys that are left; InLine's 1/n on its scores stays that of all keys."""
    each = layer(mechanism, samples=1)
    edited = hide(Local(3))(each, each.weights())
    hidden = torch.nn.functional.pad(Local(3).hidden(GRID, 0, ""), (PREFIX, 0, PREFIX, 0))
    for query in (1, 8, 30):
        left = ~hidden[query]
        scale = 8**-0.5 * int(left.sum()) / TOKENS if mechanism == "inline" else None
        alone = softless.attention_weights(each.q[:, :, query : query + 1], each.k[:, :, left], mechanism, scale=scale)
        torch.testing.assert_close(edited[:, :, query : query + 1, left], alone)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_an_empty_mask_leaves_weights_as_they_are(mechanism):
    each = layer(mechanism)
    weights = each.weights()
    assert torch.equal(hide(Random(0))(each, weights), weights)


@pytest.mark.parametrize("mechanism", ["softmax", "inline", "linear"])
def test_a_query_that_has_no_key_left_gets_zeros(mechanism):
    each = layer(mechanism)
    hidden, seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool), torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
    assert without(each.weights(), hidden, seen, each.mechanism).abs().sum() == 0


@pytest.mark.parametrize("mechanism", ["softmax", "inline", "linear"])
def test_padding_is_given_nothing(mechanism):
    key_mask = torch.arange(TOKENS)[None] < torch.tensor([[TOKENS], [20]])
    each = layer(mechanism, key_mask=key_mask)
    edited = hide(Local(5))(each, each.weights())
    assert (edited[1, :, :, 20:] == 0).all()
    torch.testing.assert_close(edited.sum(-1)[:, :, :20], torch.ones(2, 2, 20, dtype=torch.float64))


def test_keys_that_a_bias_hides_stay_hidden():
    bias = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.float64)
    bias[..., 8:] = -torch.inf
    each = layer("softmax", bias=bias)
    edited = hide(Local(7))(each, each.weights())
    assert (edited[..., 8:] == 0).all()


@pytest.mark.parametrize("mechanism", ["softmax", "inline"])
def test_an_empty_mask_leaves_a_models_answers_unchanged(mechanism):
    model, pixels = tiny(mechanism).double(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        plain = model(pixels)
        with capture(model, edit=hide(Random(0))):
            masked = model(pixels)
        with capture(model, edit=hide(Local(3))):
            other = model(pixels)
    assert (masked - plain).abs().max() <= 1e-12 * (1 + plain.abs().max())
    assert (other - plain).abs().max() > 1e-6


def test_accuracies_are_those_of_the_masked_model():
    model, pixels = tiny("softmax"), torch.randn(12, 3, 8, 8)
    with torch.no_grad():
        labels = model(pixels).argmax(-1)
        with capture(model, edit=hide(Local(3), 7)):
            masked = (model(pixels).argmax(-1) == labels).double().mean().item()
    none, local = mask_out(model, [(pixels, labels)], (None, Local(3)), seed=7)
    assert (none.mask, none.accuracy.mean, none.layers) == ("none", 1.0, 0)
    assert (local.mask, local.accuracy.mean, local.layers) == ("local 3", masked, 2)
    assert none.accuracy.n == local.accuracy.n == 12


def test_any_split_of_the_images_gives_the_same():
    model, pixels, labels = tiny(depths=1), torch.randn(10, 3, 8, 8), torch.arange(10) % 3
    whole = mask_out(model, [(pixels, labels)])
    parts = mask_out(model, zip(pixels.split([3, 7]), labels.split([3, 7]), strict=True))
    assert whole == parts
    assert [each.mask for each in whole] == [
        "none", "local 3", "local 5", "local 7", "random 9", "random 25", "random 49",
    ]  # fmt: skip
    assert len(whole) == len(MASKS)


def test_the_model_is_left_in_the_mode_it_was_in():
    model = tiny()
    model.train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    mask_out(model, [(torch.randn(2, 3, 8, 8), torch.zeros(2).long())], (None, Local(3)))
    assert [module.training for module in model.modules()] == before


def test_windows_are_masked_within_themselves():
    model = softless.create_model("swin_tiny", img_size=32, num_classes=3, depths=(1, 1, 1, 1)).eval()
    found = mask_out(model, [(torch.randn(1, 3, 32, 32), torch.zeros(1).long())], (Local(3),))
    assert found[0].layers == 4


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = softless.nn.Attention(8, 2, "softmax")

    def forward(self, x):
        return self.attention(x).mean(1)


def test_a_model_without_a_picture_is_told_so():
    batch = (torch.randn(2, 5, 8), torch.zeros(2).long())
    with pytest.raises(UnsupportedError, match="mask local 3 needs tokens that are a picture, and no layer"):
        mask_out(Text(), [batch], (None, Local(3)))


def test_no_images_are_no_accuracy():
    with pytest.raises(ArgumentError, match="batches is empty"):
        mask_out(tiny(), [])


@pytest.mark.parametrize(
    ("make", "value", "says"), [(Local, 4, "side 4 is not an odd"), (Random, -1, "tokens -1 is not")]
)
def test_masks_of_no_size_are_refused(make, value, says):
    with pytest.raises(ArgumentError, match=says):
        make(value)
