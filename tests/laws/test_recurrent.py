"""What the recurrent family promises: an exact flow, a memory that corrects itself, and one that fades."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from softless import attention, attention_weights, attention_with_state, mechanism
from softless.algebra import delta, fading
from softless.mechanisms.delta import _decline

TOKENS, DIM, WIDTH = 12, 4, 3


def tokens(*, unit: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [1, 1, N, .] and beta [1, 1, N]."""
    q, k = torch.randn(2, 1, 1, TOKENS, DIM, dtype=torch.float64).unbind()
    k = torch.nn.functional.normalize(k, dim=-1) if unit else k
    return q, k, torch.randn(1, 1, TOKENS, WIDTH, dtype=torch.float64), torch.rand(1, 1, TOKENS, dtype=torch.float64)


@pytest.mark.parametrize("length", [1e-6, 1e-2, 1.0, 30.0])
def test_efla_is_the_matrix_exponential(length: float):
    """dS/dt = -k k^T S + k v^T for a time beta, as one exponential of [[-k k^T, k v^T], [0, 0]]: within 1e-10."""
    q, k, v, beta = tokens()
    k = k * length
    out = attention(q, k, v, "efla", is_causal=True, inputs={"beta": beta})
    memory = torch.zeros(DIM, WIDTH, dtype=torch.float64)
    for t in range(TOKENS):
        key, value = k[0, 0, t], v[0, 0, t]
        flow = torch.zeros(DIM + WIDTH, DIM + WIDTH, dtype=torch.float64)
        flow[:DIM, :DIM], flow[:DIM, DIM:] = -torch.outer(key, key), torch.outer(key, value)
        step = torch.linalg.matrix_exp(beta[0, 0, t] * flow)
        memory = step[:DIM, :DIM] @ memory + step[:DIM, DIM:]
        error = (out[0, 0, t] - q[0, 0, t] @ memory).abs().max()
        assert error <= 1e-10 * (1 + memory.abs().max())


def test_efla_is_delta_of_unit_keys_with_its_gate():
    q, k, v, beta = tokens()
    length = k.norm(dim=-1)
    gate = 1 - (-beta * length.square()).exp()
    same = attention(q, k, v / length[..., None], "delta", is_causal=True, inputs={"beta": gate})
    out = attention(q, k, v, "efla", is_causal=True, inputs={"beta": beta})
    torch.testing.assert_close(out, same, rtol=1e-12, atol=1e-12)


def test_for_short_steps_efla_is_delta():
    """alpha = beta (1 - beta |k|^2 / 2 + ...): with unit keys they differ by a square of beta."""
    q, k, v, beta = tokens(unit=True)
    gaps = []
    for step in (1e-2, 1e-3):
        outs = [
            attention(q, k, v, name, is_causal=True, inputs={"beta": step * beta}) / step for name in ("delta", "efla")
        ]
        gaps.append((outs[0] - outs[1]).abs().max().item())
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.1)


def test_delta_with_a_whole_step_remembers_the_last_value_of_each_key():
    """Orthonormal keys, beta 1: what was written is read back, and writing again replaces it."""
    k = torch.eye(DIM, dtype=torch.float64)[[0, 1, 2, 0, 1]][None, None]
    v = torch.randn(1, 1, 5, WIDTH, dtype=torch.float64)
    one = {"beta": torch.ones(1, 1, 5, dtype=torch.float64)}
    torch.testing.assert_close(attention(k, k, v, "delta", is_causal=True, inputs=one), v, rtol=1e-12, atol=1e-12)
    weights = attention_weights(k, k, "delta", is_causal=True, inputs=one)[0, 0]
    torch.testing.assert_close(weights, torch.eye(5, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["delta", "efla"])
def test_a_memory_never_grows_beyond_what_was_written(name: str):
    """Of 2,000 long keys and steps of any size efla may be given: it erases before it writes."""
    k = 30 * torch.randn(1, 1, 2000, DIM)
    beta = torch.rand(1, 1, 2000) * (1 if name == "delta" else 100)
    _, state = attention_with_state(k, k, torch.ones(1, 1, 2000, WIDTH), name, inputs={"beta": beta})
    written = 1.0 if name == "delta" else 1 / k.norm(dim=-1).min().item()
    assert state.comoment.abs().max() <= 10 * DIM * written


@pytest.mark.parametrize("x", [0.0, 1e-300, 1e-9, 1e-3, 0.0624999, 0.0625, 0.5, 3.0, 1e3, 1e300])
def test_the_gate_is_its_formula_and_so_is_its_slope(x: float):
    """(1 - e^-x)/x, and (e^-x (1 + x) - 1)/x^2, which loses every digit where x is small and the series none."""
    at = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    value = _decline(at)
    (slope,) = torch.autograd.grad(value.sum(), at)
    values, slopes = [-math.expm1(-x) / x if x else 1.0], [(math.exp(-x) + math.expm1(-x) / x) / x if x else -0.5]
    if x <= 1:
        values = [(-x) ** n / math.factorial(n + 1) for n in range(20)]
        slopes = [-(n + 1) * (-x) ** n / math.factorial(n + 2) for n in range(20)]
    assert value.item() == pytest.approx(math.fsum(values), rel=1e-15)
    assert slope.item() == pytest.approx(math.fsum(slopes), rel=1e-13)


@given(data=st.data())
def test_all_forms_of_the_delta_rule_agree(data: st.DataObject):
    """Token by token, in chunks of any length, cut anywhere, or as weights: the same to 1e-12."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    n = data.draw(st.integers(1, 40))
    q, k, v = (torch.randn(2, n, size, generator=generator, dtype=torch.float64) for size in (3, 3, 2))
    k = torch.nn.functional.normalize(k, dim=-1) * (torch.rand(2, n, 1, generator=generator) > 0.2)
    erase, gain = torch.rand(2, 2, n, 1, generator=generator, dtype=torch.float64).unbind()
    start = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    out, end = delta.recurrent(q, k, gain * v, erase, start)
    chunk, cut = data.draw(st.sampled_from([1, 2, 5, 64])), data.draw(st.integers(0, n))
    pieces, memory = [], start
    for here in (slice(i, j) for i, j in pairwise(sorted({0, cut, n}))):
        parts = (x[:, here] for x in (q, k, gain * v, erase))
        piece, memory = delta.chunked(*parts, memory, chunk)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(memory, end, rtol=1e-12, atol=1e-12)
    zero, _ = delta.recurrent(q, k, gain * v, erase, torch.zeros_like(start))
    torch.testing.assert_close(delta.weights(q, k, erase, gain) @ v, zero, rtol=1e-12, atol=1e-12)


# decay


def test_the_slopes_are_the_published_ones():
    q = torch.ones(1, 4, 2, 1, dtype=torch.float64)
    for slopes, expected in (
        ("lightning", [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]),
        ("retention", [-math.log(1 - 2.0**-n) for n in (5, 6, 7, 8)]),
    ):
        weights = attention_weights(q, q, mechanism("decay", slopes=slopes, factor=0.5), is_causal=True)
        assert (-weights[0, :, 1, 0].log() / 0.5).tolist() == pytest.approx(expected, rel=1e-12)


def test_decay_with_factor_zero_is_linear_attention_without_a_normalizer():
    q, k, v, _ = tokens()
    plain = mechanism("linear", phi="identity", normalize="none")
    out = attention(q, k, v, mechanism("decay", factor=0), is_causal=True)
    torch.testing.assert_close(out, attention(q, k, v, plain, is_causal=True), rtol=1e-12, atol=1e-12)


def test_what_overflows_later_does_not_reach_back():
    """k v^T of a later token is infinite in float32: 0 times it would be NaN in every memory before."""
    k, v = torch.randn(2, 1, 1, 130, 2).unbind()
    out = attention(k, k, v, "decay", is_causal=True)
    k[:, :, 70], v[:, :, 70] = 1e30, -1e30
    assert torch.equal(attention(k, k, v, "decay", is_causal=True)[:, :, :70], out[:, :, :70])


@pytest.mark.parametrize("chunks", [1, 2, 65])
def test_decay_over_many_chunks_equals_one_chunk(chunks: int):
    k, v = torch.randn(1, 2, 2 * chunks, 2, dtype=torch.float64), torch.randn(1, 2, 2 * chunks, 1, dtype=torch.float64)
    slope, kept = torch.tensor([0.25, 1e-3], dtype=torch.float64), torch.rand(1, 2 * chunks) > 0.2
    k = k * kept[:, None, :, None]
    out, memory = fading.chunked(k, k, v, slope, kept, torch.zeros(1, 2, 2, 1, dtype=torch.float64), 2)
    torch.testing.assert_close(out, fading.weights(k, k, slope, kept) @ v, rtol=1e-11, atol=1e-11)
    _, end = fading.chunked(k, k, v, slope, kept, torch.zeros(1, 2, 2, 1, dtype=torch.float64), 2 * chunks)
    torch.testing.assert_close(memory, end, rtol=1e-11, atol=1e-11)


def test_a_long_distance_fades_as_exactly_as_a_short_one():
    """In float32 slope x 65,536 has steps of 0.004; the difference of two places has none."""
    n = 65_536
    q = torch.ones(1, 1, n, 1)
    v = torch.zeros(1, 1, n, 1)
    v[:, :, n - 3] = 1
    out = attention(q, q, v, mechanism("decay", factor=100), is_causal=True)[0, 0, -3:, 0]
    assert out.tolist() == pytest.approx([1, math.exp(-100 / 256), math.exp(-200 / 256)], rel=1e-6)
