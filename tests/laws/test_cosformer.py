"""What cosFormer promises: near tokens weigh more, none negatively, and a fixed length is the same for every call."""

import math

import pytest
import torch

from softless import attention, attention_weights, attention_with_state, mechanism
from softless.errors import ArgumentError, UnsupportedError


def ones(tokens: int, dim: int = 3) -> torch.Tensor:
    return torch.ones(1, 1, tokens, dim, dtype=torch.float64)


@pytest.mark.parametrize("length", [None, 9, 50])
def test_equal_tokens_weigh_by_the_cosine_of_their_distance(length: int | None):
    weights = attention_weights(ones(9), ones(9), mechanism("cosformer", length=length))[0, 0]
    for i in range(9):
        cosines = [math.cos(math.pi / 2 * (i - j) / (length or 9)) for j in range(9)]
        assert weights[i].tolist() == pytest.approx([c / sum(cosines) for c in cosines], abs=1e-12)


def test_no_weight_is_negative_up_to_the_length():
    q, k = torch.randn(2, 1, 2, 40, 3, dtype=torch.float64).unbind()
    for length in (None, 40, 41):
        assert (attention_weights(q, k, mechanism("cosformer", length=length)) >= 0).all()


def test_queries_of_another_sequence_count_from_one():
    weights = attention_weights(ones(2), ones(5), mechanism("cosformer"))[0, 0]
    cosines = [math.cos(math.pi / 2 * j / 5) for j in range(5)]
    assert weights[0].tolist() == pytest.approx([c / sum(cosines) for c in cosines], abs=1e-12)


def test_without_a_length_cosformer_uses_the_length_of_each_sequence():
    """So one more token changes every weight, and there is nothing causal to go on from."""
    q, k, v = torch.rand(3, 1, 1, 8, 3, dtype=torch.float64).unbind()
    short = attention_weights(q[:, :, :7], k[:, :, :7], "cosformer")
    long = attention_weights(q, k, "cosformer")[:, :, :7, :7]
    assert not torch.allclose(short / short.sum(-1, keepdim=True), long / long.sum(-1, keepdim=True))
    for call in (attention_with_state, lambda *qkv: attention(*qkv, is_causal=True)):
        with pytest.raises(UnsupportedError, match=r"'cosformer' .* the length, mechanism\('cosformer', length=M\)"):
            call(q, k, v, "cosformer")


def test_more_tokens_than_the_length_are_refused():
    with pytest.raises(ArgumentError, match="9 tokens are more than cosformer's length 8"):
        attention(ones(3), ones(9), ones(9), mechanism("cosformer", length=8))


def test_a_stream_ends_at_the_length(monkeypatch: pytest.MonkeyPatch):
    """Where its count cannot be read, with NaN."""
    made, mask = mechanism("cosformer", length=8), torch.tensor([[True, False, True]])
    _, state = attention_with_state(ones(6), ones(6), ones(6), made)
    out, state = attention_with_state(ones(3), ones(3), ones(3), made, state, key_mask=mask)  # padding is not counted
    assert out.isfinite().all()
    with pytest.raises(ArgumentError, match="9 tokens are more than cosformer's length 8"):
        attention_with_state(ones(1), ones(1), ones(1), made, state)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    out, _ = attention_with_state(ones(1), ones(1), ones(1), made, state)
    assert out.isnan().all()
