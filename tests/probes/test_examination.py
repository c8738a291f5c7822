"""An examination is one pass: the same from any batches, equal to its probes one by one, and JSON."""

import gc
import json
from dataclasses import asdict, fields
from itertools import pairwise

import pytest
import torch
from torch import nn

import softless
from softless.errors import ArgumentError, NonFiniteError, SoftlessError
from softless.probes import examination
from softless.probes.capture import capture
from softless.probes.examination import examine, measure, per_image
from softless.probes.findings import LayerFindings
from softless.probes.injectivity import confusions, rank_condition
from softless.probes.layer import Layer
from softless.probes.locality import locality, residual_share
from softless.probes.running import observe
from softless.probes.score_range import TAU, effective_rank, filtered, spread


def tiny(mechanism="inline", **options):
    options = {"img_size": 8, "patch_size": 2, "dims": 16, "depths": 2, "heads": 2, "num_classes": 3, **options}
    return softless.create_model("inline_deit_tiny", mechanism=mechanism, **options).eval()


def pixels(count=7, side=8):
    return torch.randn(count, 3, side, side)


def close(a, b):
    """Two findings, number by number."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return a == pytest.approx(b, rel=1e-5, abs=1e-7) if isinstance(a, float) else a == b


@pytest.mark.parametrize("mechanism", ["softmax", softless.mechanism("linear", phi="relu"), "hydra"], ids=str)
def test_findings_do_not_depend_on_the_split_into_batches(mechanism):
    model, images = tiny(mechanism, depths=1), pixels()
    whole = asdict(examine(model, [images]))
    for sizes in ([1, 6], [3, 3, 1]):
        assert close(asdict(examine(model, images.split(sizes))), whole)
    assert whole["images"] == 7


def test_every_estimate_equals_its_probe_called_alone():
    model, images = tiny("inline"), pixels(5)
    with torch.no_grad(), capture(model) as captured:
        model(images)
    found = examine(model, [images]).layers
    assert [each.name for each in found] == ["blocks.0.attn", "blocks.1.attn"]
    for each, layer in zip(found, captured.layers, strict=True):
        weights, scores = layer.weights(), layer.scores()
        spreads, places = spread(scores), locality(weights, layer.grid, layer.prefix)
        kept, discarded = filtered(scores)
        keys = rank_condition(layer.k, layer.mechanism)
        expected = {
            "confusions": confusions(weights).double(),
            "local_mass": places["local_mass"].mean(-1),
            "attention_distance": places["attention_distance"].mean(-1),
            "residual_share": residual_share(layer.local, layer.output()),
            "score_range": spreads["score_range"].mean(-1),
            "score_deviation": spreads["score_deviation"].mean(-1),
            "entropy": spreads["entropy"].mean(-1),
            "score_volume": spreads["score_volume"].mean(-1),
            "first_order_error": spreads["first_order_error"].mean(-1),
            "uniform_error": spreads["uniform_error"].mean(-1),
            "bound": spreads["bound"].mean(-1),
            "effective_rank": effective_rank(scores),
            "smallest_singular_value": keys.singular_values[..., -1],
        }
        for name, values in expected.items():
            assert close(asdict(getattr(each, name)), asdict(observe(values.mean(1)).estimates()[0])), name
            assert close([asdict(x) for x in each.by_head[name]], [asdict(x) for x in observe(values).estimates()])
        for place, _tau in enumerate(TAU):
            assert close(asdict(each.kept[place]), asdict(observe(kept[..., place].mean((1, 2))).estimates()[0]))
            lost = observe(discarded[..., place].mean((1, 2))).estimates()[0]
            assert close(asdict(each.discarded[place]), asdict(lost))
        assert (each.heads, each.tokens, each.mechanism, each.tau) == (2, 17, "inline", TAU)
        assert (each.rank, each.full_rank) == (int(keys.rank.min()), 9)
        baselines = [x.mean().item() for x in (places["local_baseline"], places["distance_baseline"])]
        assert [each.local_baseline, each.distance_baseline] == pytest.approx(baselines)
        assert each.verdict.startswith("To first order, a linear kernel would")


def test_histograms_count_every_image_and_head_and_every_image_once():
    model, images = tiny("softmax"), pixels(6)
    found = examine(model, images.split(4))
    with torch.no_grad(), capture(model) as captured:
        model(images)
    totals = sum(confusions(layer.weights()).sum(1) for layer in captured.layers)
    assert sum(found.confusion_histogram.counts) == 6
    edges = found.confusion_histogram.edges
    expected = [((totals >= a) & (totals < b)).sum().item() for a, b in pairwise(edges)]
    assert list(found.confusion_histogram.counts) == expected
    assert all(sum(each.confusion_histogram.counts) == 12 for each in found.layers)


def test_findings_are_json():
    found = examine(tiny("softmax", local=False), [pixels(2)])
    read = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert read["layers"][0].keys() == {field.name for field in fields(LayerFindings)}
    assert read["layers"][0]["residual_share"] is None
    assert read["layers"][0]["score_range"].keys() == {"mean", "low", "high", "n"}


def test_a_single_image_has_no_intervals():
    found = examine(tiny(), [pixels(1)])
    assert found.layers[0].entropy.low is None
    json.dumps(asdict(found), allow_nan=False)


class Constructed(nn.Module):
    """One layer whose queries are the given tokens and their doubles, and whose keys are another's."""

    def __init__(self, mechanism):
        super().__init__()
        self.attention = softless.nn.Attention(32, 2, mechanism)
        with torch.no_grad():
            self.attention.qkv.bias.zero_()

    def forward(self, x):
        return self.attention(torch.cat([x, 2 * x], 1)).mean(1)


@pytest.mark.parametrize(
    ("mechanism", "confused", "collide"),
    [("softmax", 0, 0), ("inline", 0, 0), (softless.mechanism("linear", phi="relu"), 12, 1)],
    ids=str,
)
def test_a_constructed_layer_confuses_as_the_propositions_say(mechanism, confused, collide):
    found = examine(Constructed(mechanism), [torch.randn(4, 12, 32)]).layers[0]
    assert (found.confusions.mean, found.collinear_collisions.mean) == (confused, collide)
    assert found.collinear_pairs.mean == 12
    assert found.local_mass is None


def test_windows_of_an_image_are_one_sample():
    """Queries are averaged over them, pairs are added up."""
    model = softless.create_model("swin_tiny", img_size=64, num_classes=3, depths=(1, 1, 1, 1)).eval()
    images = pixels(2, 64)
    found = examine(model, [images]).layers[0]
    with torch.no_grad(), capture(model) as captured:
        model(images)
    layer = captured.layers[0]
    assert layer.q.shape[0] > 2
    assert found.entropy.n == 2
    real = layer.key_mask if layer.key_mask is not None else torch.ones(layer.q.shape[0], 49, dtype=torch.bool)
    entropy = per_image(spread(layer.scores())["entropy"], real, 2)
    assert close(asdict(found.entropy), asdict(observe(entropy.mean(1)).estimates()[0]))
    counts = confusions(layer.weights(), real=real).unflatten(0, (2, -1)).sum(1)
    assert found.confusions.mean == pytest.approx(counts.double().mean().item())


def test_padding_changes_no_measure():
    """A text, and the same with three tokens of padding, NaN for all we know."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 9, 8).unbind()
    made = softless.mechanism("softmax")
    alone = measure(Layer("text", q, k, v, made), 2)
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 3), value=5.0) for x in (q, k, v)]
    mask = torch.arange(12).expand(2, 12) < 9
    padded = measure(Layer("text", *longer, made, key_mask=mask), 2)
    assert alone.values.keys() == padded.values.keys()
    for name, values in alone.values.items():
        torch.testing.assert_close(padded.values[name], values, msg=name, rtol=1e-5, atol=1e-6)
    assert (alone.rank, alone.full_rank) == (padded.rank, padded.full_rank)


@pytest.mark.parametrize("room", [1, 1000])
def test_measuring_a_few_images_at_a_time_changes_nothing(monkeypatch, room):
    """With everything that a layer may carry for each sample: a mask, a bias, inputs, a residual, two windows."""
    q, k, v, local = torch.randn(4, 6, 2, 9, 8).unbind()
    mask = torch.rand(6, 9) < 0.8
    mask[:, 0] = True
    more = {"key_mask": mask, "local": local, "grid": (3, 3)}
    layers = [Layer("biased", q, k, v, softless.mechanism("softmax"), bias=torch.randn(6, 1, 9, 9), **more)]
    layers.append(Layer("shared", q, k, v, softless.mechanism("softmax"), bias=torch.randn(1, 2, 9, 9), **more))
    inputs = {"beta": torch.rand(6, 2, 9)}
    layers.append(Layer("delta", q, k, v, softless.mechanism("delta"), inputs=inputs, is_causal=True, **more))
    inputs = {"weight": torch.randn(2, 8, 8), "bias": torch.randn(2, 8)}
    layers.append(Layer("affine", q, k, v, softless.mechanism("linear", phi="affine_relu"), inputs=inputs, **more))
    whole = [measure(layer, 3) for layer in layers]
    monkeypatch.setattr(examination, "ROOM", room)
    for layer, expected in zip(layers, whole, strict=True):
        found = measure(layer, 3)
        assert (found.name, found.rank, found.full_rank) == (expected.name, expected.rank, expected.full_rank)
        for name, values in expected.values.items():
            torch.testing.assert_close(found.values[name], values, msg=f"{layer.name}: {name}")


def test_memory_does_not_grow_with_the_images():
    """The tensors alive after the second batch and after the sixth."""
    seen, held = [], []

    def count(images):
        seen.append(images)
        if len(seen) in (2, 6):
            gc.collect()
            held.append(sum(each.numel() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)))

    examine(Constructed("softmax"), (torch.randn(2, 6, 32) for _ in range(6)), advance=count)
    assert held[0] == held[1] > 0


def test_half_precision_is_examined_in_float32():
    """Weights rounded to bfloat16 would be confused by rounding alone."""
    q, k = torch.randn(2, 1, 1, 40, 16).bfloat16().unbind()
    made = softless.mechanism("softmax")
    found = measure(Layer("half", q, k, k, made), 1)
    wide = measure(Layer("wide", q.float(), k.float(), k.float(), made), 1)
    assert all(torch.equal(found.values[name], wide.values[name]) for name in wide.values)


def test_batches_may_be_tensors_pairs_or_keyword_arguments():
    model, images = tiny(depths=1), pixels(3)
    labels = torch.zeros(3)
    plain = examine(model, [images])
    assert examine(model, [(images, labels)]) == plain
    assert examine(model, [{"x": images}]) == plain
    assert examine(model, [["one", "two", "three"]], forward=lambda model, _batch: model(images)) == plain


def test_advance_is_called_after_each_batch():
    told = []
    examine(tiny(), pixels(5).split(2), advance=told.append)
    assert told == [2, 2, 1]


def test_layers_are_picked_by_name():
    model, images = tiny(), pixels(2)
    whole = examine(model, [images])
    (found,) = examine(model, [images], only=lambda name: name.startswith("blocks.1")).layers
    assert found == whole.layers[1]
    with pytest.raises(ArgumentError, match=r"no layer was picked of blocks.0.attn, blocks.1.attn"):
        examine(model, [images], only=lambda name: name == "head")


def test_examine_leaves_the_model_as_it_was():
    model = tiny().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    examine(model, [pixels(2)])
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_examining_no_batches_or_no_attention_raises():
    with pytest.raises(ArgumentError, match="there is nothing to examine: batches is empty"):
        examine(tiny(), [])
    with pytest.raises(SoftlessError):
        examine(nn.Linear(2, 2), [torch.randn(1, 2)])


@pytest.mark.parametrize("broken", ["q", "k"])
def test_an_error_names_the_layer_with_numbers_that_are_not_finite(broken):
    its = dict(zip("qkv", torch.randn(3, 2, 1, 4, 8).unbind(), strict=True))
    its[broken][1, 0, 2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="layer 'broken' has scores or weights that are not finite numbers"):
        measure(Layer("broken", **its, mechanism=softless.mechanism("inline")), 2)
    mask = torch.tensor([[True] * 4, [True, True, False, True]])
    measure(Layer("padded", **its, mechanism=softless.mechanism("inline"), key_mask=mask), 2)


def test_a_batch_that_does_not_divide_into_windows_is_refused():
    q = torch.randn(5, 1, 4, 8)
    with pytest.raises(ArgumentError, match="layer 'odd' has 5 samples for a batch of 2"):
        measure(Layer("odd", q, q, q, softless.mechanism("softmax")), 2)
