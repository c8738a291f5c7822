"""Linear angular attention (Castling-ViT, You et al. 2022): the angle's kernel, cut to first order.

    1 - theta(q, k)/pi  =  1/2 + q^.k^/pi + (arcsin's higher terms)
    h_i = 1/2 v_i + (1/pi) q^_i (sum_j k^_j v_j^T)          o_i = h_i / |h_i|

The constant of the kernel, summed over keys, would be 1/2 sum_j v_j. The final formula of the paper and its code use
1/2 v_i, and so does the default here; `exact=True` is the kernel itself. The explicit weights are those of h, before
the output is divided by its length.
"""

from dataclasses import dataclass
from math import pi
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softless.algebra.feature_maps import unit
from softless.algebra.state import State
from softless.errors import UnsupportedError
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.kernelized import Kernelized, token_by_token


@dataclass(frozen=True)
class Angular(Kernelized):
    name: ClassVar[str] = "angular"
    formula: ClassVar[str] = "h / |h|,  h = 1/2 v_i + (1/pi) sum_j q^.k^_j v_j"
    paper: ClassVar[str] = "You et al. 2022, arXiv 2211.10526"
    reader: ClassVar[str] = "none"

    exact: bool = False

    @property
    def pairs_tokens(self) -> bool:  # type: ignore[override]
        return not self.exact

    def default_scale(self, head_dim: int) -> None:
        return None

    def features_q(self, q: Tensor, call: Call) -> Tensor:
        x = unit(q) * pi**-0.5
        return F.pad(x, (1, 0), value=0.5**0.5) if self.exact else x

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        queries, keys = q.shape[2], k.shape[2]
        if queries and keys and queries != keys and not call.is_causal and not self.exact:
            raise UnsupportedError(
                f"angular adds each query's own value: it needs as many queries as keys, got {queries} and "
                f"{keys} (exact=True has no such term)"
            )

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        kernel = super().weights(q, k, call)
        if self.exact:
            return kernel
        queries, keys = q.shape[2], k.shape[2]
        own = torch.ones(queries, keys, device=q.device, dtype=q.dtype).tril(keys - queries).triu(keys - queries)
        return kernel + 0.5 * own * call.visible(q, k)

    def combine(self, weights: Tensor, v: Tensor, call: Call) -> Tensor:
        return unit(super().combine(weights, v, call))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self._unit(super().attend(q, k, v, call), v)

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        out, state = super().attend_with_state(q, k, v, state, call)
        return self._unit(out, v), state

    def attend_to_state(self, q: Tensor, k: Tensor, v: Tensor, state: State, call: Call) -> Tensor:
        return self._unit(super().attend_to_state(q, k, v, state, call), v)

    def _unit(self, kernel: Tensor, v: Tensor) -> Tensor:
        """Return o for the kernel's part of h. The queries' own tokens are the last ones, if there are more keys."""
        if self.exact:
            return token_by_token(unit, kernel)
        missing = kernel.shape[2] - v.shape[2]
        v = repeat_heads(v, kernel.shape[1])
        own = F.pad(v, (0, 0, missing, 0)) if missing > 0 else v[:, :, -missing:]
        return token_by_token(lambda kernel, own: unit(0.5 * own + kernel), kernel, own)
