"""The delta rule's kernels against explicit weights in float64, in Triton's interpreter: R1, R2, R5, R6, R9.

Chunks of float32 have 16 tokens: lengths around 16 and 32 end before, at and after their edges.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from softless import attention, attention_with_state
from softless.algebra.state import State
from softless.errors import ArgumentError, BackendError
from softless.kernels.common.plan import Planned
from softless.kernels.common.tiles import Tile
from softless.kernels.delta import attend as delta_attend
from softless.kernels.delta.ops import delta
from tests.kernels.cases import poisoned
from tests.kernels.test_causal import assert_close, gradients

pytestmark = pytest.mark.kernels

every_rule = pytest.mark.parametrize("rule", ["delta", "efla"])


class Drawn(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor


def draw(tokens: int, d: int = 5, e: int = 3, *, batch: int = 1, heads: int = 1, groups: int = 1) -> Drawn:
    shapes = (heads, tokens, d), (groups, tokens, d), (groups, tokens, e)
    qkv = [torch.randn(batch, *shape).requires_grad_() for shape in shapes]
    return Drawn(*qkv, torch.rand(batch, groups, tokens).requires_grad_())


def widened(drawn: Drawn) -> Drawn:
    return Drawn(*(x.detach().double().requires_grad_() for x in drawn))


def weighed(drawn: Drawn, rule: str, **call: Any) -> Tensor:
    """By explicit weights: the specification."""
    q, k, v, beta = drawn
    return attention(q, k, v, rule, is_causal=True, inputs={"beta": beta}, backend="reference", **call)


def continued(drawn: Drawn, rule: str, state: State | None, **call: Any) -> tuple[Tensor, State]:
    """By torch, with the state."""
    q, k, v, beta = drawn
    return attention_with_state(q, k, v, rule, state, inputs={"beta": beta}, backend="torch", **call)


@pytest.mark.parametrize(
    ("rule", "tokens", "d", "e", "heads", "groups"),
    [
        ("delta", 1, 4, 4, 1, 1),
        ("delta", 15, 8, 1, 2, 1),
        ("delta", 33, 5, 40, 1, 1),
        ("efla", 2, 1, 3, 1, 1),
        ("efla", 16, 33, 8, 1, 1),
        ("efla", 17, 5, 3, 4, 2),
    ],
)
def test_delta_outputs_and_gradients_match_the_weights(rule, tokens, d, e, heads, groups):
    drawn = draw(tokens, d, e, heads=heads, groups=groups)
    wide = widened(drawn)
    out, state = delta(*drawn, None, None, rule, 0.7)
    exact = weighed(wide, rule, scale=0.7)
    assert_close([out, *gradients([out], [*drawn])], [exact, *gradients([exact], [*wide])])
    assert_close([state.comoment], [continued(wide, rule, None)[1].comoment])


@pytest.mark.parametrize("rule", [pytest.param("delta", marks=pytest.mark.slow), "efla"])
def test_hidden_tokens_are_not_read_and_get_no_gradient(rule):
    """Left padding of more than a chunk, holes, and a row that is all padding."""
    drawn, mask = draw(40, batch=3), torch.rand(3, 40) < 0.7
    mask[0, :20], mask[2] = False, False
    hidden = ~mask[:, None, :, None]
    wide = widened(drawn)
    q, *rest = drawn
    marks = hidden, hidden, hidden.squeeze(-1)
    leaves = Drawn(
        q, *(torch.where(mark, torch.nan, x.detach()).requires_grad_() for mark, x in zip(marks, rest, strict=True))
    )
    out, state = delta(*leaves, mask, None, rule, 1.0)
    exact = weighed(wide, rule, key_mask=mask)
    found = gradients([out], [*leaves])
    assert_close([out, *found], [exact, *gradients([exact], [*wide])])
    assert all((g.masked_select(mark) == 0).all() for g, mark in zip(found[1:], marks, strict=True))
    assert (out[2] == 0).all()
    assert state.n.flatten().tolist() == mask.sum(-1).tolist()


@pytest.mark.parametrize(("rule", "groups"), [("delta", 2), ("efla", 1)])
def test_gradients_flow_through_the_state_in_and_out(rule, groups):
    drawn = draw(20, heads=2, groups=groups)
    past = continued(draw(9, heads=2, groups=groups), rule, None)[1]
    memory = past.comoment.detach().requires_grad_()
    out, after = delta(*drawn, None, past._replace(comoment=memory), rule, 1.0)
    wide, wide_memory = widened(drawn), memory.detach().double().requires_grad_()
    known = State(past.n, *(x.double() for x in past[1:]))._replace(comoment=wide_memory)
    exact, truth = continued(wide, rule, known)
    found = gradients([out, after.comoment], [*drawn, memory])
    right = gradients([exact, truth.comoment], [*wide, wide_memory])
    assert_close([out, after.comoment, *found], [exact, truth.comoment, *right])
    assert [x.shape for x in after[1:]] == [x.shape for x in truth[1:]]
    assert (after.n == truth.n).all()


@pytest.mark.parametrize(
    ("rule", "backends"),
    [("delta", ("triton", "triton")), ("efla", ("torch", "triton")), ("efla", ("triton", "torch"))],
)
def test_a_prompt_and_single_tokens_match_one_call_on_both_backends(rule, backends):
    drawn = Drawn(*(x.detach() for x in draw(20, heads=2)))
    exact, state, found = weighed(widened(drawn), rule), None, []
    for here, backend in ((slice(0, 18), backends[0]), *((slice(i, i + 1), backends[1]) for i in range(18, 20))):
        q, k, v, beta = (x[:, :, here] for x in drawn)
        out, state = attention_with_state(q, k, v, rule, state, inputs={"beta": beta}, backend=backend)
        found.append(out)
    assert state.n.flatten().tolist() == [20]
    assert_close([torch.cat(found, 2)], [exact])


@pytest.mark.parametrize("size", [1e-25, 0.3, 1e15])
def test_keys_of_any_length_match_the_weights(size):
    """efla's gate is a key's length: open for short ones, saturated for long ones."""
    drawn = draw(6)
    drawn = drawn._replace(k=(size * drawn.k.detach()).requires_grad_())
    for rule in ("delta", "efla"):
        wide = widened(drawn)
        out, exact = delta(*drawn, None, None, rule, 1.0)[0], weighed(wide, rule)
        assert_close([out], [exact])
        found, right = gradients([out], [*drawn]), gradients([exact], [*wide])
        found[1], right[1] = size * found[1], size * right[1]  # dk is as large as keys are small
        assert_close(found, right)


@every_rule
@pytest.mark.parametrize("size", [0.0, 1e-40])
def test_a_zero_key_neither_erases_nor_writes(rule, size):
    drawn = draw(9)
    with torch.no_grad():
        drawn.k[:, :, 4] = size
    out, state = delta(*drawn, None, None, rule, 1.0)
    without = Drawn(*(torch.cat([x[:, :, :4], x[:, :, 5:]], 2) for x in drawn))
    left, same = delta(*without, None, None, rule, 1.0)
    assert_close([out[:, :, 5:], state.comoment], [left[:, :, 4:].double(), same.comoment.double()])
    assert all(x.isfinite().all() for x in gradients([out], [*drawn]))


@every_rule
def test_a_token_that_writes_nothing_yet_has_a_gradient_in_beta(rule):
    drawn = draw(9)
    with torch.no_grad():
        drawn.beta[..., ::3] = 0
    wide = widened(drawn)
    out, exact = delta(*drawn, None, None, rule, 1.0)[0], weighed(wide, rule)
    right = gradients([exact], [*wide])
    assert (right[3][..., ::3] != 0).all()
    assert_close([out, *gradients([out], [*drawn])], [exact, *right])


def test_later_tokens_do_not_change_earlier_outputs():
    drawn = Drawn(*(x.detach() for x in draw(36)))
    before, _ = delta(*drawn, None, None, "efla", 1.0)
    for cut in (1, 16, 20):
        changed = [torch.cat([x[:, :, :cut], 0.5 * x[:, :, cut:] + 0.1], 2) for x in drawn]
        after, _ = delta(*changed, None, None, "efla", 1.0)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_the_inverse_of_a_chunk_is_accurate_for_similar_keys(chunk, monkeypatch):
    """Powers of the matrix reach 10^17 for them; substitution stays within what is erased."""
    monkeypatch.setitem(delta_attend.WALK, torch.float32, Tile(chunk, 8, 1, 32))
    k, beta = 3 + 0.1 * torch.randn(1, 1, chunk, 8), torch.rand(1, 1, chunk)
    beta[..., ::3] = 1
    solved = Planned(lambda k, beta: delta_attend.solve(k, beta, None, "delta"))(k, beta)[1][0, 0, 0]
    key = torch.nn.functional.normalize(k[0, 0].double(), dim=-1)
    exact = torch.linalg.inv(torch.eye(chunk).double() + (beta[0, 0, :, None] * (key @ key.mT)).tril(-1))
    assert exact.abs().max() <= 1
    assert_close([solved], [exact])


def test_packed_projections_are_read_in_place_and_written_by_token():
    packed, beta = torch.randn(2, 18, 3, 2, 5).requires_grad_(), torch.rand(2, 18, 2).requires_grad_()
    out, _ = delta(*packed.permute(2, 0, 3, 1, 4), beta.mT, None, None, "delta", 1.0)
    assert out.transpose(1, 2).is_contiguous()
    wide, wide_beta = packed.detach().double().requires_grad_(), beta.detach().double().requires_grad_()
    exact = weighed(Drawn(*wide.permute(2, 0, 3, 1, 4), wide_beta.mT), "delta")
    assert_close([out, *gradients([out], [packed, beta])], [exact, *gradients([exact], [wide, wide_beta])])


def test_strided_channels_give_the_results_of_their_copy():
    drawn = draw(5)
    turned = [x.detach().mT.contiguous().mT for x in drawn[:3]]
    assert turned[0].stride(3) != 1
    assert torch.equal(
        delta(*turned, drawn.beta, None, None, "efla", 1.0)[0], delta(*drawn, None, None, "efla", 1.0)[0]
    )


def test_delta_kernels_use_64_bit_offsets():
    """Strides of 2^31 on dimensions of size 1: a product in 32 bits would leave the tensor."""
    q, k, v, beta = (x.detach() for x in draw(1))
    far = [x.as_strided(x.shape, (2**31, 2**31, 2**31, 1)).requires_grad_() for x in (q, k, v)]
    far.append(beta.as_strided(beta.shape, (2**31, 2**31, 2**31)).requires_grad_())
    near = draw(1)._replace(q=q, k=k, v=v, beta=beta)
    out, _ = delta(*far, None, None, "delta", 1.0)
    assert_close([out], [weighed(widened(near), "delta")])
    assert all(x.isfinite().all() for x in gradients([out], far))


def test_delta_kernels_read_no_uninitialized_memory():
    drawn = draw(20, 33, 33, heads=2)
    past, mask = continued(draw(3, 33, 33, heads=2), "efla", None)[1], torch.arange(20)[None] > 2
    memory = past.comoment.detach().requires_grad_()
    with poisoned():
        out, after = delta(*drawn, mask, past._replace(comoment=memory), "efla", 1.0)
        found = gradients([out, after.comoment], [*drawn, memory])
    assert all(x.isfinite().all() for x in (out, *after[1:], *found))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.parametrize("given", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_delta_operators_pass_opcheck(given):
    memory = torch.randn(1, 1, 5, 3).requires_grad_() if given else None
    mask = torch.ones(1, 5).bool() if given else None
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    quick = checks[: 3 if given else 4]  # a compiled call has a test of its own
    operator = torch.ops.softless.delta.default
    torch.library.opcheck(operator, (*draw(5, heads=2), mask, memory, "efla", 0.5), test_utils=quick)


def test_a_compiled_delta_call_is_one_graph_with_the_same_numbers():
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, State]:
        return delta(q, k, v, beta, None, None, "efla", 1.0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 17):
        drawn = draw(tokens)
        ours, theirs = compiled(*drawn)[0], call(*drawn)[0]
        assert torch.equal(ours, theirs)
        for a, b in zip(gradients([ours], [*drawn]), gradients([theirs], [*drawn]), strict=True):
            assert torch.equal(a, b)


@every_rule
def test_attention_runs_the_delta_kernels_or_says_why_it_cannot(rule):
    q, k, v, beta = (x.detach() for x in draw(5))
    call: dict[str, Any] = {"is_causal": True, "inputs": {"beta": beta}, "backend": "triton"}
    assert torch.equal(attention(q, k, v, rule, **call), delta(q, k, v, beta, None, None, rule, 1.0)[0])
    wide = torch.randn(1, 1, 5, 129)
    with pytest.raises(BackendError, match="up to 128, and q has 129, v has 3"):
        attention(wide, wide, v, rule, **call)
    with pytest.raises(BackendError, match="as many queries as keys, got 2 and 5"):
        attention(q[:, :, 3:], k, v, rule, **call)
    state = delta(q, k, v, beta, None, None, rule, 1.0)[1]
    with pytest.raises(ArgumentError, match="these q, k, v continue one of"):
        attention_with_state(q, k, k, rule, state, inputs={"beta": beta}, backend="triton")


def test_two_delta_runs_are_bitwise_equal():
    leaves = [x.detach().bfloat16().requires_grad_() for x in draw(40)]
    runs = []
    for _ in range(2):
        out, state = delta(*leaves, None, None, "efla", 1.0)
        runs.append([out, state.comoment, *gradients([out], leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
