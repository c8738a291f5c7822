"""Packed sequences on the kernels: each is as on its own, whatever its neighbors hold, forward and backward."""

import pytest
import torch
from torch import Tensor

from softless import attention, mechanism
from softless.errors import BackendError
from softless.kernels.causal import tiles as causal_tiles
from softless.kernels.causal.ops import causal_op
from softless.kernels.common import tiles
from softless.kernels.parallel.ops import attend_op

pytestmark = pytest.mark.kernels

PARALLEL = {
    "inline": mechanism("inline"),
    "linear": mechanism("linear"),
    "efficient": mechanism("efficient"),
    "exp": mechanism("linear", phi="exp"),
    "taylor": mechanism("taylor"),
    "none": mechanism("linear", phi="relu", normalize="none"),
}
CAUSAL = PARALLEL
LENGTHS = (9, 0, 35, 1)


def tokens(lengths: tuple[int, ...], heads: int, dim: int, *, seed: int = 0) -> list[Tensor]:
    """One sequence [1, heads, n, dim] for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, dim, generator=generator) for n in lengths]


def pack(sequences: list[Tensor]) -> Tensor:
    """As users make them: the tokens of all sequences and their offsets."""
    values = torch.cat([x[0].transpose(0, 1) for x in sequences])
    offsets = torch.tensor([0, *(x.shape[2] for x in sequences)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def draw(
    queries: tuple[int, ...], keys: tuple[int, ...], *, heads: int = 2, groups: int = 1, dims: tuple[int, int] = (8, 5)
):
    return tokens(queries, heads, dims[0]), tokens(keys, groups, dims[0], seed=1), tokens(keys, groups, dims[1], seed=2)


def results(run, qkv: list[list[Tensor]], upstream: list[Tensor]) -> list[list[Tensor]]:
    """The output of each sequence, then the gradients of its q, k and v."""
    leaves = [[x.clone().requires_grad_() for x in part] for part in qkv]
    out = run(*leaves)
    sum((o * g).sum() for o, g in zip(out, upstream, strict=True)).backward()
    return [[o.detach() for o in out], *([x.grad for x in part] for part in leaves)]


def assert_each_as_alone(made, qkv: tuple[list[Tensor], ...], *, is_causal: bool) -> None:
    upstream = [torch.randn(*q.shape[:3], v.shape[3]) for q, v in zip(qkv[0], qkv[2], strict=True)]

    def together(*parts: list[Tensor]) -> list[Tensor]:
        out = attention(*map(pack, parts), made, is_causal=is_causal, backend="triton")
        return [x[None] for x in out.unbind()]

    def alone(*parts: list[Tensor]) -> list[Tensor]:
        rows = zip(*parts, strict=True)
        return [attention(*row, made, is_causal=is_causal, backend="reference") for row in rows]

    exact = results(alone, [[x.double() for x in part] for part in qkv], [x.double() for x in upstream])
    for found, true in zip(results(together, list(qkv), upstream), exact, strict=True):
        for a, b in zip(found, true, strict=True):
            assert (a - b).abs().max().item() <= 2e-5 * (1 + b.abs().max().item()) if b.numel() else a.shape == b.shape


@pytest.fixture(params=["whole", "spans"])
def cut(request, monkeypatch) -> str:
    """Each head in one program, and in several."""
    if request.param == "spans":
        monkeypatch.setattr(tiles, "WHOLE", 0)
        monkeypatch.setattr(causal_tiles, "ALIGNED", 32)
        monkeypatch.setattr(causal_tiles, "cut", lambda tokens, *_: (max(1, -(-tokens // 32)), 32))
    return request.param


@pytest.mark.parametrize("made", PARALLEL.values(), ids=PARALLEL)
def test_each_sequence_is_as_on_its_own(made, cut):
    assert_each_as_alone(made, draw(LENGTHS, LENGTHS), is_causal=False)


@pytest.mark.parametrize("made", CAUSAL.values(), ids=CAUSAL)
def test_each_causal_sequence_is_as_on_its_own(made, cut):
    assert_each_as_alone(made, draw(LENGTHS, LENGTHS), is_causal=True)


def test_queries_and_keys_may_have_different_lengths(cut):
    assert_each_as_alone("linear", draw((3, 80, 5), (66, 2, 0)), is_causal=False)


def test_wide_heads_are_summed_from_numbers_kept_per_query(monkeypatch):
    monkeypatch.setattr(tiles, "is_split", lambda *_: True)
    monkeypatch.setattr(tiles, "WHOLE", 0)
    assert_each_as_alone("linear", draw((40, 3, 65), (40, 3, 65)), is_causal=False)


@pytest.mark.parametrize("made", ["linear", "inline"])
def test_lengths_that_fill_their_tiles_need_no_mask(made, monkeypatch):
    monkeypatch.setattr(tiles, "WHOLE", 0)
    assert_each_as_alone(made, draw((64, 0, 128), (64, 0, 128)), is_causal=False)
    assert {key[-1] for key in attend_op.planned.plans} == {64}


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_is_padded(is_causal):
    qkv = draw((40, 2, 7), (40, 2, 7))
    attention(*map(pack, qkv), is_causal=is_causal, backend="triton")
    planned = (causal_op if is_causal else attend_op).planned
    (key,) = planned.plans
    assert [part[0] for part in key[:3]] == [(1, 2, 49, 8), (1, 1, 49, 8), (1, 1, 49, 5)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("made", ["inline", "linear"])
def test_nan_in_a_neighbor_changes_nothing(made, is_causal, cut):
    qkv = draw((17, 40, 5), (17, 40, 5))
    upstream = [torch.randn(1, 2, n, 5) for n in (17, 40, 5)]

    def run(*parts: list[Tensor]) -> list[Tensor]:
        return [x[None] for x in attention(*map(pack, parts), made, is_causal=is_causal, backend="triton").unbind()]

    clean = results(run, list(qkv), upstream)
    spoiled = [[x if at == 1 else torch.full_like(x, float("nan")) for at, x in enumerate(part)] for part in qkv]
    for found, true in zip(results(run, spoiled, upstream), clean, strict=True):
        assert torch.equal(found[1], true[1])


def test_a_packed_projection_is_read_where_it_is():
    """Views of one tensor, as a layer makes them, give what copies give."""
    offsets = torch.tensor([0, 40, 41, 90])
    views = torch.randn(90, 3, 2, 8).unbind(1)

    def run(parts) -> Tensor:
        packs = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in parts]
        return attention(*packs, "linear", backend="triton").values()

    assert torch.equal(run(views), run([x.contiguous() for x in views]))


def test_causal_sequences_with_more_keys_than_queries_are_padded():
    q, k, v = (pack(part) for part in draw((3, 5), (9, 5)))
    with pytest.raises(BackendError, match="cannot run"):
        attention(q, k, v, "linear", is_causal=True, backend="triton")
    assert attention(q, k, v, "linear", is_causal=True).values().isfinite().all()
