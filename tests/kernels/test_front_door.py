"""The causal kernels through the front door: prompts, single tokens, and states that travel between backends."""

import pytest
import torch

from softless import attention, attention_with_state, mechanism
from softless.errors import ArgumentError, BackendError
from tests.kernels.cases import draw

pytestmark = pytest.mark.kernels

CAUSAL = ("linear", "inline", "taylor", mechanism("linear", phi="relu", normalize="none"))
NAMES = ("linear", "inline", "taylor", "none")
EXP = mechanism("linear", phi="exp")
every_mechanism = pytest.mark.parametrize("made", CAUSAL, ids=NAMES)


@pytest.mark.parametrize("made", [*CAUSAL, "efficient", EXP], ids=[*NAMES, "efficient", "exp"])
def test_a_causal_call_on_the_kernels_matches_its_weights(made):
    q, k, v = draw(70, heads=4, groups=2, batch=2)
    mask = torch.arange(70) >= torch.tensor([[3], [0]])
    exact = attention(*(x.double() for x in (q, k, v)), made, is_causal=True, key_mask=mask, backend="reference")
    found = attention(q, k, v, made, is_causal=True, key_mask=mask, backend="triton")
    assert (found - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@every_mechanism
@pytest.mark.parametrize("backends", [("triton", "triton"), ("torch", "triton"), ("triton", "torch")], ids="-".join)
def test_a_prompt_and_single_tokens_match_one_call_on_both_backends(made, backends):
    q, k, v = draw(40, heads=2)
    exact = attention(*(x.double() for x in (q, k, v)), made, is_causal=True, backend="reference")
    prompt, tokens = backends
    out, state = attention_with_state(q[:, :, :37], k[:, :, :37], v[:, :, :37], made, backend=prompt)
    found = [out]
    for i in range(37, 40):
        here = slice(i, i + 1)
        out, state = attention_with_state(q[:, :, here], k[:, :, here], v[:, :, here], made, state, backend=tokens)
        found.append(out)
    assert state.n.flatten().tolist() in ([40], [40, 40])
    assert (torch.cat(found, 2) - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


def test_exponential_features_continue_in_torch_and_triton_says_so():
    q, k, v = draw(5)
    with pytest.raises(BackendError, match="cannot run: the kernels carry no state of exponential features"):
        attention_with_state(q, k, v, EXP, backend="triton")
    assert torch.equal(attention_with_state(q, k, v, EXP)[0], attention_with_state(q, k, v, EXP, backend="torch")[0])


@pytest.mark.parametrize(
    ("made", "word", "shape", "call"),
    [
        ("linear", "torch.float64", {"dtype": torch.float64}, {}),
        ("linear", "257", {"dims": (257, 257)}, {}),
        (mechanism("inline", phi="exp"), "exponential", {}, {"is_causal": True}),
        ("linear", "3 and 5", {"keys": 5}, {"is_causal": True}),
        ("threshold", "threshold", {}, {}),
    ],
)
def test_attention_raises_the_refusal_of_the_kernels(made, word, shape, call):
    with pytest.raises(BackendError, match=f"backend 'triton' was asked for and cannot run: .*{word}"):
        attention(*draw(3, **shape), made, backend="triton", **call)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("made", ["linear", "taylor"])
def test_a_state_of_another_size_is_refused(made, tokens):
    _, state = attention_with_state(*draw(4, heads=2), made, backend="triton")
    with pytest.raises(ArgumentError, match="these q, k, v continue one of"):
        attention_with_state(*draw(tokens, heads=2, dims=(6, 4)), made, state, backend="triton")


def test_a_gradient_flows_through_a_single_token_and_its_state():
    q, k, v = draw(2, heads=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    gradients = []
    for backend in ("triton", "torch"):
        _, state = attention_with_state(q[:, :, :1], k[:, :, :1], v[:, :, :1], "linear", backend=backend)
        out, _ = attention_with_state(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], "linear", state, backend=backend)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
