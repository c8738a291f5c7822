"""Products on an Arm processor: a training in float32 does without oneDNN, and leaves it as it was."""

from types import SimpleNamespace

import pytest
import torch

from softless.train import loop
from softless.train.devices import by_blas
from tests.train.jobs import Quiet, job


@pytest.fixture
def mkldnn(monkeypatch):
    """A torch whose oneDNN is the Arm Compute Library."""
    library = SimpleNamespace(enabled=True, is_acl_available=lambda: True)
    monkeypatch.setattr(torch.backends, "mkldnn", library)
    return library


def test_float32_turns_onednn_off_inside_the_context_only(mkldnn):
    with by_blas():
        assert not mkldnn.enabled
    assert mkldnn.enabled


def test_onednn_is_on_again_after_an_error(mkldnn):
    with pytest.raises(ZeroDivisionError), by_blas():
        raise ZeroDivisionError
    assert mkldnn.enabled


def test_onednn_stays_off_if_it_was_off_before(mkldnn):
    mkldnn.enabled = False
    with by_blas():
        assert not mkldnn.enabled
    assert not mkldnn.enabled


def test_half_precision_and_other_processors_keep_onednn_on(mkldnn):
    with by_blas("bf16"):
        assert mkldnn.enabled
    mkldnn.is_acl_available = lambda: False
    with by_blas():
        assert mkldnn.enabled


def test_a_training_runs_with_onednn_off(mkldnn, tmp_path):
    class Looks(Quiet):
        def tick(self, step):
            super().tick(step)
            seen.append(mkldnn.enabled)

    seen: list[bool] = []
    loop.fit(job(tmp_path, watch=Looks()))
    assert seen == [False] * 10
    assert mkldnn.enabled
