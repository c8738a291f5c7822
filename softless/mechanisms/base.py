"""The base class of all mechanisms: explicit weights, an output, and a state that streams carry.

A mechanism is a frozen dataclass of plain options, hashable and without tensors. Tensors that it needs besides q, k and
v are passed in `inputs`. All tensors are validated before, are float32 or float64, and are zero in the padding.

    q [B, H, N, d]    k [B, G, M, d]    v [B, G, M, e]    H a multiple of G (grouped queries)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from softless.algebra.direct import Steps
from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.modes import transformed
from softless.algebra.state import AnyState, visible
from softless.errors import ArgumentError, UnsupportedError


class Call(NamedTuple):
    """The arguments of an attention call besides q, k and v. `scale` is already a number."""

    is_causal: bool = False
    key_mask: Tensor | None = None  # bool [B, M], True = a real token
    bias: Tensor | None = None  # broadcastable to [B, H, N, M]
    scale: float = 1.0
    inputs: Mapping[str, Tensor] = {}
    grid: tuple[int, int] | None = None  # height and width, for mechanisms that read tokens as a picture
    near: Any = None  # the kernels' function that reads near and far tokens, or None for the algebra's

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """Return which key each query may see, broadcastable to [B, H, N, M]."""
        return visible(q.shape[2], k.shape[2], is_causal=self.is_causal, key_mask=self.key_mask, device=q.device)


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism with its options. `softless.mechanism(name, **options)` makes one.

    >>> import softless
    >>> linear = softless.mechanism("linear", phi="affine_relu")
    >>> linear.family, linear.inputs, linear.carries_state, linear.rows_sum_to_one
    ('kernelized', ('weight', 'bias'), True, True)
    """

    name: ClassVar[str]
    family: ClassVar[str]  # kernelized | scored | recurrent
    formula: ClassVar[str]  # one line, as `softless list` prints it
    cost: ClassVar[str]  # N tokens, d channels per head, m landmarks, w window, l stride, r rounds
    paper: ClassVar[str]  # authors, year and arXiv number
    form: ClassVar[str] = "explicit weights"  # how plain torch computes a scored mechanism
    takes_bias: ClassVar[bool] = False
    carries_state: ClassVar[bool] = False
    rows_sum_to_one: ClassVar[bool] = True  # adding a constant to v adds it to the output
    reads_grid: ClassVar[bool] = False  # tokens may be a picture, after class tokens
    needs_grid: ClassVar[bool] = False  # tokens are a picture
    fused_on_gpu: ClassVar[bool] = False  # a fused kernel takes half precision as it is
    token_inputs: ClassVar[tuple[str, ...]] = ()  # inputs with one number per key: [B, G, M]
    shares_keys: ClassVar[bool] = False  # meant for k = q: a module uses one projection for both
    moves_inputs: ClassVar[bool] = False  # training changes the drawn inputs: see `moved`
    mixes_queries: ClassVar[bool] = False  # an output depends on all queries, and on their padding if N != M
    places: ClassVar[bool] = False  # weights depend on where in the sequence a token is
    pairs_tokens: ClassVar[bool] = False  # each query belongs to one key, which depends on N and M

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the `inputs` that are the same for every token, for q with these heads."""
        return {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors that the mechanism needs besides q, k and v."""
        return (*self.input_shapes(1, 1), *self.token_inputs)

    def needed(self, q: Tensor, k: Tensor) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all `inputs` of a call."""
        return self.input_shapes(q.shape[1], q.shape[3]) | dict.fromkeys(self.token_inputs, tuple(k.shape[:3]))

    def draw(self, heads: int, head_dim: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return the `inputs` that are drawn at random and not learned."""
        return {}

    def moved(self, k: Tensor, call: Call) -> dict[str, Tensor]:
        """Return the drawn inputs as they are after a training batch with these keys [B, H, M, d]."""
        return {}

    def initialize(self, name: str, tensor: Tensor) -> None:
        """Initialize a learned input in place; the default is that of nn.Linear."""
        bound = tensor.shape[-1] ** -0.5
        torch.nn.init.uniform_(tensor, -bound, bound)

    def lacks(self, is_causal: bool) -> str | None:
        """Return why the mechanism lacks this form, causal or not; None if it has it."""
        return None

    def default_scale(self, head_dim: int) -> float | None:
        """Return the factor on phi(q).phi(k), None where a factor would cancel."""
        return None

    def matrices(self, heads: int, head_dim: int) -> int:
        """Return the number of weight matrices per sample."""
        return heads

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        """Return what the fused kernels need to know about this mechanism; None if no kernel computes it."""
        return None

    def kernel_factors(self, call: Call) -> Tensor | None:
        """Return two numbers per query head for the kernels, [H, 2] in float32; None if the spec has all numbers.

        blend    a and b: the factors of its two gains
        regress  the ridge, and a factor of the scale
        """
        return None

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        """Raise if this mechanism cannot compute this call."""

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Return the explicit weights [B, H, N, M]. They are the specification of `attend`."""
        raise NotImplementedError

    def combine(self, weights: Tensor, v: Tensor, call: Call) -> Tensor:
        """Return the output for explicit weights."""
        return weights @ repeat_heads(v, weights.shape[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Return the output [B, H, N, e], computed in the fastest exact way in plain torch."""
        return self.combine(self.weights(q, k, call), v, call)

    def shortcut(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Steps | None:
        """Return what calls of this kind may run instead of `attend` where they need no gradient; None if nothing."""
        return None

    def attend_with_state(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        """Return the causal output after the tokens of `state`, and the state that includes these tokens."""
        raise UnsupportedError(
            f"mechanism '{self.name}' has no state of fixed size: keep a KV cache and call attention(is_causal=True)"
        )


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, M, d] -> [B, H, M, d]: each key head serves H / G query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def refuse_transforms(name: str) -> None:
    """Raise if forward mode or a transform of torch.func is active."""
    if transformed():
        raise UnsupportedError(
            f"{name} has gradients in reverse mode only: it cannot run under forward_ad or the transforms of "
            "torch.func; call backward() or torch.autograd.grad"
        )


def mark(state: AnyState, maker: str) -> AnyState:
    """Mark a state with the `signature` of the mechanism that made it, and return it.

    The states of two mechanisms may have the same shapes and mean different things. The mark is a string on the
    co-moment tensor. It is lost in a file, in a copy to another device and in a compiled call; a state without a mark
    is checked by its shapes only.
    """
    if not torch.compiler.is_compiling():
        state.comoment.softless_mechanism = maker  # type: ignore[attr-defined]
    return state


def check_mark(state: AnyState | None, mechanism: Mechanism) -> None:
    """Raise if a state was made by another mechanism, or with other options."""
    if state is None or torch.compiler.is_compiling():
        return
    marked, user = maker(state), signature(mechanism)
    if marked is not None and marked != user:
        raise ArgumentError(f"the state was made by {marked}, and {user} cannot go on from it: it needs one of its own")


def maker(state: AnyState) -> str | None:
    """Return the mechanism that a state is marked with, if any."""
    return getattr(state.comoment, "softless_mechanism", None)


@lru_cache(maxsize=256)
def signature(mechanism: Mechanism) -> str:
    """Return the name and the options. Functions appear by name, which is the same in every process."""
    values = [(field.name, getattr(mechanism, field.name)) for field in fields(mechanism)]
    values = [(name, float(value) if type(value) is int else value) for name, value in values]
    options = ", ".join(f"{name}={getattr(value, '__qualname__', repr(value))}" for name, value in values)
    return f"'{mechanism.name}'" + (f" ({options})" if options else "")
