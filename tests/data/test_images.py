"""A set is found, named and numbered as its folders or files say, and what is wrong with it is one sentence (R18)."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from softless.data import open_images, open_splits
from softless.data.images import counted_classes, summary, what_changed
from softless.data.sources import DigitImages
from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage
from softless.train.tasks.classify import check_classes
from tests.data.pictures import class_names, encoded, folder, parquet, pixels


def test_the_embedded_set_is_split_once_and_for_all():
    train, test = open_splits(None)
    assert (len(train), len(test)) == (1437, 360)
    assert set(train.rows) | set(test.rows) == set(range(1797))
    assert train.fingerprint == "66fefa63a4a42cb9d1c8030a13accd3a5fccd4f0f6a54762669322c80daa043c"
    assert test.fingerprint == "bc56cfc237e43c5c22b8cf2c1d3d2a5968c9fc964309224a5f550a6a825d812b"
    shares = np.bincount(test.labels) / np.bincount(np.concatenate([train.labels, test.labels]))
    assert np.allclose(shares, 360 / 1797, atol=0.005)
    image, label, name = test[7]
    assert (image.mode, image.size, label) == ("RGB", (8, 8), test.labels[7])
    assert name == test.names(7) == f"digits[{test.rows[7]}]"
    assert test.pixels.max() == 255
    assert isinstance(train, DigitImages)


def test_folders_are_classes_in_the_order_of_their_names(tmp_path):
    root = folder(tmp_path, {"train": {"dog": 3, "cat": 2}, "val": {"cat": 1, "dog": 1}})
    train, test = open_splits(root)
    assert train.classes == test.classes == ("cat", "dog")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 1, 1, 1], [0, 1])
    assert train.names(2) == str(root / "train/dog/0.png")
    image, label, name = train[4]
    assert (label, name) == (1, str(root / "train/dog/2.png"))
    assert np.array_equal(np.asarray(image), pixels(3))


def test_class_folders_alone_are_one_part_and_not_two(tmp_path):
    root = folder(tmp_path, {"": {"a": 2, "train": 2}})  # a class may be called train
    assert open_images(root, "train").classes == open_images(root, "test").classes == ("a", "train")
    with pytest.raises(FileError, match="it has one part, and images to test on are needed"):
        open_splits(root)


def test_a_share_of_each_class_is_held_out_always_alike(tmp_path):
    root = folder(tmp_path, {"": {"a": 10, "b": 21}})
    train, held = open_splits(root, hold_out=0.2)
    assert np.bincount(held.labels).tolist() == [2, 4]
    assert sorted([*train.rows, *held.rows]) == list(range(31))
    again = open_splits(root, hold_out=0.2)
    assert [part.fingerprint for part in again] == [train.fingerprint, held.fingerprint]
    assert len({train.fingerprint, held.fingerprint, open_images(root, "train").fingerprint}) == 3
    whole = open_images(root, "train")
    for index, row in enumerate(held.rows):
        image, label, name = held[index]
        assert (label, name, held.names(index), held.size(index)) == (
            *whole[row][1:],
            whole.names(row),
            whole.size(row),
        )
        assert np.array_equal(np.asarray(image), np.asarray(whole[row].image))


def test_held_out_images_need_no_test_images_and_leave_both_parts_some(tmp_path):
    root = folder(tmp_path, {"train": {"a": 3, "b": 3}})
    assert [len(part) for part in open_splits(root, hold_out=0.34)] == [4, 2]
    with pytest.raises(FileError, match=r"hold_out 0\.1 of 6 images leaves one of two parts empty"):
        open_splits(root, hold_out=0.1)
    with pytest.raises(ArgumentError, match=r"hold_out is 1.5 and must be at least 0 and below 1"):
        open_splits(root, hold_out=1.5)


def test_val_is_taken_before_test_and_may_lack_a_class(tmp_path):
    root = folder(tmp_path, {"train": {"a": 1, "b": 1, "c": 1}, "val": {"c": 2}, "test": {"a": 5}})
    test = open_images(root, "test")
    assert test.classes == ("a", "b", "c")
    assert test.labels.tolist() == [2, 2]


def test_names_of_any_script_depth_and_suffix(tmp_path):
    root = folder(tmp_path, {"": {"größe": 1, "猫 и 🐈": 1}}, form="jpeg")
    deep = root / "größe" / "x" / "y"
    deep.mkdir(parents=True)
    (deep / "É.JPG").write_bytes(encoded(1, "jpeg"))
    (root / "größe" / ".hidden.jpg").write_bytes(b"")
    (root / "größe" / "notes.txt").write_bytes(b"")
    (root / ".cache").mkdir()
    odd = os.fsdecode(b"\xff\xfe.jpg")
    (root / "größe" / odd).write_bytes(encoded(2, "jpeg"))
    images = open_images(root, "train")
    assert images.classes == ("größe", "猫 и 🐈")
    assert len(images) == 4
    names = {images[i].name for i in range(4)}
    assert {str(deep / "É.JPG"), str(root / "größe" / odd)} <= names


def test_links_are_followed_and_one_that_is_broken_is_an_image_that_cannot_be_read(tmp_path):
    root = folder(tmp_path / "set", {"": {"a": 1, "b": 1}})
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "z.png").write_bytes(encoded(9))
    (root / "a" / "linked").symlink_to(tmp_path / "far")
    (root / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    images = open_images(root, "train")
    assert [Path(images.names(i)).name for i in range(4)] == ["0.png", "gone.png", "z.png", "0.png"]
    with pytest.raises(BadImage, match=r"gone\.png: it cannot be read \(No such file"):
        images[1]


def test_a_fingerprint_depends_on_names_sizes_and_labels(tmp_path):
    def of(name: str, change) -> str:
        root = folder(tmp_path / name, {"": {"a": 2, "b": 2}})
        change(root)
        return open_images(root, "train").fingerprint

    same = of("1", Path.exists)
    assert of("2", Path.exists) == same
    assert of("3", lambda root: (root / "a/0.png").rename(root / "a/9.png")) != same
    assert of("4", lambda root: (root / "a/0.png").write_bytes(encoded(1) + b"0")) != same
    assert of("5", lambda root: (root / "a/0.png").rename(root / "b/2.png")) != same


CHANGES = {
    "more images": (
        lambda root: (root / "train/a/9.png").write_bytes(encoded(9)),
        "class 'a' of {} had 2 images to train on, and has 3 now",
    ),
    "fewer in many classes": (
        lambda root: [(root / f"train/{name}/0.png").unlink() for name in "ab"],
        "class 'a' of {} had 2 images to train on, and has 1 now, and 1 more class has changed",
    ),
    "another class": (
        lambda root: folder(root, {"train": {"c": 1}, "val": {"c": 1}}),
        "{} has other classes since: class 'c' new",
    ),
    "a class renamed": (
        lambda root: [(root / part / "b").rename(root / part / "z") for part in ("train", "val")],
        "{} has other classes since: class 'z' new and class 'b' gone",
    ),
    "other bytes": (
        lambda root: (root / "val/b/0.png").write_bytes(encoded(7) + b"0"),
        "the images of class 'b' of {} to test on are as many as before, and their sizes in bytes differ",
    ),
    "other names": (
        lambda root: (root / "train/a/1.png").rename(root / "train/a/8.png"),
        "the images of {} to train on are as many as before, and their names or their order differ",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_change_of_a_set_is_described(tmp_path, change):
    root = folder(tmp_path / "set", {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}})

    def kept():
        return json.loads(json.dumps(summary(str(root), *open_splits(root))))

    before = kept()
    assert what_changed(before, kept()) is None
    edit, says = CHANGES[change]
    edit(root)
    assert what_changed(before, kept()) == says.format(root)


def test_a_different_set_is_described_by_its_size(tmp_path):
    one = folder(tmp_path / "one", {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}})
    two = parquet(tmp_path / "two-train.parquet", [0, 1, 2])
    parquet(tmp_path / "two-val.parquet", [0, 1, 2])
    before, now = (summary(str(each), *open_splits(each)) for each in (one, two))
    sizes = f"{one} has 4 images in 2 classes to train on, and {two} has 3 images in 3 classes to train on"
    assert what_changed(before, now) == sizes
    one.rename(tmp_path / "moved")
    assert what_changed(before, summary(str(tmp_path / "moved"), *open_splits(tmp_path / "moved"))) is None


def refusal(source: object, split: str = "train") -> str:
    with pytest.raises(FileError) as caught:
        open_images(source, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_bad_folder_is_described_in_one_sentence(tmp_path):
    root = folder(tmp_path, {"empty/a": {}, "one": {"cat": 2}, "two": {"a": 0, "b": 2, "c": 0}, "half/train": {"a": 1}})
    folder(tmp_path / "strange", {"train": {"a": 1, "b": 1}, "val": {"z": 1}})
    folder(tmp_path / "blank", {"train": {"a": 1, "b": 1}, "val": {"a": 0, "b": 1}})
    assert refusal(root / "none") == f"{root / 'none'}: there is no such file or folder"
    (root / "empty").mkdir(exist_ok=True)
    assert refusal(root / "empty") == f"{root / 'empty'}: it holds no images"
    assert refusal(root / "one") == f"{root / 'one'}: it has one class, 'cat', and at least two are needed"
    assert refusal(root / "two") == f"{root / 'two'}: 2 of its 3 classes without images: 'a', 'c'"
    assert "it has train/ and no val/ or test/ beside it" in refusal(root / "half", "test")
    assert refusal(root / "strange", "test").endswith(f"'z' is not one of the 2 classes in {root / 'strange/train'}")
    assert refusal(root / "blank", "test").endswith("1 of its 2 classes without images: 'a'")


def test_images_without_class_folders_are_told_to_go_into_some(tmp_path):
    root = folder(tmp_path, {"": {"flat": 12}, "parts": {"train": 1, "val": 1}})
    for place, count in ((root / "flat", "12 images"), (root / "parts/train", "1 image")):
        source = place.parent if place.name == "train" else place
        says = f"{place} holds {count}, but no folder per class: put them into {place}/CLASS/"
        assert refusal(source) == says


def test_an_ellipsis_stands_only_for_classes_that_are_left_out():
    assert counted_classes(("a", "b")) == "2 classes (a, b)"
    assert counted_classes(("a", "b", "c", "d")) == "4 classes (a, b, c, ...)"
    with pytest.raises(
        ArgumentError, match=r"^r was trained on 2 classes \(a, b\), and the images have 1 class \(a\)$"
    ):
        check_classes(Path("r"), {"classes": ["a", "b"]}, ("a",))


def test_a_loop_of_links_is_named_and_ends(tmp_path):
    root = folder(tmp_path, {"": {"a": 1, "b": 1}})
    (root / "a" / "up").symlink_to(root)
    assert refusal(root).endswith("a/up/a: a symbolic link leads back to a folder above it")
    (root / "a" / "up").unlink()
    (root / "a" / "self").symlink_to(root / "a" / "self")
    assert refusal(root).endswith("a/self: the link leads nowhere (Too many levels of symbolic links)")


def test_a_broken_link_to_a_class_is_refused(tmp_path):
    root = folder(tmp_path, {"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 1}})
    (root / "val/c").symlink_to(tmp_path / "unmounted")
    assert refusal(root, "test").endswith("val/c: the link leads nowhere (No such file or directory)")
    (root / "val/c").rename(root / "val/a/c.png")  # an image that is not there is damaged, not a class
    assert len(open_images(root, "test")) == 3


def test_two_folders_with_equal_fingerprints_are_two_parts(tmp_path):
    """The same names, sizes and labels in both: two parts still."""
    root = folder(tmp_path, {"train": {"a": 1, "b": 1}, "valid": {"a": 1, "b": 1}}, form="bmp")
    train, test = open_splits(root)
    assert train.fingerprint == test.fingerprint
    assert test.names(0) == str(root / "valid/a/0.bmp")


def test_a_folder_named_digits_is_not_confused_with_the_embedded_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "digits", {"": {"a": 1, "b": 1}})
    assert refusal("digits") == "'digits' is the embedded set, and a file here has that name: say ./digits for the file"
    assert open_images("./digits", "train").classes == ("a", "b")


def test_numeric_keys_of_class_names_are_labels(tmp_path):
    parquet(tmp_path / "x.parquet", list(range(12)))
    names = {str(label): f"class {label}" for label in range(12)}
    class_names(tmp_path / "x-classes.json", dict(sorted(names.items())))  # 0, 1, 10, 11, 2, ...
    assert open_images(tmp_path / "x.parquet", "train").classes == tuple(names.values())
    class_names(tmp_path / "x-classes.json", {"1": "a", "2": "b"})
    assert refusal(tmp_path / "x.parquet").endswith("its 2 keys are labels, and they are not 0 to 1")


def test_classes_with_equal_names_get_their_label(tmp_path):
    parquet(tmp_path / "x.parquet", [0, 1, 2])
    class_names(tmp_path / "x-classes.json", ["crane", "dog", "crane"])
    assert open_images(tmp_path / "x.parquet", "train").classes == ("crane (0)", "dog", "crane (2)")


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    root = folder(tmp_path, {"": {"a": 1, "b": 1}})
    real = os.scandir

    def scandir(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert refusal(root) == f"{root / 'b'}: the folder cannot be read (Permission denied)"


def test_a_parquet_file_finds_its_other_half_and_its_names(tmp_path):
    parquet(tmp_path / "pets12-webp-train.parquet", [0, 2, 1])
    parquet(tmp_path / "pets12-webp-test.parquet", [2])
    class_names(tmp_path / "pets-classes.json", {"n01": "cat", "n02": "dog", "n03": "newt"})
    class_names(tmp_path / "pet-classes.json", ["of", "another", "set"])
    for given in ("train", "test"):
        train, test = open_splits(tmp_path / f"pets12-webp-{given}.parquet")
        assert train.classes == test.classes == ("cat", "dog", "newt")
        assert (train.labels.tolist(), test.labels.tolist()) == ([0, 2, 1], [2])
    image, label, name = train[1]
    assert (label, name) == (2, f"{tmp_path}/pets12-webp-train.parquet[row 1]")
    assert np.array_equal(np.asarray(image), pixels(1))


def test_classes_without_names_are_numbers_and_those_of_the_training_part(tmp_path):
    parquet(tmp_path / "a-train.parquet", [0, 1, 2, 3])
    parquet(tmp_path / "a-val.parquet", [1, 0])
    for given in ("train", "val"):
        assert open_images(tmp_path / f"a-{given}.parquet", "test").classes == ("0", "1", "2", "3")
    (tmp_path / "a-train.parquet").unlink()
    assert open_images(tmp_path / "a-val.parquet", "test").classes == ("0", "1")
    parquet(tmp_path / "b-train.parquet", [0, 1])
    parquet(tmp_path / "b-val.parquet", [1, 2])
    with pytest.raises(FileError, match=r"b-val.parquet: .* label 2, and the labels of 2 classes run from 0 to 1"):
        open_splits(tmp_path / "b-train.parquet")


def test_parts_of_other_classes_are_refused(tmp_path):
    for part, names in (("train", ["cat", "dog"]), ("val", ["dog", "cat"])):
        parquet(tmp_path / f"a-{part}.parquet", [0, 1])
        class_names(tmp_path / f"a-{part}-classes.json", names)
    with pytest.raises(
        FileError, match=r"train on have 2 classes \(cat, dog\), and those to test on have 2 classes \(dog, "
    ):
        open_splits(tmp_path / "a-train.parquet")


def test_a_column_split_makes_two_parts_of_one_file(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1, 0, 1], split=["trainval", "test", "test", "trainval"])
    train, test = open_splits(path)
    assert (train.names(1), test.names(1)) == (f"{path}[row 3]", f"{path}[row 2]")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1], [1, 0])


def test_the_pairs_and_names_of_hugging_face_are_understood(tmp_path):
    pairs = [{"bytes": encoded(row), "path": f"{row}.png"} for row in range(2)]
    noted = b'{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}'
    table = pa.table({"image": pairs, "label": [1, 0]}).replace_schema_metadata({b"huggingface": noted})
    pq.write_table(table, tmp_path / "a.parquet")
    images = open_images(tmp_path / "a.parquet", "train")
    assert images.classes == ("cat", "dog")
    assert np.array_equal(np.asarray(images[1].image), pixels(1))


def test_a_bad_parquet_file_is_described_in_one_sentence(tmp_path):
    def file(labels, **columns) -> Path:
        return parquet(tmp_path / "x.parquet", labels, **columns)

    assert refusal(file([])).endswith("its column label is null, and whole numbers from 0 are needed")
    assert refusal(file([0, 0])).endswith("it has one class, '0', and at least two are needed")
    assert refusal(file([0, 2, 3])).endswith("1 of its 4 classes without images: '1'")
    assert refusal(file([0, -1, 1])).endswith("image 1 has label -1, and the labels of 2 classes run from 0 to 1")
    assert refusal(file([0, 1, 10**12])).endswith(
        "image 2 has label 1000000000000, and the labels of 1000000 classes run from 0 to 999999"
    )
    assert refusal(file([0, None, 1])).endswith("row 1 has no label")
    assert refusal(file(["a", "b"])).endswith("its column label is string, and whole numbers from 0 are needed")
    assert "its column split has none of train" in refusal(file([0, 1], split=["x", "y"]))
    pq.write_table(pa.table({"picture": [1]}), tmp_path / "x.parquet")
    assert refusal(tmp_path / "x.parquet").endswith("it has columns picture, and image is needed")
    pq.write_table(pa.table({"image": [1], "label": [0]}), tmp_path / "x.parquet")
    assert refusal(tmp_path / "x.parquet").endswith("its column image is int64, and the bytes of pictures are needed")
    (tmp_path / "x.txt").write_text("hello")
    assert refusal(tmp_path / "x.txt").endswith("it is neither a folder of images nor a parquet file")
    parquet(tmp_path / "y-train.parquet", [0, 1])
    assert "there is no -val.parquet or -valid.parquet or -validation.parquet or -test.parquet beside it" in refusal(
        tmp_path / "y-train.parquet", "test"
    )


def test_bad_class_names_are_described_in_one_sentence(tmp_path):
    path = parquet(tmp_path / "x.parquet", [0, 1, 2])
    names = tmp_path / "x-classes.json"
    class_names(names, ["a", "b"])
    assert refusal(path).endswith("image 2 has label 2, and the labels of 2 classes run from 0 to 1")
    class_names(names, ["a", "b", "c", "d"])
    assert refusal(path).endswith("1 of its 4 classes without images: 'd'")
    for text in ("[1, 2]", "[]", '"cat"', "3"):
        names.write_text(text)
        assert refusal(path).startswith(f"{names}: a list of the classes' names is needed")
    for text in ("{", "[" * 100_000, "\udcff"):
        names.write_bytes(text.encode(errors="surrogateescape"))
        assert refusal(path).startswith(f"{names}: the names of the classes cannot be read")


def test_a_row_without_an_image_is_a_bad_image(tmp_path):
    path = parquet(tmp_path / "x.parquet", [0, 1], images=[encoded(), None])
    with pytest.raises(BadImage, match=r"x\.parquet\[row 1\]: it is empty"):
        open_images(path, "train")[1]


def truncations(count: int, seed: int, tmp_path: Path) -> int:
    """How many of these cuts of a parquet file are reported."""
    whole = parquet(tmp_path / "cut.parquet", [0, 1, 2] * 10).read_bytes()
    draw = random.Random(seed)
    for _ in range(count):
        (tmp_path / "cut.parquet").write_bytes(whole[: draw.randrange(len(whole))])
        with pytest.raises(BadImage, match=r"cut\.parquet: it is no intact parquet file"):
            open_images(tmp_path / "cut.parquet", "train")
    return count


def test_a_truncated_parquet_file_is_found_when_it_is_opened(tmp_path):
    assert truncations(50, 0, tmp_path) == 50


def test_open_images_checks_its_arguments():
    with pytest.raises(ArgumentError, match="split is 'val' and must be 'train' or 'test'"):
        open_images(None, "val")
