"""What a mechanism needs beyond q, k and v, owned by a module.

learned     a parameter, one for all tokens          affine_relu's weight and bias, focused's scale, linformer's e
drawn       a buffer, saved with the weights         performer's projection, reformer's rotations, emanet's bases
predicted   sigmoid(W x + b), one number a token     the step of delta and efla
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from softless.mechanisms import Mechanism


class Inputs(nn.Module):
    """Called with the tokens, it gives the `inputs=` of an attention call. What is predicted is under `predicted`."""

    def __init__(self, mechanism: Mechanism, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.mechanism, self.heads, self.head_dim = mechanism, heads, dim // heads
        drawn = mechanism.draw(heads, self.head_dim)
        for name, shape in mechanism.input_shapes(heads, self.head_dim).items():
            if name in drawn:
                self.register_buffer(name, drawn[name])
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
                mechanism.initialize(name, getattr(self, name).data)
        self.predicted = nn.ModuleDict({name: nn.Linear(dim, kv_heads) for name in mechanism.token_inputs})

    @torch.jit.ignore
    def forward(self, x: Float[Tensor, "b n c"] | None) -> dict[str, Tensor]:
        names = self.mechanism.input_shapes(self.heads, self.head_dim)
        found = {name: getattr(self, name) for name in names}
        for name, predict in self.predicted.items():
            assert x is not None, f"{name} is predicted from the tokens"
            found[name] = predict(x).sigmoid().transpose(1, 2)  # [B, kv_heads, N]
        return found

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw anew what is drawn."""
        for name, x in self.mechanism.draw(self.heads, self.head_dim, generator).items():
            getattr(self, name).copy_(x)
