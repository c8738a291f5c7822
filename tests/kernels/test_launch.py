"""Machine code for Hopper is made by a ptxas that is known to be right."""

import os

import pytest
import triton
from triton.backends.nvidia.compiler import get_ptxas

from softless.kernels.common import launch


class Tool:
    def __init__(self, version: str, path: str):
        self.version, self.path = version, path


class Tools:
    ptxas = Tool("12.8", "old")
    ptxas_blackwell = Tool("12.9", "new")


@pytest.fixture
def old(monkeypatch):
    """A Triton like 3.6; the names that are set on it come back."""
    tools = Tools()
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(triton.knobs, "nvidia", tools)
    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas", lambda _: tools.ptxas)
    return tools


def test_the_installed_ptxas_is_new_enough():
    """From the import on: `auto` asks before any kernel is launched."""
    assert tuple(map(int, get_ptxas(90).version.split("."))) == launch.PTXAS >= launch.PTXAS_NEEDED


def test_an_old_ptxas_is_replaced(old):
    launch.choose_ptxas()
    assert old.ptxas == "new"


def test_a_ptxas_named_by_the_user_is_kept(old, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", os.devnull)
    launch.choose_ptxas()
    assert old.ptxas is Tools.ptxas


@pytest.mark.parametrize("error", [RuntimeError("Cannot find ptxas"), PermissionError(13, "Permission denied", "")])
def test_a_triton_without_ptxas_raises_nothing(monkeypatch, error):
    def missing(_):
        raise error

    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas", missing)
    launch.choose_ptxas()
