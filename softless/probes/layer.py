"""One attention call of a model, as it happened: the queries, keys and values it saw, and what it made of them.

    scores_ij  = scale q_i.k_j + bias_ij            what a softmax would see; -inf where i may not see j
    weights    = mechanism(scores)                  explicit, of the layer's own mechanism
    output     = weights v  [+ local]               local: what InLine's residual added

Shapes: B batch (windows folded into it, as the model did), H heads, G key heads, N queries, M keys, D and E channels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softless.algebra.state import visible
from softless.functional import attention_weights, hide, prepare, widen
from softless.mechanisms import Mechanism
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.softmax import Softmax


@dataclass(frozen=True, eq=False)
class Layer:
    """What `capture` finds in a model.

    >>> import torch, softless
    >>> from softless.probes.layer import Layer
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()                   # [B, H, N, D]
    >>> layer = Layer("mine", q, k, v, softless.mechanism("softmax"), grid=(2, 3))
    >>> layer.scores().shape, torch.allclose(layer.output(), softless.attention(q, k, v, "softmax"), atol=1e-6)
    (torch.Size([1, 2, 6, 6]), True)
    """

    name: str  # path of the module
    q: Float[Tensor, "b h n d"]  # as attention saw it, after rotations by position
    k: Float[Tensor, "b g m d"]
    v: Float[Tensor, "b g m e"]
    mechanism: Mechanism
    scale: float | None = None  # None for the mechanism's own
    bias: Float[Tensor, "#b #h #n #m"] | None = None
    key_mask: Bool[Tensor, "b m"] | None = None
    is_causal: bool = False
    inputs: dict[str, Tensor] | None = None
    grid: tuple[int, int] | None = None  # where tokens are a picture (of one window, where windowed)
    prefix: int = 0  # class and register tokens before the grid
    local: Float[Tensor, "b h n e"] | None = None

    def scores(self) -> Float[Tensor, "b h n m"]:
        """What a softmax would see, float32 at least."""
        q, k = widen(self.q), widen(hide(self.k, self.key_mask))
        if isinstance(self.mechanism, Softmax):
            q = self.mechanism.confused(q, self._call())
        scale = self.q.shape[3] ** -0.5 if self.scale is None else self.scale
        scores = scale * (q @ repeat_heads(k, q.shape[1]).mT)
        if self.bias is not None:
            scores = scores + self.bias
        seen = visible(q.shape[2], k.shape[2], is_causal=self.is_causal, key_mask=self.key_mask, device=q.device)
        return torch.where(seen, scores, -torch.inf)

    def weights(self) -> Float[Tensor, "b c n m"]:
        """A matrix a head, or more where its mechanism has more (hydra: one a channel)."""
        return attention_weights(self.q, self.k, self.mechanism, **self._options())

    def output(self) -> Float[Tensor, "b h n e"]:
        """weights v, without the local residual."""
        return self.combined(self.weights())

    def combined(self, weights: Float[Tensor, "b c n m"]) -> Float[Tensor, "b h n e"]:
        """The output that other weights would give."""
        v = hide(self.v, self.key_mask)
        return self.mechanism.combine(widen(weights), widen(v), self._call()).to(self.v.dtype)

    def _call(self) -> Call:
        options = self._options()
        return prepare(self.q, self.k, self.v, self.mechanism, **options, backend="auto")[1]

    def _options(self) -> dict[str, Any]:
        return {
            "is_causal": self.is_causal,
            "key_mask": self.key_mask,
            "bias": self.bias,
            "scale": self.scale,
            "inputs": self.inputs,
            "grid": self.grid if self.mechanism.reads_grid else None,
        }
