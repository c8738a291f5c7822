"""R1: every form of a mechanism is one function.

weights = parallel = chunked, whatever the chunk = recurrent = cut, with the state carried over (test_streaming.py).
Nothing here knows how a form is implemented: each is compared with the formula of oracle.py in float64.

Not judged: rows whose denominator nearly cancels (|mass| < 0.1 sum|s|: divide with identity or leaky_relu,
threshold with tau > 1), rows that underflow the dtype, scores within rounding of the threshold. Angular
divides its output by |h|, so there a row's bound is divided by |h| too and says nothing where h vanishes.
"""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softless import algebra, attention, attention_weights
from softless.algebra import READERS, Gains, Log, State
from tests.laws import oracle
from tests.laws.cases import (
    CASES,
    CAUSAL,
    STATEFUL,
    TOLERANCE,
    WHOLE,
    Case,
    ask,
    asks,
    assert_answers,
    every_form,
    streamed,
    true_answer,
    true_rows,
)

EVERY_CASE = True
BACKENDS = {torch.float64: ("reference", "torch"), torch.float32: ("torch",)}
DTYPES = list(BACKENDS)
CHUNKS = (1, 4, 16, 128)  # 64 is the default


@pytest.mark.parametrize("case", WHOLE, ids=str)
@given(data=st.data())
def test_parallel_is_the_weights(case: Case, data: st.DataObject):
    exact = data.draw(asks(case, masked=data.draw(st.booleans())))
    for dtype in DTYPES:
        at = exact.to(dtype)
        true, call = true_answer(case, at), {"key_mask": at.key_mask, **at.extra}
        for backend in BACKENDS[dtype]:
            assert_answers(attention(*at[:3], case.made, backend=backend, **call), true, f"{backend} {dtype}")


@pytest.mark.parametrize("case", CAUSAL, ids=str)
@given(data=st.data())
def test_causal_is_the_masked_weights_whatever_the_chunk(case: Case, data: st.DataObject):
    exact, chunk = data.draw(asks(case, masked=data.draw(st.booleans()))), data.draw(st.sampled_from(CHUNKS))
    for dtype in DTYPES:
        at = exact.to(dtype)
        true = true_answer(case, at, is_causal=True)
        call = {"is_causal": True, "key_mask": at.key_mask, **at.extra}
        for backend in BACKENDS[dtype]:
            assert_answers(attention(*at[:3], case.made, backend=backend, **call), true, f"{backend} {dtype}")
        if case in STATEFUL:
            with patch.object(type(case.made), "chunk", chunk):
                assert_answers(attention(*at[:3], case.made, **call), true, f"chunk {chunk} {dtype}")


@pytest.mark.parametrize("case", STATEFUL, ids=str)
@given(data=st.data())
def test_streaming_token_by_token_gives_the_whole_output(case: Case, data: st.DataObject):
    exact = data.draw(asks(case, masked=data.draw(st.booleans()), longest=10))
    at = exact.to(data.draw(st.sampled_from(DTYPES)))
    out, _ = streamed(case, at, range(1, at.q.shape[2]))
    assert_answers(out, true_answer(case, at, is_causal=True), f"recurrent {at.q.dtype}")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@given(data=st.data())
def test_sequences_of_several_chunks_match_the_formula(case: Case, data: st.DataObject):
    """Up to 257 tokens: five chunks."""
    at = data.draw(asks(case, masked=data.draw(st.booleans()), longest=257))
    call = {"key_mask": at.key_mask, **at.extra}
    for is_causal in case.forms:
        true = true_answer(case, at, is_causal=is_causal)
        assert_answers(attention(*at[:3], case.made, is_causal=is_causal, **call), true, f"causal {is_causal}")
    if case in STATEFUL:
        assert_answers(streamed(case, at, [data.draw(st.integers(1, 257))])[0], true, "state")


@every_form
def test_attention_weights_are_the_formulas(case: Case, is_causal: bool):
    at = ask(case, 9, heads=(4, 2))._replace(key_mask=torch.arange(9).expand(2, 9) % 3 != torch.tensor([[0], [1]]))
    rows = true_rows(case, at, is_causal=is_causal)
    given_weights = attention_weights(at.q, at.k, case.made, is_causal=is_causal, key_mask=at.key_mask, **at.extra)
    error = (given_weights - rows.weights).abs()
    assert (error <= TOLERANCE[torch.float64] * rows.size[..., None])[rows.safe].all()


# The algebra itself, on bare features.

FEATURES = [
    pytest.param(reader, *logs, id=f"{reader}-{'exp' if logs[0] else 'plain'}-{'exp' if logs[1] else 'plain'}")
    for reader in READERS
    for logs in ([(False, False), (False, True)] if reader == "channel" else [(a, b) for a in (0, 1) for b in (0, 1)])
]


def true_reading(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, reader: str) -> tuple[Tensor, Tensor]:
    """(output, size of each row) for positive features."""
    score = q @ k.mT
    if reader == "channel":
        total = (seen.double() @ k)[..., None, :]  # [B, H, N, 1, D]
        weights = (q[..., None, :] * k[..., None, :, :] / torch.where(total > 0, total, 1.0)).sum(-1) * seen
        return weights @ v, 1 + weights.sum(-1)
    limits = torch.finfo(q.dtype).eps, torch.finfo(q.dtype).tiny
    rows = {
        "divide": lambda: oracle.divide(score, score, seen, *limits),
        "subtract": lambda: oracle.subtract(score, score, seen, 0.7),
        "contrast": lambda: oracle.contrast(score, score, seen, 0.7),
        "none": lambda: oracle.plain(score, score, seen, 0.7),
        "blend": lambda: oracle.divide(score, score, seen, *limits),
    }[reader]()
    if reader == "blend":
        added = oracle.subtract(score, score, seen, 0.7)
        weights = 0.4 * rows.weights + added.weights - 0.4 * oracle.even(seen)
        rows = rows._replace(weights=weights, size=rows.size + added.size)
    return rows.weights @ v, rows.size


@pytest.mark.parametrize(("reader", "log_q", "log_k"), FEATURES)
@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_all_forms_of_the_algebra_agree(reader: str, log_q: bool, log_k: bool, data: st.DataObject):
    """weights, parallel, chunked, recurrent, and merged states, for any feature map."""
    at = data.draw(asks(CASES[0], masked=True, longest=20))
    k, v = (x.repeat_interleave(at.q.shape[1] // x.shape[1], 1) for x in (at.k, at.v))
    q, k = (oracle.unit(x) * 3 for x in (at.q, k))  # logarithms between -3 and 3
    phi_q, phi_k, tokens, mask = q.exp(), k.exp(), q.shape[2], at.key_mask[:, None]
    if reader == "channel":
        phi_q = oracle.unit_sum(phi_q)
    given_q, given_k = Log(q) if log_q else phi_q, Log(k) if log_k else phi_k
    chunk = data.draw(st.sampled_from([1, 2, 8, 64] if log_k else [1, 3, 7, 64, 99]))
    cut, scale = data.draw(st.integers(0, tokens)), 0.7
    if reader == "blend":
        scale = Gains(*torch.tensor([0.4, 0.7], dtype=torch.float64)[:, None, None])

    def part(x: Tensor | Log, start: int, stop: int) -> Tensor | Log:
        return Log(x.value[:, :, start:stop]) if isinstance(x, Log) else x[:, :, start:stop]

    def seen_by(start: int, stop: int) -> State:
        return algebra.observe(part(given_k, start, stop), v[:, :, start:stop], mask[..., start:stop])

    visible = {causal: oracle.visible(q, k, causal, at.key_mask) for causal in (False, True)}
    pieces = algebra.merge(seen_by(0, cut), seen_by(cut, tokens)) if 0 < cut < tokens else seen_by(0, tokens)
    answers = {
        "weights": algebra.weights(given_q, given_k, reader, scale, visible[False]) @ v,
        "parallel": algebra.parallel(given_q, given_k, v, reader, scale, mask),
        "merged": algebra.read(given_q, pieces, reader, scale),
        "causal weights": algebra.weights(given_q, given_k, reader, scale, visible[True]) @ v,
        "chunked": algebra.chunked(given_q, given_k, v, reader, scale, mask, None, chunk),
        "recurrent": algebra.recurrent(given_q, given_k, v, reader, scale, mask)[0],
    }
    for form, out in answers.items():
        true, size = true_reading(phi_q, phi_k, v, visible[form in ("causal weights", "chunked", "recurrent")], reader)
        error, bound = (out - true).abs(), 1e-12 * (1 + size * v.abs().max())[..., None]
        assert (error <= bound).all(), f"{form}: {(error / bound).max():.3g} times the bound"


@pytest.mark.parametrize("log_k", [False, True], ids=["plain", "exp"])
@given(data=st.data())
def test_merging_is_associative_and_nothing_is_its_identity(log_k: bool, data: st.DataObject):
    at = data.draw(asks(CASES[0], longest=33))
    k, v, tokens = at.k, at.v, at.k.shape[2]
    cuts = sorted(data.draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
    place = torch.arange(tokens)

    def seen_by(start: int, stop: int) -> State:
        mask = ((place >= start) & (place < stop)).expand(2, 1, tokens)
        return algebra.observe(Log(k) if log_k else k, v, mask)

    nothing, a, b, c = seen_by(0, 0), seen_by(0, cuts[0]), seen_by(cuts[0], cuts[1]), seen_by(cuts[1], tokens)
    left, right = algebra.merge(algebra.merge(a, b), c), algebra.merge(a, algebra.merge(b, c))
    size = {"k_mean": k.abs().max(), "v_mean": v.abs().max(), "comoment": tokens * k.abs().max() * v.abs().max()}
    if log_k:
        size |= {"k_mean": 1 + k.abs().max(), "comoment": tokens * (1 + k.abs().max()) * v.abs().max()}
    for field, allowed in size.items():
        error = (getattr(left, field) - getattr(right, field)).abs().max()
        assert error <= 1e-12 * (1 + allowed), f"{field}: {error:.3g}"
    assert torch.equal(left.n, right.n)
    assert torch.equal(left.shift, right.shift)
    for same in (algebra.merge(nothing, a), algebra.merge(a, nothing)):
        assert all(torch.equal(x, y) for x, y in zip(same, a, strict=True))
