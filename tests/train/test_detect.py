"""Detection: heads learn to find objects, runs resume to the same bits, and what is found is counted correctly.

Mask R-CNN also learns the mask of each object.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.models.detection.roi_heads import project_masks_on_boxes

from softless.data import reading
from softless.data.boxed_sources import open_boxed
from softless.data.joint import JointAugment
from softless.data.joint_boxes import NOTHING, BoxBatch, packed
from softless.data.object_masks import decode, encode
from softless.errors import ArgumentError, FileError
from softless.io import checkpoint
from softless.train.assemble import Runtime
from softless.train.assemble_dense import train_dense, trained
from softless.train.dense_recipe import DetectModel, DetectRecipe
from softless.train.run import Run
from softless.train.tasks.detect import BoxCounts, BoxLoss, answered, at_own_size, in_image, targets_of
from softless.train.tasks.detect_heads import Detections, build_detector
from softless.train.tasks.features import start_backbone
from tests.data import outlined
from tests.data.boxed import VALUES, pair_of_files, parquet, row
from tests.train.jobs import Killed, Quiet, digest
from tests.train.test_resume import Impatient

STILL = JointAugment(scale=(1.0, 1.0), flip=0.0, brightness=0, contrast=0, saturation=0, hue=0)
TWO = {"dims": [16, 32], "depths": [1, 1], "heads": [1, 2]}
MODELS = {
    "pvt": DetectModel(name="inline_pvt_tiny", **TWO),
    "swin": DetectModel(name="inline_swin_tiny", **TWO),
    "cswin": DetectModel(name="inline_cswin_tiny", dims=[16, 32], depths=[1, 1], heads=[2, 2]),
    "deit": DetectModel(name="inline_deit_tiny", patch_size=8, dims=32, depths=2, heads=2),
    "softmax swin": DetectModel(name="swin_tiny", **TWO),
    "timm": DetectModel(name="resnet10t"),
}
HEADS = ("faster_rcnn", "retinanet", "mask_rcnn")
SMALL = replace(MODELS["pvt"], channels=16)
RECIPE = DetectRecipe(
    model=SMALL, height=32, width=48, batch=4, epochs=3, warmup_epochs=1, lr=1e-3, warmup_lr=1e-4, min_lr=1e-4,
    clip=1.0, ema=0.5, accumulate=2, checkpoint_every=2, log_every=2,
)  # fmt: skip
CPU = Runtime(device="cpu")
SHOWN = torch.tensor([[32, 48]] * 2)


def run(folder, data, recipe=RECIPE, watch=None, **options):
    return train_dense(folder, recipe, str(data), Quiet() if watch is None else watch, runtime=CPU, **options)


@pytest.fixture
def rectangles(tmp_path):
    """Images with boxes and masks; the masks are read by Mask R-CNN alone."""
    return pair_of_files(tmp_path / "data", draw=outlined.row)


def targets(*counts):
    """As many objects in each image."""
    box = [2.0, 3.0, 20.0, 30.0]
    boxes, mask = torch.tensor([box]), torch.from_numpy(outlined.ellipse(box, 32, 48))[None]
    return [
        {"boxes": boxes.repeat(count, 1), "labels": torch.arange(count), "masks": mask.repeat(count, 1, 1)}
        for count in counts
    ]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", MODELS)
def test_every_family_with_every_head_gives_losses_that_reach_every_weight(family, head):
    torch.manual_seed(0)
    network, images = (
        build_detector(replace(MODELS[family], head=head, channels=16), (32, 48), 2),
        torch.randn(2, 3, 32, 48),
    )
    losses, per_image = network(images, SHOWN, targets(2, 0))
    assert per_image == []
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    torch.stack([*losses.values()]).sum().backward()
    lacking = [name for name, x in network.named_parameters() if x.grad is None or not x.grad.isfinite().all()]
    assert lacking == []
    assert {*network.no_weight_decay()} <= {name for name, _ in network.named_parameters()}
    with torch.no_grad():
        measured, per_image = network.eval()(images, SHOWN, targets(2, 0))
        again, _ = network(images, SHOWN, targets(2, 0))
        nothing, _ = network(images, SHOWN)
    assert measured == again
    assert (measured.keys(), nothing) == (losses.keys(), {})
    assert len(per_image) == 2
    for each in per_image:
        assert (each.corners[:, 2:] <= torch.tensor([48, 32])).all()
        assert (each.scores.diff() <= 0).all()
        assert {*each.labels.tolist()} <= {0, 1}
        assert (None if each.masks is None else [*each.masks.shape]) == (
            [len(each.labels), 28, 28] if head == "mask_rcnn" else None
        )


def test_masks_change_nothing_about_features_and_boxes():
    torch.manual_seed(0)
    networks = [build_detector(replace(SMALL, head=head), (32, 48), 2) for head in ("mask_rcnn", "faster_rcnn")]
    weights, found = networks[0].state_dict(), []
    networks[1].load_state_dict({name: weight for name, weight in weights.items() if "mask" not in name})
    images = torch.randn(2, 3, 32, 48)
    for network in networks:
        torch.manual_seed(0)
        losses, _ = network(images, SHOWN, targets(2, 1))
        answers = [each._replace(masks=None) for each in network.eval()(images, SHOWN)[1]]
        losses.pop("loss_mask", None)
        found.append((network.features(images), losses, answers))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("head", HEADS)
def test_nothing_is_found_where_nothing_is_shown(head):
    torch.manual_seed(0)
    network = build_detector(replace(SMALL, head=head), (32, 48), 2).eval()
    for parameter in network.head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # so that the scores are high enough to be found
    shown = torch.tensor([[16, 48], [32, 24]])
    with torch.no_grad():
        _, per_image = network(torch.randn(2, 3, 32, 48), shown)
    for each, (height, width) in zip(per_image, shown.tolist(), strict=True):
        assert len(each.scores) > 0
        assert each.corners[:, 3].max() <= height
        assert each.corners[:, 2].max() <= width


def learned(place, model, updates, images=4, lr=2e-3):
    """What a training on a few images measures on the same images, of which it sees each twice."""
    folder, draw = place / "data", outlined.row if model.head == "mask_rcnn" else row
    pair_of_files(folder, train=images, test=1, draw=draw)
    parquet(folder / "x-test.parquet", [draw(seed) for seed in range(images)] * 2)
    recipe = replace(
        RECIPE, model=replace(model, anchor=24.0), augment=STILL, batch=images, epochs=updates, warmup_epochs=5,
        ema=0.0, accumulate=1, lr=lr, evaluate_every=updates, checkpoint_every=updates,
    )  # fmt: skip
    return run(place / "a", folder / "x-train.parquet", recipe).last


UPDATES = {"faster_rcnn": 60, "retinanet": 150, "mask_rcnn": 60}
OVERFITTED = [
    ("pvt", "retinanet", 60),
    *(pytest.param(family, head, UPDATES[head], marks=pytest.mark.slow) for family in MODELS for head in HEADS),
]


@pytest.mark.parametrize(("family", "head", "updates"), OVERFITTED)
def test_a_small_set_is_learned_by_heart(tmp_path, family, head, updates):
    numbers = learned(tmp_path, replace(MODELS[family], head=head, channels=32), updates)
    assert {name: number for name, number in numbers.items() if "ap50" in name and number < 0.95} == {}


def test_the_masks_of_two_images_are_learned_by_heart(tmp_path):
    numbers = learned(tmp_path, replace(SMALL, head="mask_rcnn"), 40, images=2, lr=4e-3)
    assert min(numbers["ap50"], numbers["mask_ap50"]) >= 0.95


@pytest.mark.parametrize(("head", "change", "stop"), [
    ("faster_rcnn", {}, Killed), ("retinanet", {}, Impatient), ("faster_rcnn", {"precision": "bf16"}, Impatient),
    ("mask_rcnn", {}, Killed),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_detection_that_is_interrupted_anywhere_resumes_to_the_same_bits(tmp_path, rectangles, head, change, stop):
    recipe, at = replace(RECIPE, model=replace(SMALL, head=head), **change), int(torch.randint(1, 6, ()))
    run(tmp_path / "whole", rectangles, recipe)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rectangles, recipe, stop(at))
    run(tmp_path / "cut", rectangles, recipe, resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole"), f"interrupted after update {at}"


def test_the_best_model_of_a_run_gives_the_scores_of_the_run_and_starts_another(tmp_path, rectangles):
    watch, recipe = Quiet(), replace(RECIPE, model=replace(SMALL, head="retinanet"))
    outcome = run(tmp_path / "a", rectangles, recipe, watch)
    measured = [numbers["ap"] for _, numbers in watch.lines if "ap" in numbers]
    assert (outcome.metric, outcome.best) == ("ap", max(measured))
    _, read, about = trained(tmp_path / "a")
    assert (read, about["classes"], about["step"]) == (recipe, ["red", "blue"], outcome.best_step)
    saved = checkpoint.newest(Run(tmp_path / "a").best)
    assert (saved.state["scores"]["ap"], saved.state["scores"]["boxes"]) == (outcome.best, 8)
    network = build_detector(SMALL, (32, 48), 5)
    start_backbone(network.features, tmp_path / "a")
    for name, tensor in network.features.state_dict().items():
        assert torch.equal(tensor, saved.parts["model"][f"features.{name}"])


def test_bad_boxes_stop_a_run_before_it_begins_or_are_skipped(tmp_path, rectangles, monkeypatch):
    rows = [row(seed) for seed in range(8)]
    rows[2] |= {"labels": [0, 5]}
    rows[5] |= {"image": rows[5]["image"][:-20]}
    parquet(rectangles, rows)
    with pytest.raises(FileError, match=r"row 2\]: its box 1 .* has class 5, and the classes are 0, 1"):
        run(tmp_path / "a", rectangles)
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr(reading, "LIMIT", 0.5)
    skip, recipe = Runtime(device="cpu", on_bad_image="skip"), replace(RECIPE, model=replace(SMALL, head="retinanet"))
    outcome = train_dense(tmp_path / "b", recipe, str(rectangles), Quiet(), runtime=skip)
    skipped = json.loads((tmp_path / "b/skipped.json").read_text())["train"]
    assert (outcome.skipped, [*skipped]) == (2, [f"{rectangles}[row {place}]" for place in (2, 5)])


def test_bad_masks_stop_a_run_before_it_begins_or_are_skipped(tmp_path, rectangles, monkeypatch):
    rows = [outlined.row(seed) for seed in range(8)]
    rows[2] |= {"masks": rows[2]["masks"][:1]}
    parquet(rectangles, rows)
    recipe = replace(RECIPE, model=replace(SMALL, head="mask_rcnn"), epochs=1, warmup_epochs=0)
    with pytest.raises(FileError, match=r"row 2\]: it has 2 boxes and 1 masks, and each box needs a mask"):
        run(tmp_path / "a", rectangles, recipe)
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr(reading, "LIMIT", 0.5)
    skip = Runtime(device="cpu", on_bad_image="skip")
    assert train_dense(tmp_path / "b", recipe, str(rectangles), Quiet(), runtime=skip).skipped == 1


def test_the_loss_of_parts_is_the_loss_of_the_whole():
    torch.manual_seed(0)
    network, loss = build_detector(replace(SMALL, head="retinanet"), (32, 48), 2), BoxLoss(RECIPE)
    boxes, labels = torch.rand(4, 3, 4) * 10, torch.randint(0, 2, (4, 3))
    boxes[..., 2:] += 15
    labels[0], labels[1, 1:] = NOTHING, NOTHING
    masks = torch.stack([packed([*torch.eye(48)[None, :32].byte().roll(at, 2)] * 3, (32, 48)) for at in range(4)])
    shown = SHOWN.repeat(2, 1)
    batch = BoxBatch(torch.randn(4, 3, 32, 48), boxes, labels, masks, shown, shown, torch.arange(4))
    whole, *parts = (loss(network, part) for count in (1, 2) for part in loss.parts(batch, count))
    torch.testing.assert_close(sum(parts) / 2, whole)
    counted = targets_of(boxes, labels, masks)
    assert [len(each["labels"]) for each in counted] == [len(each["masks"]) for each in counted] == [0, 1, 3, 3]
    assert torch.equal(counted[3]["masks"][2], torch.eye(48).bool()[:32].roll(3, 1))


def test_what_is_found_is_counted_in_pixels_of_the_image_at_its_own_size(tmp_path):
    images = open_boxed(parquet(tmp_path / "x.parquet", [row(0), row(1, height=64, width=48)]), "train", VALUES)
    ranks = [BoxCounts(images, torch.device("cpu")) for _ in range(2)]
    shown = torch.tensor([[16, 24], [32, 24]])  # both are seen at half their size
    for index, counts in enumerate(ranks):
        boxes = images[index].boxes
        half = Detections(torch.from_numpy(boxes.corners) / 2, torch.from_numpy(boxes.labels), torch.tensor([0.9, 0.8]))
        shape = torch.tensor(images.size(index)[::-1])
        counts.count(index, at_own_size(half, shown[index], shape), shown[index], shape)
    for ours, theirs in zip(ranks[0].tensors(), ranks[1].tensors(), strict=True):
        ours.add_(theirs)  # as several ranks add up what they have seen
    scores = ranks[0].scores()
    assert (scores.images, scores.boxes, scores.ap) == (2, 4, pytest.approx(1))
    assert ranks[1].scores().images == 1


@pytest.mark.parametrize("head", ["retinanet", "mask_rcnn"])
def test_a_picture_is_answered_in_its_own_pixels(rectangles, head):
    torch.manual_seed(0)
    network = build_detector(replace(SMALL, head=head), (32, 48), 2).eval()
    for parameter in network.head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    image = open_boxed(rectangles, "train", VALUES)[0].image.resize((480, 640))
    with torch.no_grad():
        corners, labels, scores, masks = answered(network, RECIPE, image, torch.device("cpu"))
    assert len(corners) == len(labels) == len(scores) > 0
    assert [code["size"] for code in masks] == [[640, 480]] * (len(scores) if head == "mask_rcnn" else 0)
    assert (corners >= 0).all()
    assert 48 < corners[:, 2].max() <= 480
    assert np.all(np.diff(scores) <= 0)


def test_a_head_that_answers_what_it_was_taught_draws_each_mask_where_it_was():
    """Of an ellipse of width w and height h, at most the pixels that its outline crosses are wrong: 2 (w + h)."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        shape, scale = rng.integers(40, 90, 2), int(rng.integers(1, 4))
        corner, size = rng.uniform(0, 15, 2), rng.uniform(12, 24, 2)
        box = [*corner, *(corner + size)]  # in the image as it was seen; at its own size, it is `scale` times as large
        seen, own = (outlined.ellipse([side * by for side in box], *shape * by) for by in (1, scale))
        corners = torch.tensor([box])
        masks = project_masks_on_boxes(torch.from_numpy(seen)[None], corners, torch.tensor([0]), 28)
        shown, shape = torch.from_numpy(shape), torch.from_numpy(shape * scale)
        detections = at_own_size(Detections(corners, torch.tensor([0]), torch.ones(1), masks), shown, shape)
        (code,) = in_image(detections, shown, shape)
        assert (decode(code) != own).sum() <= 2 * scale * size.sum()


def test_masks_are_drawn_by_linear_interpolation_between_the_centers_of_their_cells():
    rng = np.random.default_rng(0)
    for _ in range(30):
        shown, shape = (torch.from_numpy(rng.integers(20, 60, 2)) for _ in range(2))
        sides = shape.flip(0).repeat(2)
        corners = torch.from_numpy(np.sort(rng.random((1, 2, 2)), 1).reshape(1, 4)) * sides
        masks = torch.from_numpy(rng.random((1, 28, 28)))
        (code,) = in_image(Detections(corners, torch.zeros(1), torch.zeros(1), masks), shown, shape)
        axes = [torch.arange(int(side)).double() + 0.5 for side in shape]  # centers of pixels
        y, x = torch.meshgrid(*axes, indexing="ij")
        left, top, right, bottom = corners[0]
        inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
        u, v = x - 0.5 * shape[1] / shown[1] - left, y - 0.5 * shape[0] / shown[0] - top
        places = torch.stack([2 * u / (right - left) - 1, 2 * v / (bottom - top) - 1], 2)[None]
        expected = torch.nn.functional.grid_sample(masks[None], places, padding_mode="border", align_corners=False)
        assert code == encode((inside & (expected[0, 0] >= 0.5)).numpy())


WRONG = [
    ({"head": "yolo"}, r"model\.head is 'yolo' and must be one of faster_rcnn, retinanet, mask_rcnn"),
    ({"anchor": -1.0}, r"model\.anchor is -1\.0 and must be from 0 to 16384"),
    ({"channels": 20}, r"model\.channels is 20 and must be a multiple of 16"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_a_wrong_key_of_the_model_is_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        DetectModel(**options)


def test_what_a_detection_cannot_do_is_refused(tmp_path, rectangles):
    with pytest.raises(ArgumentError, match="a detection makes boxes of any number: it must be false"):
        replace(RECIPE, compile=True)
    with pytest.raises(ArgumentError, match="a CUDA graph needs updates of one shape, and a detection has any number"):
        train_dense(tmp_path / "a", RECIPE, str(rectangles), Quiet(), runtime=Runtime(device="cpu", graph=True))
