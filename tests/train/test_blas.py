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


def test_float32_does_without_it_until_the_end(mkldnn):
    with by_blas():
        assert not mkldnn.enabled
    assert mkldnn.enabled


def test_an_error_brings_it_back(mkldnn):
    with pytest.raises(ZeroDivisionError), by_blas():
        raise ZeroDivisionError
    assert mkldnn.enabled


def test_who_has_it_off_keeps_it_off(mkldnn):
    mkldnn.enabled = False
    with by_blas():
        assert not mkldnn.enabled
    assert not mkldnn.enabled


def test_half_precision_and_other_processors_keep_it(mkldnn):
    with by_blas("bf16"):
        assert mkldnn.enabled
    mkldnn.is_acl_available = lambda: False
    with by_blas():
        assert mkldnn.enabled


def test_a_training_does_without_it(mkldnn, tmp_path):
    class Looks(Quiet):
        def tick(self, step):
            super().tick(step)
            seen.append(mkldnn.enabled)

    seen: list[bool] = []
    loop.fit(job(tmp_path, watch=Looks()))
    assert seen == [False] * 10
    assert mkldnn.enabled
