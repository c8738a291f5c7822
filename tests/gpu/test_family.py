"""Every mechanism, and what is beyond attention, on a CUDA device: the numbers of the formulas."""

import pytest
import torch
from torch import Tensor

import softless
from softless.nn import Reversible
from tests.laws.cases import Case, ask, assert_answers, every_form, true_answer
from tests.nn.test_reversible import DIM, gradients, pair, plain, reversible

pytestmark = pytest.mark.gpu


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_every_mechanism_matches_its_formula_on_cuda(case: Case, is_causal: bool, dtype: torch.dtype) -> None:
    mask = torch.arange(130) < torch.tensor([[130], [90]])
    at = ask(case, 130, dtype=dtype)._replace(key_mask=mask)
    extra = at.extra | {"inputs": {name: x.cuda() for name, x in at.inputs.items()}}
    q, k, v = (x.cuda() for x in at[:3])
    found = softless.attention(q, k, v, case.made, is_causal=is_causal, key_mask=mask.cuda(), **extra)
    assert_answers(found.cpu(), true_answer(case, at, is_causal=is_causal), str(case))


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("name", ["softmax", "linear", "inline"])
def test_a_reversible_stack_draws_the_same_numbers_again(name: str, rate: float) -> None:
    torch.manual_seed(0)
    stack = Reversible([pair(name, rate) for _ in range(3)]).cuda()
    x = torch.randn(2, 50, DIM, device="cuda", requires_grad=True)
    (out, ours), (true, theirs) = (gradients(run, stack, x) for run in (reversible, plain))
    assert torch.equal(out, true)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)


def test_the_memory_of_a_reversible_stack_is_flat_in_depth() -> None:
    def peak(depth: int) -> int:
        stack = Reversible([pair("linear") for _ in range(depth)]).cuda()
        x = torch.randn(8, 4096, DIM, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stack(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(1)
    assert peak(8) <= 1.05 * peak(2)


def test_autocast_is_restored_in_the_backward_pass() -> None:
    stack = Reversible([pair("inline", 0.2) for _ in range(2)]).cuda()
    x = torch.randn(2, 50, DIM, device="cuda", requires_grad=True)

    def cast(run) -> tuple[Tensor, list[Tensor]]:
        def inside(*given: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return run(*given)

        return gradients(inside, stack, x)

    (out, ours), (true, theirs) = cast(reversible), cast(plain)
    assert torch.equal(out, true)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-2, atol=2e-2)
