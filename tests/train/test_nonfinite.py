"""A number that is not finite stops the training before the update (R23), also where only the device knows it."""

import json

import pytest
import torch
from torch import nn

from softless.errors import NonFiniteError
from softless.io import checkpoint
from softless.train.loop import Loop, fit
from softless.train.run import Run
from softless.train.stop import Stop
from tests.train.jobs import job, network

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


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("where", ["loss", "gradient", "data"])
def test_training_stops_before_the_update_and_names_the_batch(tmp_path, where, value):
    model = Spoiled(where, BAD[value], at=7)
    work = job(tmp_path, model=model, **FINITE)
    with pytest.raises(NonFiniteError, match=r"update 7 was not made: .*the checkpoint of update 6 is kept"):
        fit(work)
    kept = checkpoint.newest(Run(tmp_path).last)
    assert kept.step == 6
    (tmp_path / "good").mkdir()
    good = Loop(job(tmp_path / "good", model=Spoiled(where, BAD[value], at=99), **FINITE))
    seen = []
    good.engine.update = lambda *batch, update=good.engine.update: (
        update(*batch),
        seen.append(weights(good.engine.plain)),
    )
    good.run_on(Stop())
    good.close()
    assert all(torch.equal(tensor, seen[6][name]) for name, tensor in model.state_dict().items())
    report = json.loads((tmp_path / "nonfinite-rank0.json").read_text())
    assert report["step"] == 7
    assert len(report["ids"]) == len(report["names"]) == 24
    assert report["names"][0] == f"picture {report['ids'][0]}"
    assert sorted(report["ids"]) == sorted(batch_of(tmp_path, 7))
    assert not (tmp_path / "result.json").exists()


def batch_of(folder, step):
    """The images of an update, from the sampler alone."""
    feed = job(folder).train
    epoch, index = divmod(step, feed.per_epoch)
    feed.begin(epoch)
    return list(feed)[index].ids.tolist()


def test_where_the_host_does_not_look_the_device_leaves_out_every_later_update(tmp_path):
    """As on a GPU, where the flag is read every log_every updates: the weights are still those of the last good one."""
    model = Spoiled("loss", float("nan"), at=1)
    loop = Loop(job(tmp_path, model=model, log_every=50, **FINITE))
    feed, engine = loop.job.train, loop.engine
    feed.begin(0)
    batches = [feed.finish(batch, 0) for batch in feed]
    engine.update(*batches[0])
    after = weights(model)
    moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
    for batch in batches[1:]:
        engine.update(*batch)
    assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())
    states = list(engine.optimizer.state.values())
    assert all(torch.equal(state["exp_avg"], before) for state, before in zip(states, moments, strict=True))
    assert {state["step"].item() for state in states} == {1.0}
    failure = engine.failure()
    assert failure.step == 1
    assert failure.loss != failure.loss
    loop.close()


def test_a_run_that_failed_can_go_on_once_its_cause_is_gone(tmp_path):
    with pytest.raises(NonFiniteError):
        fit(job(tmp_path, model=Spoiled("loss", float("nan"), at=7), **FINITE))
    assert fit(job(tmp_path, model=Spoiled("loss", 0.0, at=7), resume=True, **FINITE)).steps == 10


def test_before_the_first_save_there_is_nothing_to_keep(tmp_path):
    with pytest.raises(NonFiniteError, match="no checkpoint had been saved"):
        fit(job(tmp_path, model=Spoiled("data", float("inf"), at=0), **FINITE))
