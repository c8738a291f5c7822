"""A run that goes on is the run that was never interrupted: the same bits, however and wherever it stopped."""

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from softless.errors import ArgumentError, FileError
from softless.io import checkpoint
from softless.train import loop
from softless.train.devices import Devices
from softless.train.loop import Interrupted, fit
from softless.train.run import Run, must_agree
from tests.train.jobs import Killed, Quiet, digest, job, network

WAYS = {
    "as in the file": {},
    "accumulated": {"accumulate": 2},
    "read as it goes": {"cache": False},
    "bf16": {"precision": "bf16"},
    "no average, no mixing": {"ema": 0.0, "mixup": 0.0, "cutmix": 0.0},
    "saved every epoch": {"checkpoint_every": 0},
    "channels last": {"channels_last": True},
}


class Impatient(Quiet):
    """Presses Ctrl-C, or sends other signals, during an update."""

    def __init__(self, at, *signals):
        super().__init__()
        self.at, self.signals = at, signals or (signal.SIGINT,)

    def tick(self, step):
        super().tick(step)
        if step == self.at:
            for number in self.signals:
                os.kill(os.getpid(), number)


def model(changes):
    """Channels last is about pictures."""
    if not changes.get("channels_last"):
        return network()
    torch.manual_seed(7)
    parts = torch.nn.Conv2d(3, 8, 2), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Flatten(), torch.nn.Linear(72, 3)
    return torch.nn.Sequential(*parts)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so where a CPU has no bf16
@pytest.mark.parametrize("way", WAYS)
def test_a_run_interrupted_by_ctrl_c_and_resumed_ends_bitwise_the_same(tmp_path, way):
    changes = WAYS[way]
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    fit(job(tmp_path / "whole", model=model(changes), **changes))
    expected = digest(tmp_path / "whole")
    for resume, stop in enumerate((4, 5, 7)):  # within an epoch, at its end, in the next
        with pytest.raises(Interrupted, match=f"stopped after update {stop} of 10"):
            fit(job(tmp_path / "cut", model=model(changes), resume=bool(resume), watch=Impatient(stop), **changes))
        assert checkpoint.newest(Run(tmp_path / "cut").last).step == stop
    outcome = fit(job(tmp_path / "cut", model=model(changes), resume=True, **changes))
    assert digest(tmp_path / "cut") == expected
    assert outcome.steps == 10


def test_the_log_holds_what_the_watcher_saw_without_the_speed(tmp_path):
    watch = Quiet()
    fit(job(tmp_path, watch=watch))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5, 6, 8, 10, 10]
    assert watch.steps == list(range(1, 11))
    for line, (step, numbers) in zip(lines, watch.lines, strict=True):
        assert line == {"step": step, **{key: value for key, value in numbers.items() if key != "images_per_second"}}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 10
    assert result["machine"]["device"] == "cpu"
    assert result["versions"]["torch"] == torch.__version__


@pytest.fixture
def heeding_ctrl_c():
    """A job in the background starts with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(job(tmp_path, watch=Impatient(4, signal.SIGINT, signal.SIGINT)))
    assert not isinstance(stopped.value, Interrupted)
    assert checkpoint.newest(Run(tmp_path).last).step == 3
    with pytest.raises(KeyboardInterrupt):  # and afterwards it means what it meant before
        signal.raise_signal(signal.SIGINT)


def test_repeated_sigterm_saves_before_it_stops(tmp_path):
    before = signal.signal(signal.SIGTERM, handler := lambda *_: None)
    try:
        with pytest.raises(Interrupted, match="stopped after update 4 of 10"):
            fit(job(tmp_path, watch=Impatient(4, signal.SIGTERM, signal.SIGTERM)))
        assert checkpoint.newest(Run(tmp_path).last).step == 4
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_rank_stops_before_the_state_is_saved(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Devices, "wait", lambda _: saved.append(checkpoint.newest(Run(tmp_path).last).step))
    with pytest.raises(Interrupted):
        fit(job(tmp_path, watch=Impatient(4)))
    assert saved == [4]


def test_the_reported_speed_leaves_out_the_time_of_a_save(tmp_path, monkeypatch):
    """A clock that moves with the updates alone, and saves between two lines of the log."""
    watch = Quiet()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: 2.0 * len(watch.steps)))
    outcome = fit(job(tmp_path, watch=watch))
    rates = [numbers["images_per_second"] for _, numbers in watch.lines if "images_per_second" in numbers]
    assert rates == [24 / 2.0] * 5
    assert outcome.seconds == 20.0


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    first = fit(job(tmp_path))
    before, watch = digest(tmp_path, generators=False), Quiet()
    again = fit(job(tmp_path, resume=True, watch=watch))
    assert watch.steps == []
    assert replace(again, seconds=0.0) == replace(first, seconds=0.0)
    assert digest(tmp_path, generators=False) == before


def test_what_was_skipped_before_an_interruption_is_still_counted(tmp_path):
    work = job(tmp_path, watch=Impatient(4))
    work.task.train.skipped["picture 5"] = "it is damaged"
    with pytest.raises(Interrupted):
        fit(work)
    work = job(tmp_path, resume=True)
    work.task.test.skipped["picture 3"] = "it is empty"
    assert fit(work).skipped == 2
    skipped = {"train": {"picture 5": "it is damaged"}, "test": {"picture 3": "it is empty"}}
    assert json.loads((tmp_path / "skipped.json").read_text()) == skipped
    assert fit(job(tmp_path, resume=True)).skipped == 2


def test_a_run_resumes_from_the_newest_intact_checkpoint(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        fit(job(tmp_path / name))
    expected = digest(tmp_path / "whole")
    path = tmp_path / "cut/last/step-00000010/optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"optimizer.safetensors is damaged.*step-00000009 is used instead"):
        fit(job(tmp_path / "cut", resume=True))
    assert digest(tmp_path / "cut") == expected


def test_the_best_weights_are_those_of_the_best_evaluation(tmp_path):
    fit(job(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    tests = [line for line in lines if "top1" in line]
    found = checkpoint.newest(Run(tmp_path).best)
    best = max(tests, key=lambda line: line["top1"])
    assert (found.step, found.state["scores"]["top1"]) == (best["step"], best["top1"])
    assert list(found.parts) == ["model"]


def test_best_weights_match_the_result_after_a_run_goes_back(tmp_path, monkeypatch):
    """Killed after two evaluations that no checkpoint tells of, it takes another course, and does worse."""
    top1 = iter((0.5, 0.8, 0.9, 0.3, 0.4, 0.2))  # after updates 5, 10 and 15; then after 10, 15 and 20
    measured = loop.evaluate

    def scripted(*arguments):
        counts = measured(*arguments)
        scores = replace(counts.scores(), top1=next(top1))
        counts.scores = lambda: scores
        return counts

    monkeypatch.setattr(loop, "evaluate", scripted)
    with pytest.raises(KeyboardInterrupt):
        fit(job(tmp_path, watch=Killed(16), epochs=4, checkpoint_every=9))
    assert checkpoint.newest(Run(tmp_path).best).step == 15
    outcome = fit(job(tmp_path, resume=True, epochs=4, checkpoint_every=9))
    found = checkpoint.newest(Run(tmp_path).best)
    assert (outcome.best_step, outcome.best) == (5, 0.5) == (found.step, found.state["scores"]["top1"])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3)), r"in model, missing .*; unexpected 4.weight"),
        (
            torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(48, 8), torch.nn.GELU(), torch.nn.Dropout(), torch.nn.Linear(8, 3)
            ),
            r"mis-shaped 1.weight \(file \[16, 48\], model \[8, 48\]\)",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, other, says):
    fit(job(tmp_path))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(FileError, match="does not fit this model"):
        fit(job(tmp_path, model=other, resume=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_a_run_refuses_to_resume_with_other_settings(tmp_path):
    fit(job(tmp_path))
    with pytest.raises(ArgumentError, match="the run has seed 0, and seed 3 was given"):
        fit(job(tmp_path, resume=True, seed=3))
    with pytest.raises(FileError, match="holds ema, model, optimizer, progress, and model, optimizer, progress are"):
        fit(job(tmp_path, resume=True, ema=0.0))
    must_agree({"a": {"b": 1}}, {"a": {"b": 1}}, "it")
    with pytest.raises(ArgumentError, match=r"it was begun with a.b 1, and it is 2 now"):
        must_agree({"a": {"b": 1}}, {"a": {"b": 2}}, "it")
    with pytest.raises(ArgumentError, match="it was begun with c 1, and it is None now"):
        must_agree({"c": 1}, {}, "it")


def test_a_run_is_not_begun_twice_in_a_folder(tmp_path):
    run = Run(tmp_path / "a")
    run.begin({"seed": 1, "recipe": {}})
    assert run.read()["seed"] == 1
    with pytest.raises(ArgumentError, match="holds a run already: go on with it with --resume, or give another folder"):
        run.begin({"seed": 2})
    assert run.read()["seed"] == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "run.json is damaged"),
        ("[]", "is damaged"),
        ('{"schema": "x"}', "has schema 'x'"),
        ("[" * 9999, "damaged"),
    ],
)
def test_a_run_json_that_cannot_be_read_raises_a_file_error(tmp_path, text, says):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(FileError, match=says):
        Run(tmp_path).read()
    with pytest.raises(FileError, match=r"holds no run: there is no run.json in it"):
        Run(tmp_path / "none").read()


@pytest.mark.slow
@pytest.mark.compile
def test_a_compiled_training_is_close_to_the_plain_one_and_resumes_bitwise(tmp_path):
    changes = {"compile": True, "mixup": 0.0, "cutmix": 0.0, "ema": 0.0}
    for name in ("plain", "whole", "cut"):
        (tmp_path / name).mkdir()
    fit(job(tmp_path / "plain", model=network(0.0), **{**changes, "compile": False}))
    fit(job(tmp_path / "whole", model=network(0.0), **changes))
    with pytest.raises(Interrupted):
        fit(job(tmp_path / "cut", model=network(0.0), watch=Impatient(4), **changes))
    fit(job(tmp_path / "cut", model=network(0.0), resume=True, **changes))
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    plain, ours = (checkpoint.newest(Run(tmp_path / name).last).parts["model"] for name in ("plain", "whole"))
    assert plain.keys() == ours.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5)
