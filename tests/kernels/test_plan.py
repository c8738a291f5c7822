"""Plans (`softless.kernels.common.plan`): the same steps for the same kind of call, and other steps for any other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import softless
from softless.kernels.common import plan
from softless.kernels.parallel.ops import attend_backward_op, attend_op
from tests.kernels.cases import poisoned

pytestmark = pytest.mark.kernels
SPEC = ("elu", "elu", "divide", False, 1.0, 1.0, 0.0, True)


def draw(*shape: int) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(3)]


def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    return attend_op(q, k, v, key_mask, None, None, *SPEC[:4], scale, *SPEC[5:], [0, 0, 0])[0]


def assert_right(q: Tensor, k: Tensor, v: Tensor) -> None:
    exact = softless.attention(q.double(), k.double(), v.double(), "linear", backend="reference")
    torch.testing.assert_close(attend(q, k, v), exact.float(), atol=1e-5, rtol=1e-5)


def test_a_second_call_repeats_the_plan_on_its_own_numbers():
    for _ in range(3):
        assert_right(*draw(2, 3, 20, 8))
    assert len(attend_op.planned.plans) == 1


def test_two_calls_share_no_memory():
    q, k, v = draw(1, 2, 9, 8)
    first, second = attend(q, k, v), attend(q, k, 2 * v)
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(2 * first, second)


def strided(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


CHANGES = {
    "shape": lambda q, k, v: attend(q[:, :, :19], k, v),
    "stride": lambda q, k, v: attend(strided(q), k, v),
    "dtype": lambda q, k, v: attend(q.half(), k.half(), v.half()),
    "alignment": lambda q, k, v: attend(q, unaligned(k), v),
    "key mask": lambda q, k, v: attend(q, k, v, torch.ones(2, 20).bool()),
    "scale": lambda q, k, v: attend(q, k, v, scale=2.0),
    "sign of zero": lambda q, k, v: (attend(q, k, v, scale=0.0), attend(q, k, v, scale=-0.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_of_another_kind_has_another_plan(change):
    q, k, v = draw(2, 3, 20, 8)
    attend(q, k, v)
    before = len(attend_op.planned.plans)
    CHANGES[change](q, k, v)
    assert len(attend_op.planned.plans) == before + (2 if change == "sign of zero" else 1)
    assert_right(q, k, v)


@pytest.mark.parametrize("make", [strided, unaligned, lambda x: x[:, :, ::2], lambda x: x[:1].expand(2, 3, 20, 8)])
def test_every_layout_is_computed_from_its_own_addresses(make):
    for _ in range(2):
        assert_right(*map(make, draw(2, 3, 20, 8)))


def test_inputs_that_share_memory_and_inputs_that_do_not_have_the_same_plan():
    x = torch.randn(1, 2, 12, 8)
    assert_right(x, x, x)
    assert_right(*draw(1, 2, 12, 8))
    assert len(attend_op.planned.plans) == 1


def test_memory_between_kernels_is_released_before_the_next_is_allocated():
    """300 tokens of 2 heads are cut into spans: parts, records, output."""
    attend(*draw(1, 2, 300, 8))
    (steps,) = [each.steps for each in attend_op.planned.plans.values()]
    kinds = [type(step).__name__ for step in steps]
    assert kinds == ["Allocate", "Launch", "Allocate", "Launch", "Release", "Allocate", "Launch"]


def test_a_plan_holds_no_tensor():
    attend(*draw(1, 2, 300, 8))
    (kept,) = attend_op.planned.plans.values()
    assert [slot for slot in kept.empty if slot is not None] == []


def test_old_plans_give_way(monkeypatch):
    monkeypatch.setattr(plan, "MOST", 3)
    for tokens in range(1, 7):
        assert_right(*draw(1, 1, tokens, 4))
    assert len(attend_op.planned.plans) == 3


def test_threads_share_plans(monkeypatch):
    """Triton's interpreter runs in one thread only, so here no kernel runs."""
    monkeypatch.setattr(plan.Launch, "__call__", lambda *_: None)
    shapes = [(1, 2, tokens, 8) for tokens in (5, 6, 7)] * 8
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda shape: attend(*draw(*shape)), shapes))
    assert [tuple(out.shape) for out in outputs] == shapes
    assert len(attend_op.planned.plans) == 3


def test_a_backward_pass_has_a_plan_for_each_layout_of_its_upstream_gradient():
    leaves = [x.requires_grad_() for x in draw(2, 3, 20, 8)]
    upstream = torch.randn(2, 3, 20, 8)
    found = [torch.autograd.grad(attend(*leaves), leaves, make(upstream)) for make in (Tensor.clone, strided)]
    for contiguous, other in zip(*found, strict=True):
        torch.testing.assert_close(contiguous, other)
    assert len(attend_backward_op.planned.plans) == 2


def test_plans_are_made_of_what_the_operator_does_and_nothing_is_read_unwritten():
    """Wide heads add up slices with PyTorch's own operations between the kernels."""
    leaves = [x.requires_grad_() for x in (torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 130))]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    reference = softless.attention(*exact, "linear", backend="reference")
    upstream = torch.randn(1, 1, 4, 130)
    needed = torch.autograd.grad(reference, exact, upstream.double())
    for _ in range(2):
        with poisoned():
            found = torch.autograd.grad(attend(*leaves), leaves, upstream)
        for ours, theirs in zip(found, needed, strict=True):
            torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=1e-5)


def test_a_counter_sees_the_operator():
    with FlopCounterMode(display=False) as counter:
        attend(*draw(1, 1, 10, 4))
    assert counter.get_total_flops() == 2 * 20 * 4 * 4


def test_a_negated_view_is_computed_with_its_sign():
    q, k, v = draw(1, 1, 5, 4)
    torch.testing.assert_close(attend(q, k, torch._neg_view(v)), -attend(q, k, v))


def test_the_plain_call_and_the_dispatcher_give_the_same_bits():
    q, k, v = draw(2, 3, 50, 8)
    registered = attend_op.registered(q, k, v, None, None, None, *SPEC, [0, 0, 0])[0]
    assert torch.equal(attend(q, k, v), registered)
