"""General similarity attention: the quadratic form that every other mechanism specializes.

    o_i = sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j),      sim >= 0

`sim` maps q [B, H, N, d] and k [B, H, M, d] to [B, H, N, M]. exp(q.k) makes it softmax, phi(q).phi(k)
linear attention, 1 + q^.k^ Taylor attention. A row whose similarities are all zero reads the mean. A similarity below
zero at a visible key, by more than rounding, raises. This is checked only on a CPU and outside torch.compile and vmap,
where the numbers can be read without waiting.
`sim` sees ones instead of hidden keys: k / |k| has no value at zero, and its gradient of nan would reach q.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.algebra.modes import readable
from softless.errors import ArgumentError
from softless.mechanisms.base import Call, Mechanism, repeat_heads


@dataclass(frozen=True)
class General(Mechanism):
    name: ClassVar[str] = "general"
    family: ClassVar[str] = "scored"
    formula: ClassVar[str] = "sum_j sim(q, k_j) v_j / sum_j sim(q, k_j)"
    cost: ClassVar[str] = "O(N^2 d)"
    paper: ClassVar[str] = "Tsai et al. 2019, arXiv 1908.11775"

    sim: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if not callable(self.sim):
            raise ArgumentError(
                f"general needs sim, a function of q [B, H, N, d] and k [B, H, M, d] that returns [B, H, N, M]; "
                f"got {self.sim!r}"
            )

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        assert self.sim is not None
        k, visible = repeat_heads(k, q.shape[1]), call.visible(q, k)
        if call.key_mask is not None:
            k = torch.where(call.key_mask[:, None, :, None], k, 1.0)
        sim = torch.where(visible, _checked(self.sim(q, k), q, k), 0.0)
        _check_signs(sim)
        mass = sim.sum(-1, keepdim=True)
        even = visible / visible.sum(-1, keepdim=True).clamp(min=1).to(sim.dtype)
        return torch.where(mass != 0, sim / torch.where(mass != 0, mass, 1.0), even)


def _checked(sim: object, q: Tensor, k: Tensor) -> Tensor:
    """Return the similarities if they have one number per pair, else raise."""
    needed = (*q.shape[:3], k.shape[2])
    if not isinstance(sim, Tensor) or sim.shape != needed or sim.dtype != q.dtype:
        returned = f"{sim.dtype} {list(sim.shape)}" if isinstance(sim, Tensor) else type(sim).__name__
        raise ArgumentError(f"sim returned {returned} and must return a {q.dtype} tensor of shape {list(needed)}")
    return sim


def _check_signs(sim: Tensor) -> None:
    """Raise for similarities below zero, except those that rounding explains, as in 1 + q^.k^."""
    if not sim.numel() or not readable(sim):
        return
    least, largest = (x.item() for x in sim.detach().aminmax())
    if least < -64 * torch.finfo(sim.dtype).eps * max(-least, largest):
        raise ArgumentError(f"sim returned {least:.4g} for a visible key, and similarities must be at least 0")
