"""PoWER-BERT: who stays, in which order, and how the search finds how many."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from softless import mechanism
from softless.errors import SoftlessError
from softless.nn import Attention, EliminationEncoder, significance
from softless.nn.beyond.elimination import EliminationLayer, Survivors, ranked

DIM, N = 12, 9


def weights_and_mask() -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, 6:] = False
    scores = torch.randn(2, 3, N, N, dtype=torch.float64).masked_fill(~mask[:, None, None], -torch.inf)
    return scores.softmax(-1), mask


def votes(weights: Tensor, mask: Tensor) -> list[float]:
    """One sample, by the definition: what the other real tokens give token j, a mean over heads."""
    heads, tokens = len(weights), len(mask)
    return [
        sum(weights[h, i, j].item() for h in range(heads) for i in range(tokens) if i != j and mask[i]) / heads
        for j in range(tokens)
    ]


def survivors_by_hand(weights: Tensor, mask: Tensor, kept: int) -> list[int]:
    """The class token, then the highest votes among real tokens, then padding from the left; in their order."""
    real = [j for j in range(len(mask)) if mask[j]]
    given = votes(weights, mask)
    others = sorted(real[1:], key=lambda j: -given[j])
    return sorted([*real[:1], *others, *(j for j in range(len(mask)) if not mask[j])][:kept])


def test_significance_is_the_attention_from_other_tokens():
    weights, mask = weights_and_mask()
    for b, row in enumerate(significance(weights, mask)):
        torch.testing.assert_close(row, torch.tensor(votes(weights[b], mask[b]), dtype=torch.float64))


@pytest.mark.parametrize("kept", [1, 2, 5, 6, 8, 9])
def test_the_most_significant_tokens_stay_in_their_order(kept: int):
    layer, x = EliminationLayer(DIM, 3, "softmax", 20).double(), torch.randn(2, N, DIM, dtype=torch.float64)
    _, mask = weights_and_mask()
    _, weights = layer.attn.with_weights(x, key_mask=mask)
    left = layer(Survivors(x, mask, torch.arange(N).expand(2, -1)), None, kept)
    every = layer(Survivors(x, mask, torch.arange(N).expand(2, -1)), None, None)
    for b in range(2):
        expected = survivors_by_hand(weights[b], mask[b], kept)
        assert left.places[b].tolist() == expected
        assert torch.equal(left.key_mask[b], mask[b, expected])
        real = [j for j in expected if mask[b, j]]
        torch.testing.assert_close(left.x[b, : len(real)], every.x[b, real], rtol=1e-12, atol=1e-12)


def test_the_class_token_is_the_first_real_one():
    weights, mask = weights_and_mask()
    mask[1] = torch.arange(N) >= 3
    first = ranked(weights, mask)[:, 0]
    assert first.tolist() == [0, 3]


def test_an_elimination_layer_is_a_bert_layer():
    """norm(x + attention(x)), then norm(a + feed forward(a)): with every token kept there is nothing else."""
    layer, x = EliminationLayer(DIM, 3, "softmax", 20).double(), torch.randn(2, N, DIM, dtype=torch.float64)
    now = Survivors(x, torch.ones(2, N, dtype=torch.bool), torch.arange(N).expand(2, -1))
    a = layer.norm1(x + layer.attn(x))
    expected = layer.norm2(a + layer.feed(a))
    for kept in (None, N, 2 * N):
        torch.testing.assert_close(layer(now, None, kept).x, expected, rtol=1e-12, atol=1e-12)


def test_a_search_multiplies_by_rank():
    layer, x = EliminationLayer(DIM, 3, "softmax", 20).double(), torch.randn(2, N, DIM, dtype=torch.float64)
    _, mask = weights_and_mask()
    retention = torch.rand(N, dtype=torch.float64)
    out, weights = layer.attn.with_weights(x, key_mask=mask)
    a = layer.norm1(x + out)
    found = layer(Survivors(x, mask, torch.arange(N).expand(2, -1)), retention, None)
    for b in range(2):
        before = [survivors_by_hand(weights[b], mask[b], kept) for kept in range(N + 1)]
        for j in range(N):
            rank = next(kept for kept in range(N) if j in before[kept + 1])
            scaled = a[b, j] * retention[rank] if mask[b, j] else a[b, j]
            torch.testing.assert_close(found.x[b, j], layer.norm2(scaled + layer.feed(scaled)), rtol=1e-12, atol=1e-12)


def test_a_search_that_never_started_changes_nothing():
    encoder, x = EliminationEncoder(DIM, 3, 2, N), torch.randn(2, N, DIM)
    before = encoder(x).x
    encoder.search()
    assert torch.equal(encoder(x).x, before)
    encoder.eliminate(encoder.found())
    assert encoder.kept == (N, N)
    assert torch.equal(encoder(x).x, before)
    encoder.train_all()
    assert encoder(x).places.shape == (2, N)


def test_the_counts_are_the_rounded_masses_and_never_grow():
    encoder = EliminationEncoder(DIM, 3, 4, N)
    with torch.no_grad():
        encoder.retention.copy_(torch.tensor([0.5, 0.7, 0.0, 1.0])[:, None].expand(-1, N))
    assert encoder.found() == [
        math.ceil(4.5),
        5,
        1,
        1,
    ]  # 6.3 is more than the layer before has; at least the class token
    assert encoder.penalty().item() == pytest.approx(N * (0.5 + 2 * 0.7 + 4 * 1.0))
    with torch.no_grad():
        encoder.retention[0] += 7
    encoder.clip()
    assert encoder.retention.max() == 1
    assert encoder.found()[0] == N


def test_the_search_drops_tokens_that_are_not_needed():
    """The answer stands in the class token: under the penalty, W falls, and falls most where it costs most."""
    encoder = EliminationEncoder(DIM, 3, 2, N)
    encoder.search()
    optimizer = torch.optim.SGD([encoder.retention], lr=0.05)
    x = torch.randn(4, N, DIM)
    for _ in range(30):
        optimizer.zero_grad()
        (encoder(x).x[:, 0, 0].square().mean() + 0.1 * encoder.penalty()).backward()
        optimizer.step()
        encoder.clip()
    first, second = encoder.found()
    assert second < first < N


def test_elimination_ignores_padding_and_the_rest_of_the_batch():
    encoder = EliminationEncoder(DIM, 3, 3, N).double()
    x, mask = torch.randn(2, N, DIM, dtype=torch.float64), weights_and_mask()[1]
    with torch.no_grad():
        encoder.retention.uniform_(0, 1)
    poisoned = torch.where(mask[..., None], x, 1e4)
    for phase in (encoder.train_all, encoder.search, lambda: encoder.eliminate([5, 4, 2])):
        phase()
        out, alone, other = encoder(x, mask), encoder(x[1:, :6]), encoder(poisoned, mask)
        real = out.key_mask[1].sum()
        assert torch.equal(out.places[1, :real], alone.places[0])
        torch.testing.assert_close(out.x[1, :real], alone.x[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other.x[out.key_mask], out.x[out.key_mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("phase", ["train_all", "search", "eliminate"])
def test_the_phase_is_saved_with_the_weights(phase: str, tmp_path):
    ours, theirs = (EliminationEncoder(DIM, 3, 3, N) for _ in range(2))
    theirs.search()  # what it did before does not matter
    with torch.no_grad():
        ours.retention.uniform_(0, 1)
    getattr(ours, phase)(*([[5, 4, 2]] if phase == "eliminate" else []))
    save_file(ours.state_dict(), tmp_path / "encoder.safetensors")
    theirs.load_state_dict(load_file(tmp_path / "encoder.safetensors"))
    x = torch.randn(2, N, DIM)
    assert (theirs.searching, theirs.kept) == (ours.searching, ours.kept)
    assert torch.equal(theirs(x).x, ours(x).x)


def test_nan_in_padding_reaches_neither_outputs_nor_gradients_of_the_search():
    encoder = EliminationEncoder(DIM, 3, 2, N)
    encoder.search()
    mask = weights_and_mask()[1]
    x = torch.where(mask[..., None], torch.randn(2, N, DIM), torch.nan)
    out = encoder(x, mask)
    out.x[mask].square().sum().backward()
    assert out.x[mask].isfinite().all()
    assert encoder.retention.grad.isfinite().all()


def test_a_sequence_of_padding_is_finite():
    encoder = EliminationEncoder(DIM, 3, 2, N)
    encoder.eliminate([4, 2])
    out = encoder(torch.randn(2, N, DIM), torch.zeros(2, N, dtype=torch.bool))
    assert out.x.isfinite().all()
    assert not out.key_mask.any()


@pytest.mark.parametrize("made", ["softmax", "inline", "hydra", "transnormer", mechanism("topk", k=4)], ids=str)
def test_with_weights_returns_the_weights_behind_the_output(made):
    layer, x = Attention(DIM, 3, made).double(), torch.randn(2, N, DIM, dtype=torch.float64)
    mask = weights_and_mask()[1]
    out, weights = layer.with_weights(x, key_mask=mask)
    torch.testing.assert_close(out, layer(x, key_mask=mask), rtol=1e-10, atol=1e-10)
    assert weights.shape[-2:] == (N, N)
    with pytest.raises(SoftlessError, match="local=True"):
        Attention(DIM, 3, local=True).with_weights(x)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EliminationEncoder(DIM, 3, 0, N), "depth 0 is not a whole number, at least 1"),
        (lambda: EliminationEncoder(DIM, 5, 1, N), "dim 12 is not a multiple of heads 5"),
        (lambda: EliminationEncoder(DIM, 3, 2, N).eliminate([4]), r"kept \[4\] must be .* each of 2 layers"),
        (lambda: EliminationEncoder(DIM, 3, 2, N).eliminate([4, 5]), r"kept \[4, 5\] .* never more than"),
        (lambda: EliminationEncoder(DIM, 3, 2, N).eliminate([4, 0]), r"kept \[4, 0\] .* at least 1"),
    ],
)
def test_bad_options_of_elimination_are_refused_in_one_sentence(make, words: str):
    with pytest.raises(SoftlessError, match=words):
        make()


def test_a_search_cannot_rank_more_than_its_length():
    encoder = EliminationEncoder(DIM, 3, 1, N)
    encoder.search()
    with pytest.raises(SoftlessError, match="length 9 cannot rank 10 tokens"):
        encoder(torch.randn(1, 10, DIM))
