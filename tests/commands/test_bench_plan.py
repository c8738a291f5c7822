"""What `softless bench` is about to measure, settled and refused before anything runs."""

import pytest
import torch

from softless.bench import contest
from softless.bench import measure as bench_measure
from softless.bench.cost import Shape
from softless.errors import ArgumentError

DEFAULTS = {
    "shapes": [(1, 8, 64, 16)], "tokens": None, "keys": None, "kv_heads": None, "causal": False, "backward": False,
    "dtype": None, "device": "cpu", "backend": "auto", "repeats": 3, "quick": True,
}  # fmt: skip


def plan(*names, options=None, **changes):
    return bench_measure.plan(names or ("inline",), options or {}, **DEFAULTS | changes)


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
    monkeypatch.setattr(contest, "free_bytes", lambda _: None)
    (terms,) = plan(device="auto").terms
    assert (terms.device, terms.dtype) == (device, dtype)
    assert plan(device="auto", dtype="float16").terms[0].dtype == torch.float16


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="device cuda was asked for and torch finds none"):
        plan(device="cuda")


def test_an_option_goes_to_every_mechanism():
    made = plan("linear", "inline", options={"phi": "relu"}).mechanisms
    assert [each.phi for each in made.values()] == ["relu", "relu"]
    with pytest.raises(ArgumentError, match="'hydra' has no option 'phi'"):
        plan("linear", "hydra", options={"phi": "relu"})


def test_a_length_that_does_not_fit_is_refused_before_the_first_is_measured(monkeypatch):
    monkeypatch.setattr(contest, "free_bytes", lambda _: 10**8)
    with pytest.raises(ArgumentError, match="shape 1,8,65536,16"):
        plan(tokens=[16, 65536])


def test_the_command_names_everything_that_was_settled():
    made = plan("linear", options={"phi": "relu"}, causal=True, backward=True, tokens=[8], kv_heads=2, keys=9)
    assert made.command == (
        "softless bench linear --shape 1,8,64,16 --tokens 8 --keys 9 --kv-heads 2 --causal --backward "
        "--option phi=relu --dtype float32 --device cpu --backend auto --repeats 3 --quick"
    )


def test_a_bar_moves_as_far_as_it_is_long(monkeypatch):
    """Whatever the number of contestants, passes and lengths, progress ends at 100 %."""
    moved = []

    class Bar:
        def __init__(self, total, _wanted):
            self.total = total

        def __enter__(self):
            moved.append(-self.total)
            return lambda _label, amount: moved.append(amount)

        def __exit__(self, *_):
            """Nothing to close."""

    monkeypatch.setattr(bench_measure, "progress", Bar)
    list(bench_measure._results(plan("inline", "hydra", backward=True, tokens=[4, 8]), 1e9, True))
    assert sum(moved) == pytest.approx(0)
