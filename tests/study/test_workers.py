"""Workers that take one run after the other: what they say, and what becomes of them."""

from contextlib import closing
from pathlib import Path

import pytest

from softless.study import workers as module
from softless.study.twin_run import TwinRun
from softless.study.twins import Twin, twins_named
from softless.study.workers import Workers, work
from softless.train.assemble import Runtime
from softless.train.loop import Interrupted
from softless.train.recipe import read_recipe

ROOT = Path(__file__).parents[2]
TINY = read_recipe(str(ROOT / "tests/commands/quick.toml"))
BAD = Twin(id="bad", label="bad", mechanism="linear", options={"phi": "nonsense"})


def twin_run(out, twin):
    return TwinRun(out=out, twin=twin, seed=0, base=TINY, data=None, runtime=Runtime(device="cpu"))


class Pipe:
    """The worker's end: tasks come in, words go out."""

    def __init__(self, *tasks):
        self.tasks, self.said, self.word = list(tasks), [], False

    def recv(self):
        if not self.tasks:
            raise EOFError
        return self.tasks.pop(0)

    def send(self, said):
        self.said.append(said)

    def poll(self):
        return self.word


@pytest.fixture
def worker(monkeypatch):
    """`work` in this process, which keeps its own Ctrl-C and threads."""
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(TwinRun, "material", lambda _: None)
    return work


def test_a_worker_takes_runs_until_there_are_none(worker, monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(module, "execute", lambda run, *_: ran.append(run.name) or {"status": "done"})
    softmax, inline = twins_named(["softmax", "inline"])
    end = Pipe(twin_run(tmp_path, softmax), twin_run(tmp_path, inline), None, twin_run(tmp_path, softmax))
    worker(end)
    assert ran == ["softmax-0", "inline-0"]
    assert end.said == [("over", {"status": "done"})] * 2
    assert len(end.tasks) == 1


def test_images_are_fetched_once_for_all_runs_of_a_grid(worker, monkeypatch, tmp_path):
    fetched = []
    monkeypatch.setattr(TwinRun, "material", lambda run: fetched.append(run.out))
    monkeypatch.setattr(module, "execute", lambda *_: {"status": "done"})
    softmax, inline = twins_named(["softmax", "inline"])
    other = tmp_path / "other"
    worker(Pipe(*(twin_run(tmp_path, twin) for twin in (softmax, inline)), twin_run(other, softmax)))
    assert fetched == [tmp_path, other]


def test_a_worker_ends_when_its_parent_is_gone(worker, monkeypatch, tmp_path):
    def interrupted(*_):
        raise Interrupted(1, 2)

    monkeypatch.setattr(module, "execute", interrupted)
    end = Pipe(twin_run(tmp_path, twins_named(["softmax"])[0]))
    worker(end)
    worker(Pipe())
    assert end.said == []


def test_any_message_stops_a_run(worker, tmp_path):
    end = Pipe(twin_run(tmp_path, twins_named(["softmax"])[0]))
    end.word = True
    worker(end)
    assert [kind for kind, *_ in end.said] == ["share", "over"]
    assert end.said[-1] == ("over", None)
    assert (tmp_path / "trainings/softmax-0/last").is_dir()
    again = Pipe(twin_run(tmp_path, twins_named(["softmax"])[0]))
    worker(again)
    assert again.said[-1][1]["status"] == "done"


def test_a_worker_reports_progress_rarely(worker, monkeypatch, tmp_path):
    def steps(task, _decoded, progress, _stopped):
        for step in range(1, 101):
            progress(task.name, step / 100)

    monkeypatch.setattr(module, "execute", steps)
    monkeypatch.setattr(module.time, "monotonic", lambda: 1000.0)
    end = Pipe(twin_run(tmp_path, twins_named(["softmax"])[0]))
    worker(end)
    assert end.said == [("share", "softmax-0", 0.01), ("share", "softmax-0", 1.0), ("over", None)]


@pytest.mark.slow
def test_a_worker_whose_run_failed_is_replaced(tmp_path):
    with closing(Workers(1)) as workers:
        workers.start(twin_run(tmp_path, BAD))
        first = workers.workers[0].process.pid
        (record,) = workers.wait(lambda *_: None)
        assert record["status"] == "failed"
        assert workers.workers == []
        workers.start(twin_run(tmp_path, twins_named(["softmax"])[0]))
        assert workers.workers[0].process.pid != first
        (record,) = workers.wait(lambda *_: None)
        assert record["status"] == "done"
        assert len(workers.workers) == 1


@pytest.mark.slow
def test_leaving_early_saves_what_runs(tmp_path):
    long = TwinRun(
        out=tmp_path, twin=twins_named(["softmax"])[0], seed=0, data=None, runtime=Runtime(device="cpu"),
        base=read_recipe(str(ROOT / "tests/commands/quick.toml"), [("epochs", "100000")]),
    )  # fmt: skip

    def stop(*_):
        raise KeyboardInterrupt

    workers = Workers(1)
    workers.start(long)
    process = workers.workers[0].process
    with closing(workers), pytest.raises(KeyboardInterrupt):
        workers.wait(stop)
    assert process.exitcode == 0
    assert list((tmp_path / "trainings/softmax-0/last").glob("step-*"))
    assert not (tmp_path / "runs").exists()
