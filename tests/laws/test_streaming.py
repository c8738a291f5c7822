"""R8: streaming. Cut anywhere, carry the state, save it and load it: the output is that of the whole sequence.

The state is float32 (float64 for float64 input), its size does not depend on the tokens seen, and a round
trip through a file keeps every bit.
"""

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from softless import Mechanism, State, attention, attention_with_state, mechanism
from softless.algebra.state import AnyState
from softless.errors import ArgumentError
from tests.laws.cases import STATEFUL, Case, ask, asks, assert_answers, streamed, true_answer

ONE_LAW = True  # these tests share the examples of one law


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states") / "state.safetensors"


def through(file: Path, state: AnyState) -> AnyState:
    """Save, load, and compare bit for bit."""
    save_file(state._asdict(), file)
    loaded = type(state)(**load_file(file))
    for field, old, new in zip(state._fields, state, loaded, strict=True):
        assert old.dtype == new.dtype, field
        assert torch.equal(old, new), field
    return loaded


@pytest.mark.parametrize("case", STATEFUL, ids=str)
@given(data=st.data())
def test_a_stream_cut_anywhere_and_saved_is_the_whole(case: Case, file: Path, data: st.DataObject):
    exact = data.draw(asks(case, masked=data.draw(st.booleans())))
    at = exact.to(data.draw(st.sampled_from([torch.float64, torch.float32])))
    tokens, state, outputs = at.q.shape[2], None, []
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=2), label="cuts") | {0, tokens})
    for start, stop in pairwise(cuts):
        out, state = streamed(case, at.tokens(start, stop), [], state)
        state = through(file, state)
        outputs.append(out)
    assert_answers(torch.cat(outputs, 2), true_answer(case, at, is_causal=True), f"cut at {cuts} {at.q.dtype}")


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["heads", "grouped heads"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_in_half_precision_the_state_is_float32(case: Case, dtype: torch.dtype, heads: tuple[int, int], file: Path):
    """The cuts cost what float32 costs; then both outputs are rounded, to neighbors at worst."""
    at = ask(case, 70, heads=heads, dtype=dtype)
    at = at._replace(key_mask=torch.arange(70).expand(2, 70) % 7 != torch.tensor([[1], [5]]))
    whole = attention(*at[:3], case.made, is_causal=True, key_mask=at.key_mask, **at.extra)
    first, state = streamed(case, at.tokens(0, 33), [1, 2, 19])
    assert {x.dtype for x in state if x.is_floating_point()} == {torch.float32}
    assert first.dtype == whole.dtype == dtype
    second, _ = streamed(case, at.tokens(33, 70), [5], through(file, state))
    true = true_answer(case, at.to(torch.float32), is_causal=True)
    error = (torch.cat([first, second], 2).double() - whole.double()).abs()
    allowed = 1e-5 * true.bound + torch.finfo(dtype).eps * whole.double().abs()
    assert (error <= allowed)[true.safe.expand_as(error)].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_the_state_does_not_grow(case: Case, dtype: torch.dtype):
    def size(tokens: int) -> dict[str, tuple[torch.dtype, torch.Size]]:
        at = ask(case, tokens, dtype=dtype, heads=(4, 2))
        state = attention_with_state(*at[:3], case.made, **at.extra)[1]
        return {field: (x.dtype, x.shape) for field, x in state._asdict().items()}

    assert size(1) == size(2) == size(64) == size(131)
    assert {kind for kind, _ in size(1).values() if kind.is_floating_point} == {dtype}


def assert_same(new: AnyState, old: AnyState) -> None:
    """Bit for bit; a count may have been broadcast to the batch."""
    for field, x, y in zip(old._fields, new, old, strict=True):
        assert torch.equal(x, y.expand_as(x)), field


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_padding_leaves_the_state_as_it_was(case: Case):
    at = ask(case, 9, heads=(4, 2))
    _, state = streamed(case, at, [])
    padding = at._replace(k=at.k * torch.nan, v=at.v * torch.nan, key_mask=torch.zeros(2, 9, dtype=torch.bool))
    _, after = streamed(case, padding, [3], state)
    assert_same(after, state)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_picked_rows_go_on_as_their_own_sequences(case: Case, masked: bool):
    """As the beams of a search do: row 1 twice, row 0 once."""
    at, picked = ask(case, 12, heads=(4, 2)), torch.tensor([1, 1, 0])
    if masked:
        at = at._replace(key_mask=torch.arange(12) < torch.tensor([[12], [5]]))
    beams = at.each(lambda x: x[picked])
    _, state = streamed(case, at.tokens(0, 9), [])
    out, _ = streamed(case, beams.tokens(9, 12), [], state.rows(picked))
    expected, _ = streamed(case, beams, [9])
    assert (out - expected[:, :, 9:]).abs().max() <= 1e-12 * (1 + expected.abs().max())


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_no_tokens_change_nothing_and_no_queries_ask_nothing(case: Case):
    at = ask(case, 4)
    nothing, true = at.tokens(0, 0), true_answer(case, at, is_causal=True)
    out, state = attention_with_state(*nothing[:3], case.made, **nothing.extra)
    assert out.shape == (2, 2, 0, at.v.shape[3])
    out, state = streamed(case, at, [], state)
    assert_answers(out, true, "after a call without tokens")
    out, after = attention_with_state(*nothing[:3], case.made, state, **nothing.extra)
    assert out.shape == (2, 2, 0, at.v.shape[3])
    assert_same(after, state)
    out, after = attention_with_state(nothing.q, at.k, at.v, case.made, **at.extra)
    assert out.shape == (2, 2, 0, at.v.shape[3])
    assert after.n.unique().item() == 4


@pytest.mark.parametrize("cut", [1, 4, 8])
@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_gradients_flow_through_the_state(case: Case, cut: int):
    """Token j's gradient from what is read after the cut is the one the whole sequence gives."""
    at = ask(case, 9)
    at = at._replace(key_mask=torch.arange(9).expand(2, 9) != torch.tensor([[0], [5]]))
    at = at._replace(q=at.q.abs() + 0.1, k=at.k.abs() + 0.1)  # away from kinks, and from masses that cancel
    grads = []
    for cuts in ([cut], []):
        leaves = [x.clone().requires_grad_() for x in at[:3]]
        out, state = streamed(case, at._replace(q=leaves[0], k=leaves[1], v=leaves[2]), cuts)
        loss = out[:, :, cut:].square().sum() + state.comoment.square().sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for name, split, whole in zip("qkv", *grads, strict=True):
        assert (split - whole).abs().max() <= 1e-10 * (1 + whole.abs().max()), f"d{name}"


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_the_state_of_another_mechanism_is_refused_and_both_are_named(case: Case):
    """Shapes do not tell: the memory of `delta` is as large as the co-moment of `linear`."""
    at = ask(case, 6)
    _, state = attention_with_state(*at[:3], case.made, **at.extra)
    for other in STATEFUL:
        if other.made == case.made:
            continue
        asked, both = ask(other, 6), f"^the state was made by '{case.name}'.* and '{other.name}'.* cannot go on"
        with pytest.raises(ArgumentError, match=both):
            attention_with_state(*asked[:3], other.made, state, **asked.extra)


@pytest.mark.parametrize(
    "again", [mechanism("linear", phi="exp", t=2), mechanism("linear", phi="exp", t=2.0)], ids=repr
)
def test_an_equal_mechanism_goes_on_from_a_state(again: Mechanism):
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    _, state = attention_with_state(q, k, v, mechanism("linear", phi="exp", t=2.0))
    for copied in (state, State(*state), state.rows(torch.tensor([0])), copy.deepcopy(state)):
        attention_with_state(q, k, v, again, copied)


def test_a_state_of_tensors_alone_is_judged_by_its_shapes():
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    _, state = attention_with_state(q, k, v, "linear")
    bare = State(*(x.clone() for x in state))
    attention_with_state(q, k, v, "inline", bare)
    with pytest.raises(ArgumentError, match="the state's comoment is"):
        attention_with_state(q, k, v, "taylor", bare)
