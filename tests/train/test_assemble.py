"""From names to a training: where it begins, also the second time, and what must still be so when it goes on."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from softless.errors import ArgumentError, FileError
from softless.io import checkpoint
from softless.train.assemble import Runtime, agree, describe, train
from softless.train.devices import Devices
from softless.train.recipe import read_recipe
from softless.train.run import Run
from softless.train.tasks.classify import build, image_loader
from tests.train.jobs import RECIPE, SMALL, Killed, Pictures


class Looking(Killed):
    """At the weights a training begins with."""

    def begin(self, job, parameters):
        self.first = next(job.task.model.parameters()).detach().clone()


@pytest.fixture
def start(tmp_path):
    """`start(after, ...)`: the weights a training on the digits begins with; it is killed after this update."""

    def run(after=None, **options):
        watch = Looking(after)
        try:
            train(tmp_path / "run", read_recipe("digits", SMALL), None, watch, runtime=Runtime(device="cpu"), **options)
        except KeyboardInterrupt:
            assert after is not None
        return watch.first

    return run


@pytest.fixture
def given(tmp_path):
    """A file of weights, and its first tensor."""
    recipe = read_recipe("digits", SMALL)
    torch.manual_seed(99)
    model = build(recipe.model, recipe.image_size, 10)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", next(model.parameters()).detach()


def test_a_run_killed_before_its_first_save_restarts_from_its_init_weights(start, given, tmp_path):
    path, expected = given
    assert torch.equal(start(1, init=path), expected)
    assert not checkpoint.places(Run(tmp_path / "run").last)
    assert Run(tmp_path / "run").read()["init"] == str(path)
    with pytest.raises(ArgumentError, match=r"was begun with init '.*weights.safetensors', and it is None now"):
        start(resume=True)
    assert torch.equal(start(1, resume=True, init=path), expected)


def test_a_run_with_a_checkpoint_resumes_without_its_init_file(start, given):
    path, _ = given
    start(3, init=path)
    path.unlink()
    start(resume=True, init=path)


def test_a_batch_smaller_than_the_number_of_processes_is_refused():
    devices = Devices("cpu")
    devices.ranks = 2
    with pytest.raises(ArgumentError, match="batch of 1 is too small: it needs at least one image for each of 2 proc"):
        image_loader(Pictures(9), replace(RECIPE, batch=1, mixup=0.0, cutmix=0.0), 0, devices, train=False)


def test_ranks_wait_for_each_other_before_the_first_one_writes_run_json(start, tmp_path, monkeypatch):
    """Until ranks have waited for each other once, a slower one may still be looking for a run."""
    begun = []
    monkeypatch.setattr(Devices, "wait", lambda _: begun.append(Run(tmp_path / "run").about.exists()))
    start(1)
    assert begun == [False, True]


def about(recipe):
    return describe(recipe, None, Pictures(9), Pictures(3, 1), 0, None, None)


def test_a_recipe_key_missing_in_an_old_run_takes_its_default():
    now = about(read_recipe("digits"))
    before = about(read_recipe("digits"))
    del before["init"], before["recipe"]["accumulate"], before["recipe"]["augment"]["area"]
    agree(before, now, "the run")
    with pytest.raises(ArgumentError, match=r"the run was begun with recipe.accumulate 1, and it is 2 now"):
        agree(before, about(read_recipe("digits", [("accumulate", "2")])), "the run")


def test_recipe_prose_may_change_and_a_run_json_without_a_recipe_is_an_error():
    now = about(read_recipe("digits"))
    agree(about(read_recipe("digits", [("cost", "much")])), now, "the run")
    with pytest.raises(FileError, match=r"the run: its run.json lacks 'recipe'"):
        agree({}, now, "the run")
