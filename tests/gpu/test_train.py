"""Training on a CUDA device: replayed graphs learn what single kernels do, and a resumed run is the same run."""

from pathlib import Path

import pytest
import torch

import softless
from softless.errors import UnsupportedError
from softless.kernels.common import choice, self_check
from softless.train.devices import Devices
from softless.train.loop import Job, fit
from tests.train.jobs import digest, job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # torch's compiler imports it
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # and looks at it
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # of which it would rather have more
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # first in a thread of torch's, which says so once
]


def training(folder: Path, *, graph: bool, resume: bool = False, **changes: bool | int) -> Job:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = softless.create_model(
        "inline_deit_tiny", img_size=4, patch_size=2, dims=64, depths=2, heads=2, num_classes=3, drop_path_rate=0.2
    )
    return job(folder, model=model, devices=Devices("cuda", graph=graph), resume=resume, **changes)


@pytest.mark.parametrize(("compiled", "accumulate"), [(False, 1), (True, 1), (False, 2)])
def test_a_replayed_update_is_the_update(tmp_path, compiled, accumulate):
    """The same kernels on the same numbers: what is drawn for the dropped paths may differ, so none are."""
    losses = []
    for graph in (False, True):
        made = training(tmp_path / str(graph), graph=graph, compile=compiled and graph, accumulate=accumulate)
        for module in made.task.model.modules():
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
        losses.append(fit(made).last["test_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_resumed_run_of_graphs_is_the_uninterrupted_one(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(training(whole, graph=True))
    first = training(parts, graph=True)
    first.watch.tick = lambda step: (_ for _ in ()).throw(KeyboardInterrupt) if step == 7 else None
    with pytest.raises(KeyboardInterrupt):
        fit(first)
    fit(training(parts, graph=True, resume=True))
    assert digest(whole, generators=False) == digest(parts, generators=False)


def test_a_compiled_training_checks_the_kernels_before_it_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "TESTED", frozenset())
    monkeypatch.setattr(self_check, "VERDICTS", {})
    fit(training(tmp_path / "run", graph=True, compile=True))
    assert [verdict.passed for verdict in self_check.VERDICTS.values()] == [True]


def test_a_model_that_waits_for_the_gpu_cannot_be_recorded(tmp_path):
    made = training(tmp_path / "run", graph=True)
    wait = made.task.model.register_forward_hook(lambda _module, _inputs, out: out * out.sum().isfinite().item())
    with pytest.raises(UnsupportedError, match="train without --graph"):
        fit(made)
    wait.remove()
