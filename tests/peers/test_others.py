"""Agreement with smaller libraries, and with the published formula of one that no longer builds."""

import pytest
import torch
from torch import Tensor, nn

from softless import attention, mechanism

N, DIM, HEADS, D = 24, 12, 3, 4


def heads(x: Tensor) -> Tensor:
    """[B, N, C] -> [B, heads, N, d]"""
    return x.unflatten(-1, (HEADS, D)).transpose(1, 2)


def side_by_side(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("share", ["kv", "heads"])
@pytest.mark.parametrize("count", [N, 17])
def test_linformer(count: int, share: str):
    """A shorter sequence uses the first columns of E and F."""
    peer = pytest.importorskip("linformer", reason="make setup installs it")
    layer = peer.LinformerSelfAttention(DIM, N, k=5, heads=HEADS, share_kv=share == "kv").double()
    x = torch.randn(2, count, DIM, dtype=torch.float64)
    to_v = layer.to_k if share == "kv" else layer.to_v  # there one projection makes k and v too
    q, k, v = (heads(part(x)) for part in (layer.to_q, layer.to_k, to_v))
    inputs = {"e": layer.proj_k.T} | ({"f": layer.proj_v.T} if share == "heads" else {})
    out = attention(q, k, v, mechanism("linformer", rank=5, length=N, share=share), inputs=inputs)
    torch.testing.assert_close(layer.to_out(side_by_side(out)), layer(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 6])
def test_nystrom_attention(steps: int):
    """One sample and one head: theirs start the inverse from the largest of all. Their mean adds 1e-8 to its count."""
    peer = pytest.importorskip("nystrom_attention", reason="make setup installs it")
    layer = peer.NystromAttention(DIM, DIM, 1, num_landmarks=6, pinv_iterations=steps, residual=False).double()
    x = torch.randn(1, N, DIM, dtype=torch.float64)
    q, k, v = (part[:, None] for part in layer.to_qkv(x).chunk(3, -1))
    out = attention(q, k, v, mechanism("nystrom", landmarks=6, steps=steps))
    expected = layer(x)
    torch.testing.assert_close(layer.to_out(out[:, 0]), expected, rtol=0, atol=1e-7 * expected.abs().max().item())


def test_with_others_in_the_batch_nystrom_attention_differs_and_ours_does_not():
    """The right law, where theirs takes the largest norm of the whole batch."""
    peer = pytest.importorskip("nystrom_attention", reason="make setup installs it")
    layer = peer.NystromAttention(DIM, DIM, 1, num_landmarks=6, pinv_iterations=2, residual=False).double()
    x = torch.randn(2, N, DIM, dtype=torch.float64) * torch.tensor([1.0, 9.0])[:, None, None]
    q, k, v = (part[:, None] for part in layer.to_qkv(x).chunk(3, -1))
    made = mechanism("nystrom", landmarks=6, steps=2)
    ours, alone = (attention(q[:some], k[:some], v[:some], made) for some in (2, 1))
    torch.testing.assert_close(ours[:1], alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x)[:1], layer(x[:1]), rtol=1e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_agent_attention(padded: bool):
    """Given our agents, the means of the queries; its gate open, and without talking heads."""
    peer = pytest.importorskip("agent_attention_pytorch", reason="make setup installs it")
    options = {"num_agent_tokens": 6, "dim_head": D, "heads": HEADS, "talking_heads": False, "gate": False}
    layer = peer.AgentSelfAttention(DIM, **options).double()
    x, mask = torch.randn(2, N, DIM, dtype=torch.float64), torch.ones(2, N, dtype=torch.bool)
    mask[1, 12:] = not padded
    q, k, v = (heads(part) for part in layer.to_qkv[0](x).chunk(3, -1))
    agents = torch.stack([row[:, keep].unflatten(1, (6, -1)).mean(2) for row, keep in zip(q, mask, strict=True)])
    expected = layer(x, mask=mask, agent_tokens=agents)
    out = attention(q, k, v, mechanism("agent", agents=6), key_mask=mask)
    torch.testing.assert_close(layer.to_out(out)[mask], expected[mask], rtol=1e-12, atol=1e-12)


# fast-transformers does not build any more. Its formulas (Katharopoulos et al. 2020, its eps of 1e-6 included):


def feature(x: Tensor) -> Tensor:
    return nn.functional.elu(x) + 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_fast_transformers_linear_attention(is_causal: bool):
    q, k, v = torch.randn(3, 2, HEADS, N, D, dtype=torch.float64).unbind()
    lengths = torch.tensor([N, 15])
    keys = torch.where((torch.arange(N) < lengths[:, None])[:, None, :, None], feature(k), 0.0)
    rows = feature(q) @ keys.mT
    rows = rows.tril() if is_causal else rows
    mass = rows.sum(-1, keepdim=True)
    expected = rows @ v / (mass + 1e-6)
    mask = torch.arange(N) < lengths[:, None]
    out = attention(q, k, v, "linear", is_causal=is_causal, key_mask=mask)
    torch.testing.assert_close(out, expected * (1 + 1e-6 / mass), rtol=1e-10, atol=1e-10)


def test_fast_transformers_recurrent_attention():
    """S and z token by token."""
    q, k, v = torch.randn(3, 2, HEADS, N, D, dtype=torch.float64).unbind()
    state, total = torch.zeros(2, HEADS, D, D, dtype=torch.float64), torch.zeros(2, HEADS, D, dtype=torch.float64)
    out = attention(q, k, v, "linear", is_causal=True)
    for i in range(N):
        total = total + feature(k[:, :, i])
        state = state + feature(k[:, :, i])[..., None] * v[:, :, i][..., None, :]
        mass = (feature(q[:, :, i]) * total).sum(-1, keepdim=True)
        read = (feature(q[:, :, i])[..., None, :] @ state)[..., 0, :] / mass
        torch.testing.assert_close(out[:, :, i], read, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_fast_transformers_favor(kind: str):
    """phi(x) = exp(W x~ - |x~|^2 / 2), or with both signs of W; x~ = x d^-1/4. Their factor m^-1/2 cancels."""
    q, k, v = torch.randn(3, 2, HEADS, N, D, dtype=torch.float64).unbind()
    projection = torch.randn(9, D, dtype=torch.float64)

    def favor(x: Tensor) -> Tensor:
        x = x * D**-0.25
        turned = x @ projection.T
        turned = turned if kind == "positive" else torch.cat([turned, -turned], -1)
        return (turned - x.square().sum(-1, keepdim=True) / 2).exp()

    rows = favor(q) @ favor(k).mT
    out = attention(q, k, v, mechanism("performer", features=9, kind=kind), inputs={"projection": projection})
    torch.testing.assert_close(out, rows @ v / rows.sum(-1, keepdim=True), rtol=1e-10, atol=1e-10)
