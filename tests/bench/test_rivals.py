"""Other libraries are called as they document it, with our features, and their absence is a sentence."""

import sys
from types import ModuleType

import pytest
import torch

import softless
from softless.bench import contestants
from softless.bench.contest import contest
from softless.bench.cost import Shape, Terms

CHUNK, FUSED, BLA = contestants.WITH_PHI
ALONE = contestants.RIVALS[3:]


def running(q, k, v, scale=None, normalize=True):
    """What fla's functions compute, in fla's layout [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.mT * scale).tril()
    out = weights @ v
    out = out / weights.sum(-1, keepdim=True) if normalize else out
    return out.transpose(1, 2), None


def whole(q, k, v):
    """What flash_bla's function computes, in our layout."""
    return (q @ (k.mT @ v)) / (q @ k.sum(-2)[..., None])


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins under the rivals' names."""
    for rival in contestants.RIVALS:
        module = sys.modules.get(rival.module) or ModuleType(rival.module)
        setattr(module, rival.function, running if rival.causal else whole)
        monkeypatch.setitem(sys.modules, rival.module, module)
    monkeypatch.setattr(contestants, "find_spec", lambda _: True)


def qkv():
    return torch.randn(3, 2, 4, 17, 8, dtype=torch.float64).unbind()


@pytest.mark.parametrize("phi", ["elu", "softmax"])
def test_a_rival_computes_our_function(installed, phi):
    tensors = qkv()
    normalized, raw = (softless.mechanism("linear", phi=phi, normalize=how) for how in ("divide", "none"))
    for rival, mechanism in ((CHUNK, normalized), (FUSED, raw), (BLA, normalized)):
        exact = softless.attention(*tensors, mechanism, is_causal=rival.causal, backend="reference")
        assert (contestants.load(rival, mechanism)(*tensors) - exact).abs().max() <= 1e-12 * (1 + exact.abs().max())


def test_a_kernel_alone_has_its_features_given(installed):
    q, k, v = qkv()
    for rival, alone in zip(contestants.WITH_PHI, ALONE, strict=True):
        mechanism = softless.mechanism("linear", phi="exp")
        assert alone.label == f"{rival.label} alone"
        assert torch.equal(
            contestants.load(alone, mechanism)(q.exp(), k.exp(), v), contestants.load(rival, mechanism)(q, k, v)
        )


def test_no_rival_is_made_to_copy(installed, monkeypatch):
    """fla gets [B, T, H, D] as it lies in memory, and its gradients too."""
    seen = []

    def look(*features, **options):
        seen.extend(x.is_contiguous() for x in features)
        return running(*features, **options)

    monkeypatch.setattr(sys.modules[CHUNK.module], CHUNK.function, look)
    call = contestants.load(CHUNK, softless.mechanism("linear"))
    who = contestants.Contestant(CHUNK.label, "rival", call=call, lay=CHUNK.lay)
    contest([who], Terms(shape=Shape(1, 2, 8, 4, 8, 2)), rate=1e9, backward=True, repeats=1)
    assert seen
    assert all(seen)


def absences(**changes):
    terms = Terms(**{"shape": Shape(1, 2, 8, 4, 8, 2), "is_causal": True, "device": "cuda"} | changes)
    return [contestants.absence(rival, terms) for rival in contestants.RIVALS]


def test_a_rival_that_can_take_the_call_has_no_excuse(installed):
    assert absences()[:2] == [None, None]
    assert absences(is_causal=False)[2] is None


def test_an_absence_is_a_reason(installed, monkeypatch):
    assert absences()[2] == "is not causal, and this call is causal"
    assert absences(is_causal=False)[0] == "is causal, and this call is not"
    assert absences(device="cpu")[0] == "needs a CUDA device"
    assert absences(shape=Shape(1, 2, 8, 4, 8, 1))[0] == "takes as many key heads as query heads"
    monkeypatch.setattr(contestants, "find_spec", lambda _: None)
    assert absences()[0] == "fla is not installed (pip install fla-core)"


def test_a_rival_that_fails_to_load_stays_on_the_list(monkeypatch):
    def fail(*_):
        raise ImportError("libcuda.so.1\nis missing")

    monkeypatch.setattr(contestants, "absence", lambda *_: None)
    monkeypatch.setattr(contestants, "load", fail)
    terms = Terms(shape=Shape(1, 2, 8, 4, 8, 2))
    everyone = contestants.contestants({"linear": softless.mechanism("linear")}, terms, compiled=False)
    assert [each.absent for each in everyone if each.role == "rival"] == ["ImportError: libcuda.so.1"] * 6


def test_rivals_compute_linear_and_nothing_else():
    terms = Terms(shape=Shape(1, 2, 8, 4, 8, 2))
    everyone = contestants.contestants({"inline": softless.mechanism("inline")}, terms, compiled=False)
    assert {each.absent for each in everyone if each.role == "rival"} == {"computes linear, and this is inline"}
