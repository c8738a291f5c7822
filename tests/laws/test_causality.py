"""R9: causality. Whatever comes after token i, outputs up to i keep every bit.

Also what is centered, rescaled or summed along the way must not look ahead: not even by a rounding.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from softless import attention, attention_weights, attention_with_state
from tests.laws.cases import CAUSAL, STATEFUL, TOLERANCE, Ask, Case, ask, asks

SORTED = ("reformer",)  # later tokens move earlier ones in the order, and so the order of their sums
FUTURES = ("other", "huge", "tiny", "zero", "masked")
# 0 nan is nan: SDPA may add its mask to the scores, forward substitution multiplies by zeros, reformer sorts.
SPREADING = ("softmax", "delta", "efla", *SORTED)


def unheard(case: Case, here: Tensor, there: Tensor) -> bool:
    """The same bits; sums in another order agree to R1's bar."""
    if case.name in SORTED:
        return bool(((here - there).abs() <= TOLERANCE[here.dtype] * (1 + here.abs().max())).all())
    return torch.equal(here, there)


def change_after(at: Ask, i: int, future: str) -> Ask:
    """The same question with everything after token i replaced."""
    q, k, v = (x.clone() for x in at[:3])
    mask = at.key_mask.clone()
    for x in (q, k, v):
        late = x[:, :, i + 1 :]
        changes = {"huge": late.sign() * 1e30, "tiny": late * 1e-30, "zero": late * 0}
        late.copy_(changes.get(future, late.flip(-1) + 0.7))
    mask[:, i + 1 :] = (not mask[:, i + 1 :].any()) if future == "masked" else mask[:, i + 1 :]
    return Ask(q, k, v, mask, at.inputs)


@pytest.mark.parametrize("case", CAUSAL, ids=str)
@given(data=st.data())
def test_the_past_does_not_depend_on_the_future(case: Case, data: st.DataObject):
    at = data.draw(asks(case, masked=True)).to(data.draw(st.sampled_from([torch.float64, torch.float32])))
    i = data.draw(st.integers(0, at.q.shape[2] - 1))
    other = change_after(at, i, data.draw(st.sampled_from(FUTURES)))

    state = None
    if case in STATEFUL:  # a past that both share
        _, state = attention_with_state(at.q.flip(2), at.k.flip(2), at.v + 2, case.made, **at.extra)

    def answers(at: Ask) -> dict[str, torch.Tensor]:
        call: dict[str, Any] = {"key_mask": at.key_mask, **at.extra}
        made = {
            "torch": attention(*at[:3], case.made, is_causal=True, **call),
            "reference": attention(*at[:3], case.made, is_causal=True, backend="reference", **call),
        }
        if state is not None:
            made["continued"] = attention_with_state(*at[:3], case.made, state, **call)[0]
        return made

    changed = answers(other)
    for how, out in answers(at).items():
        assert unheard(case, out[:, :, : i + 1], changed[how][:, :, : i + 1]), how


@pytest.mark.parametrize("case", [case for case in CAUSAL if case.name not in SPREADING], ids=str)
def test_the_past_does_not_depend_on_a_future_key_that_is_nan(case: Case):
    """Be it in the same chunk or a later one; chunks of two tokens make more than are summed at once."""
    at = ask(case, 131, batch=1, heads=(1, 1))

    def out(k: Tensor) -> Tensor:
        if case not in STATEFUL:
            return attention(at.q, k, at.v, case.made, is_causal=True, **at.extra)
        _, state = attention_with_state(*at.tokens(0, 3)[:3], case.made, **at.tokens(0, 3).extra)
        return attention_with_state(at.q, k, at.v, case.made, state, **at.extra)[0]

    for chunk in (2, 64):
        with patch.object(type(case.made), "chunk", chunk, create=True):
            whole = out(at.k)
            for i, key in ((5, torch.nan), (63, -torch.inf), (64, torch.inf), (70, torch.nan)):
                k = torch.where(torch.arange(131)[:, None] > i, key, at.k)
                assert torch.equal(out(k)[:, :, : i + 1], whole[:, :, : i + 1]), (chunk, i, key)


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_the_last_token_is_heard_by_itself_alone(case: Case):
    """And it is heard: a mechanism deaf to every token would be causal too."""
    for tokens in (63, 64, 65, 127, 128, 129):
        at = ask(case, tokens)._replace(key_mask=torch.ones(2, tokens, dtype=torch.bool))
        other = change_after(at, tokens - 2, "other")
        outs = [attention(*x[:3], case.made, is_causal=True, **at.extra) for x in (at, other)]
        assert unheard(case, outs[0][:, :, :-1], outs[1][:, :, :-1]), tokens
        assert not torch.equal(outs[0][:, :, -1], outs[1][:, :, -1]), tokens


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_the_last_query_stands_at_the_last_key(case: Case):
    """With N queries and M keys, query i sees keys up to i + M - N, and no other."""
    for queries, keys in ((3, 7), (7, 3), (1, 70), (70, 66)):
        at = ask(case, queries, keys)
        out = attention(*at[:3], case.made, is_causal=True, **at.extra)
        for i in range(0, queries, max(1, queries // 5)):
            seen = max(0, i + 1 + keys - queries)
            k, v = at.k.clone(), at.v.clone()
            k[:, :, seen:], v[:, :, seen:] = 1e30, -1e30
            changed = attention(at.q, k, v, case.made, is_causal=True, **at.extra)
            assert unheard(case, out[:, :, : i + 1], changed[:, :, : i + 1]), (queries, keys, i)
            if not seen:
                assert torch.equal(out[:, :, i], torch.zeros_like(out[:, :, i])), (queries, keys, i)


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_causal_weights_have_nothing_above_the_diagonal(case: Case):
    at = ask(case, 9)
    weights = attention_weights(at.q, at.k, case.made, is_causal=True, **at.extra)
    assert torch.equal(weights, weights.tril())
