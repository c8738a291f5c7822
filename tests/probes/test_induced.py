"""Confusion on purpose: queries that are made to share their rows, and what that costs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import softless
from softless.errors import ArgumentError, UnsupportedError
from softless.probes.capture import capture
from softless.probes.confusion import confusions
from softless.probes.editing import edited_accuracy
from softless.probes.induced import induce, induced_confusion, share_rows
from softless.probes.layer import Layer


def layer(mechanism="softmax", tokens=10):
    q, k, v = torch.randn(3, 2, 3, tokens, 8, dtype=torch.float64).unbind()
    return Layer("layer", q, k, v, softless.mechanism(mechanism))


def tiny(mechanism):
    options = {"img_size": 8, "patch_size": 2, "dims": 16, "depths": 2, "heads": 2, "num_classes": 3}
    return softless.create_model("inline_deit_tiny", mechanism=mechanism, local=False, **options).eval()


def test_f1_is_softmax_of_the_normalized_relu():
    each = layer()
    q = each.q.relu()
    q = q / q.norm(dim=-1, keepdim=True)
    expected = (q @ each.k.mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(induce("relu")(each, each.weights()), expected)


def test_f1_confuses_what_softmax_told_apart():
    each = layer()
    doubled = torch.cat([each.q, 2 * each.q], 2)
    each = Layer("layer", doubled, each.k, each.v, each.mechanism)
    assert (confusions(each.weights(), q=doubled) == 0).all()
    assert (confusions(induce("relu")(each, each.weights()), q=doubled) >= 10).all()


def test_f2_is_drawn_once_for_each_layer_and_seed():
    each = layer()
    rows = [induce("affine_relu", seed)(each, each.weights()) for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    torch.testing.assert_close(rows[0].sum(-1), torch.ones(2, 3, 10, dtype=torch.float64))


def test_a_layer_without_softmax_has_no_queries_to_confuse():
    each = layer("inline")
    with pytest.raises(UnsupportedError, match="layer 'layer' runs 'inline'"):
        induce()(each, each.weights())


@pytest.mark.parametrize("mechanism", ["softmax", "inline"])
@pytest.mark.parametrize(("ratio", "pairs"), [(0.0, 0), (0.4, 2), (0.5, 2), (1.0, 5)])
def test_a_share_of_the_queries_reads_in_pairs(mechanism, ratio, pairs):
    each = layer(mechanism)
    weights = each.weights()
    edited = share_rows(ratio)(each, weights)
    assert (confusions(edited, q=each.q) == pairs).all()
    assert (edited != weights).any(-1).sum().item() == 2 * 3 * pairs


def test_shared_rows_are_the_same_in_every_batch():
    each, other = layer(), layer()
    for weights in (each.weights(), other.weights()):
        a, b = share_rows(0.6)(each, weights), share_rows(0.6)(other, weights)
        assert torch.equal(a, b)
    assert not torch.equal(a, share_rows(0.6, seed=1)(each, weights))


def test_a_ratio_that_is_none_is_refused():
    with pytest.raises(ArgumentError, match=r"ratio 1.5 is not a share between 0 and 1"):
        share_rows(1.5)


def test_accuracies_are_those_of_the_confused_model():
    model, pixels = tiny("softmax"), torch.randn(20, 3, 8, 8)
    with torch.no_grad():
        labels = model(pixels).argmax(-1)
        with capture(model, edit=induce("relu")):
            confused = (model(pixels).argmax(-1) == labels).double().mean().item()
    found = induced_confusion(model, [(pixels[:7], labels[:7]), (pixels[7:], labels[7:])], ratios=(0.0, 0.125))
    assert [each.what for each in found] == ["none", "f1", "f2", "rows 0 %", "rows 12.5 %"]
    by_name = {each.what: each.accuracy for each in found}
    assert by_name["none"].mean == by_name["rows 0 %"].mean == 1
    assert by_name["f1"].mean == confused
    assert all(each.n == 20 for each in by_name.values())


class Wrapped(nn.Module):
    """Answers as Hugging Face's models do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pixels):
        return SimpleNamespace(logits=self.inner(pixels))


def test_models_that_answer_with_more_than_logits_are_understood():
    model, pixels, labels = tiny("inline"), torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    edits = {"none": None, "even": lambda _layer, weights: torch.full_like(weights, 1 / weights.shape[-1])}
    plain = edited_accuracy(model, [(pixels, labels)], edits)
    assert edited_accuracy(Wrapped(model), [(pixels, labels)], edits) == plain
