"""Images with boxes: found in files and folders, bad ones named, and augmented together."""

import json

import numpy as np
import pytest
import torch

from softless.data.annotated_sources import open_annotated_splits, open_annotated_test, values_of
from softless.data.annotation_check import check_annotations
from softless.data.boxed_sources import has_boxes, open_boxed
from softless.data.boxes import BoxValues
from softless.data.joint import JointAugment
from softless.data.joint_boxes import NOTHING, BoxReader, box_loader, box_transform
from softless.data.reading import Damage, Draw
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage
from tests.data.boxed import CLASSES, COLORS, VALUES, coco, drawn, pair_of_files, parquet, row

PLAIN = JointAugment(scale=(1.0, 1.0), flip=0.0, brightness=0, contrast=0, saturation=0, hue=0)


def test_a_pair_of_files_gives_every_image_its_boxes(tmp_path):
    train, test = open_annotated_splits(pair_of_files(tmp_path), BoxValues())
    assert (len(train), len(test), train.classes) == (8, 4, CLASSES)
    for index in range(8):
        pixels, boxes, labels = drawn(index)
        sample = train[index]
        assert np.array_equal(np.asarray(sample.image), pixels)
        assert (sample.boxes.corners.tolist(), sample.boxes.labels.tolist()) == (boxes, labels)
        assert sample.name == f"{tmp_path}/x-train.parquet[row {index}]"
    part, whole = open_annotated_splits(pair_of_files(tmp_path), BoxValues(), 0.25)
    assert (len(part), len(whole)) == (6, 2)
    assert (
        part.fingerprint != train.fingerprint == open_boxed(tmp_path / "x-train.parquet", "train", VALUES).fingerprint
    )


LAYOUTS = {
    "as COCO": ("annotations/instances_{}2017.json", "{}2017", ("train", "val")),
    "beside the images": ("{}/_annotations.coco.json", "{}", ("train", "valid")),
    "one folder of images": ("{}.json", "images", ("train", "test")),
    "a folder for each part": ("{}.json", "images/{}", ("train", "val")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_usual_layouts_of_coco_are_found(tmp_path, layout):
    file, images, parts = LAYOUTS[layout]
    for part, seeds in zip(parts, ([3, 1, 2], [4, 5]), strict=True):
        coco(tmp_path / file.format(part), tmp_path / images.format(part), seeds)
    assert has_boxes(tmp_path, "boxes")
    assert isinstance(values_of(tmp_path), BoxValues)
    train, test = open_annotated_splits(tmp_path, BoxValues())
    assert (len(train), len(test), train.classes) == (3, 2, ("red", "blue"))  # in the order of their ids
    sample = test[1]
    assert np.array_equal(np.asarray(sample.image), drawn(5)[0])
    assert (sample.boxes.corners.tolist(), sample.boxes.labels.tolist()) == drawn(5)[1:]
    assert train.names(2) == str(tmp_path / images.format(parts[0]) / "3.png")
    alone = open_annotated_test(tmp_path / file.format(parts[0]), BoxValues(), 0.34)
    assert len(alone) == 1


def test_numbers_corners_and_crowds_mean_what_the_recipe_says(tmp_path):
    one = {**row(0), "boxes": [[2, 3, 10, 20], [4, 4, 0, 5]], "labels": [9, 4], "crowd": [True, False]}
    path = parquet(tmp_path / "x.parquet", [one])
    values = BoxValues(classes=CLASSES, values=(4, 9), form="xywh", empty="drop")
    boxes = open_boxed(path, "train", values)[0].boxes
    assert (boxes.corners.tolist(), boxes.labels.tolist()) == ([[2, 3, 12, 23]], [1])
    assert (boxes.crowd.tolist(), boxes.areas.tolist()) == ([True], [200])


BAD = {
    "its box 1 (30, 4, 49.5, 8) reaches 1.5 pixels beyond the image, which has 48 x 32": ([30, 4, 49.5, 8], 1),
    "its box 1 (-3, 4, 9, 8) reaches 3 pixels beyond the image, which has 48 x 32": ([-3, 4, 9, 8], 1),
    "its box 1 (5, 4, 5, 8) is empty: it has no width or no height": ([5, 4, 5, 8], 1),
    "its box 1 (9, 4, 5, 8) is empty: it has no width or no height": ([9, 4, 5, 8], 1),
    "its box 1 (nan, 4, 5, 8) has a side that is no number": ([float("nan"), 4, 5, 8], 1),
    "its box 1 (1, 4, 5, 8) has class 2, and the classes are 0, 1": ([1, 4, 5, 8], 2),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_box_is_named_with_the_reason(tmp_path, why):
    rows, (box, label) = [row(seed) for seed in range(3)], BAD[why]
    rows[1] |= {"boxes": [rows[1]["boxes"][0], box], "labels": [0, label]}
    images = open_boxed(parquet(tmp_path / "x.parquet", rows), "train", VALUES)
    for attempt in (lambda: images[1], lambda: check_annotations(images, Damage("fail", 3))):
        with pytest.raises(BadImage) as error:
            attempt()
        assert str(error.value) == f"{tmp_path}/x.parquet[row 1]: {why}"
    damage = Damage("skip", 5000)
    check_annotations(images, damage)
    assert [*damage.skipped] == [images.names(1)]


def test_images_that_are_named_and_missing_are_all_found_at_once(tmp_path):
    coco(tmp_path / "train.json", tmp_path / "images", [0, 1, 2, 3])
    for seed in (1, 2):
        (tmp_path / f"images/{seed}.png").unlink()
    images = open_boxed(tmp_path / "train.json", "train", BoxValues())
    with pytest.raises(FileError) as error:
        check_annotations(images, Damage("fail", 4))
    assert str(error.value) == "2 of 4 images with boxes are bad: " + "; ".join(
        f"{tmp_path}/images/{seed}.png: it cannot be read (No such file or directory)" for seed in (1, 2)
    )


def test_a_box_may_reach_one_pixel_beyond_its_image_and_is_cut_off(tmp_path):
    one = {**row(0), "boxes": [[-1, 0, 49, 33]], "labels": [0]}
    images = open_boxed(parquet(tmp_path / "x.parquet", [one]), "train", VALUES)
    assert images[0].boxes.corners.tolist() == [[0, 0, 48, 32]]


def test_what_is_missing_or_broken_is_said_in_one_sentence(tmp_path):
    def refused(path, says, values=VALUES):
        with pytest.raises((FileError, ArgumentError), match=says):
            open_annotated_splits(path, values)

    refused(tmp_path / "none", "there is no such parquet file, JSON file or folder of images and boxes")
    refused(tmp_path, r"it has no JSON file of COCO, such as annotations/instances_train2017\.json")
    path = parquet(tmp_path / "x.parquet", [row(0)])
    refused(path, r"its classes have no names: list them in .*NAME-classes\.json, or in the recipe", BoxValues())
    refused(
        path, "it has columns image, boxes, labels, and objects is needed", BoxValues(classes=CLASSES, column="objects")
    )
    refused(path, "it has one part, and images to test on are needed")
    refused(parquet(path, [{**row(0), "labels": [1]}]), r"x\.parquet\[row 0\]: it has 2 boxes, 1 labels and 1 crowds")
    refused(parquet(path, [{**row(0), "boxes": [[1, 2, 3]] * 2}]), r"row 0\]: one of its boxes is \[1\.0, 2\.0, 3\.0\]")
    file = tmp_path / "a.json"
    for text, says in {
        "{": "it is no JSON file of COCO", "{}": "it is no JSON file of COCO \\(it lacks 'images'\\)",
        json.dumps(coco(file, tmp_path, [0]) | {"images": []}): "2 of its boxes are of images that it does not list",
        '{"images": [], "annotations": [], "categories": []}': "it holds no images",
    }.items():  # fmt: skip
        file.write_text(text)
        refused(file, says, BoxValues())
    images = open_boxed(parquet(path, [{**row(0), "boxes": [], "labels": []}] * 3), "train", VALUES)
    with pytest.raises(FileError, match=r"row 0\]: none of the 3 images has a box"):
        check_annotations(images, Damage("fail", 3))


WRONG = [
    ({"values": (1, 1)}, r"boxes\.values is \(1, 1\) and must be different whole numbers"),
    ({"classes": ("a", "b"), "values": (1,)}, r"boxes\.values has 1 numbers, and there are 2 classes: a, b"),
    ({"classes": ("a", "a")}, r"boxes\.classes has 2 names, and 1 to 10000 different are needed"),
    ({"classes": "ab"}, r"boxes\.classes is 'ab' and must be a list of names"),
    ({"form": "cxcywh"}, r"boxes\.form is 'cxcywh' and must be one of xyxy, xywh"),
    ({"empty": "skip"}, r"boxes\.empty is 'skip' and must be one of refuse, drop"),
    ({"labels": 3}, r"boxes\.labels is 3 and must be the name of a column"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_values_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        BoxValues(**options)


def surrounds(pixels, box, color):
    """Whether a box has the pixels of this color inside and none outside, to a pixel."""
    rows, columns = (pixels.permute(1, 2, 0) - torch.tensor(color)).abs().sum(-1).lt(60).nonzero().unbind(1)
    seen = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return (seen - box).abs().max() <= 1


def test_an_image_and_its_boxes_move_together(tmp_path):
    images = open_boxed(pair_of_files(tmp_path), "train", VALUES)
    augment = JointAugment(scale=(1.5, 2.5), brightness=0, contrast=0, saturation=0, hue=0)
    reader, seen, boxes = BoxReader(images, box_transform(augment, (24, 36), train=True)), set(), 0
    for draw in range(40):
        pixels, corners, labels, masks, shown, shape, _ = reader[Draw(draw % 8, (0, draw))]
        assert (tuple(pixels.shape), tuple(masks.shape)) == ((3, 24, 36), (0, 24, 36))
        assert (shown, shape) == ([24, 36], (32, 48))
        seen.add(pixels.numpy().tobytes())
        for box, label in zip(corners, labels.tolist(), strict=True):
            if (box[2:] - box[:2]).min() > 3:
                boxes += 1
                assert surrounds(pixels.int(), box, COLORS[label])
    assert len(seen) == 40
    assert boxes > 30


def test_tests_scale_images_and_boxes_into_the_size_and_leave_crowds_out(tmp_path):
    wide, tall = row(0), {**row(1, height=60, width=30), "crowd": [False, True]}
    path = parquet(tmp_path / "x.parquet", [{**wide, "crowd": [False, False]}, tall])
    images = open_boxed(path, "train", VALUES)
    (batch,) = box_loader(
        images, size=(24, 24), batch=2, sampler=ResumableSampler(2, seed=0, shuffle=False), train=False, augment=PLAIN,
        workers=0, damage=Damage("fail", 2), device=torch.device("cpu"),
    )  # fmt: skip
    assert batch.pixels.shape == (2, 3, 24, 24)
    assert (batch.shown.tolist(), batch.shapes.tolist()) == ([[16, 24], [24, 12]], [[32, 48], [60, 30]])
    assert batch.labels.tolist() == [[0, 1], [0, NOTHING]]
    torch.testing.assert_close(batch.boxes[0], torch.tensor(wide["boxes"]) / 2)
    torch.testing.assert_close(batch.boxes[1, 0], torch.tensor(tall["boxes"][0]) * 0.4)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_of_an_epoch_depend_on_seed_epoch_and_image_alone(tmp_path, workers):
    images = open_boxed(pair_of_files(tmp_path), "train", VALUES)

    def batches(position=0, workers=0, epoch=1):
        sampler = ResumableSampler(8, seed=3)
        sampler.load_state_dict({"epoch": epoch, "position": position})
        return [*box_loader(
            images, size=(16, 16), batch=2, sampler=sampler, train=True, augment=JointAugment(), workers=workers,
            damage=Damage("fail", 8), device=torch.device("cpu"),
        )]  # fmt: skip

    whole, rest = batches(), batches(position=4, workers=workers)
    assert (len(whole), len(rest)) == (4, 2)
    for one, other in zip(whole[2:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(whole[0].pixels, batches(epoch=2)[0].pixels)
