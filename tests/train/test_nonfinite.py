"""A number that is not finite stops the training before the update (R23), also where only the device knows it."""

import itertools
import json

import pytest
import torch
from torch import nn

from softless.errors import NonFiniteError
from softless.io import checkpoint
from softless.train.devices import Devices
from softless.train.loop import Interrupted, Loop, fit
from softless.train.run import Run
from tests.train.jobs import Quiet, digest, job, network
from tests.train.test_resume import Impatient

BAD = {"NaN": float("nan"), "infinity": float("inf")}
FINITE = {"mixup": 0.0, "cutmix": 0.0, "ema": 0.5}


class Spoiled(nn.Module):
    """A network that spoils its input, its answer or its gradient in one forward pass of its training."""

    def __init__(self, where: str, value: float, at: int):
        super().__init__()
        self.inner, self.where, self.value, self.at, self.calls = network(0.0), where, value, at, 0

    def forward(self, x):
        spoil = self.training and self.calls == self.at
        self.calls += self.training
        if spoil and self.where == "data":
            x = torch.where(torch.arange(len(x))[:, None, None, None] == 1, self.value, x)
        out = self.inner(x)
        if spoil and self.where == "loss":
            out = out + torch.tensor([[self.value, 0.0, 0.0]])
        if spoil and self.where == "gradient":
            out = Poison.apply(out, self.value)
        return out


class Poison(torch.autograd.Function):
    """The answer as it is, and a gradient that is not."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone().fill_(ctx.value), None


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Keeping(Quiet):
    """Keeps the weights after every update."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []

    def tick(self, step):
        self.seen.append(weights(self.model))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("where", ["loss", "gradient", "data"])
def test_a_nonfinite_update_is_not_made_and_its_batch_is_reported(tmp_path, where, value):
    model = Spoiled(where, BAD[value], at=7)
    work = job(tmp_path, model=model, **FINITE)
    with pytest.raises(NonFiniteError, match=r"update 7 was not made: .*the checkpoint of update 6 is kept"):
        fit(work)
    kept = checkpoint.newest(Run(tmp_path).last)
    assert kept.step == 6
    (tmp_path / "good").mkdir()
    good = Keeping(Spoiled(where, BAD[value], at=99))
    fit(job(tmp_path / "good", model=good.model, watch=good, **FINITE))
    assert all(torch.equal(tensor, good.seen[6][name]) for name, tensor in model.state_dict().items())
    report = json.loads((tmp_path / "nonfinite-rank0.json").read_text())
    assert report["step"] == 7
    assert len(report["ids"]) == len(report["names"]) == 24
    assert report["names"][0] == f"picture {report['ids'][0]}"
    assert sorted(report["ids"]) == sorted(batch_of(tmp_path, 7))
    assert not (tmp_path / "result.json").exists()


def batch_of(folder, step):
    """The images of an update, from the sampler alone."""
    batches = job(folder).task.train
    epoch, index = divmod(step, batches.per_epoch)
    batches.sampler.set_epoch(epoch)
    return list(batches)[index].ids.tolist()


def test_the_device_skips_every_update_after_a_nonfinite_one(tmp_path):
    """As on a GPU, where the flag is read every log_every updates: the weights are still those of the last good one."""
    model = Spoiled("loss", float("nan"), at=1)
    loop = Loop(job(tmp_path, model=model, log_every=50, **FINITE))
    with loop.ledger:
        batches, engine = list(loop.task.train), loop.engine
        engine.update(batches[0])
        after = weights(model)
        moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
        for batch in batches[1:]:
            engine.update(batch)
        assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())
        states = list(engine.optimizer.state.values())
        assert all(torch.equal(state["exp_avg"], before) for state, before in zip(states, moments, strict=True))
        assert {state["step"].item() for state in states} == {1.0}
        failure = engine.failure()
        assert failure.step == 1
        assert failure.loss != failure.loss


def test_a_run_that_failed_can_go_on_once_its_cause_is_gone(tmp_path):
    with pytest.raises(NonFiniteError):
        fit(job(tmp_path, model=Spoiled("loss", float("nan"), at=7), **FINITE))
    assert fit(job(tmp_path, model=Spoiled("loss", 0.0, at=7), resume=True, **FINITE)).steps == 10


def test_a_failure_before_the_first_save_says_that_no_checkpoint_exists(tmp_path):
    with pytest.raises(NonFiniteError, match="no checkpoint had been saved"):
        fit(job(tmp_path, model=Spoiled("data", float("inf"), at=0), **FINITE))


def scaled():
    """A CPU that scales gradients as fp16 does on a GPU."""
    devices = Devices("cpu")
    devices.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    return devices


class Overflowing(nn.Module):
    """A network whose gradient overflows in some forward passes of its training."""

    def __init__(self, *when: range):
        super().__init__()
        self.inner, self.when, self.calls = network(0.0), when, 0

    def forward(self, x):
        out = self.inner(x)
        if self.training and any(self.calls in each for each in self.when):
            out = Poison.apply(out, float("inf"))
        self.calls += self.training
        return out


def test_a_gradient_that_overflows_in_fp16_is_skipped_and_the_scale_halved(tmp_path):
    watch, devices = Keeping(Overflowing(range(2, 4))), scaled()
    fit(job(tmp_path, model=watch.model, watch=watch, devices=devices, **FINITE))
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(watch.seen)]
    assert moved == [True, False, False, *[True] * 6]  # between updates 0, 1, ..., 9
    assert devices.scaler.get_scale() == 2.0**16 / 4 * 2 * 2  # doubled again after three sound ones, twice


def test_gradients_that_always_overflow_in_fp16_stop_the_training(tmp_path):
    """20 in a row are forgiven, and a sound one in between begins the count anew."""
    model = Overflowing(range(20), range(21, 99))
    with pytest.raises(NonFiniteError, match=r"update 41 was not made: .* norm (inf|nan), as in the 20 updates before"):
        fit(job(tmp_path, model=model, devices=scaled(), epochs=20, **FINITE))
    assert checkpoint.newest(Run(tmp_path).last).step == 39
    assert json.loads((tmp_path / "nonfinite-rank0.json").read_text())["step"] == 41
    assert not (tmp_path / "result.json").exists()


def test_a_resumed_run_goes_on_counting_overflows(tmp_path):
    endings = []
    for cuts in ([], [30]):
        folder = tmp_path / str(cuts)
        folder.mkdir()
        for at in cuts:
            with pytest.raises(Interrupted):
                fit(job(folder, model=Overflowing(range(12, 99)), devices=scaled(), watch=Impatient(at), epochs=20))
        rest = Overflowing(range(12 - sum(cuts), 99))
        with pytest.raises(NonFiniteError) as stopped:
            fit(job(folder, model=rest, devices=scaled(), resume=bool(cuts), epochs=20))
        endings.append(str(stopped.value).partition(";")[0])
        assert checkpoint.newest(Run(folder).last).step == 30
    assert endings[0] == endings[1]
    assert endings[0].startswith("update 32 was not made")


def test_an_overflow_survives_an_interruption_bitwise(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    fit(job(tmp_path / "whole", model=Overflowing(range(2, 6)), devices=scaled()))
    expected = digest(tmp_path / "whole")
    with pytest.raises(Interrupted):
        fit(job(tmp_path / "cut", model=Overflowing(range(2, 6)), devices=scaled(), watch=Impatient(4)))
    assert checkpoint.newest(Run(tmp_path / "cut").last).parts["progress"]["overflows"].item() == 2
    fit(job(tmp_path / "cut", model=Overflowing(range(2)), devices=scaled(), resume=True))
    assert digest(tmp_path / "cut") == expected
