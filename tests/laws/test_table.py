"""One table: every mechanism under every condition matches its formula, or refuses and says why.

The refusals are written out here; whatever is not refused is computed, and nothing is silently ignored.
"""

import re
from typing import NamedTuple

import pytest
import torch

from softless import attention, attention_weights, attention_with_state, list_mechanisms, mechanism
from softless.errors import ArgumentError, SoftlessError, UnsupportedError
from tests.laws import oracle_scored
from tests.laws.cases import (
    CASES,
    SQUARE,
    STATEFUL,
    STATELESS,
    Ask,
    Case,
    ask,
    assert_answers,
    every_form,
    streamed,
    true_answer,
)

NO_STATE = r"has no state of fixed size: keep a KV cache"
OWN_TOKEN = r"needs as many queries as keys, got {} and {}"
OWN_PLACE = r"gives keys to positions: it needs as many queries as keys, got {} and {}"
SCORED = ("softmax", "threshold", "topk", "sparse", "longformer", "nonlocal", "reformer")  # they take a bias
# What has no causal form, or no other, says why.
NO_PICTURE = r"needs grid=\(height, width\)"
ONE_FORM = {
    "cosformer": "the future decides: set the length",
    "mlla": "has no order",
    "a2": "gathers from all tokens",
    "nearfar": "has neighborhood=3 of a picture, which has no order",
    "regress": "(weighs keys by the mean of all queries|has a ridge relative to the trace of all keys)",
}
ONE_FORM |= dict.fromkeys(("delta", "efla", "decay"), "goes through tokens in their order")
ONE_FORM |= dict.fromkeys(oracle_scored.NOT_CAUSAL, "mixes all tokens before it weighs them")


class Column(NamedTuple):
    """A condition: the shape of the call, whether it is causal, masked, or continues a state."""

    queries: int = 7
    keys: int = 7
    is_causal: bool = False
    masked: bool = False
    heads: tuple[int, int] = (2, 2)
    state: bool = False


COLUMNS = {
    "plain": Column(),
    "causal": Column(is_causal=True),
    "key mask": Column(masked=True),
    "causal, key mask": Column(is_causal=True, masked=True),
    "fewer queries": Column(3, 7, masked=True),
    "more queries": Column(7, 3, masked=True),
    "causal, fewer queries": Column(3, 7, is_causal=True, masked=True),
    "causal, more queries": Column(7, 3, is_causal=True, masked=True),
    "causal, one query": Column(1, 70, is_causal=True),
    "grouped heads": Column(heads=(4, 2)),
    "causal, grouped heads": Column(is_causal=True, masked=True, heads=(4, 1)),
    "fewer queries, grouped heads": Column(3, 7, masked=True, heads=(4, 2)),
    "state": Column(is_causal=True, state=True),
    "state, fewer queries": Column(3, 7, is_causal=True, masked=True, state=True),
    "state, grouped heads": Column(is_causal=True, masked=True, heads=(4, 2), state=True),
}


PICTURES = ("agent", "soft", "asymmetric_nonlocal")  # they may read one, or a sequence


def test_every_mechanism_is_in_the_table():
    assert {case.name for case in CASES} == set(list_mechanisms())


def refusal(case: Case, column: Column) -> str | None:
    """What the refusal must say, or None if there must be none."""
    if column.is_causal not in case.forms:
        return ONE_FORM[case.name]
    if case.made.needs_grid and column.queries != column.keys:
        return NO_PICTURE
    if column.state and case.name in STATELESS:
        return NO_STATE
    if case.name in SQUARE and not column.is_causal and column.queries != column.keys:
        return OWN_PLACE.format(column.queries, column.keys)
    if case.id == "angular" and not column.is_causal and column.queries != column.keys:
        return OWN_TOKEN.format(column.queries, column.keys)  # it adds each query's own value
    return None


def question(case: Case, column: Column) -> Ask:
    """The first row is all padding, the second starts and ends with some."""
    at = ask(case, column.queries, column.keys, heads=column.heads)
    place = torch.arange(column.keys)
    return at._replace(key_mask=torch.stack([place < 0, (place > 0) & (place < 6)])) if column.masked else at


def answer(case: Case, at: Ask, column: Column) -> torch.Tensor:
    call = {"key_mask": at.key_mask, **at.extra}
    if column.state:
        whole = column.queries != column.keys
        return attention_with_state(*at[:3], case.made, None, **call)[0] if whole else streamed(case, at, [3])[0]
    return attention(*at[:3], case.made, is_causal=column.is_causal, **call)


def refused(case: Case, at: Ask, column: Column) -> str:
    """What the call says instead of an answer."""
    try:
        answer(case, at, column)
    except SoftlessError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing, it answers"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_mechanism_matches_its_formula_or_says_why_not(case: Case):
    """A row of the table; what fails is named by its column."""
    for name, column in COLUMNS.items():
        at = question(case, column)
        if reason := refusal(case, column):
            kind, said = "ArgumentError" if reason == NO_PICTURE else "UnsupportedError", refused(case, at, column)
            assert re.match(f"{kind}: .*{reason}", said), f"{name}: it says {said}"
        else:
            assert_answers(answer(case, at, column), true_answer(case, at, is_causal=column.is_causal), name)


@every_form
def test_a_query_that_sees_nothing_reads_zero(case: Case, is_causal: bool):
    at = ask(case, 5)._replace(key_mask=torch.zeros(2, 5, dtype=torch.bool))
    out = attention(*at[:3], case.made, is_causal=is_causal, key_mask=at.key_mask, **at.extra)
    assert torch.equal(out, torch.zeros_like(out))


@every_form
def test_no_queries_give_nothing_and_no_keys_give_zeros(case: Case, is_causal: bool):
    at, no_keys = ask(case, 4), ask(case, 4, 0)
    call = {"mechanism": case.made, "is_causal": is_causal}
    assert attention(at.q[:, :, :0], at.k, at.v, **at.extra, **call).shape == (2, 2, 0, at.v.shape[3])
    none = attention(*no_keys[:3], **no_keys.extra, **call)
    assert torch.equal(none, torch.zeros(2, 2, 4, at.v.shape[3], dtype=torch.float64))


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_a_state_needs_a_key_for_every_query(case: Case):
    at = ask(case, 7, 3)
    with pytest.raises(ArgumentError, match="7 queries and 3 keys"):
        attention_with_state(*at[:3], case.made, **at.extra)


BIASES = ((6, 7), (1, 7), (2, 1, 7), (2, 1, 6, 7), (2, 2, 6, 7))
BIASED = [(case, shape) for case in CASES for shape in (BIASES if case.name in SCORED else BIASES[:1])]


@pytest.mark.parametrize(("case", "shape"), BIASED, ids=str)
def test_bias_is_added_to_scores_where_there_are_scores(case: Case, shape: tuple[int, ...]):
    at, bias = ask(case, 6, 7), torch.randn(shape, dtype=torch.float64)
    if case.name not in SCORED:
        with pytest.raises(UnsupportedError, match=rf"'{case.name}' has none .* these have: {', '.join(SCORED)}"):
            attention(*at[:3], case.made, bias=bias, is_causal=case.forms[0], **at.extra)
        return
    for is_causal in (True,) if case.name in SQUARE else case.forms:
        true = true_answer(case, at, is_causal=is_causal, bias=bias)
        for backend in ("torch", "reference"):
            out = attention(*at[:3], case.made, bias=bias, is_causal=is_causal, **at.extra, backend=backend)
            assert_answers(out, true, backend)


@pytest.mark.parametrize("shape", [(7, 6), (3, 1, 6, 7), (1, 2, 2, 6, 7)], ids=str)
@pytest.mark.parametrize("name", [name for name in SCORED if name not in SQUARE])
def test_a_bias_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...]):
    at = ask(CASES[0], 6, 7)
    with pytest.raises(ArgumentError, match=r"must broadcast to \[B, H, N, M\] = \[2, 2, 6, 7\]"):
        attention(*at[:3], name, bias=torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", [name for name in SCORED if name != "reformer"])  # there padding is not hashed
def test_a_bias_of_minus_infinity_hides_a_key(name: str, is_causal: bool, backend: str):
    """As the key mask would; a softmax row without any key reads zero in every backend."""
    at, bias = ask(CASES[0], 5), torch.zeros(5, 5, dtype=torch.float64)
    bias[:, 1:3] = -torch.inf
    hidden = {"key_mask": torch.tensor([1, 0, 0, 1, 1]).bool().expand(2, 5), "is_causal": is_causal, "backend": backend}
    out = attention(*at[:3], name, bias=bias, is_causal=is_causal, backend=backend)
    torch.testing.assert_close(out, attention(*at[:3], name, **hidden), rtol=0, atol=1e-12)
    bias[2] = -torch.inf
    out = attention(*at[:3], name, bias=bias, is_causal=is_causal, backend=backend)
    assert out.isfinite().all()
    assert name != "softmax" or torch.equal(out[:, :, 2], torch.zeros_like(out[:, :, 2]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scale_multiplies_the_product_or_is_refused(case: Case):
    """Division and a norm cancel a factor; the others have room for one. angular does not take it."""
    at = ask(case, 7)
    free = (
        *SCORED,
        *oracle_scored.NOT_CAUSAL,
        "inline",
        "blend",
        "regress",
        "hydra",
        "delta",
        "efla",
        "decay",
        "diagonal",
        "nearfar",
    )
    takes = (case.name in free and "t1" not in case.options.values()) or case.options.get("normalize") == "none"
    form = {"is_causal": case.forms[0]}
    for scale in (0.3, 2.0 if case.name == "soft" else -2.0):
        if not takes:
            for call, how in (
                ((attention, form), (attention_with_state, {})) if case in STATEFUL else ((attention, form),)
            ):
                with pytest.raises(UnsupportedError, match=f"scale {scale} .*'{case.name}'"):
                    call(*at[:3], case.made, scale=scale, **at.extra, **how)
            with pytest.raises(UnsupportedError, match=f"scale {scale} .*'{case.name}'"):
                attention_weights(at.q, at.k, case.made, scale=scale, **at.extra, **form)
            continue
        for is_causal in case.forms:
            true = true_answer(case, at, is_causal=is_causal, scale=scale)
            for backend in ("torch", "reference"):
                out = attention(*at[:3], case.made, scale=scale, is_causal=is_causal, **at.extra, backend=backend)
                assert_answers(out, true, f"scale {scale} {backend}")
        if case in STATEFUL:
            assert_answers(attention_with_state(*at[:3], case.made, scale=scale, **at.extra)[0], true, "state")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_are_named_when_missing_extra_or_misshapen(case: Case):
    at, call = ask(case, 5), {"mechanism": case.made, "is_causal": case.forms[0]}
    with pytest.raises(ArgumentError, match="got unheard_of"):
        attention(*at[:3], inputs=at.inputs | {"unheard_of": torch.ones(1)}, **call)
    needed = {"affine_relu": {"weight": [2, 4, 4], "bias": [2, 4]}, "learned_scale": {"scale": [2, 4]}}
    needed |= {"learned": {"ridge": [2], "gain": [2]}}
    needed |= {
        "delta": {"beta": [2, 2, 5]},
        "efla": {"beta": [2, 2, 5]},
        "performer": {"projection": [5, 4]},
        "performer features=3 kind=hyperbolic": {"projection": [3, 4]},
        **oracle_scored.INPUTS,
    }
    chosen = {*case.options.values(), *(option for option, value in case.options.items() if value is True), case.id}
    wants = next((shapes for key, shapes in needed.items() if key in chosen), {})
    wants = wants | ({"divide": [2], "subtract": [2]} if case.name == "blend" else {})
    if case.name == "nearfar":
        maps = {"shared": {"map": [2, 4, 4]}, "separate": {"map_q": [2, 3, 4], "map_k": [2, 3, 4]}, "identity": {}}
        wants = {"gain": [2]} | maps[case.options.get("maps", "shared")]
    assert set(case.made.inputs) == set(wants)
    for name, shape in wants.items():
        with pytest.raises(ArgumentError, match=f"'{case.name}' needs inputs {name}"):
            attention(*at[:3], inputs={key: x for key, x in at.inputs.items() if key != name}, **call)
        with pytest.raises(ArgumentError) as refused:
            attention(*at[:3], inputs=at.inputs | {name: torch.ones(3, dtype=torch.float64)}, **call)
        assert f"'{name}' is [3] and must be a tensor of shape {shape}" in str(refused.value)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_grid_is_read_or_refused(case: Case):
    at = ask(case, 6)
    call = {"mechanism": case.made, "is_causal": case.forms[0], "inputs": at.inputs}
    if case.made.needs_grid:
        for grid in (None, (2, 2), (6,), (0, 6), "picture"):
            with pytest.raises(ArgumentError, match=NO_PICTURE):
                attention(*at[:3], grid=grid, **call)
        flat, tall = (attention(*at[:3], grid=grid, **call) for grid in ((1, 6), (3, 2)))
        assert not torch.allclose(flat, tall)
        return
    if case.name in PICTURES:
        for grid in ((2, 4), (6,), (0, 6), "picture"):
            with pytest.raises(ArgumentError, match=r"must be \(height, width\) of a picture.* 6 queries and 6 keys"):
                attention(*at[:3], grid=grid, **call)
        return
    with pytest.raises(UnsupportedError, match=rf"grid \(2, 3\) was passed, and mechanism '{case.name}'"):
        attention(*at[:3], grid=(2, 3), **call)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_does_not_fit_is_refused_with_both_shapes(case: Case):
    at = ask(case, 6, heads=(2, 2))
    wrong = {
        "mask shape": ({"key_mask": torch.ones(2, 5, dtype=torch.bool)}, r"\[2, 5\] and must be .* = \[2, 6\]"),
        "mask dtype": ({"key_mask": torch.ones(2, 6)}, "torch.float32 and must be a bool"),
        "heads": ({"q": at.q.repeat(1, 2, 1, 1)[:, :3]}, "3 query heads are not a multiple of 2"),
        "width": ({"k": at.k[..., :2]}, "same head dimension"),
        "tokens": ({"v": at.v[:, :, :5]}, "same heads and tokens"),
        "dtype": ({"v": at.v.float()}, "must share one dtype"),
        "batch": ({"v": at.v[:1], "k": at.k[:1]}, "batch sizes must be equal"),
        "backend": ({"backend": "fortran"}, "'fortran' is not one of auto, reference, torch, triton"),
        "triton": ({"backend": "triton"}, "triton"),
    }
    for what, (change, reason) in wrong.items():
        call = {"q": at.q, "k": at.k, "v": at.v, **at.extra, "is_causal": case.forms[0]} | change
        with pytest.raises(SoftlessError, match=reason) as refused:
            attention(mechanism=case.made, **call)
        assert isinstance(refused.value, ValueError), what


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_a_state_of_another_shape_is_refused(case: Case):
    at, other = ask(case, 4), ask(case, 4, dims=(5, 5))
    state = attention_with_state(*other[:3], case.made, **other.extra)[1]
    with pytest.raises(ArgumentError, match="the state's comoment is"):
        attention_with_state(*at[:3], case.made, state, **at.extra)


def test_hydra_needs_values_as_wide_as_queries():
    at = ask(CASES[0], 4, dims=(4, 3))
    for call in (attention, attention_with_state):
        with pytest.raises(UnsupportedError, match=r"hydra multiplies .* 3 .* 4"):
            call(*at[:3], mechanism("hydra"))
