"""Edited attention: hidden keys, confused queries, and the accuracy that is left."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import softless
from softless.errors import ArgumentError, UnsupportedError
from softless.probes.capture import capture
from softless.probes.injectivity import confusions
from softless.probes.interventions import (
    MASKS,
    Local,
    Random,
    edited_accuracy,
    hide,
    induce,
    induced_confusion,
    mask_out,
    share_rows,
    without,
)
from softless.probes.layer import Layer

GRID, PREFIX = (5, 6), 1
TOKENS = PREFIX + 30
MECHANISMS = ["softmax", "inline", "linear", "hydra", "regress", softless.mechanism("linear", phi="relu")]


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
def test_a_random_mask_hides_its_number_of_keys_outside_of_the_3x3(tokens):
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
def test_padding_gets_no_weight_after_masking(mechanism):
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


def test_masked_accuracy_is_that_of_the_edited_model():
    model, pixels = tiny("softmax"), torch.randn(12, 3, 8, 8)
    with torch.no_grad():
        labels = model(pixels).argmax(-1)
        with capture(model, edit=hide(Local(3), 7)):
            masked = (model(pixels).argmax(-1) == labels).double().mean().item()
    accuracies = mask_out(model, [(pixels, labels)], (None, Local(3)), seed=7)
    assert {name: (accuracy.mean, accuracy.n) for name, accuracy in accuracies.items()} == {
        "none": (1.0, 12),
        "local 3": (masked, 12),
    }


def test_masked_accuracy_does_not_depend_on_the_batches():
    model, pixels, labels = tiny(depths=1), torch.randn(10, 3, 8, 8), torch.arange(10) % 3
    whole = mask_out(model, [(pixels, labels)])
    parts = mask_out(model, zip(pixels.split([3, 7]), labels.split([3, 7]), strict=True))
    assert whole == parts
    assert list(whole) == [
        "none", "local 3", "local 5", "local 7", "random 9", "random 25", "random 49",
    ]  # fmt: skip
    assert len(whole) == len(MASKS)


def test_mask_out_leaves_every_module_in_its_mode():
    model = tiny()
    model.train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    mask_out(model, [(torch.randn(2, 3, 8, 8), torch.zeros(2).long())], (None, Local(3)))
    assert [module.training for module in model.modules()] == before


def test_all_four_windowed_layers_of_swin_are_masked():
    model = softless.create_model("swin_tiny", img_size=32, num_classes=3, depths=(1, 1, 1, 1)).eval()
    masked = set()
    edits = {"local 3": hide(Local(3), reached=masked)}
    edited_accuracy(model, [(torch.randn(1, 3, 32, 32), torch.zeros(1).long())], edits)
    assert len(masked) == 4


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = softless.nn.Attention(8, 2, "softmax")

    def forward(self, x):
        return self.attention(x).mean(1)


def test_masking_a_model_that_sees_no_image_is_refused():
    batch = (torch.randn(2, 5, 8), torch.zeros(2).long())
    with pytest.raises(UnsupportedError, match="mask local 3 needs tokens that are patches of an image: no layer"):
        mask_out(Text(), [batch], (None, Local(3)))


def test_an_accuracy_without_images_is_refused():
    with pytest.raises(ArgumentError, match="batches is empty"):
        mask_out(tiny(), [])


@pytest.mark.parametrize(
    ("make", "value", "says"), [(Local, 4, "side 4 is not an odd"), (Random, -1, "tokens -1 is not")]
)
def test_masks_of_impossible_size_are_refused(make, value, says):
    with pytest.raises(ArgumentError, match=says):
        make(value)


def plain_layer(mechanism="softmax", tokens=10):
    q, k, v = torch.randn(3, 2, 3, tokens, 8, dtype=torch.float64).unbind()
    return Layer("layer", q, k, v, softless.mechanism(mechanism))


def test_f1_is_softmax_of_the_normalized_relu():
    each = plain_layer()
    q = each.q.relu()
    q = q / q.norm(dim=-1, keepdim=True)
    expected = (q @ each.k.mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(induce("relu")(each, each.weights()), expected)


def test_f1_confuses_queries_that_softmax_tells_apart():
    each = plain_layer()
    doubled = torch.cat([each.q, 2 * each.q], 2)
    each = Layer("layer", doubled, each.k, each.v, each.mechanism)
    assert (confusions(each.weights(), q=doubled) == 0).all()
    assert (confusions(induce("relu")(each, each.weights()), q=doubled) >= 10).all()


def test_f2_is_drawn_once_for_each_layer_and_seed():
    each = plain_layer()
    rows = [induce("affine_relu", seed)(each, each.weights()) for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    torch.testing.assert_close(rows[0].sum(-1), torch.ones(2, 3, 10, dtype=torch.float64))


def test_inducing_confusion_in_a_layer_without_softmax_is_refused():
    each = plain_layer("inline")
    with pytest.raises(UnsupportedError, match="layer 'layer' runs 'inline'"):
        induce()(each, each.weights())


@pytest.mark.parametrize("mechanism", ["softmax", "inline"])
@pytest.mark.parametrize(("ratio", "pairs"), [(0.0, 0), (0.4, 2), (0.5, 2), (1.0, 5)])
def test_a_share_of_the_queries_reads_in_pairs(mechanism, ratio, pairs):
    each = plain_layer(mechanism)
    weights = each.weights()
    edited = share_rows(ratio)(each, weights)
    assert (confusions(edited, q=each.q) == pairs).all()
    assert (edited != weights).any(-1).sum().item() == 2 * 3 * pairs


def test_shared_rows_are_the_same_in_every_batch():
    each, other = plain_layer(), plain_layer()
    for weights in (each.weights(), other.weights()):
        a, b = share_rows(0.6)(each, weights), share_rows(0.6)(other, weights)
        assert torch.equal(a, b)
    assert not torch.equal(a, share_rows(0.6, seed=1)(each, weights))


def test_a_ratio_of_shared_rows_above_1_is_refused():
    with pytest.raises(ArgumentError, match=r"ratio 1.5 is not a share between 0 and 1"):
        share_rows(1.5)


def test_induced_accuracy_is_that_of_the_edited_model():
    model, pixels = tiny("softmax", local=False), torch.randn(20, 3, 8, 8)
    with torch.no_grad():
        labels = model(pixels).argmax(-1)
        with capture(model, edit=induce("relu")):
            confused = (model(pixels).argmax(-1) == labels).double().mean().item()
    by_name = induced_confusion(model, [(pixels[:7], labels[:7]), (pixels[7:], labels[7:])], ratios=(0.0, 0.125))
    assert list(by_name) == ["none", "f1", "f2", "rows 0 %", "rows 12.5 %"]
    assert by_name["none"].mean == by_name["rows 0 %"].mean == 1
    assert by_name["f1"].mean == confused
    assert all(accuracy.n == 20 for accuracy in by_name.values())


class Wrapped(nn.Module):
    """Answers as Hugging Face's models do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pixels):
        return SimpleNamespace(logits=self.inner(pixels))


def test_models_that_return_more_than_logits_have_an_accuracy():
    model, pixels, labels = tiny("inline", local=False), torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    edits = {"none": None, "even": lambda _layer, weights: torch.full_like(weights, 1 / weights.shape[-1])}
    plain = edited_accuracy(model, [(pixels, labels)], edits)
    assert edited_accuracy(Wrapped(model), [(pixels, labels)], edits) == plain
