"""The causal kernels for exponential keys against explicit weights in float64: R1, R2, R3, R5, R6, R9."""

from itertools import product

import pytest
import torch
from torch import Tensor

from softless import Mechanism, attention, mechanism
from softless.kernels.causal.ops import causal
from tests.kernels.cases import poisoned
from tests.kernels.test_causal import assert_close, draw, gradients, segments_of
from tests.kernels.test_causal_precision import HALF, numbers
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget
from tests.numerics.eager import visible

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]
MADE = {"divide": mechanism("linear", phi="exp"), "channel": mechanism("efficient")}
every_reader = pytest.mark.parametrize("made", MADE.values(), ids=MADE)


def compare(made: Mechanism, leaves: list[Tensor]) -> None:
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = attention(*wide, made, is_causal=True, backend="reference")
    out = causal(*leaves, None, made.kernel_spec(1.0))
    assert_close([out, *gradients([out], leaves)], [exact, *gradients([exact], wide)])


@every_reader
@pytest.mark.parametrize(
    ("tokens", "d", "e", "heads", "groups"),
    [(33, 5, 3, 2, 1), (16, 33, 40, 1, 1), (34, 1, 1, 4, 2), (1, 4, 4, 1, 1)],
)
def test_outputs_and_gradients_match_the_weights(made, tokens, d, e, heads, groups):
    compare(made, draw(tokens, d, e, heads=heads, groups=groups))


@pytest.mark.parametrize("t", [0.5, 2.0])
def test_a_temperature_reaches_queries_keys_and_both_gradients(t):
    compare(mechanism("linear", phi="exp", t=t), draw(20))


@every_reader
@pytest.mark.parametrize("length", [16, 20])
def test_cutting_into_segments_does_not_change_the_results(monkeypatch, made, length):
    segments_of(monkeypatch, -(-50 // length), length)
    compare(made, draw(50, 5, 40, heads=2))


@every_reader
@pytest.mark.parametrize("size", [10.0, 30.0])
@pytest.mark.parametrize("segments", [1, 3])
def test_no_query_loses_a_key_to_a_larger_one_that_it_does_not_see(monkeypatch, made, size, segments):
    """Keys rise by far more than e^40 within a tile: a maximum over the tile would erase what earlier queries see."""
    segments_of(monkeypatch, segments, 48 if segments == 1 else 16)
    q, k, v = (x.detach() for x in draw(48))
    rising = torch.linspace(-1, 1, 48)[:, None]
    compare(made, [x.requires_grad_() for x in (q, size * (k + 3 * rising), v)])
    compare(made, [x.requires_grad_() for x in (size * q, size * k, v)])


@every_reader
@pytest.mark.parametrize("segments", [1, 3])
def test_hidden_tokens_are_not_read_and_get_no_gradient(monkeypatch, made, segments):
    segments_of(monkeypatch, segments, 40 if segments == 1 else 16)
    leaves = draw(40, batch=3)
    mask = torch.rand(3, 40) < 0.7
    mask[0, :20], mask[2] = False, False
    hidden = ~mask[:, None, :, None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    leaves[1:] = [torch.where(hidden, torch.nan, x.detach()).requires_grad_() for x in leaves[1:]]
    out = causal(*leaves, mask, made.kernel_spec(1.0))
    exact = attention(*wide, made, is_causal=True, key_mask=mask, backend="reference")
    found = gradients([out], leaves)
    assert_close([out, *found], [exact, *gradients([exact], wide)])
    assert (out[0, :, : mask[0].nonzero()[0]] == 0).all()
    assert all((g.masked_select(hidden) == 0).all() for g in found[1:])


@every_reader
def test_no_bit_of_an_output_depends_on_later_tokens(made):
    q, k, v = (x.detach() for x in draw(40))
    before = causal(q, k, v, None, made.kernel_spec(1.0))
    for late in (10, 21, 39):
        changed = k.clone()
        changed[:, :, late:] += torch.tensor([5.0, 50.0, 500.0, -50.0, 0.1])
        after = causal(q, changed, v, None, made.kernel_spec(1.0))
        assert torch.equal(before[:, :, :late], after[:, :, :late])


@every_reader
def test_a_key_that_is_not_a_number_reaches_no_earlier_query(made):
    q, k, v = (x.detach() for x in draw(6))
    k[:, :, 2] = torch.nan
    out = causal(q, k, v, None, made.kernel_spec(1.0))
    assert out[:, :, :2].isfinite().all()
    assert out[:, :, 2:].isnan().all()


@every_reader
def test_no_uninitialized_memory_is_read(monkeypatch, made):
    segments_of(monkeypatch, 3, 16)
    leaves = draw(40, 33, 33, heads=2)
    with poisoned():
        out = causal(*leaves, torch.arange(40)[None] > 3, made.kernel_spec(1.0))
        found = gradients([out], leaves)
    assert all(x.isfinite().all() for x in (out, *found))


@every_reader
def test_two_runs_are_bitwise_equal(monkeypatch, made):
    segments_of(monkeypatch, 2, 32)
    leaves = [x.detach().bfloat16().requires_grad_() for x in draw(40)]
    first, second = (causal(*leaves, None, made.kernel_spec(1.0)) for _ in range(2))
    for a, b in zip([first, *gradients([first], leaves)], [second, *gradients([second], leaves)], strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_the_operator_passes_opcheck(monkeypatch):
    operator = torch.ops.softless.causal_exponential.default
    torch.library.opcheck(operator, (*draw(5, heads=2), None, "divide", 1.0))
    segments_of(monkeypatch, 2, 16)
    torch.library.opcheck(operator, (*draw(20), torch.ones(1, 20).bool(), "channel", 1.0))


@every_reader
def test_a_compiled_call_is_one_graph_with_the_same_numbers(made):
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v, None, made.kernel_spec(1.0))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (17, 24):
        leaves = draw(tokens)
        ours, theirs = compiled(*leaves), call(*leaves)
        assert torch.equal(ours, theirs)
        for a, b in zip(gradients([ours], leaves), gradients([theirs], leaves), strict=True):
            assert torch.equal(a, b)


def typed_out(reader: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formulas of the papers, in the dtype of the tensors."""
    seen = visible(q, k, True)
    if reader == "channel":
        shares = k[:, :, None].masked_fill(seen[..., None] == 0, -torch.inf).softmax(3)  # [1, 1, N, M, d]
        return (q.softmax(-1)[:, :, :, None] @ shares.mT)[:, :, :, 0] @ v
    scores = ((q - q.amax(-1, keepdim=True)).exp() @ (k - k.amax()).exp().mT) * seen
    return scores @ v / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("reader", "family", "dtype"),
    [pytest.param(*case, id="-".join(case), marks=[pytest.mark.slow] if i % 2 else [])
     for i, case in enumerate(product(MADE, ("plain", "offset", "wide", "equal", "sink"), (*HALF, *reversed(HALF))))
     if i % 4 in (0, 1)],
)  # fmt: skip
def test_errors_stay_within_the_budget(monkeypatch, reader, family, dtype):
    segments_of(monkeypatch, 2, 64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 100, 32) for _ in "qkv")
    first = 1 + 4 * (torch.arange(100) == 0)[:, None]
    k, v = {"plain": (k, v), "offset": (k + 30, v + 30), "wide": (3 * k, v), "equal": (0.01 * k, v + 3),
            "sink": (first * k, v)}[family]  # fmt: skip
    given = [x.to(HALF[dtype]) for x in (q, k, v)]
    exact = numbers(
        lambda q, k, v: attention(q, k, v, MADE[reader], is_causal=True, backend="reference"), given, torch.float64
    )
    ours = numbers(lambda q, k, v: causal(q, k, v, None, MADE[reader].kernel_spec(1.0)), given, HALF[dtype])
    plain = numbers(lambda q, k, v: typed_out(reader, q, k, v), given, HALF[dtype])
    for name, truth, mine, theirs in zip(("output", "dq", "dk", "dv"), exact, ours, plain, strict=True):
        assert_within_budget(mine, truth, theirs, **(FORWARD if name == "output" else GRADIENT), name=name)
