"""Images with masks: found in files and folders, decoded safely, bad ones named, and augmented together."""

import numpy as np
import pytest
import torch

from softless.data.annotated_sources import open_annotated_splits, open_annotated_test
from softless.data.annotation_check import check_annotated_part, check_annotations
from softless.data.joint import JointAugment, MaskReader, joint_transform, mask_loader
from softless.data.masked_sources import has_masks, open_masked
from softless.data.masks import VOID, MaskValues
from softless.data.reading import Damage, Draw
from softless.data.sampler import ResumableSampler
from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage, decode_mask
from tests.data.masked import CLASSES, VALUES, drawn, encoded, pair_of_files, parquet, png, write

PLAIN = JointAugment(scale=(1.0, 1.0), flip=0.0, brightness=0, contrast=0, saturation=0, hue=0)


def test_a_pair_of_files_gives_every_image_its_mask(tmp_path):
    train, test = open_annotated_splits(pair_of_files(tmp_path), MaskValues())
    assert (len(train), len(test), train.classes) == (8, 4, CLASSES)
    for index in range(8):
        pixels, mask = drawn(index)
        sample = train[index]
        assert np.array_equal(np.asarray(sample.image), pixels)
        assert np.array_equal(sample.mask, mask)
        assert sample.name == f"{tmp_path}/x-train.parquet[row {index}]"
    assert train.size(0) == (32, 24)


LAYOUTS = [
    ("train/images/{}.jpg", "train/masks/{}.png", "val/images/{}.jpg", "val/masks/{}.png"),
    ("images/training/{}.jpg", "masks/training/{}.png", "images/validation/{}.jpg", "masks/validation/{}.png"),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=["parts first", "images first"])
def test_the_usual_folders_are_found(tmp_path, layout):
    for seed in range(5):
        image, mask = layout[:2] if seed < 3 else layout[2:]
        write(tmp_path / image.format(seed), tmp_path / mask.format(seed), encoded(seed))
    assert has_masks(tmp_path, "mask")
    train, test = open_annotated_splits(tmp_path, VALUES)
    assert (len(train), len(test)) == (3, 2)
    assert np.array_equal(test[1].mask, drawn(4)[1])
    assert train.names(2) == str(tmp_path / layout[0].format(2))


def test_a_held_out_part_is_always_the_same_and_overlaps_with_nothing(tmp_path):
    source = pair_of_files(tmp_path, train=10)
    (train, test), (again, _) = (open_annotated_splits(source, VALUES, 0.3) for _ in range(2))
    assert (len(train), len(test)) == (7, 3)
    assert sorted([*train.rows, *test.rows]) == list(range(10))
    assert train.fingerprint == again.fingerprint != test.fingerprint
    one = parquet(tmp_path / "y.parquet", [encoded(seed) for seed in range(10)])
    assert len(open_annotated_test(one, VALUES, 0.3)) == 3
    assert len(open_annotated_test(source, VALUES, 0.3)) == 4  # these have a part of their own to test on
    with pytest.raises(FileError, match=r"hold_out 0\.01 of 10 images leaves one of two parts empty"):
        open_annotated_splits(source, VALUES, 0.01)


def test_the_numbers_of_a_mask_become_classes(tmp_path):
    mask = np.array([[1, 2, 3, 9]], np.uint8)
    path = parquet(tmp_path / "x.parquet", [(png(np.zeros((1, 4, 3), np.uint8)), png(mask))])
    values = MaskValues(classes=("a", "b", "c"), values=(3, 1, 2), void=(9,))
    assert open_masked(path, "train", values)[0].mask.tolist() == [[1, 2, 0, VOID]]


def test_palette_and_sixteen_bit_masks_keep_their_numbers():
    mask = drawn(0)[1]
    assert np.array_equal(decode_mask(png(mask, palette=True), "x"), mask)
    assert np.array_equal(decode_mask(png(mask.astype(np.uint16)), "x"), mask)
    with pytest.raises(BadImage, match="x: its pixels are RGB, and a mask has one whole number per pixel"):
        decode_mask(png(drawn(0)[0]), "x")
    with pytest.raises(BadImage, match="from 300 to 300, and the numbers of a mask from 0 to 255"):
        decode_mask(png(np.full((2, 2), 300, np.uint16)), "x")


def odd(mask):
    mask = np.where(mask == VOID, 0, mask)
    mask[3, 5] = 7
    return mask


PIXELS, MASK = drawn(1)
BAD = {
    "its mask has 31 x 24 pixels, and the image 32 x 24": png(MASK[:, 1:]),
    "its mask has the number 7 in row 3, column 5, and no class has it: classes have 0 to 2, and void has 255": png(
        odd(MASK)
    ),
    "its mask: it is empty": b"",
    "its mask: it is no intact JPEG": b"nothing",
    "its mask: its pixels are RGB": png(PIXELS),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_mask_is_named_with_the_reason(tmp_path, why):
    pairs = [encoded(seed) for seed in range(3)]
    pairs[1] = (pairs[1][0], BAD[why])
    images = open_masked(parquet(tmp_path / "x.parquet", pairs), "train", VALUES)
    with pytest.raises(BadImage) as error:
        images[1]
    assert str(error.value).startswith(f"{tmp_path}/x.parquet[row 1]: {why}")
    with pytest.raises(BadImage) as before:
        check_annotations(images, Damage("fail", 3))
    assert str(before.value) == str(error.value)


def test_bad_masks_are_all_named_at_once_or_skipped(tmp_path):
    pairs = [encoded(seed) for seed in range(3)]
    pairs[0] = pairs[2] = (pairs[0][0], b"")
    images = open_masked(parquet(tmp_path / "x.parquet", pairs), "train", VALUES)
    with pytest.raises(FileError, match=r"2 of 3 masks are bad: .*row 0\]: its mask: it is empty; .*row 2\]: its mask"):
        check_annotations(images, Damage("fail", 3))
    damage = Damage("skip", 5000)
    check_annotations(images, damage)
    assert [*damage.skipped] == [images.names(0), images.names(2)]
    with pytest.raises(FileError, match=r"skip leaves out at most 0\.1% of them: 0"):
        check_annotations(images, Damage("skip", 3))


def test_a_set_without_any_class_is_refused(tmp_path):
    void = (png(np.zeros((4, 4, 3), np.uint8)), png(np.full((4, 4), VOID, np.uint8)))
    images = open_masked(parquet(tmp_path / "x.parquet", [void, void]), "train", VALUES)
    with pytest.raises(FileError, match="the masks of all 2 images have only void, and no class"):
        check_annotations(images, Damage("fail", 2))


WRONG = [
    ({"values": (1, 1)}, r"masks\.values is \(1, 1\) and must be different whole numbers from 0 to 255"),
    ({"void": (256,)}, r"masks\.void is \(256,\) and must be"),
    ({"classes": ("a", "b"), "values": (0, 1, 2)}, r"masks\.values has 3 numbers, and there are 2 classes: a, b"),
    ({"classes": ("a", "b"), "void": (1,)}, r"masks\.void has 1, which is the number of class 'b'"),
    ({"classes": ("a",)}, r"masks\.classes has 1 names, and 2 to 254 different are needed"),
    ({"classes": "ab"}, r"masks\.classes is 'ab' and must be a list of names"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_numbers_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        MaskValues(**options)


def test_what_is_missing_is_said_in_one_sentence(tmp_path):
    with pytest.raises(FileError, match="there is no such parquet file or folder of images and masks"):
        open_masked(tmp_path / "none", "train", VALUES)
    path = parquet(tmp_path / "x.parquet", [encoded(0)])
    with pytest.raises(FileError, match=r"its classes have no names: list them in .*NAME-classes\.json, or in the rec"):
        open_masked(path, "train", MaskValues())
    with pytest.raises(FileError, match="it has columns image, mask, and trimap is needed"):
        open_masked(path, "train", MaskValues(classes=CLASSES, column="trimap"))
    with pytest.raises(FileError, match="it has one part, and images to test on are needed"):
        open_annotated_splits(path, VALUES)
    with pytest.raises(FileError, match="it has no folders images/ and masks/, at the top or in train/"):
        open_masked(tmp_path, "train", VALUES)


def test_a_missing_mask_is_a_bad_mask_and_hides_no_other(tmp_path):
    for seed in range(3):
        write(tmp_path / f"images/{seed}.jpg", tmp_path / f"masks/{seed}.png", encoded(seed))
    (tmp_path / "masks/0.png").unlink()
    (tmp_path / "masks/2.png").write_bytes(b"")
    part = check_annotated_part("whole", open_masked(tmp_path, "train", VALUES), workers=0, tick=lambda _images: None)
    assert part["damaged"] == [
        {"name": f"{tmp_path}/images/0.jpg", "why": f"its mask: there is no picture '0' in {tmp_path}/masks"},
        {"name": f"{tmp_path}/images/2.jpg", "why": "its mask: it is empty"},
    ]


def test_an_image_and_its_mask_move_together(tmp_path):
    """The color of a pixel tells its class, so a crop or a flip of only one of the two would show."""
    images = open_masked(pair_of_files(tmp_path), "train", VALUES)
    augment = JointAugment(scale=(2.0, 2.0), brightness=0, contrast=0, saturation=0, hue=0)
    reader = MaskReader(images, joint_transform(augment, (12, 16), train=True))
    seen = []
    for draw in range(40):
        pixels, mask, _ = reader[Draw(draw % 8, (0, draw))]
        seen.append(pixels)
        assert (pixels.shape, mask.shape) == ((3, 12, 16), (12, 16))
        told = pixels.float().argmax(0)  # green, red or blue
        inside = mask != VOID
        assert torch.equal(torch.tensor([1, 0, 2])[told][inside], mask[inside].long())
    assert len({pixels.numpy().tobytes() for pixels in seen}) == 40


def test_what_a_crop_adds_is_black_and_void(tmp_path):
    images = open_masked(pair_of_files(tmp_path), "train", VALUES)
    pixels, mask, _ = MaskReader(images, joint_transform(JointAugment(scale=(0.5, 0.5)), (24, 32), train=True))[
        Draw(0, (1,))
    ]
    beyond = torch.ones(24, 32, dtype=torch.bool)
    rows, columns = (pixels.sum(0) > 0).nonzero().unbind(1)
    beyond[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = False
    assert beyond.sum() == 24 * 32 - 12 * 16
    assert (mask[beyond] == VOID).all()
    assert (mask[~beyond] != VOID).sum() > 100


@pytest.mark.parametrize("workers", [0, 2])
def test_the_pixels_of_an_epoch_depend_on_seed_epoch_and_image_alone(tmp_path, workers):
    images = open_masked(pair_of_files(tmp_path), "train", VALUES)

    def batches(position=0, workers=0, epoch=1):
        sampler = ResumableSampler(8, seed=3)
        sampler.load_state_dict({"epoch": epoch, "position": position})
        return [*mask_loader(
            images, size=(16, 16), batch=2, sampler=sampler, train=True, augment=JointAugment(), workers=workers,
            damage=Damage("fail", 8), device=torch.device("cpu"),
        )]  # fmt: skip

    whole, rest = batches(), batches(position=4, workers=workers)
    assert (len(whole), len(rest)) == (4, 2)
    for one, other in zip(whole[2:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(whole[0].pixels, batches(epoch=2)[0].pixels)


def test_tests_resize_images_and_keep_masks_of_different_sizes(tmp_path):
    pairs = [encoded(0), encoded(1, height=30, width=20)]
    images = open_masked(parquet(tmp_path / "x.parquet", pairs), "train", VALUES)
    (batch,) = mask_loader(
        images, size=(16, 16), batch=2, sampler=ResumableSampler(2, seed=0, shuffle=False), train=False, augment=PLAIN,
        workers=0, damage=Damage("fail", 2), device=torch.device("cpu"),
    )  # fmt: skip
    assert batch.pixels.shape == (2, 3, 16, 16)
    assert batch.masks.shape == (2, 30, 32)
    assert batch.shapes.tolist() == [[24, 32], [30, 20]]
    assert np.array_equal(batch.masks[0, :24], drawn(0)[1])
    assert (batch.masks[0, 24:] == VOID).all()
    assert np.array_equal(batch.masks[1, :, :20], drawn(1, 30, 20)[1])
    assert (batch.masks[1, :, 20:] == VOID).all()


def test_a_skipped_image_is_replaced_by_another_of_the_batch(tmp_path):
    pairs = [encoded(seed) for seed in range(4)]
    pairs[2] = (pairs[2][0], b"")
    images = open_masked(parquet(tmp_path / "x.parquet", pairs), "train", VALUES)
    damage = Damage("skip", 4)
    damage.images = 4000
    reader = MaskReader(images, joint_transform(PLAIN, (24, 32), train=True))
    batch, bad = reader.gather([reader[Draw(index)] for index in range(4)])
    assert batch.ids.tolist() == [0, 1, 3]
    assert [each.name for each in bad] == [images.names(2)]
