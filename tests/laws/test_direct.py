"""The direct parallel form, and blocks of tokens, are the same function as the formula.

`softless.algebra.direct` answers unmasked calls of subtract, contrast and divide. Long calls without gradients run in
blocks of tokens, which these tests make short. oracle.py and backend "reference" know neither.
"""

import pytest
import torch
from torch import Tensor, nn

from softless import attention, mechanism
from softless.algebra import direct
from softless.functional import attention_qkv
from softless.mechanisms import MECHANISMS, Mechanism, hydra, kernelized, mlla
from softless.stopwatch import peak_bytes
from tests.laws.cases import WHOLE, Case, ask, assert_answers, true_answer
from tests.numerics.budget import FORWARD

KERNELIZED = [name for name, made in MECHANISMS.items() if issubclass(made, kernelized.Kernelized)]
READERS = [mechanism("inline"), mechanism("inline", gain="sum"), mechanism("linear")]
READERS += [mechanism("inline", phi="elu", phi_k="relu")]
every_reader = pytest.mark.parametrize("made", READERS, ids=str)


def leaves(tokens: int = 5, keys: int | None = None) -> list[Tensor]:
    """q, k and v in float64, with some features at 0 and values far from it."""
    lengths = (tokens, keys or tokens, keys or tokens)
    q, k, v = (torch.randn(2, 3, each, 4, dtype=torch.float64) for each in lengths)
    return [x.requires_grad_() for x in (q, k, v + 3)]


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct, "BLOCK", 4)
    monkeypatch.setattr(kernelized, "LONG", 8)
    for module in (kernelized, hydra, mlla):
        monkeypatch.setattr(module, "BLOCK", 4)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["alike", "grouped"])
@pytest.mark.parametrize("case", [each for each in WHOLE if each.made.family == "kernelized"], ids=str)
def test_blocks_of_tokens_give_the_formula(case: Case, heads: tuple[int, int], masked: bool):
    exact = ask(case, 19, heads=heads)
    if masked:
        hidden = torch.tensor([[0, 3, 8], [12, 13, 18]])  # the mask of a block may hide nothing, some and its edges
        exact = exact._replace(key_mask=torch.ones(2, 19, dtype=torch.bool).scatter(1, hidden, False))
    for dtype in (torch.float64, torch.float32):
        at = exact.to(dtype)
        given = attention(*at[:3], case.made, key_mask=at.key_mask, **at.extra)
        assert_answers(given, true_answer(case, at), str(dtype))


@every_reader
def test_one_node_of_autograd_answers_and_its_gradients_are_the_reference(made: Mechanism):
    inputs, upstream = leaves(7, 9), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    out = attention(*inputs, made)
    assert type(out.grad_fn).__name__ in ("_SubtractBackward", "_DivideBackward")
    expected = attention(*inputs, made, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(each, inputs, upstream) for each in (out, expected)), strict=True)
    for given, true in pairs:
        torch.testing.assert_close(given, true, rtol=0, atol=1e-12)


@every_reader
@pytest.mark.parametrize("lengths", [(5, 9), (40, 50)], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_short_call_without_gradients_gives_the_formula(made: Mechanism, lengths: tuple[int, int], dtype):
    """Heads of 4 channels: 5 queries and 9 keys are read by pairs, 40 and 50 through the sum of all keys."""
    queries, keys = lengths
    q, k, v = torch.randn(2, queries, 3, 4), torch.randn(2, keys, 3, 4), 3 + torch.randn(2, keys, 3, 6)
    exact = [x.transpose(1, 2).double() for x in (q, k, v)]
    expected = attention(*exact, made, backend="reference")
    for lay in (torch.Tensor.contiguous, lambda x: x):  # and as a view of [B, N, H, d]
        given = attention(*(lay(x.to(dtype)) for x in exact), made)
        within = 8 * torch.finfo(dtype).eps * expected.abs().max()
        torch.testing.assert_close(given.double(), expected, rtol=0, atol=float(within))


@every_reader
def test_a_short_packed_call_gives_the_formula(made: Mechanism):
    qkv = torch.randn(2, 7, 3, 4, 8, dtype=torch.float64)
    expected = attention(*qkv.permute(2, 0, 3, 1, 4), made, backend="reference")
    torch.testing.assert_close(attention_qkv(qkv, made), expected, rtol=0, atol=1e-12)


def test_a_call_takes_its_shortcut_only_where_it_holds():
    """Grad mode, transforms, subclasses and modes that watch operators take the way that serves them."""
    q, k, v = (x.detach() for x in leaves(7))
    first = attention(q, k, v)
    assert attention(q.requires_grad_(), k, v).grad_fn is not None
    with torch.no_grad():
        assert torch.equal(attention(q, k, v), first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q.detach(), k, v), first)
    for given in (
        torch.func.vmap(attention)(*(x[None].detach() for x in (q, k, v)))[0],
        attention(q.float(), k.float(), v.float()),
    ):
        torch.testing.assert_close(given.double(), first, rtol=0, atol=1e-5)


@every_reader
def test_gradients_of_gradients_match_finite_differences(made: Mechanism):
    assert torch.autograd.gradgradcheck(lambda *inputs: attention(*inputs, made), leaves(3))


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_a_mass_out_of_range_is_read_with_scaled_queries(size: float):
    """Features of 1e-30 or 1e30 on both sides have a product that float32 does not have."""
    q, k, v = torch.rand(3, 1, 2, 6, 4).unbind()
    made = mechanism("linear", phi="relu")
    given = attention(q * size, k * size, v, made)
    expected = attention(q.double() * size, k.double() * size, v.double(), made, backend="reference")
    torch.testing.assert_close(given.double(), expected, rtol=0, atol=1e-6)


def test_one_query_without_mass_leaves_the_others_as_they_are():
    q, k, v = torch.rand(3, 1, 1, 6, 4).unbind()
    q[0, 0, 2] = -1.0
    given = attention(q, k, v, mechanism("linear", phi="relu"))
    torch.testing.assert_close(given[0, 0, 2], v.mean(2)[0, 0])
    torch.testing.assert_close(given, attention(q, k, v, mechanism("linear", phi="relu"), backend="reference"))


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_blocks_also_read_a_mass_out_of_range(size: float):
    q, k, v = torch.rand(3, 1, 2, 11, 4).unbind()
    made = mechanism("linear", phi="relu")
    given = attention(q * size, k * size, v, made)
    expected = attention(q.double() * size, k.double() * size, v.double(), made, backend="reference")
    torch.testing.assert_close(given.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("name", ["inline", "linear"])
def test_blocks_lose_no_digits_to_values_far_from_zero_and_keys_that_drift(name: str):
    """The first block's keys lie far from the mean of all keys, and v_mean is rounded to 1e-5 of the values' spread."""
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    k, v = k + torch.linspace(0, 30, 64)[:, None], v + 1000
    exact = attention(q.double(), k.double(), v.double(), name, backend="reference")
    ulp = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (attention(q, k, v, name).double() - exact).abs().max() <= FORWARD["ulps"] * ulp


@pytest.mark.usefixtures("short_blocks")
def test_a_feature_map_that_learns_is_not_cut_into_blocks():
    learned = nn.Linear(4, 4)
    q, k, v = torch.randn(3, 1, 2, 11, 4).unbind()
    attention(q, k, v, mechanism("inline", phi=learned)).sum().backward()
    assert learned.weight.grad is not None
    assert learned.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", KERNELIZED)
def test_a_long_call_holds_its_output_and_half_as_much_again(name: str):
    q, k, v = torch.randn(3, 1, 2, 4096, 64).unbind()
    made = mechanism(name)
    inputs = {each: torch.ones(shape) for each, shape in made.needed(q, k).items()} | made.draw(2, 64)
    grid = (64, 64) if made.needs_grid else None
    peak = peak_bytes(lambda: attention(q, k, v, made, inputs=inputs, grid=grid), q.device)
    assert peak <= 1.5 * q.numel() * q.element_size()
