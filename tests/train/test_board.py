"""Curves for TensorBoard are those of the log, and what keeps them from the disk is one sentence."""

import json
import resource

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from softless.errors import FileError
from softless.train.loop import fit
from softless.train.run import Board, Run
from tests.train.jobs import Killed, job


@pytest.fixture
def no_room():
    """No file of this process may grow beyond 200 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_tensorboard_curves_match_the_log_after_a_resumed_run(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(job(tmp_path, watch=Killed(5)))
    fit(job(tmp_path, resume=True))
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    lines = [json.loads(line) for line in Run(tmp_path).log.read_text().splitlines()]
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("test/top1", "top1")):
        expected = [(line["step"], line[key]) for line in lines if key in line]
        steps, values = zip(*expected, strict=True)
        assert tuple(each.step for each in shown.Scalars(tag)) == steps
        assert [each.value for each in shown.Scalars(tag)] == pytest.approx(values, rel=1e-6)  # single precision


@pytest.mark.usefixtures("no_room")
def test_curves_on_a_full_disk_raise_a_file_error(tmp_path):
    board = Board(tmp_path / "curves", 0)
    with pytest.raises(FileError, match=r"the curves in .*/curves cannot be written: File too large"):
        board.add("train", {f"number {n}": float(n) for n in range(100)}, 1)
    board.close()


def test_a_curve_folder_that_cannot_be_created_raises_a_file_error(tmp_path):
    (tmp_path / "curves").write_text("a file")
    with pytest.raises(FileError, match=r"the curves in .*/curves cannot be written: File exists"):
        Board(tmp_path / "curves", 0)


def test_an_error_in_training_is_raised_before_an_error_in_closing(tmp_path, monkeypatch):
    def close(_):
        raise FileError("the curves cannot be written")

    monkeypatch.setattr(Board, "close", close)
    with pytest.raises(KeyboardInterrupt):
        fit(job(tmp_path, watch=Killed(5)))
    with pytest.raises(FileError, match="the curves cannot be written"):
        fit(job(tmp_path, resume=True))
