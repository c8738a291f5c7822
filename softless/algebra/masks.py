"""Which key each query may see."""

import torch
from jaxtyping import Bool
from torch import Tensor


def causal(queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "n m"]:
    """True where key j is not after query i, aligned at the bottom right: the last query sees every key.

    >>> causal(2, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    rows = torch.arange(queries, device=device)[:, None] + (keys - queries)
    return torch.arange(keys, device=device) <= rows


def visible(
    queries: int,
    keys: int,
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "b m"] | None,
    device: torch.device | None = None,
) -> Bool[Tensor, "#b 1 #n m"]:
    """The causal mask and the key mask as one, broadcastable to [B, H, N, M]."""
    if is_causal:
        seen = causal(queries, keys, device)[None, None]
    else:
        seen = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
    return seen if key_mask is None else seen & key_mask[:, None, None, :]
