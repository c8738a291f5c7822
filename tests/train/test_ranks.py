"""Many devices are one (R20): DDP and FSDP2 on gloo, checkpoints for any number of ranks, no rank left waiting."""

import json
import shutil
import signal
import socket

import pytest
import torch

from softless.io import checkpoint
from softless.train.loop import fit
from softless.train.run import Run
from tests.data.boxed import pair_of_files as boxes
from tests.data.masked import pair_of_files
from tests.data.outlined import row
from tests.ranks import run
from tests.train.jobs import job
from tests.train.ranks import EXACT, Blocks, detect, language, segment

EXACTLY = 1e-12
IN_SINGLE = 1e-6
BOOK = "the cat sat on the mat, and the dog sat on the log.\n" * 12
ENDS_WITHIN = 60  # seconds after one rank was killed


def start(folder, ranks, *acts):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return run("tests.train.ranks", folder, ranks, *acts, **group)


def finish(ended):
    assert [each.status for each in ended] == [0] * len(ended), [each.said for each in ended]


def gap(folder, expected):
    """Between the newest checkpoints of two runs."""
    ours, theirs = (checkpoint.newest(Run(place).last) for place in (folder, expected))
    assert ours.step == theirs.step == 10
    return max(
        (ours.parts[part][name] - tensor).abs().max().item()
        for part in ("model", "optimizer", "ema")
        for name, tensor in theirs.parts[part].items()
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The training of one process."""
    folder = tmp_path_factory.mktemp("alone")
    fit(job(folder, model=Blocks(), **EXACT))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two ranks: cases compared, evaluations, two trainings, and then one of them is killed. One start pays for all."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("ddp", "fsdp", "dead"):
        (folder / name).mkdir()
    (folder / "book.txt").write_text(BOOK)
    pair_of_files(folder / "data")
    boxes(folder / "boxes")
    boxes(folder / "masks", train=1, test=3, draw=row)
    acts = ("compare:10", "uneven", "train", "apart", "again", "language", "segment", "detect", "masks", "die")
    return folder, start(folder, 2, *acts)


def middle(folder, place):
    """A copy of a run as it was in the middle."""
    shutil.copytree(folder, place)
    shutil.rmtree(place / "last/step-00000010")
    return place


def test_an_update_of_two_ranks_equals_that_of_one(pair):
    folder, ended = pair
    assert (folder / "compare.json").exists(), ended
    found = json.loads((folder / "compare.json").read_text())
    assert max(found.values()) <= EXACTLY


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_training_of_two_ranks_equals_that_of_one(pair, alone, way):
    folder, _ = pair
    assert gap(folder / way, alone) <= EXACTLY
    logs = [
        [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()] for place in (folder / way, alone)
    ]
    for ours, theirs in zip(*logs, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[key] - theirs[key]) <= 1e-6 for key in ours)  # scores are counted in single precision


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_ranks_with_unequally_many_images_evaluate_together(pair, way):
    """25 images on 2 ranks, 12 at a time on each: one has a batch more."""
    folder, ended = pair
    assert (folder / "uneven.json").exists(), ended
    found = json.loads((folder / "uneven.json").read_text())[way]
    pairs = found["scores"]
    assert [ours[0] for ours, _ in pairs] == [1, 1, 25, 25]
    for (*ours, answers), (*theirs, expected) in pairs:
        assert ours == pytest.approx(theirs, rel=1e-6)  # counted in single precision
        assert answers == expected
    assert list(found["skipped"]) == ["picture 7", "picture 8"]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_one_rank_resumes_a_checkpoint_of_two(pair, alone, way, tmp_path):
    folder, _ = pair
    place = middle(folder / way, tmp_path / "one")
    fit(job(place, model=Blocks(), resume=True, **EXACT))
    assert gap(place, alone) <= EXACTLY


@pytest.mark.parametrize(("way", "theirs"), [("ddp", "step-00000005"), ("fsdp", "none")])
def test_ranks_that_see_different_checkpoints_refuse_to_resume(pair, way, theirs):
    folder, ended = pair
    assert (folder / "apart.json").exists(), ended
    for sentence in json.loads((folder / "apart.json").read_text())[way]:
        assert sentence.endswith(f"/last rank 0 finds step-00000010, rank 1 finds {theirs}")


def test_processes_that_have_trained_can_train_again(pair):
    folder, ended = pair
    assert (folder / "again.json").exists(), ended
    assert json.loads((folder / "again.json").read_text()) == {"ddp": 3, "fsdp": 3}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_language_model_of_two_ranks_equals_that_of_one(pair, tmp_path, way):
    folder, ended = pair
    assert (folder / "language.json").exists(), ended
    (tmp_path / "book.txt").write_text(BOOK)
    found, expected = json.loads((folder / "language.json").read_text())[way], language(tmp_path / "alone")
    assert found["last"] == pytest.approx(expected["last"], rel=IN_SINGLE)
    assert found["answers"]["bytes"] == expected["answers"]["bytes"]  # every test sequence was seen
    weights = [checkpoint.newest(Run(place).last).parts for place in (folder / f"language-{way}", tmp_path / "alone")]
    for part in ("model", "ema"):
        assert {*weights[0][part]} == {*weights[1][part]}
        for name, tensor in weights[1][part].items():
            torch.testing.assert_close(weights[0][part][name], tensor, rtol=0, atol=IN_SINGLE)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize(("act", "alone", "files"), [("segment", segment, "data"), ("detect", detect, "boxes")])
def test_a_dense_training_of_two_ranks_equals_that_of_one(pair, tmp_path, act, alone, files, way):
    folder, ended = pair
    assert (folder / f"{act}.json").exists(), ended
    shutil.copytree(folder / files, tmp_path / files)
    found, expected = json.loads((folder / f"{act}.json").read_text())[way], alone(tmp_path / "alone")
    assert found == pytest.approx(expected, abs=EXACTLY)
    weights = [checkpoint.newest(Run(place).last).parts for place in (folder / f"{act}-{way}", tmp_path / "alone")]
    for part in ("model", "ema"):
        for name, tensor in weights[1][part].items():
            torch.testing.assert_close(weights[0][part][name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_ranks_find_the_masks_that_one_finds(pair, way):
    folder, ended = pair
    assert (folder / "masks.json").exists(), ended
    found, expected = json.loads((folder / "masks.json").read_text())[way]
    assert sorted(expected) == ["0", "1", "2"]
    assert min(map(len, expected.values())) > 0
    assert found == expected


def test_a_killed_rank_ends_the_others(pair):
    folder, (waiting, killed) = pair
    assert killed.status == -signal.SIGKILL
    assert waiting.status != 0, waiting.said
    assert waiting.seconds - killed.seconds <= ENDS_WITHIN
    assert checkpoint.newest(Run(folder / "dead").last) is None  # killed before the first save


@pytest.mark.slow
def test_three_ranks_resume_a_checkpoint_of_two(pair, alone, tmp_path):
    folder, _ = pair
    for way in ("ddp", "fsdp"):
        middle(folder / way, tmp_path / way)
    finish(start(tmp_path, 3, "resume"))
    for way in ("ddp", "fsdp"):
        assert gap(tmp_path / way, alone) <= EXACTLY


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_hundred_updates_of_several_ranks_equal_those_of_one(tmp_path, ranks):
    finish(start(tmp_path, ranks, "compare:100"))
    assert max(json.loads((tmp_path / "compare.json").read_text()).values()) <= EXACTLY
