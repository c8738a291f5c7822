"""The tensors that a mechanism needs beyond q, k and v, held by a module.

learned     a parameter, shared by all tokens        affine_relu's weight and bias, focused's scale, linformer's e
drawn       a random buffer, saved with the weights  performer's projection, reformer's rotations, emanet's bases
predicted   sigmoid(W x + b), one number per token   the step size of delta and efla
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.precision import full_precision, widen
from softless.backends import hide
from softless.mechanisms import Call, Mechanism
from softless.mechanisms.base import repeat_heads
from softless.packed import pack


class Inputs(nn.Module):
    """Returns the `inputs=` of an attention call, given the tokens."""

    def __init__(self, mechanism: Mechanism, dim: int, heads: int, kv_heads: int, *, head_dim: int | None = None):
        super().__init__()
        self.mechanism, self.heads, self.head_dim = mechanism, heads, head_dim or dim // heads
        drawn = mechanism.draw(heads, self.head_dim)
        for name, shape in mechanism.input_shapes(heads, self.head_dim).items():
            if name in drawn:
                self.register_buffer(name, drawn[name])
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
                mechanism.initialize(name, getattr(self, name).data)
        self.predicted = nn.ModuleDict({name: nn.Linear(dim, kv_heads) for name in mechanism.token_inputs})

    def forward(self, x: Float[Tensor, "b n c"] | None) -> dict[str, Tensor]:
        names = self.mechanism.input_shapes(self.heads, self.head_dim)
        tensors = {name: getattr(self, name) for name in names}
        if self.training and self.mechanism.moves_inputs:  # a graph may still hold them when they are updated
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, predict in self.predicted.items():
            assert x is not None, f"{name} is predicted from the tokens"
            tensors[name] = predict(x).sigmoid().transpose(1, 2)  # [B, kv_heads, N]
        return tensors

    @torch.no_grad()
    def move(self, k: Float[Tensor, "b g m d"], key_mask: Bool[Tensor, "b m"] | None) -> None:
        """Update the drawn buffers with the keys of a training batch."""
        if k.is_nested:
            sequences = pack("k", k)
            key_mask = sequences.real()
            k = sequences.padded(key_mask)
        k = widen(hide(repeat_heads(k, self.heads), key_mask))
        scale = self.mechanism.default_scale(self.head_dim)
        call = Call(key_mask=key_mask, scale=1.0 if scale is None else scale, inputs=self(None))
        with full_precision(k):
            for name, x in self.mechanism.moved(k, call).items():
                getattr(self, name).copy_(x)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the drawn buffers again."""
        for name, x in self.mechanism.draw(self.heads, self.head_dim, generator).items():
            getattr(self, name).copy_(x)


def moving(module: nn.Module) -> list[Tensor]:
    """Return the buffers of a module that training updates."""
    inputs = (part for part in module.modules() if isinstance(part, Inputs) and part.mechanism.moves_inputs)
    return [buffer for part in inputs for buffer in part.buffers()]


class BufferSnapshot:
    """A copy of the buffers that training updates, so that a second run of a call starts from the same values."""

    def __init__(self, module: nn.Module):
        self.buffers = moving(module)
        self.values = [buffer.clone() for buffer in self.buffers]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the copies inside this context, and the current values after it."""
        current = [buffer.clone() for buffer in self.buffers]
        try:
            self._put(self.values)
            yield
        finally:
            self._put(current)

    def _put(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the `context_fn=` of torch's checkpoint: a context for the call, and one for its second run."""
        return nullcontext(), self.restored()
