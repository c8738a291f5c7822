"""Under checkpointing, autocast, vmap and functional gradients the call is the same function."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from softless import attention, attention_weights, attention_with_state, mechanism
from softless.nn import Attention
from tests.numerics.cases import CASES, CAUSAL, STATEFUL, Draw, attend, draw, every_form, gradients


@every_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(case, is_causal, use_reentrant):
    given = draw(case, 70, 3)
    leaves = [x.requires_grad_() for x in given.leaves()]

    def run(*tensors: Tensor) -> Tensor:
        return attend(case, given.rebuilt(*tensors), is_causal=is_causal)

    plain, checked = run(*leaves), checkpoint(run, *leaves, use_reentrant=use_reentrant)
    upstream = torch.randn_like(plain)
    assert torch.equal(plain, checked)
    assert all(map(torch.equal, gradients(plain, upstream, leaves), gradients_of_backward(checked, upstream, leaves)))


def gradients_of_backward(out: Tensor, upstream: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Reentrant checkpoints answer `backward` only."""
    out.backward(upstream)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


@every_form
def test_autocast_casts_as_sdpa_does(case, is_causal):
    given = draw(case, 70, 3)
    q, k, v, inputs = given.to(torch.float32)
    low = given.to(torch.float32)._replace(q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16())
    expected = attend(case, low, is_causal=is_causal)
    with torch.autocast("cpu", torch.bfloat16):
        sdpa = F.scaled_dot_product_attention(q, k, v)
        out = attend(case, Draw(q, k, v, inputs), is_causal=is_causal)
        double = attend(case, given, is_causal=is_causal)
    assert out.dtype == sdpa.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert double.dtype == torch.float64
    assert torch.equal(double, attend(case, given, is_causal=is_causal))


def test_autocast_mixes_dtypes_as_sdpa_does():
    """A float32 q with bfloat16 k and v, as a projection inside autocast gives them."""
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    k, v = k.bfloat16(), v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v)
        out = attention(q, k, v, "softmax")
    ulp = torch.finfo(torch.bfloat16).eps * expected.abs().max().item()
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=ulp)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sums_are_float32_under_autocast(is_causal):
    """5,000 ones add up to 5,000; bfloat16 sums would stop at 256."""
    ones = torch.ones(1, 1, 5000, 1)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(ones, ones, ones, mechanism("linear", phi="identity", normalize="none"), is_causal=is_causal)
    assert out[0, 0, -1].item() == pytest.approx(5000, rel=2**-8)


@pytest.mark.parametrize("case", STATEFUL)
def test_a_state_is_float32_under_autocast(case):
    q, k, v, inputs = draw(case, 9, 3).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = attention_with_state(q, k, v, CASES[case], inputs=inputs)
        out, state = attention_with_state(q, k, v, CASES[case], state, inputs=inputs)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in state} == {torch.int64, torch.float32}


def test_weights_follow_autocast():
    q, k = torch.randn(2, 1, 2, 5, 4).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_weights(q, k, "linear").dtype == torch.bfloat16


def test_the_module_runs_under_autocast():
    layer = Attention(12, 3, "inline", local=True)
    x = torch.randn(2, 8, 12)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, (2, 4), key_mask=torch.tensor([[True] * 8, [True] * 5 + [False] * 3]))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(),
        layer(x, (2, 4), key_mask=torch.tensor([[True] * 8, [True] * 5 + [False] * 3])),
        rtol=0.05,
        atol=0.05,
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA on a CPU has no batching rule
@every_form
def test_vmap_is_a_loop(case, is_causal):
    given = draw(case, 9, 3, batch=4)

    def one(*sample: Tensor) -> Tensor:
        return attend(case, alone(given, *sample), is_causal=is_causal)[0]

    out = torch.func.vmap(one)(*samples(given))
    expected = torch.stack([one(*each) for each in zip(*samples(given), strict=True)])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def samples(given: Draw) -> list[Tensor]:
    """What differs from sample to sample."""
    return [*given[:3], *([given.inputs["beta"]] if "beta" in given.inputs else [])]


def alone(given: Draw, q: Tensor, k: Tensor, v: Tensor, *beta: Tensor) -> Draw:
    """One sample as a batch."""
    return Draw(q[None], k[None], v[None], given.inputs | ({"beta": beta[0][None]} if beta else {}))


@every_form
def test_functional_gradients_are_backward(case, is_causal):
    given = draw(case, 9, 3)
    leaves = tuple(x.requires_grad_() for x in given.leaves())

    def loss(*tensors: Tensor) -> Tensor:
        return attend(case, given.rebuilt(*tensors), is_causal=is_causal).sin().sum()

    ours = torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*leaves)
    theirs = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if expected is None else expected)


@pytest.mark.parametrize("case", [case for case in CAUSAL if not case.startswith("softmax")])
def test_per_sample_gradients(case):
    """vmap of grad: what differential privacy and influence functions ask for."""
    given = draw(case, 5, 2, batch=3)

    def loss(*sample: Tensor) -> Tensor:
        return attend(case, alone(given, *sample), is_causal=True).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss))(*samples(given))
    expected = torch.stack([torch.func.grad(loss)(*each) for each in zip(*samples(given), strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
