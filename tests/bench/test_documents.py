"""The plan of `softless bench`: settled, or refused, before anything runs."""

import pytest
import torch

from softless import stopwatch
from softless.bench import documents
from softless.bench.cost import Shape
from softless.errors import ArgumentError
from softless.mechanisms import mechanism

DEFAULTS = {
    "shapes": [(1, 8, 64, 16)], "tokens": None, "keys": None, "kv_heads": None, "causal": False, "backward": False,
    "dtype": None, "device": "cpu", "backend": "auto", "repeats": 3, "quick": True,
}  # fmt: skip


def plan(*names, **changes):
    mechanisms = {name: mechanism(name) for name in names or ("inline",)}
    return documents.plan_calls(mechanisms, **DEFAULTS | changes)


def test_a_shape_is_that_of_q_and_k_and_v_follow_it():
    (terms,) = plan().terms
    assert terms.shape == Shape(batch=1, heads=8, queries=64, head_dim=16, keys=64, kv_heads=8)
    (terms,) = plan(keys=5, kv_heads=2).terms
    assert terms.shape == Shape(batch=1, heads=8, queries=64, head_dim=16, keys=5, kv_heads=2)


def test_lengths_replace_n_in_every_shape():
    sizes = [terms.shape for terms in plan(shapes=[(1, 2, 3, 4), (5, 6, 7, 8)], tokens=[10, 20]).terms]
    assert [(size.batch, size.queries, size.keys) for size in sizes] == [
        (1, 10, 10),
        (1, 20, 20),
        (5, 10, 10),
        (5, 20, 20),
    ]


def test_a_shape_given_twice_runs_once():
    assert len(plan(shapes=[(1, 2, 3, 4), (1, 2, 3, 4)]).terms) == 1
    assert len(plan(shapes=[(1, 2, 3, 4), (1, 2, 9, 4)], tokens=[8]).terms) == 1


def test_the_backward_pass_comes_after_the_forward_one():
    assert plan().passes == (False,)
    assert plan(backward=True).passes == (False, True)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_the_dtype_is_what_the_device_is_used_with(monkeypatch, device, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: None)
    (terms,) = plan(device="auto").terms
    assert (terms.device, terms.dtype) == (device, dtype)
    assert plan(device="auto", dtype="float16").terms[0].dtype == torch.float16


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="device is 'cuda', and torch finds no CUDA device"):
        plan(device="cuda")


def test_a_length_that_does_not_fit_is_refused_before_the_first_is_measured(monkeypatch):
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 10**8)
    with pytest.raises(ArgumentError, match="shape 1,8,65536,16"):
        plan(tokens=[16, 65536])


def test_progress_adds_up_to_one():
    """The amounts add up for any number of contestants, passes and lengths."""
    moved = []
    both = plan("inline", "hydra", backward=True, tokens=[4, 8])
    list(documents._call_results(both, 1e9, lambda _label, amount: moved.append(amount)))
    assert sum(moved) == pytest.approx(1)
