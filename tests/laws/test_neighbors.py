"""R7: a row does not know its neighbors: neither the rest of the batch nor its own padding.

float64 within 1e-12 of the row alone, in the units of oracle.py; token by token, bit for bit. What the
key mask hides may be NaN or infinite and changes no output and no gradient.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from softless import attention, attention_with_state
from tests.laws.cases import (
    CASES,
    PLACED,
    STATEFUL,
    Answer,
    Ask,
    Case,
    ask,
    asks,
    assert_answers,
    streamed,
    true_answer,
)

ONE_LAW = True  # these tests share the examples of one law
KINDS = ("left", "right", "between")
POISON = (0.0, 1e30, float("inf"), float("-inf"), float("nan"))


def spread(at: Ask, places: list[Tensor], tokens: int, poison: float) -> Ask:
    """Row b's first tokens moved to places[b] of a longer sequence; the rest is padding."""
    return at._replace(key_mask=torch.ones(len(places), at.q.shape[2], dtype=torch.bool)).each(
        lambda x: _moved(x, places, tokens, poison if x.is_floating_point() else False)
    )


def _moved(x: Tensor, places: list[Tensor], tokens: int, fill: float) -> Tensor:
    new = x.new_full((*x.shape[:2], tokens, *x.shape[3:]), fill)
    for b, place in enumerate(places):
        new[b, :, place] = x[b, :, : len(place)]
    return new


@st.composite
def ragged(draw: st.DrawFn, rows: int, longest: int, kinds: Sequence[str] = KINDS) -> tuple[list[Tensor], int]:
    """(where each row's tokens go, padded length): padding at the left, at the right, or in between."""
    lengths = [draw(st.integers(1, longest)) for _ in range(rows)]
    tokens = longest + draw(st.integers(0, 3))
    kind = draw(st.sampled_from(kinds))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    whole = torch.arange(tokens)
    places = {
        "left": lambda n: whole[tokens - n :],
        "right": lambda n: whole[:n],
        "between": lambda n: torch.randperm(tokens, generator=rng)[:n].sort().values,
    }
    return [places[kind](n) for n in lengths], tokens


@pytest.mark.parametrize("case", CASES, ids=str)
@given(data=st.data())
def test_the_batch_and_its_order_do_not_matter(case: Case, data: st.DataObject):
    is_causal = data.draw(st.sampled_from(case.forms))
    at = data.draw(asks(case, masked=data.draw(st.booleans())))
    together = attention(*at[:3], case.made, is_causal=is_causal, key_mask=at.key_mask, **at.extra)
    flipped = at.each(lambda x: x.flip(0))
    swapped = attention(*flipped[:3], case.made, is_causal=is_causal, key_mask=flipped.key_mask, **flipped.extra)
    true = true_answer(case, at, is_causal=is_causal)
    assert_answers(swapped.flip(0), true._replace(out=together), "order")
    for b in range(2):
        one = at.row(b)
        alone = attention(*one[:3], case.made, is_causal=is_causal, key_mask=one.key_mask, **one.extra)
        assert_answers(alone, Answer(*(x[b : b + 1] for x in true._replace(out=together))), f"row {b}")


@pytest.mark.parametrize("case", [each for each in CASES if not each.made.needs_grid], ids=str)  # a picture has places
@given(data=st.data())
def test_padding_does_not_matter(case: Case, data: st.DataObject):
    """At the left, at the right or in between; where places count, padding must come last."""
    is_causal = data.draw(st.sampled_from(case.forms))
    at = data.draw(asks(case, longest=70))
    places, tokens = data.draw(ragged(2, at.q.shape[2], ["right"] if case.name in PLACED else KINDS))
    padded = spread(at, places, tokens, data.draw(st.sampled_from(POISON)))
    out = attention(*padded[:3], case.made, is_causal=is_causal, key_mask=padded.key_mask, **padded.extra)
    for b, place in enumerate(places):
        one = at.row(b).tokens(0, len(place))
        alone = attention(*one[:3], case.made, is_causal=is_causal, **one.extra)
        true = true_answer(case, one, is_causal=is_causal)
        assert_answers(out[b : b + 1, :, place], true._replace(out=alone), f"row {b}")


@pytest.mark.parametrize("case", STATEFUL, ids=str)
@given(data=st.data())
def test_a_padded_state_goes_on_as_the_row_alone(case: Case, data: st.DataObject):
    """Prefill a ragged batch, then decode it, both with padding: no padding is ever absorbed."""
    at = data.draw(asks(case, longest=40))
    places, tokens = data.draw(ragged(2, at.q.shape[2]))
    padded, cut = spread(at, places, tokens, float("nan")), data.draw(st.integers(1, tokens))
    out, state = streamed(case, padded, [cut])
    for b, place in enumerate(places):
        one = at.row(b).tokens(0, len(place))
        alone, end = streamed(case, one, [])
        assert_answers(out[b : b + 1, :, place], true_answer(case, one, is_causal=True)._replace(out=alone), f"row {b}")
        assert state.n.expand(2, *state.n.shape[1:])[b].unique().item() == end.n.unique().item() == len(place)


@pytest.mark.parametrize("case", STATEFUL, ids=str)
@given(data=st.data())
def test_token_by_token_a_row_is_the_same_bit_for_bit(case: Case, data: st.DataObject):
    at = data.draw(asks(case, longest=5))
    places, tokens = data.draw(ragged(2, at.q.shape[2]))
    padded = spread(at, places, tokens, float("nan"))
    out, state = streamed(case, padded, range(1, tokens))
    for b, place in enumerate(places):
        one = at.row(b).tokens(0, len(place))
        alone, end = streamed(case, one, range(1, len(place)))
        assert torch.equal(out[b : b + 1, :, place], alone), f"row {b}"
        for field in state._fields[1:]:
            assert torch.equal(getattr(state, field)[b : b + 1], getattr(end, field)), f"row {b}: {field}"


def gradients(case: Case, at: Ask, *, stateful: bool = False, **call: Any) -> tuple[Tensor, ...]:
    """The output, and the gradient of each tensor."""
    leaves = [x.clone().requires_grad_() for x in (*at[:3], *at.inputs.values())]
    call |= at.extra | {"key_mask": at.key_mask, "inputs": dict(zip(at.inputs, leaves[3:], strict=True))}
    out = (attention_with_state if stateful else attention)(*leaves[:3], case.made, **call)
    out = out[0] if stateful else out
    out = torch.where(at.key_mask[:, None, :, None], out, 0.0)  # a padded query's own answer is nobody's business
    loss = (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum()
    return (out, *torch.autograd.grad(loss, leaves, materialize_grads=True))


CALLS = {
    "all": {},
    "causal": {"is_causal": True},
    "weights": {"backend": "reference"},
    "causal weights": {"is_causal": True, "backend": "reference"},
    "state": {"stateful": True},
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_mask_hides_changes_no_output_and_no_gradient(case: Case, how: str):
    stateful, is_causal = how == "state", how not in ("all", "weights")
    if (stateful and case not in STATEFUL) or is_causal not in case.forms:
        return  # test_table.py has the refusal
    at = ask(case, 7, heads=(4, 2))
    at = at._replace(key_mask=torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool))

    def filled(poison: float) -> Ask:
        def fill(x: Tensor) -> Tensor:
            real = at.key_mask[:, None] if x.ndim == 3 else at.key_mask[:, None, :, None]
            return torch.where(real, x, poison) if x.is_floating_point() else x

        return at.each(fill)

    clean = gradients(case, filled(0.5)._replace(q=at.q), **CALLS[how])
    for poison in POISON:
        dirty = filled(poison)
        names = ("output", "dq", "dk", "dv", *at.inputs)
        for name, x, y in zip(names, gradients(case, dirty._replace(q=at.q), **CALLS[how]), clean, strict=True):
            assert torch.equal(x, y), f"{poison} in the padding changes {name}"
        assert torch.equal(gradients(case, dirty, **CALLS[how])[0], clean[0]), f"{poison} in padded queries"
