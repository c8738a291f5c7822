"""The bar says how far it is and how long it will take; decoding moves it too."""

import pytest

from softless.commands import bench, probe, study, train_display
from softless.commands import progress as module
from softless.commands.progress import Bar
from softless.commands.study import ProgressLines
from softless.study.pipeline import DECODING
from tests.commands.conftest import RECIPE
from tests.commands.tiny import words


class Recorder(Bar):
    """A bar that remembers every label and amount."""

    moves: list[tuple[str, float]]

    def __init__(self, total: float):
        super().__init__(None, total)
        self.moves = []

    def __call__(self, label: str, amount: float) -> None:
        super().__call__(label, amount)
        self.moves.append((label, amount))


@pytest.fixture
def bars(monkeypatch):
    """Every bar that a command opens, in order."""
    opened = []

    def recording(total, wanted):
        opened.append(Recorder(total))
        return Entered(opened[-1])

    for user in (train_display, study, bench, module):
        monkeypatch.setattr(user, "progress", recording)
    assert not hasattr(probe, "progress"), "it imports it when it runs"
    return opened


class Entered:
    def __init__(self, bar):
        self.bar = bar

    def __enter__(self):
        return self.bar

    def __exit__(self, *_):
        return None


def test_the_time_left_follows_from_the_pace_so_far():
    bar = Bar(None, 10)
    assert bar.left(5.0) == ""
    bar("working", 4)
    assert bar.left(20.0) == "30 s left"
    bar("working", 6)
    assert bar.left(50.0) == "1 s left"


def test_skipped_progress_does_not_count_for_the_pace():
    bar = Bar(None, 100)
    bar.skip(50)
    assert bar.left(1.0) == ""
    bar("working", 1)
    assert bar.left(60.0) == "49 min left"


def test_a_study_shows_how_many_images_are_decoded():
    bar = Recorder(DECODING + 1)
    lines = ProgressLines(bar, images=200, decoding=DECODING, quiet=True)
    lines.decoding(64)
    lines.decoding(64)
    assert [label for label, _ in bar.moves] == ["decoding images, 64 of 200", "decoding images, 128 of 200"]
    assert bar.done == pytest.approx(DECODING * 128 / 200)
    lines.tick("softmax-0", 0.5)
    assert bar.done == pytest.approx(DECODING + 0.5)


def test_a_training_shows_decoding_and_updates_to_the_end(softless, bars):
    result = softless("train", "--recipe", RECIPE, "--out", "a")
    assert result.exit_code == 0, result.output
    decoding, _ = bars
    assert decoding.moves[0][0] == "decoding images, 64 of 1,797"
    assert decoding.moves[-1][0] == "decoding images, 1,797 of 1,797"
    for bar in bars:
        assert (bar.done, bar.skipped) == (bar.total, 0)


def test_a_resumed_training_does_not_count_earlier_updates_for_the_pace(softless, flowers, bars, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    for path in (tmp_path / "a/last").glob("step-00000004/*"):
        path.unlink()
    assert softless("train", "--out", "a", "--resume").exit_code == 0
    assert (bars[-1].total, bars[-1].skipped, bars[-1].done) == (4, 2, 4)


def test_a_bench_a_probe_and_a_study_reach_the_end_of_their_bars(softless, bars):
    assert softless("bench", "inline", "--shape", "1,1,8,4", "--repeats", "1", "--quick").exit_code == 0
    assert softless("probe", "inline_deit_tiny", "--images", "2", "--size", "32").exit_code == 0
    assert softless("study").exit_code == 0
    assert len(bars) == 3
    for bar in bars:
        assert bar.done == pytest.approx(bar.total)
