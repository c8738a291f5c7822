"""What a scored mechanism becomes at the ends of its options, and what it costs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from softless import Mechanism, attention, attention_weights, mechanism
from softless.algebra.feature_maps import unit
from softless.errors import ArgumentError
from tests.laws.cases import CASES, WHOLE, Case, ask

N = 24


def qkv(tokens: int = N, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, heads, tokens, 4, dtype=torch.float64) for _ in "qkv")


def forms(made: Mechanism) -> tuple[bool, ...]:
    """What is_causal may be."""
    return tuple(is_causal for is_causal in (False, True) if made.lacks(is_causal) is None)


WIDEST = {
    "topk": mechanism("topk", k=N),
    "topk beyond": mechanism("topk", k=10 * N),
    "local": mechanism("sparse", pattern="local", stride=N),
    "every key a column": mechanism("sparse", pattern="strided", stride=1),
    "one group": mechanism("sparse", pattern="fixed", stride=N),
    "all summaries": mechanism("sparse", pattern="fixed", stride=4, summary=4),
    "window": mechanism("longformer", window=N - 1, global_tokens=0),
    "all global": mechanism("longformer", window=0, global_tokens=N),
    "nonlocal": mechanism("nonlocal"),
    "nystrom": mechanism("nystrom", landmarks=N),
    "nystrom beyond": mechanism("nystrom", landmarks=10 * N),
}


@pytest.mark.parametrize("name", WIDEST)
def test_a_mechanism_at_its_widest_is_softmax(name: str):
    q, k, v = qkv()
    mask = torch.rand(2, N) > 0.3
    for is_causal in forms(WIDEST[name]):
        exact = attention(q, k, v, "softmax", is_causal=is_causal, key_mask=mask)
        out = attention(q, k, v, WIDEST[name], is_causal=is_causal, key_mask=mask)
        torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


def test_linformer_with_the_identity_is_softmax():
    q, k, v = qkv()
    inputs = {"e": torch.eye(N, dtype=torch.float64)}
    out = attention(q, k, v, mechanism("linformer", rank=N, length=N), inputs=inputs)
    torch.testing.assert_close(out, attention(q, k, v, "softmax"), rtol=1e-12, atol=1e-12)


def test_what_linformer_shares_is_the_same_tensor_for_all():
    q, k, v = qkv()
    e, f = torch.randn(2, 5, N, dtype=torch.float64)

    def out(share: str, **inputs: Tensor) -> Tensor:
        return attention(q, k, v, mechanism("linformer", rank=5, length=N, share=share), inputs=inputs)

    a_head = [x.expand(2, -1, -1) for x in (e, f)]
    torch.testing.assert_close(out("heads", e=e, f=f), out("none", e=a_head[0], f=a_head[1]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out("kv", e=e), out("heads", e=e, f=e), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_reformer_with_enough_rounds_is_softmax_over_the_other_tokens(is_causal: bool):
    """Each round misses a pair with some probability; 60 rounds of two buckets miss none here."""
    q, _, v = qkv()
    made = mechanism("reformer", buckets=2, rounds=60, window=N)
    out = attention(q, q, v, made, is_causal=is_causal, inputs={"rotations": torch.randn(2, 60, 4, 1).double()})
    scores = q @ unit(q).mT
    hidden = torch.eye(N, dtype=torch.bool) | (torch.ones(N, N).bool().triu(1) & is_causal)
    exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out[:, :, 1:], exact[:, :, 1:], rtol=1e-12, atol=1e-12)
    assert not is_causal or torch.equal(out[:, :, 0], v[:, :, 0])  # the first token has no other


def test_reformer_with_more_rounds_comes_nearer_to_softmax():
    q, _, v = qkv(128)
    exact = (q @ unit(q).mT).masked_fill(torch.eye(128, dtype=torch.bool), -torch.inf).softmax(-1) @ v
    errors = []
    for rounds in (1, 4, 16):
        made = mechanism("reformer", buckets=8, rounds=rounds, window=128)
        rotations = torch.randn(2, rounds, 4, 4, dtype=torch.float64)
        errors.append((attention(q, q, v, made, inputs={"rotations": rotations}) - exact).norm().item())
    assert errors[0] > errors[1] > errors[2]


def test_nystrom_comes_nearer_with_more_landmarks_and_its_inverse_with_more_steps():
    q, k, v = qkv(96)
    exact = attention(q, k, v, "softmax")
    few, many = (attention(q, k, v, mechanism("nystrom", landmarks=m, steps=20)) for m in (4, 48))
    assert (many - exact).norm() < (few - exact).norm()
    sums = [attention_weights(q, k, mechanism("nystrom", landmarks=8, steps=n)).sum(-1) for n in (6, 30)]
    assert (sums[1] - 1).abs().max() <= 1e-9
    assert (sums[1] - 1).abs().max() <= (sums[0] - 1).abs().max()


def test_soft_through_every_token_is_its_ridge_regression():
    """With each key a landmark, g(q, k) (g(k, k) + 0.01 I)^-1 g(k, k) v."""
    q, _, v = qkv()
    g = (-0.25 * (q[..., :, None, :] - q[..., None, :, :]).square().sum(-1)).exp()  # s / 2 = 1/4 at d = 4
    exact = g @ torch.linalg.solve(g + 0.01 * torch.eye(N, dtype=torch.float64), g @ v)
    torch.testing.assert_close(attention(q, q, v, mechanism("soft", landmarks=N)), exact, rtol=1e-9, atol=1e-9)


def test_pooled_tokens_are_those_of_adaptive_pooling():
    """Where the runs are equally long, torch's pooling makes the same means."""
    q, k, v = qkv()
    pooled = F.adaptive_avg_pool1d(q.mT.flatten(0, 1), 6).unflatten(0, (2, 2)).mT
    exact = F.scaled_dot_product_attention(q, pooled, F.scaled_dot_product_attention(pooled, k, v))
    torch.testing.assert_close(attention(q, k, v, mechanism("agent", agents=6)), exact, rtol=1e-12, atol=1e-12)
    pooled = [
        torch.cat([F.adaptive_avg_pool1d(x.mT.flatten(0, 1), p).unflatten(0, (2, 2)).mT for p in (1, 3, 8)], 2)
        for x in (k, v)
    ]
    out = attention(q, k, v, mechanism("asymmetric_nonlocal", pyramid=(1, 3, 8)))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, *pooled), rtol=1e-12, atol=1e-12)


def test_emanet_reconstructs_as_the_authors_unit_does():
    """X [C, n], mu [C, K]: three rounds of their loop, then mu Z^T."""
    x, mu = torch.randn(16, N, dtype=torch.float64), F.normalize(torch.randn(16, 5, dtype=torch.float64), dim=0)
    inputs = {"bases": mu.T[None]}
    for _ in range(3):
        z = (x.T @ mu).softmax(-1)
        mu = F.normalize(x @ (z / z.sum(0)), dim=0)
    tokens = x.T[None, None]
    out = attention(tokens, tokens, tokens, mechanism("emanet", bases=5), inputs=inputs)
    torch.testing.assert_close(out[0, 0], (mu @ z.T).T, rtol=1e-12, atol=1e-12)


def test_emanet_holds_its_bases_constant_unless_told():
    q, k, v = (x.requires_grad_() for x in qkv())
    inputs = {"bases": torch.randn(2, 5, 4, dtype=torch.float64)}
    outs = [attention(q, k, v, mechanism("emanet", bases=5, detach=held), inputs=inputs) for held in (True, False)]
    assert torch.equal(*outs)
    held, free = (torch.autograd.grad(out.sum(), (q, k, v), materialize_grads=True) for out in outs)
    assert [bool(g.any()) for g in held] == [False, False, True]
    assert [bool(g.any()) for g in free] == [True, True, True]
    assert torch.equal(held[2], free[2])


ORDERED = ("sparse", "longformer", "linformer", "nystrom", "agent", "soft", "asymmetric_nonlocal", "reformer")
ORDERED += ("cosformer", "diagonal", "mlla", "nearfar")
PERMUTED = [case for case in WHOLE if case.id != "angular" and case.name not in ORDERED]
PERMUTED = [case for case in PERMUTED if not case.made.mixes_queries]  # the mask of the keys hides queries too


@pytest.mark.parametrize("case", PERMUTED, ids=str)
def test_without_places_the_order_of_keys_does_not_matter(case: Case):
    at, order = ask(case, 9, heads=(4, 2)), torch.randperm(9)
    call = {"mechanism": case.made, "inputs": at.inputs}
    mask = torch.rand(2, 9) > 0.3
    here = attention(*at[:3], **call, key_mask=mask)
    there = attention(at.q, at.k[:, :, order], at.v[:, :, order], **call, key_mask=mask[:, order])
    torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-9)


# No N x N in one tensor; test_scaling.py has the sum of them.


class Sizes(TorchDispatchMode):
    """The largest tensor any operation gives."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.largest = max(self.largest, x.untyped_storage().nbytes() if isinstance(x, Tensor) else 0)
        return out


THIN = {
    "local": (mechanism("sparse", pattern="local", stride=16), 2.1),
    "longformer": (mechanism("longformer", window=16, global_tokens=2), 2.1),
    "nearfar": (mechanism("nearfar", window=16, first=2), 2.1),
    "linformer": (mechanism("linformer", rank=16, length=4096), 2.1),
    "nystrom": (mechanism("nystrom", landmarks=16), 2.1),
    "agent": (mechanism("agent", agents=16), 2.1),
    "soft": (mechanism("soft", landmarks=16), 2.1),
    "asymmetric_nonlocal": (mechanism("asymmetric_nonlocal", pyramid=(1, 9, 16)), 2.1),
    "emanet": (mechanism("emanet", bases=16, detach=False), 2.1),
    "reformer": (mechanism("reformer", buckets=8, rounds=2, window=8), 2.1),
    "strided": (mechanism("sparse", pattern="local+strided", stride=64), 4.0),  # N^2 / 64: N^1.5 with the best stride
    "fixed": (mechanism("sparse", pattern="fixed", stride=64, summary=2), 4.0),
}


def largest(made, tokens: int, is_causal: bool) -> int:
    """Bytes of the largest tensor of a call and its gradient."""
    leaves = [torch.randn(1, 1, tokens, 8, requires_grad=True) for _ in "qkv"]
    inputs = {name: torch.randn(shape) for name, shape in made.input_shapes(1, 8).items()}
    mask = torch.arange(tokens)[None] < tokens - 3
    with Sizes() as sizes:
        attention(*leaves, made, inputs=inputs, key_mask=mask, is_causal=is_causal).sum().backward()
    return sizes.largest


@pytest.mark.parametrize("name", THIN)
def test_no_tensor_holds_all_pairs(name: str):
    made, growth = THIN[name]
    for is_causal in forms(made):
        once, twice = (largest(made, tokens, is_causal) for tokens in (2048, 4096))
        assert twice < 4096**2 * 4 / 8, "an eighth of the pairs would be too many"
        assert twice / once <= growth


def test_a_matrix_of_all_pairs_would_be_noticed():
    assert largest(mechanism("topk"), 2048, False) >= 2048**2 * 4


def test_every_case_says_whether_it_is_causal():
    for case in CASES:
        assert forms(case.made) == case.forms


def dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def one_and_cosine(q: Tensor, k: Tensor) -> Tensor:
    return 1 + unit(q) @ unit(k).mT


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_general_similarity_below_zero_is_refused(backend: str, is_causal: bool):
    q, k, v = qkv()
    with pytest.raises(
        ArgumentError, match=r"sim returned -\d.* for a visible key, and similarities must be at least 0"
    ):
        attention(q, k, v, mechanism("general", sim=dot), is_causal=is_causal, backend=backend)


def test_a_general_similarity_may_be_anything_at_hidden_keys():
    q, k, v = (x.abs() for x in qkv())
    mask, made = torch.arange(N) < N - 3, mechanism("general", sim=dot)
    shown = attention(q, k, v, made, key_mask=mask.expand(2, N))
    k[:, :, N - 3 :] *= -1
    assert torch.equal(attention(q, k, v, made, key_mask=mask.expand(2, N)), shown)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_general_similarity_may_round_below_zero(dtype: torch.dtype):
    """1 + cos is zero for opposite vectors, and rounds to -1e-7 for some of them."""
    q, _, v = (x.to(dtype) for x in qkv(200))
    assert attention(q, -q, v, mechanism("general", sim=one_and_cosine)).isfinite().all()


def test_the_signs_of_a_general_similarity_are_not_looked_at_under_vmap():
    q, k, v = qkv()
    made = mechanism("general", sim=dot)
    out = torch.func.vmap(lambda *one: attention(*(x[None] for x in one), made)[0])(q, k, v)
    assert out.shape == v.shape
