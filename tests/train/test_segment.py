"""Segmentation: heads see the features they should, learn, resume to the same bits, and are counted correctly."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from softless.data import reading
from softless.data.joint import JointAugment, MaskBatch
from softless.data.masks import VOID
from softless.errors import ArgumentError, FileError
from softless.io import checkpoint
from softless.train.assemble import Runtime, train
from softless.train.assemble_dense import train_dense, trained
from softless.train.dense_recipe import SegmentModel, SegmentRecipe
from softless.train.recipe import read_recipe
from softless.train.run import Run
from softless.train.tasks.features import build_features, start_backbone
from softless.train.tasks.segment import PixelCounts, PixelLoss
from softless.train.tasks.segment_heads import build_network
from tests.data.masked import CLASSES, encoded, pair_of_files, parquet
from tests.train.jobs import Killed, Quiet, digest
from tests.train.test_resume import Impatient

STILL = JointAugment(scale=(1.0, 1.0), flip=0.0, brightness=0, contrast=0, saturation=0, hue=0)
TWO = {"dims": [16, 32], "depths": [1, 1], "heads": [1, 2]}
MODELS = {
    "pvt": SegmentModel(name="inline_pvt_tiny", **TWO),
    "swin": SegmentModel(name="inline_swin_tiny", **TWO),
    "cswin": SegmentModel(name="inline_cswin_tiny", dims=[16, 32], depths=[1, 1], heads=[2, 2]),
    "deit": SegmentModel(name="inline_deit_tiny", patch_size=4, dims=32, depths=2, heads=2),
    "softmax swin": SegmentModel(name="swin_tiny", **TWO),
    "timm": SegmentModel(name="resnet10t"),
}
SMALL = replace(MODELS["pvt"], channels=16)
RECIPE = SegmentRecipe(
    model=SMALL, height=24, width=32, batch=4, epochs=3, warmup_epochs=1, lr=1e-2, warmup_lr=1e-3, min_lr=1e-3,
    clip=1.0, ema=0.5, accumulate=2, checkpoint_every=2, log_every=2,
)  # fmt: skip
CPU = Runtime(device="cpu")


def run(folder, data, recipe=RECIPE, watch=None, **options):
    return train_dense(folder, recipe, str(data), Quiet() if watch is None else watch, runtime=CPU, **options)


@pytest.fixture
def squares(tmp_path):
    return pair_of_files(tmp_path / "data")


@pytest.mark.parametrize("family", ["pvt", "swin", "cswin", "softmax swin"])
def test_the_features_of_a_pyramid_are_its_stages_run_by_hand(family):
    features = build_features(MODELS[family], (24, 32)).eval()
    model, images = features.backbone.model, torch.randn(2, 3, 24, 32)
    x, expected = images, []
    for embed, blocks in model.stages():
        x = blocks(embed(x))
        expected.append(x.permute(0, 3, 1, 2))
    found = features(images)
    assert [y.shape[1] for y in found] == features.channels == [16, 32]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_plain_transformer_gives_four_scales_of_its_last_block():
    features = build_features(MODELS["deit"], (24, 32)).eval()
    images, model = torch.randn(2, 3, 24, 32), features.backbone.model
    tokens, grid = model.embed(images)
    patches = model.blocks(tokens, grid)[:, 1:].unflatten(1, tuple(grid)).permute(0, 3, 1, 2)
    found = features(images)
    assert [tuple(x.shape[1:]) for x in found] == [(32, 24, 32), (32, 12, 16), (32, 6, 8), (32, 3, 4)]
    torch.testing.assert_close(found[2], patches)


def test_features_that_timm_gives_with_channels_last_are_turned():
    model = SegmentModel(name="swin_tiny_patch4_window7_224")
    features = build_features(model, (64, 96)).eval()
    assert [tuple(x.shape[1:]) for x in features(torch.randn(1, 3, 64, 96))] == [
        (96, 16, 24), (192, 8, 12), (384, 4, 6), (768, 2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("head", ["upernet", "fpn"])
@pytest.mark.parametrize("family", MODELS)
def test_every_family_with_every_head_gives_every_pixel_logits_and_learns(family, head):
    model = replace(MODELS[family], head=head, channels=16, auxiliary=0.4)
    network, images = build_network(model, (24, 32), 3), torch.randn(2, 3, 24, 32)
    masks = torch.randint(0, 3, (2, 24, 32), dtype=torch.uint8)
    answers = network(images)
    assert [tuple(answer.shape) for answer in answers] == [(2, 3, 24, 32)] * 2
    PixelLoss(replace(RECIPE, model=model))(network, (images, masks)).backward()
    lacking = [name for name, x in network.named_parameters() if x.grad is None or not x.grad.isfinite().all()]
    assert lacking == []
    assert len(network.eval()(images)) == 1
    assert {*network.no_weight_decay()} <= {name for name, _ in network.named_parameters()}


OVERFITTED = [
    pytest.param(family, head, marks=() if family == "pvt" else pytest.mark.slow)
    for family in MODELS
    for head in ("upernet", "fpn")
    if (family, head) != ("timm", "upernet")  # 0.965 after 60 updates: the backbone keeps its batch norms
]


@pytest.mark.parametrize(("family", "head"), OVERFITTED)
def test_a_small_set_is_learned_by_heart(tmp_path, family, head):
    folder = tmp_path / "data"
    pair_of_files(folder, train=4, test=1)
    parquet(folder / "x-test.parquet", [encoded(seed) for seed in range(4)] * 2)  # the same images, twice
    model = replace(MODELS[family], head=head, channels=32)
    if family in ("pvt", "swin", "cswin", "softmax swin"):  # from 4 x 4, bilinear logits round the corners of squares
        model = replace(model, patch_size=2)
    recipe = replace(
        RECIPE, model=model, augment=STILL, epochs=60, warmup_epochs=5, ema=0.0, accumulate=1, lr=5e-3, min_lr=1e-4,
        evaluate_every=60, checkpoint_every=60,
    )  # fmt: skip
    assert run(tmp_path / "a", folder / "x-train.parquet", recipe).best >= 0.98


@pytest.mark.parametrize("stop", [Impatient, Killed])
@pytest.mark.parametrize("change", [{}, {"precision": "bf16"}, {"model": replace(SMALL, head="fpn", auxiliary=0.4)}])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_segmentation_that_is_interrupted_anywhere_resumes_to_the_same_bits(tmp_path, squares, change, stop):
    recipe, at = replace(RECIPE, **change), int(torch.randint(1, 6, ()))
    run(tmp_path / "whole", squares, recipe)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", squares, recipe, stop(at))
    run(tmp_path / "cut", squares, recipe, resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole"), f"interrupted after update {at}"


def test_the_best_model_of_a_run_gives_the_scores_of_the_run(tmp_path, squares):
    watch = Quiet()
    outcome = run(tmp_path / "a", squares, watch=watch)
    measured = [numbers["miou"] for _, numbers in watch.lines if "miou" in numbers]
    assert (outcome.metric, outcome.best) == ("miou", max(measured))
    model, recipe, about = trained(tmp_path / "a")
    assert (recipe, about["classes"], about["step"]) == (RECIPE, [*CLASSES], outcome.best_step)
    saved = checkpoint.newest(Run(tmp_path / "a").best)
    assert saved.state["scores"]["miou"] == outcome.best
    assert len(saved.state["scores"]["by_class"]) == 3
    assert isinstance(model, nn.Module)


def test_a_bad_mask_stops_a_run_before_it_begins(tmp_path):
    folder = tmp_path / "data"
    path = pair_of_files(folder)
    parquet(folder / "x-test.parquet", [encoded(1), (encoded(2)[0], b""), (encoded(3)[0], encoded(3, height=9)[1])])
    with pytest.raises(
        FileError, match=r"2 of 3 masks are bad: .*row 1\]: its mask: it is empty; .*row 2\]: its mask has"
    ):
        run(tmp_path / "a", path)
    assert not (tmp_path / "a").exists()


def test_bad_images_and_masks_are_skipped_and_the_run_resumes_to_the_same_bits(tmp_path, squares, monkeypatch):
    monkeypatch.setattr(reading, "LIMIT", 0.5)
    pairs = [encoded(seed) for seed in range(8)]
    pairs[2], pairs[5] = (pairs[2][0], b""), (pairs[5][0][:-20], pairs[5][1])
    parquet(squares, pairs)
    skip = Runtime(device="cpu", on_bad_image="skip")
    whole = train_dense(tmp_path / "whole", RECIPE, str(squares), Quiet(), runtime=skip)
    with pytest.raises(KeyboardInterrupt):
        train_dense(tmp_path / "cut", RECIPE, str(squares), Killed(3), runtime=skip)
    train_dense(tmp_path / "cut", RECIPE, str(squares), Quiet(), runtime=skip, resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    skipped = json.loads((tmp_path / "whole/skipped.json").read_text())
    assert skipped["train"] == {
        f"{squares}[row 2]": "its mask: it is empty",
        f"{squares}[row 5]": skipped["train"][f"{squares}[row 5]"],
    }
    assert (whole.skipped, skipped["test"]) == (2, {})


def test_a_run_goes_on_only_with_the_same_images_recipe_and_seed(tmp_path, squares):
    run(tmp_path / "a", squares)
    with pytest.raises(ArgumentError, match=r"was begun with recipe\.lr 0\.01, and it is 0\.5 now"):
        run(tmp_path / "a", squares, replace(RECIPE, lr=0.5), resume=True)
    with pytest.raises(ArgumentError, match=r"was begun with seed 0, and it is 1 now"):
        run(tmp_path / "a", squares, resume=True, seed=1)
    other = pair_of_files(tmp_path / "other", train=9)
    with pytest.raises(ArgumentError, match=r"other images to train on \(8 images then and 9 now\)"):
        run(tmp_path / "a", other, resume=True)


def test_a_backbone_begins_with_the_weights_of_a_classifier(tmp_path):
    sizes = [("model.name", "inline_pvt_tiny"), *((f"model.{key}", str(value)) for key, value in TWO.items())]
    recipe = read_recipe("digits", [
        ("epochs", "1"), ("warmup_epochs", "0"), ("batch", "400"), ("model", "{}"), *sizes, ("image_size", "16"),
    ])  # fmt: skip
    train(tmp_path / "digits", recipe, None, Quiet(), runtime=CPU)
    weights = checkpoint.newest(Run(tmp_path / "digits").best).parts["model"]
    features = build_features(SMALL, (24, 32))
    start_backbone(features, tmp_path / "digits")
    own = features.backbone.model.state_dict()
    assert {name for name in weights if name not in own} == {"head.weight", "head.bias"}
    for name, tensor in own.items():
        if name.startswith("pos_embed"):
            assert tensor.shape != weights[name].shape
        else:
            assert torch.equal(tensor, weights[name]), name
    other = build_features(MODELS["swin"], (24, 32))
    with pytest.raises(
        FileError, match=r"the model of .*digits does not fit the backbone Swin: missing patch_embed\.pro"
    ):
        start_backbone(other, tmp_path / "digits")


def test_a_backbone_begins_with_that_of_another_segmentation(tmp_path, squares):
    run(tmp_path / "a", squares)
    network = build_network(replace(SMALL, head="fpn"), (24, 32), 5)
    start_backbone(network.features, tmp_path / "a")
    weights = checkpoint.newest(Run(tmp_path / "a").best).parts["model"]
    for name, tensor in network.features.state_dict().items():
        assert torch.equal(tensor, weights[f"features.{name}"])


def by_sets(answers, masks, classes):
    """IoU of each class by counting sets of pixels; None where there are none."""
    shares = []
    for label in range(classes):
        called = {(*place,) for place in np.argwhere((answers == label) & (masks != VOID))}
        real = {(*place,) for place in np.argwhere(masks == label)}
        shares.append(len(called & real) / len(called | real) if called | real else None)
    return shares


CASES = {
    "random": lambda rng: (rng.standard_normal((3, 4, 6, 5)), rng.integers(0, 4, (3, 6, 5))),
    "with void": lambda rng: (rng.standard_normal((3, 4, 6, 5)), rng.choice([0, 1, 2, 3, VOID], (3, 6, 5))),
    "an empty mask": lambda rng: (
        rng.standard_normal((2, 4, 6, 5)), np.stack([np.full((6, 5), VOID), np.ones((6, 5))])),
    "nothing but void": lambda rng: (rng.standard_normal((1, 4, 6, 5)), np.full((1, 6, 5), VOID)),
    "ties": lambda rng: (rng.integers(0, 2, (3, 4, 6, 5)).astype(float), rng.integers(0, 4, (3, 6, 5))),
    "all equal": lambda rng: (np.zeros((2, 4, 6, 5)), rng.integers(0, 4, (2, 6, 5))),
    "a class in no mask and no answer": lambda rng: (
        rng.standard_normal((2, 4, 6, 5)) - [[[[0]], [[0]], [[0]], [[99]]]], rng.integers(0, 3, (2, 6, 5))),
    "a class in answers alone": lambda rng: (rng.standard_normal((2, 4, 6, 5)), rng.integers(0, 3, (2, 6, 5))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_an_independent_count(case):
    logits, masks = CASES[case](np.random.default_rng(5))
    counts = PixelCounts(4, torch.device("cpu"))
    for start in range(len(logits)):  # one image at a time
        one = torch.tensor(logits[start : start + 1]), torch.tensor(masks[start : start + 1].astype(np.uint8))
        counts.count(*one)
    scores, known = counts.scores(), masks != VOID
    answers = logits.argmax(1)
    expected = by_sets(answers, masks, 4)
    assert scores.by_class == pytest.approx(expected)
    real = [share for share in expected if share is not None]
    assert scores.miou == pytest.approx(np.mean(real) if real else 0.0)
    assert scores.pixels == known.sum()
    assert scores.accuracy == pytest.approx((answers == masks)[known].mean() if known.any() else 0.0)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    picked = np.take_along_axis(logs, np.where(known, masks, 0)[:, None].astype(int), 1)[:, 0]
    assert scores.loss == pytest.approx(-picked[known].mean() if known.any() else 0.0)
    assert math.isfinite(scores.loss)


def test_masks_of_different_sizes_are_counted_at_their_own_size():
    logits = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])[None]  # [1, 2, 1, 2]: class 1, then class 0
    model = nn.Module()
    model.forward = lambda pixels: (logits.expand(len(pixels), -1, -1, -1),)
    masks = torch.full((2, 4, 4), VOID, dtype=torch.uint8)
    masks[0, :2, :4] = torch.tensor([1, 1, 0, 0])
    masks[1, :4, :2] = torch.tensor([1, 0])
    batch = MaskBatch(torch.zeros(2, 3, 1, 2), masks, torch.tensor([[2, 4], [4, 2]]), torch.arange(2))
    counts = PixelCounts(2, torch.device("cpu"))
    counts.add(model, batch)
    assert counts.confusion.tolist() == [[8, 0], [0, 8]]


def test_the_loss_of_parts_is_the_loss_of_the_whole_and_void_gives_no_gradient():
    torch.manual_seed(0)
    network, loss = build_network(SMALL, (24, 32), 3), PixelLoss(RECIPE)
    images, masks = torch.randn(4, 3, 24, 32), torch.randint(0, 3, (4, 24, 32), dtype=torch.uint8)
    masks[0] = VOID
    batch = MaskBatch(images, masks, torch.empty(0), torch.arange(4))
    whole, *parts = (loss(network, part) for count in (1, 2) for part in loss.parts(batch, count))
    torch.testing.assert_close(sum(parts) / 2, whole)
    nothing = loss(network, (images[:1], masks[:1]))
    assert nothing.item() == 0.0
    nothing.backward()
    assert all(not x.grad.any() for x in network.parameters() if x.grad is not None)


WRONG = [
    ({"global_pool": "avg"}, r"model\.global_pool is 'avg', and a head that answers for every place reads"),
    ({"head": "unet"}, r"model\.head is 'unet' and must be one of upernet, fpn"),
    ({"channels": 20}, r"model\.channels is 20 and must be a multiple of 16"),
    ({"auxiliary": -1.0}, r"model\.auxiliary is -1\.0 and must be from 0 to 10"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_a_wrong_key_of_the_model_is_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        SegmentModel(**options)


def test_a_model_that_nobody_has_is_refused():
    with pytest.raises(ArgumentError, match="'swim_tiny' is no model of softless and none of timm"):
        build_features(SegmentModel(name="swim_tiny"), (24, 32))
    with pytest.raises(ArgumentError, match="timm's model 'resnet10t' gives no features with"):
        build_features(SegmentModel(name="resnet10t", local=True), (24, 32))
