"""What `cost` counts is what the formula says, and nothing is computed to count it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import softless
from softless.bench.cost import (
    BLOCKS,
    CHUNKED,
    EXPLICIT,
    FUSED,
    LOW_RANK,
    PARALLEL,
    Shape,
    Terms,
    cost,
    crossover,
    flops,
    form,
)
from softless.bench.scaling import study_cases
from softless.errors import ArgumentError, UnsupportedError

B, H, N, D = 2, 8, 300, 32
SHAPE = Shape(batch=B, heads=H, queries=N, head_dim=D, keys=N, kv_heads=H)
TERMS = Terms(shape=SHAPE)

CASES = [pytest.param(case.mechanism, id=case.label) for case in study_cases()]
# A search is long: of those in blocks and of low rank, only these have theirs at every change.
SOON = ("diagonal", "agent", "asymmetric_nonlocal")
LATER = [each for each in CASES if each.values[0].form in (BLOCKS, LOW_RANK) and each.values[0].name not in SOON]
SEARCHED = [pytest.param(*each.values, id=each.id, marks=[pytest.mark.slow] * (each in LATER)) for each in CASES]


def sized(**sides: int) -> Terms:
    """A call of the usual shape but for these sides."""
    return Terms(shape=replace(SHAPE, **sides))


def test_inline_takes_two_products_with_the_state():
    assert flops(softless.mechanism("inline"), TERMS) == 4 * B * H * N * D**2


def test_regress_takes_the_products_of_both_states_and_one_solve_per_head():
    solve = B * H * (2 * D**3 // 3 + 2 * D**3)
    assert flops(softless.mechanism("regress"), TERMS) == 6 * B * H * N * D**2 + solve


@pytest.mark.parametrize("name", ["softmax", "threshold"])
@pytest.mark.parametrize("keys", [N, 77])
def test_scored_mechanisms_take_two_products_with_all_pairs(name, keys):
    assert flops(softless.mechanism(name), sized(keys=keys)) == 4 * B * H * N * keys * D


def test_hydra_takes_no_product_between_channels():
    assert flops(softless.mechanism("hydra"), TERMS) == 2 * B * H * N * D


def each_way(later: bool) -> Iterator[Any]:
    """The mechanisms, as causal as they can be; `later`, the other way of those that have two."""
    for each in CASES:
        causal = each.values[0].lacks(True) is None
        if causal or not later:
            marks = [pytest.mark.slow] * later
            yield pytest.param(*each.values, causal and not later, id=f"{each.id}-{causal and not later}", marks=marks)


@pytest.mark.parametrize(("mechanism", "is_causal"), [*each_way(False), *each_way(True)])
def test_flops_grow_linearly_with_a_state_and_quadratically_without(mechanism, is_causal):
    if mechanism.lacks(is_causal):
        return  # tests/laws/test_table.py has the refusal
    some = 2**11 if mechanism.form == BLOCKS else 2**14  # blocks are many, and counted one by one
    calls = [sized(batch=1, queries=n, keys=n, head_dim=16) for n in (some, 2 * some)]
    once, twice = (flops(mechanism, replace(terms, is_causal=is_causal)) for terms in calls)
    if mechanism.name == "sparse":  # a window of fixed width, and columns of N / stride keys
        assert 2 < twice / once < 4
        return
    assert twice / once == pytest.approx(4 if form(mechanism, is_causal) in (FUSED, EXPLICIT) else 2, rel=0.05)


def test_the_floor_is_q_k_v_read_and_o_written():
    q, kv = B * H * N * D, B * 2 * 77 * D
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        terms = replace(sized(keys=77, kv_heads=2), dtype=dtype)
        assert cost(softless.mechanism("inline"), terms).floor_bytes == (2 * q + 2 * kv) * dtype.itemsize


@pytest.mark.parametrize("mechanism", CASES)
def test_weight_and_state_bytes_are_those_of_the_real_tensors(mechanism):
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    counted = cost(mechanism, Terms(shape=Shape(batch=2, heads=4, queries=9, head_dim=8, keys=9, kv_heads=4)))
    assert counted.weight_bytes == softless.attention_weights(q, k, mechanism).nbytes
    if mechanism.carries_state:
        _, state = softless.attention_with_state(q, k, v, mechanism)
        assert counted.state_bytes == sum(part.nbytes for part in state)
    else:
        assert counted.state_bytes is None


def test_half_precision_weights_are_computed_in_float32():
    half = cost(softless.mechanism("threshold"), Terms(shape=SHAPE, dtype=torch.bfloat16))
    assert half.weight_bytes == B * H * N * N * 4


@pytest.mark.parametrize("mechanism", SEARCHED)
def test_crossover_is_where_flops_really_cross(mechanism):
    def ratio(tokens):
        here = sized(head_dim=16, queries=tokens, keys=tokens)
        return flops(mechanism, here) / flops(softless.mechanism("softmax"), here)

    tokens = crossover(mechanism, sized(head_dim=16))
    if tokens is None:
        assert all(ratio(n) >= 1 for n in (64, 4096))
    else:
        assert ratio(tokens) <= 1
        assert tokens == 1 or ratio(tokens - 1) >= 1  # a block of all tokens costs what softmax does


def test_inline_crosses_softmax_at_the_head_dimension():
    assert crossover(softless.mechanism("inline"), sized(head_dim=64)) == 64
    assert crossover(softless.mechanism("softmax"), TERMS) is None


def test_form_names_how_each_family_is_computed():
    assert form(softless.mechanism("softmax"), True) == FUSED
    assert form(softless.mechanism("threshold"), True) == EXPLICIT
    assert form(softless.mechanism("diagonal"), True) == BLOCKS
    assert form(softless.mechanism("reformer"), True) == BLOCKS
    assert form(softless.mechanism("linformer"), False) == LOW_RANK
    assert form(softless.mechanism("efla"), True) == CHUNKED
    assert form(softless.mechanism("inline"), False) == PARALLEL
    assert form(softless.mechanism("inline"), True) == CHUNKED


def test_learned_inputs_are_counted_too():
    plain, learned = softless.mechanism("linear", phi="relu"), softless.mechanism("linear", phi="affine_relu")
    assert flops(learned, TERMS) == flops(plain, TERMS) + 2 * (2 * B * H * N * D**2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_counting_needs_neither_memory_nor_the_device(device):
    terms = Terms(shape=Shape(1, 8, 2**20, 64, 2**20, 8), device=device)
    assert cost(softless.mechanism("threshold"), terms).flops == 4 * 8 * 2**40 * 64


@pytest.mark.parametrize("grow", ["batch", "heads", "queries", "keys", "head_dim", "kv_heads"])
def test_a_shape_beyond_counting_is_refused_with_its_numbers(grow):
    with pytest.raises(ArgumentError, match="999999999999999"):
        cost(softless.mechanism("inline"), sized(**{grow: 999_999_999_999_999}))


def test_the_largest_shape_that_is_accepted_can_be_counted():
    for name, options in (("taylor", {"order": 2}), ("hydra", {}), ("linear", {"phi": "exp"})):
        mechanism = softless.mechanism(name, **options)
        for shape in (Shape(1, 1, 1, 2**17, 1, 1), Shape(1, 1, 2**26, 64, 2**26, 1), Shape(2**44, 1, 1, 4, 1, 1)):
            for is_causal in (False, True):
                assert math.isfinite(cost(mechanism, Terms(shape=shape, is_causal=is_causal)).flops)


def test_what_attention_refuses_cost_refuses():
    with pytest.raises(UnsupportedError, match="as many queries as keys"):
        cost(softless.mechanism("angular"), sized(keys=7))
    with pytest.raises(ArgumentError, match="8 query heads are not a multiple of 3"):
        cost(softless.mechanism("inline"), sized(kv_heads=3))
