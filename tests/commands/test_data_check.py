"""`softless data check` names every damaged file and why, and exits 1 if there is one (R17, R18)."""

import json
import os
import random
from pathlib import Path

import pytest

from softless.commands.common import plain
from softless.data.check import check_part, open_parts
from tests.data.pictures import FORMS, encoded, folder, mutants, parquet

WRONG = [
    ("none", {}, "none: there is no such file or folder"),
    ("empty", {"empty": {}}, "empty: it holds no images"),
    ("gap", {"gap": {"a": 1, "b": 0}}, "gap: 1 of its 2 classes without images: 'b'"),
    ("one", {"one": {"a": 2}}, "one: it has one class, 'a', and at least two are needed"),
]


@pytest.fixture
def flowers(tmp_path):
    return folder(tmp_path / "flowers", {"train": {"rose": 3, "lily": 2}, "val": {"rose": 1, "lily": 1}})


def checked(softless, *words):
    result = softless("data", "check", *map(str, words), "--json")
    return result.exit_code, json.loads(result.stdout)


def test_an_intact_set_exits_0_and_says_so(softless, flowers):
    result = softless("data", "check", str(flowers))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("All 7 images can be decoded.\n")
    words = " ".join(result.stdout.split())
    assert "train 5 2 2 to 3 24 x 20 24 x 20 0 test 2 2 1 24 x 20" in words


def test_two_parts_that_look_alike_are_both_checked(softless, tmp_path):
    root = folder(tmp_path / "alike", {"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 1}}, form="bmp")
    bad = root / "val/b/0.bmp"
    bad.write_bytes(bytes(bad.stat().st_size))
    code, document = checked(softless, root)
    assert code == 1
    assert [part["part"] for part in document["parts"]] == ["train", "test"]
    assert [len(part["damaged"]) for part in document["parts"]] == [0, 1]


def test_the_json_schema_is_frozen(softless, flowers):
    code, document = checked(softless, flowers)
    assert code == 0
    assert list(document) == ["schema", "source", "images", "ok", "skippable", "parts"]
    assert (document["schema"], document["images"], document["ok"]) == ("softless.data-check/1", 7, True)
    for part in document["parts"]:
        assert list(part) == ["part", "images", "fingerprint", "smallest", "largest", "classes", "damaged"]
    train, test = document["parts"]
    assert (train["part"], test["part"]) == ("train", "test")
    assert train["classes"] == [{"name": "lily", "images": 2}, {"name": "rose", "images": 3}]
    assert (train["smallest"], train["largest"], len(train["fingerprint"])) == ([24, 20], [24, 20], 64)


def test_every_damaged_file_is_named_with_the_reason_and_the_exit_is_1(softless, flowers):
    (flowers / "train/rose/1.png").write_bytes(b"")
    (flowers / "val/lily/0.png").write_bytes(encoded(1)[:-30])
    (flowers / "train/lily/link.png").symlink_to("nowhere")
    result = softless("data", "check", str(flowers))
    assert result.exit_code == 1
    assert f"{flowers}/train/rose/1.png: it is empty\n" in result.stdout
    assert f"{flowers}/val/lily/0.png: it is damaged (" in result.stdout
    assert f"{flowers}/train/lily/link.png: it cannot be read (No such file or directory)\n" in result.stdout
    assert "3 damaged among 8 images. That is more than the 0.1% that" in result.stdout
    code, document = checked(softless, flowers)
    assert (code, document["ok"], document["skippable"]) == (1, False, False)
    assert [bad["name"] for part in document["parts"] for bad in part["damaged"]] == [
        f"{flowers}/train/lily/link.png",
        f"{flowers}/train/rose/1.png",
        f"{flowers}/val/lily/0.png",
    ]


def test_damage_that_skip_would_leave_out_is_marked(softless, tmp_path):
    images = [b"x", *[encoded(0, "bmp")] * 999]
    path = parquet(tmp_path / "many.parquet", [0, 1] * 500, images=images)
    result = softless("data", "check", str(path))
    assert result.exit_code == 1
    assert "1 damaged among 1,000 images. --on-bad-image skip leaves them out." in result.stdout
    assert f"{path}[row 0]: it is no intact" in result.stdout


def test_a_damaged_parquet_file_is_damage_and_its_other_half_is_checked(softless, tmp_path):
    cut = parquet(tmp_path / "x-train.parquet", [0, 1])
    cut.write_bytes(cut.read_bytes()[:-9])
    test = parquet(tmp_path / "x-test.parquet", [0, 1], images=[encoded(), b"x"])
    (tmp_path / "x-classes.json").write_text('["a", "b"]')
    code, document = checked(softless, cut)
    assert code == 1
    assert [(part["part"], part["images"]) for part in document["parts"]] == [("train", 0), ("test", 2)]
    named = [bad["name"] for part in document["parts"] for bad in part["damaged"]]
    assert named == [str(cut), f"{test}[row 1]"]
    (tmp_path / "x-classes.json").unlink()
    test.unlink()
    assert softless("data", "check", str(cut)).stdout.endswith("Nothing could be read.\n")


def test_every_set_in_a_folder_of_parquet_files_is_checked(softless, tmp_path):
    root = tmp_path / "sets"
    root.mkdir()
    parquet(root / "flowers-train.parquet", [0, 1, 1])
    parquet(root / "flowers-val.parquet", [0, 1])
    parquet(root / "trees.parquet", [0, 1], images=[encoded(), b"x"])
    parquet(root / "one.parquet", [0, 0])
    (root / "flowers-classes.json").write_text('["rose", "lily"]')
    code, document = checked(softless, root)
    assert code == 1
    assert [(part["part"], part["images"]) for part in document["parts"]] == [
        ("flowers train", 3), ("flowers test", 2), ("one.parquet", 0), ("trees whole", 2),
    ]  # fmt: skip
    named = [(bad["name"], bad["why"]) for part in document["parts"] for bad in part["damaged"]]
    assert named[0] == (f"{root}/one.parquet", "it has one class, '0', and at least two are needed")
    assert named[1][0] == f"{root}/trees.parquet[row 1]"
    result = softless("data", "check", str(root))
    assert "2 damaged among 7 images." in result.stdout
    for name in ("one", "trees"):
        (root / f"{name}.parquet").unlink()
    assert softless("data", "check", str(root)).stdout.endswith("All 5 images can be decoded.\n")
    refused = softless("train", "--data", str(root))
    assert refused.stderr == (
        f"error: {root}: it holds parquet files and no folders of images: give one of the files, such as "
        f"{root}/flowers-train.parquet\n"
    )


@pytest.mark.parametrize(("name", "parts", "says"), WRONG)
def test_a_problem_of_the_set_as_a_whole_exits_3(softless, tmp_path, name, parts, says):
    for each, classes in parts.items():
        (tmp_path / each).mkdir()
        folder(tmp_path, {each: classes})
    result = softless("data", "check", name)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == f"error: {says}\n"


def test_pictures_with_a_readme_are_a_set_of_images_without_classes(softless, tmp_path):
    (folder(tmp_path, {"": {"flat": 3}}) / "flat/readme.txt").write_text("hi\n")
    result = softless("data", "check", "flat")
    assert result.stderr == "error: flat holds 3 images, but no folder per class: put them into flat/CLASS/\n"
    assert result.exit_code == 3


def test_labels_out_of_range_are_bad_input(softless, tmp_path):
    (tmp_path / "x-classes.json").write_text('["a", "b"]')
    result = softless("data", "check", str(parquet(tmp_path / "x.parquet", [0, 1, 2])))
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "image 2 has label 2, and the labels of 2 classes run from 0 to 1" in result.stderr


@pytest.mark.parametrize("words", [[], ["a", "b"], ["digits", "--workers", "-1"], ["digits", "--workers", "999"]])
def test_usage_errors_exit_2(softless, words):
    result = softless("data", "check", *words)
    assert result.exit_code == 2
    assert "Usage: softless data check" in result.stderr


def test_help_fits_its_terminal(softless):
    for words in (("data",), ("data", "--help"), ("data", "check", "--help")):
        assert max(map(len, softless(*words).output.splitlines())) <= 80


def test_names_no_terminal_can_show_are_shown(softless, fresh, tmp_path):
    root = folder(tmp_path / "set", {"": {"a": 1, "b": 1}})
    for name in (b"\xff.png", b"\x1b[31m\n.png", "猫.png".encode()):
        (root / "a" / os.fsdecode(name)).write_bytes(b"")
    result = fresh("data", "check", str(root), env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert result.returncode == 1
    assert "\x1b" not in result.stdout
    shown = [line.rpartition("/")[2] for line in result.stdout.splitlines() if "it is empty" in line]
    assert shown == [r"\x1b[31m\n.png: it is empty", r"\u732b.png: it is empty", r"\udcff.png: it is empty"]
    assert plain("a b.png") == "a b.png"


def reported(root: Path, bad: set[Path]) -> bool:
    """Whether the check names these files and no others."""
    parts = [check_part(name, part, workers=0, tick=lambda _: None) for name, part in open_parts(root).items()]
    return {Path(bad_image["name"]) for part in parts for bad_image in part["damaged"]} == bad


def truncate(root: Path, count: int, seed: int) -> set[Path]:
    """Cut as many random files of a set at a random place."""
    draw = random.Random(seed)
    chosen = draw.sample(sorted(path for path in root.rglob("*") if path.is_file()), count)
    for path in chosen:
        data = path.read_bytes()
        path.write_bytes(data[: draw.randrange(len(data))])
    return set(chosen)


def check_truncations(tmp_path: Path, pictures: int, files: int) -> None:
    """As many pictures in each form, and parquet files."""
    for form in FORMS:
        root = folder(tmp_path / form, {"": {"a": pictures, "b": pictures}}, form)
        assert reported(root, truncate(root, pictures, seed=18))
    for number in range(files):
        path = parquet(tmp_path / f"{number}.parquet", [0, 1] * 5)
        assert reported(path, set())
        data = path.read_bytes()
        path.write_bytes(data[: random.Random(number).randrange(len(data))])
        assert reported(path, {path})


def test_200_random_truncations_are_all_reported(tmp_path):
    check_truncations(tmp_path, 20, 20)


@pytest.mark.slow
def test_2000_random_truncations_are_all_reported(tmp_path):
    check_truncations(tmp_path, 200, 200)


def check_mutants(tmp_path: Path, count: int) -> None:
    """In a worker process, whose death would be an error of its own."""
    images = [data for _, data in mutants(count, seed=1200)]
    path = parquet(tmp_path / "mutants.parquet", [row % 2 for row in range(count)], images=images)
    ((name, part),) = open_parts(path).items()
    told = []
    found = check_part(name, part, workers=1, tick=told.append)
    assert sum(told) == found["images"] == count
    assert 0 < len(found["damaged"]) < count


def test_1200_mutated_files_kill_no_process(tmp_path):
    check_mutants(tmp_path, 1200)


@pytest.mark.slow
def test_50000_mutated_files_kill_no_process(tmp_path):
    check_mutants(tmp_path, 50_000)
