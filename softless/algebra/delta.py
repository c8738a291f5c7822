"""The delta rule: a memory that erases what it holds for a key before it writes.

    S_t = S_{t-1} - a_t k_t (k_t^T S_{t-1}) + k_t u_t^T          |k_t| is 1, or 0 for no key
    o_t = S_t^T q_t

a is how much is erased, between 0 and 1; u is what is written. Three forms of one function:

    weights     w = tril(q k^T) (I + stril(diag(a) k k^T))^-1 diag(gain), where u = gain v
    recurrent   as above, token by token
    chunked     a chunk at a time (the WY form): with S what came before,
                    (I + stril(diag(a) k k^T)) U = u - diag(a) k S
                    o = q S + tril(q k^T) U          S <- S + k^T U

Forward substitution is the recurrence in coordinates of the keys, so it is as stable as the recurrence.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from softless.algebra.chunks import fold, unfold


def weights(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b n d"],
    erase: Float[Tensor, "*#b n 1"],
    gain: Float[Tensor, "*#b n 1"],
) -> Float[Tensor, "*b n n"]:
    """Return the explicit weights: o = w v."""
    return (q @ k.mT).tril() @ _solve(k, erase, torch.diag_embed(gain.squeeze(-1)))


def recurrent(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b n d"],
    u: Float[Tensor, "*#b n e"],
    erase: Float[Tensor, "*#b n 1"],
    memory: Float[Tensor, "*#b d e"],
) -> tuple[Float[Tensor, "*b n e"], Float[Tensor, "*#b d e"]]:
    """Compute the output token by token."""
    outputs = []
    for i in range(k.shape[-2]):
        here = slice(i, i + 1)
        key = k[..., here, :]  # [*b, 1, d]
        memory = memory + key.mT @ (u[..., here, :] - erase[..., here, :] * (key @ memory))
        outputs.append(q[..., here, :] @ memory)
    return torch.cat(outputs, -2), memory


def chunked(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b n d"],
    u: Float[Tensor, "*#b n e"],
    erase: Float[Tensor, "*#b n 1"],
    memory: Float[Tensor, "*#b d e"],
    chunk: int,
) -> tuple[Float[Tensor, "*b n e"], Float[Tensor, "*#b d e"]]:
    """Compute the output chunk by chunk. Only the memory between chunks is computed in a loop."""
    q_c, k_c, u_c, a_c = (fold(x, chunk) for x in (q, k, u, erase))  # [*b, c, l, .]
    solved = _solve(k_c, a_c, torch.cat([u_c, a_c * k_c], -1))
    written, taken = solved.split((u.shape[-1], k.shape[-1]), -1)  # [*b, c, l, e], [*b, c, l, d]
    before = []
    for add, take in zip((k_c.mT @ written).unbind(-3), (k_c.mT @ taken).unbind(-3), strict=True):  # [*b, d, .]
        before.append(memory)
        memory = memory + (add - take @ memory)
    past = torch.stack(before, -3)  # [*b, c, d, e]
    out = q_c @ past + (q_c @ k_c.mT).tril() @ (written - taken @ past)
    return unfold(out, u.shape[-2]), memory


def _solve(
    k: Float[Tensor, "*b l d"], erase: Float[Tensor, "*b l 1"], right: Float[Tensor, "*b l m"]
) -> Float[Tensor, "*b l m"]:
    """Return (I + stril(diag(a) k k^T))^-1 right. Only the part below the diagonal is read."""
    return torch.linalg.solve_triangular((erase * k) @ k.mT, right, upper=False, unitriangular=True)
