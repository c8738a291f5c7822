"""Masks of objects: every encoding means the same pixels, bad masks are named, and masks move with their boxes."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as codes
from torchvision.ops import masks_to_boxes

from softless.data.annotation_check import check_annotations
from softless.data.boxed_sources import open_boxed
from softless.data.boxes import BoxValues, MaskedBoxValues
from softless.data.drawing import framed
from softless.data.joint import JointAugment
from softless.data.joint_boxes import BoxReader, box_loader, box_transform, packed, unpacked
from softless.data.object_masks import decode, encode, from_coco
from softless.data.reading import Damage, Draw
from softless.data.sampler import ResumableSampler
from softless.errors import FileError
from softless.io.pictures import BadImage
from tests.data import boxed, outlined
from tests.data.boxed import parquet
from tests.data.masked import png
from tests.data.outlined import VALUES, coco, drawn, rectangle, row


def runs(mask):
    """The run-length code of a mask, uncompressed."""
    flat = np.concatenate([[0], mask.T.ravel().astype(int), [-1]])
    ends = np.flatnonzero(np.diff(flat))
    return np.diff(ends, prepend=0).tolist()


def compressed(mask):
    code = encode(mask)
    return code | {"counts": code["counts"].decode()}


def test_a_parquet_file_and_every_form_of_coco_give_the_same_pixels(tmp_path):
    _, boxes, masks = drawn(0)
    files = {depth: tmp_path / f"{depth}.parquet" for depth in ("bits", "bytes")}
    parquet(files["bits"], [row(0)])
    parquet(files["bytes"], [row(0) | {"masks": [png(7 * mask.astype(np.uint8)) for mask in masks]}])
    for file in files.values():
        found = open_boxed(file, "train", VALUES)[0].boxes
        assert found.areas.tolist() == [mask.sum() for mask in masks]
        assert all(np.array_equal(decode(code), mask) for code, mask in zip(found.masks, masks, strict=True))
    left, top, right, bottom = boxes[1]
    middle = (left + right) / 2
    halves = [
        [left, top, middle, top, middle, bottom, left, bottom],
        [middle, top, right, top, right, bottom, middle, bottom],
    ]
    forms = {
        "polygons": halves, "one polygon": [[left, top, right, top, right, bottom, left, bottom]],
        "compressed": compressed(masks[1]), "runs": {"size": [32, 48], "counts": runs(masks[1])},
    }  # fmt: skip
    for form in forms.values():
        coco(tmp_path / "train.json", tmp_path / "images", [compressed(masks[0]), form])
        found = open_boxed(tmp_path / "train.json", "train", MaskedBoxValues())[0].boxes
        assert all(np.array_equal(decode(code), mask) for code, mask in zip(found.masks, masks, strict=True))


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**31))
def test_a_compressed_code_is_read_as_pycocotools_wrote_it(height, width, share, seed):
    rng = np.random.default_rng(seed)
    mask = np.repeat(rng.random((height, width)) < share, 1 + seed % 50, 0)
    assert from_coco(json.dumps(compressed(mask)).encode(), mask.shape[::-1], "x") == encode(mask)


def test_masks_are_read_only_if_they_are_needed(tmp_path):
    path = parquet(tmp_path / "x.parquet", [row(0) | {"masks": [b"", b"damage"]}])
    assert open_boxed(path, "train", boxed.VALUES)[0].boxes.masks is None
    with pytest.raises(BadImage, match="its box 0 has no mask"):
        open_boxed(path, "train", VALUES)[0]


WHOLE = np.ones((32, 48), bool)
BAD = {
    "it has 2 boxes and 1 masks, and each box needs a mask": [png(WHOLE)],
    "it has 2 boxes and 0 masks, and each box needs a mask": None,
    "its box 1 has no mask, and each box needs one": [png(WHOLE), None],
    "its mask 1: it has 24 x 16 pixels, and the image 48 x 32": [png(WHOLE), png(WHOLE[:16, :24])],
    "its mask 1 is empty: none of its pixels belongs to the object": [png(WHOLE), png(~WHOLE)],
    "its mask 1: it is cut short: its last bytes are missing": [png(WHOLE), png(WHOLE)[:-8]],
    "its mask 0: its pixels are RGB, and a mask has one whole number per pixel": [
        png(np.zeros((32, 48, 3), np.uint8)), png(WHOLE),
    ],
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_a_bad_mask_is_named_with_the_reason(tmp_path, why):
    rows = [row(seed) for seed in range(3)]
    rows[1] |= {"masks": BAD[why]}
    images = open_boxed(parquet(tmp_path / "x.parquet", rows), "train", VALUES)
    for attempt in (lambda: images[1], lambda: check_annotations(images, Damage("fail", 3))):
        with pytest.raises(BadImage) as error:
            attempt()
        assert str(error.value) == f"{tmp_path}/x.parquet[row 1]: {why}"
    damage = Damage("skip", 5000)
    check_annotations(images, damage)
    assert [*damage.skipped] == [images.names(1)]


SQUARE = [1, 1, 9, 1, 9, 9, 1, 9]
BAD_IN_COCO = {
    "its box 0 has no mask, and each box needs one": [],
    "its mask 0: a polygon of it has 4 numbers, and an even number from 6 is needed": [SQUARE, SQUARE[:4]],
    "its mask 0: a polygon of it has 7 numbers, and an even number from 6 is needed": [SQUARE[:7]],
    "its mask 0: a polygon of it reaches 2 pixels beyond the image, which has 48 x 32": [[*SQUARE[:6], -2, 9]],
    "its mask 0: a polygon of it has a corner that is no number": [[*SQUARE[:6], float("nan"), 9]],
    "its mask 0: it is neither a list of polygons nor a run-length code of COCO": [["a", "b"]],
    "its mask 0: it has 32 x 48 pixels, and the image 48 x 32": {"size": [48, 32], "counts": [0, 48 * 32]},
    "its mask 0: its runs have 1500 pixels in all, and the image 1536": {"size": [32, 48], "counts": [1400, 100]},
    "its mask 0 is empty: none of its pixels belongs to the object": {"size": [32, 48], "counts": [1536]},
}


@pytest.mark.parametrize("why", BAD_IN_COCO)
def test_a_bad_segmentation_of_coco_is_named_with_the_reason(tmp_path, why):
    coco(tmp_path / "train.json", tmp_path / "images", [BAD_IN_COCO[why], [SQUARE]])
    with pytest.raises(BadImage) as error:
        open_boxed(tmp_path / "train.json", "train", MaskedBoxValues())[0]
    assert str(error.value) == f"{tmp_path}/images/0.png: {why}"


NO_CODES = [
    {}, 7, "text", None, {"size": [32, 48]}, {"size": [32], "counts": "04"}, {"size": [32, 48], "counts": "\u00e9"},
    {"size": [32, 48], "counts": ""}, {"size": [32, 48], "counts": [-1, 1537]}, {"size": [32, 48], "counts": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize("segmentation", NO_CODES, ids=str)
def test_what_is_no_code_is_never_given_to_pycocotools(segmentation):
    with pytest.raises(BadImage, match="neither a list of polygons nor a run-length code of COCO"):
        from_coco(json.dumps(segmentation).encode(), (48, 32), "x")


def test_a_column_that_is_missing_or_of_another_kind_is_named(tmp_path):
    path = parquet(tmp_path / "x.parquet", [boxed.row(0)])
    with pytest.raises(FileError, match="it has columns image, boxes, labels, and masks is needed"):
        open_boxed(path, "train", VALUES)
    table = pq.read_table(path)
    for column, kind in ((pa.array([b"a"]), "binary"), (pa.array([["a"]]), "list<[a-z]+: string>")):
        pq.write_table(table.append_column("masks", column), path)
        with pytest.raises(FileError, match=f"its column masks is {kind}, and lists of the bytes of pictures are"):
            open_boxed(path, "train", VALUES)


def test_other_masks_are_another_set(tmp_path):
    path = tmp_path / "x.parquet"
    prints = {open_boxed(parquet(path, [row(0)]), "train", values).fingerprint for values in (VALUES, boxed.VALUES)}
    noise = np.random.default_rng(0).random((32, 48)) < 0.5
    prints |= {open_boxed(parquet(path, [row(0) | {"masks": [png(noise)] * 2}]), "train", VALUES).fingerprint}
    assert len(prints) == 3


def test_boxes_that_are_dropped_lose_their_masks(tmp_path):
    one = row(0) | {"boxes": [[4, 4, 4, 9], drawn(0)[1][1]], "masks": [None, png(drawn(0)[2][1])]}
    values = MaskedBoxValues(classes=VALUES.classes, empty="drop")
    boxes = open_boxed(parquet(tmp_path / "x.parquet", [one]), "train", values)[0].boxes
    assert [decode(code).tolist() for code in boxes.masks] == [drawn(0)[2][1].tolist()]


@given(st.data())
@settings(max_examples=30)
def test_masks_move_as_their_boxes_do(tmp_path_factory, data):
    """The box of the mask that was moved is the box that was moved, to a pixel; what is cropped away has neither."""
    sides = [data.draw(st.integers(20, 90)) for _ in range(2)]
    size = data.draw(st.integers(16, 64)), data.draw(st.integers(16, 64))
    most = data.draw(st.floats(0.5, 3))
    boxes, labels, masks = [], [], []
    for _ in range(data.draw(st.integers(0, 20))):
        top, left = (data.draw(st.integers(0, side - 8)) for side in sides)
        bottom, right = (data.draw(st.integers(low + 8, side)) for low, side in zip((top, left), sides, strict=True))
        boxes.append([float(left), float(top), float(right), float(bottom)])
        masks.append(png(rectangle(boxes[-1], *sides)))
        labels.append(0)
    image = png(np.zeros((*sides, 3), np.uint8))
    rows = [{"image": image, "boxes": boxes, "labels": labels, "masks": masks}]
    path = parquet(tmp_path_factory.mktemp("moved") / "x.parquet", rows)
    images = open_boxed(path, "train", VALUES)
    for train in (True, False):
        change = box_transform(JointAugment(scale=(most / 2, most)), size, train=train)
        _, corners, labels, bits, *_ = BoxReader(images, change)[Draw(0, (0, 1, 2))]
        assert (len(labels), tuple(bits.shape)) == (len(corners), (-(-len(corners) // 8), *size))
        moved = unpacked(bits)
        assert not moved[len(corners) :].any()
        assert moved[: len(corners)].flatten(1).any(1).all()
        if len(corners):
            spans = masks_to_boxes(moved[: len(corners)]) + torch.tensor([0, 0, 1, 1])
            assert (spans - corners).abs().max() <= 1 + 1e-4


def test_a_batch_has_a_bit_for_each_pixel_of_each_mask(tmp_path):
    rows = [row(0), row(1) | {"boxes": [], "labels": [], "masks": []}, row(2, height=64, width=24)]
    rows[2] |= {"crowd": [True, False]}
    images = open_boxed(parquet(tmp_path / "x.parquet", [{"crowd": None} | each for each in rows]), "train", VALUES)
    plain = JointAugment(scale=(1.0, 1.0), flip=0.0, brightness=0, contrast=0, saturation=0, hue=0)
    (batch,) = box_loader(
        images, size=(32, 48), batch=3, sampler=ResumableSampler(3, seed=0, shuffle=False), train=False, augment=plain,
        workers=0, damage=Damage("fail", 3), device=torch.device("cpu"),
    )  # fmt: skip
    assert (batch.masks.dtype, tuple(batch.masks.shape)) == (torch.uint8, (3, 1, 32, 48))
    first, second, third = map(unpacked, batch.masks)
    assert np.array_equal(first[:2], drawn(0)[2])
    assert not second.any()
    half = drawn(2, height=64, width=24)[2][1][::2, ::2]
    assert np.array_equal(third[0, :, :12], half)
    assert not third[0, :, 12:].any()
    assert not third[1:].any()
    masks = [torch.randint(2, (5, 7), dtype=torch.uint8) for _ in range(11)]
    assert torch.equal(unpacked(packed(masks, (5, 7)))[:11], torch.stack(masks).bool())
    assert codes.area(encode(half)) == half.sum()
    assert outlined.VALUES.masked
    assert not BoxValues().masked


def test_the_mask_of_an_object_is_drawn_onto_its_pixels_and_no_others():
    pixels, boxes, masks = drawn(0, height=96, width=128)
    names, corners, labels = (*VALUES.classes,), np.array(boxes), np.arange(2)
    plain, colored = (
        np.array(framed(Image.fromarray(pixels), corners, labels, np.array([0.9, 0.6]), names, chosen))[:96, :128]
        for chosen in ([], [mask.astype(np.uint8) for mask in masks])
    )
    changed, belongs = (plain != colored).any(2), masks[0] | masks[1]
    assert not (changed & ~belongs).any()
    assert changed.sum() > belongs.sum() / 2  # frames and scores are drawn over the rest


@given(
    st.integers(1, 30), st.integers(1, 30), st.lists(st.lists(st.floats(-1, 31), min_size=6, max_size=12), min_size=1)
)
def test_any_polygon_near_its_image_is_a_mask_of_the_image_or_refused(height, width, polygons):
    try:
        code = from_coco(json.dumps(polygons).encode(), (width, height), "x")
    except BadImage:
        return
    assert (decode(code).shape, decode(code).sum()) == ((height, width), codes.area(code))
