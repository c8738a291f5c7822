"""Means over the cells of a picture, which agent, soft and asymmetric_nonlocal take with `grid=`.

The oracle is torch's adaptive pooling, of the picture alone.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softless import attention, attention_weights, mechanism
from softless.errors import SoftlessError
from softless.nn import Attention
from softless.nn.mixing import as_heads

GRID, D = (6, 7), 4
MADE = {
    "agent": mechanism("agent", agents=9),
    "soft": mechanism("soft", landmarks=9),
    "asymmetric_nonlocal": mechanism("asymmetric_nonlocal", pyramid=(1, 9, 16)),
}


def qkv(outside: int = 0, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shape = (batch, 2, outside + GRID[0] * GRID[1], D)
    return tuple(torch.randn(shape, dtype=torch.float64) for _ in "qkv")


def pool(x: Tensor, side: int, grid: tuple[int, int] = GRID) -> Tensor:
    """[B, H, N, d] -> [B, H, side^2, d], of the last h w tokens."""
    picture = x[:, :, -grid[0] * grid[1] :].mT.unflatten(-1, grid).flatten(0, 1)
    return F.adaptive_avg_pool2d(picture, side).flatten(2).mT.unflatten(0, x.shape[:2])


def gaussian(a: Tensor, b: Tensor) -> Tensor:
    return (-0.5 * D**-0.5 * torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()).exp()


def expected(name: str, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int] = GRID) -> Tensor:
    if name == "agent":
        agents = pool(q, 3, grid)
        return F.scaled_dot_product_attention(q, agents, F.scaled_dot_product_attention(agents, k, v))
    if name == "soft":
        marks = pool(k, 3, grid)
        center = gaussian(marks, marks) + 0.01 * torch.eye(9, dtype=torch.float64)
        return gaussian(q, marks) @ torch.linalg.solve(center, gaussian(marks, k) @ v)
    before = slice(0, q.shape[2] - grid[0] * grid[1])
    keys, values = (
        torch.cat([pool(x, 1, grid), pool(x, 3, grid), pool(x, 4, grid), x[:, :, before]], 2) for x in (k, v)
    )
    return F.scaled_dot_product_attention(q, keys, values)


@pytest.mark.parametrize("grid", [(6, 7), (2, 21), (1, 42), (42, 1)])
@pytest.mark.parametrize("outside", [0, 2])
@pytest.mark.parametrize("name", MADE)
def test_means_over_cells_are_adaptive_pooling(name: str, outside: int, grid: tuple[int, int]):
    """Where cells are smaller than a token they share it; class tokens are asked and read, but in no cell."""
    q, k, v = qkv(outside)
    out = attention(q, k, v, MADE[name], grid=grid)
    torch.testing.assert_close(out, expected(name, q, k, v, grid), rtol=1e-9, atol=1e-9)
    weights = attention_weights(q, k, MADE[name], grid=grid)
    torch.testing.assert_close(weights @ v, out, rtol=1e-10, atol=1e-10)


def hidden_edge(outside: int = 1) -> Tensor:
    """A picture of 6 x 7 whose last two columns and last three rows are padding: 3 x 5 in truth."""
    real = torch.zeros(GRID, dtype=torch.bool)
    real[:3, :5] = True
    return torch.cat([torch.ones(outside, dtype=torch.bool), real.flatten()]).expand(2, -1)


@pytest.mark.parametrize("name", MADE)
def test_means_over_cells_leave_out_padding(name: str):
    """Cell by cell: the mean of its real tokens; a cell without any is left out."""
    q, k, v = qkv(1)
    mask = hidden_edge()
    made = {"agent": "agents", "soft": "landmarks"}
    made = mechanism(name, **{made[name]: 4} if name in made else {"pyramid": (4,)})
    out = attention(q, k, v, made, grid=GRID, key_mask=mask)

    def means(x: Tensor) -> Tensor:
        """Of 2 x 2 cells the upper two; the lower ones are all padding."""
        picture, real = x[:, :, 1:].unflatten(2, GRID), mask[0, 1:].unflatten(0, GRID)
        cells = [(slice(0, 3), slice(0, 4)), (slice(0, 3), slice(3, 7))]
        return torch.stack([picture[:, :, a, b][:, :, real[a, b]].mean(2) for a, b in cells], 2)

    picture_k, picture_v = means(k), means(v)
    k, v = k[:, :, mask[0]], v[:, :, mask[0]]
    if name == "agent":
        agents = means(q)
        exact = F.scaled_dot_product_attention(q, agents, F.scaled_dot_product_attention(agents, k, v))
    elif name == "soft":
        center = gaussian(picture_k, picture_k) + 0.01 * torch.eye(2, dtype=torch.float64)
        exact = gaussian(q, picture_k) @ torch.linalg.solve(center, gaussian(picture_k, k) @ v)
    else:
        keys, values = (torch.cat([pooled, x[:, :, :1]], 2) for pooled, x in ((picture_k, k), (picture_v, v)))
        exact = F.scaled_dot_product_attention(q, keys, values)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MADE)
def test_a_row_knows_neither_its_padding_nor_its_neighbors(name: str):
    q, k, v = qkv(1)
    mask = hidden_edge()
    call = {"mechanism": MADE[name], "grid": GRID, "key_mask": mask}
    out = attention(q, k, v, **call)
    poisoned = [torch.where(mask[:, None, :, None], x, torch.nan) for x in (k, v)]
    real_q = torch.where(mask[:, None, :, None], q, 1e4)
    again = attention(real_q, *poisoned, **call)
    torch.testing.assert_close(again[:, :, mask[0]], out[:, :, mask[0]], rtol=1e-10, atol=1e-10)
    alone = attention(q[1:], k[1:], v[1:], **call | {"key_mask": mask[1:]})
    torch.testing.assert_close(out[1:], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_gradients_are_right(name: str):
    leaves = [x[:1, :1, :13].clone().requires_grad_() for x in qkv()]
    mask = torch.arange(13)[None] < 10
    assert torch.autograd.gradcheck(lambda *x: attention(*x, MADE[name], grid=(3, 4), key_mask=mask), leaves)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (mechanism("agent", agents=5), r"agents 5 is not a square, and a picture \(6, 7\)"),
        (mechanism("soft", landmarks=8), "landmarks 8 is not a square"),
        (mechanism("asymmetric_nonlocal", pyramid=(1, 3)), "pyramid 3 is not a square"),
    ],
)
def test_what_does_not_cut_a_picture_is_refused(made, words: str):
    q, k, v = qkv()
    assert attention(q, k, v, made).isfinite().all()  # a sequence is cut into any number of runs
    with pytest.raises(SoftlessError, match=words):
        attention(q, k, v, made, grid=GRID)
    with pytest.raises(SoftlessError, match="42 queries and 41 keys"):
        attention(q, k[:, :, 1:], v[:, :, 1:], made, grid=(5, 8))


@pytest.mark.parametrize("name", MADE)
def test_a_module_passes_its_picture_on(name: str):
    layer, x = Attention(8, 2, MADE[name]).double(), torch.randn(2, 1 + 42, 8, dtype=torch.float64)
    q, k, v = as_heads(layer.project(x))
    out = layer.proj(expected(name, q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, grid=GRID), out, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(layer(x), out)
