"""What every mechanism offers: explicit weights, an output, and a carried state, or a plain refusal.

A mechanism is a frozen dataclass of plain options, hashable and without tensors. What it needs
beyond q, k, v travels in `inputs`. Tensors arrive validated, wide (float32 or float64), and zero in the padding.

    q [B, H, N, d]    k [B, G, M, d]    v [B, G, M, e]    H a multiple of G (grouped queries)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor
from torch.autograd import forward_ad

from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.masks import visible
from softless.algebra.state import State
from softless.errors import ArgumentError, UnsupportedError


class Call(NamedTuple):
    """Everything an attention call says besides q, k and v. `scale` is resolved before it gets here."""

    is_causal: bool = False
    key_mask: Tensor | None = None  # bool [B, M], True = a real token
    bias: Tensor | None = None  # broadcastable to [B, H, N, M]
    scale: float = 1.0
    inputs: Mapping[str, Tensor] = {}
    grid: tuple[int, int] | None = None  # height and width, for mechanisms that read tokens as a picture

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """Which key each query may see, broadcastable to [B, H, N, M]."""
        return visible(q.shape[2], k.shape[2], is_causal=self.is_causal, key_mask=self.key_mask, device=q.device)


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism with its options. Make one with `softless.mechanism(name, **options)`.

    >>> import softless
    >>> made = softless.mechanism("linear", phi="affine_relu")
    >>> made.family, made.inputs, made.carries_state, made.rows_sum_to_one
    ('kernelized', ('weight', 'bias'), True, True)
    """

    name: ClassVar[str]
    family: ClassVar[str]  # kernelized | scored | recurrent
    formula: ClassVar[str]  # one line, as `softless list` prints it
    cost: ClassVar[str]  # N tokens, d channels a head, m stand-ins, w window, l stride, r rounds
    paper: ClassVar[str]  # who, when and where
    form: ClassVar[str] = "explicit weights"  # how plain torch computes a scored one
    takes_bias: ClassVar[bool] = False
    carries_state: ClassVar[bool] = False
    reads_grid: ClassVar[bool] = False  # tokens may be a picture, after some that are not in it
    needs_grid: ClassVar[bool] = False  # tokens are a picture
    fused_on_gpu: ClassVar[bool] = False  # a kernel there takes half precision as it is
    token_inputs: ClassVar[tuple[str, ...]] = ()  # inputs of one number a key: [B, G, M]
    shares_keys: ClassVar[bool] = False  # meant for k = q: a module projects one for both
    moves_inputs: ClassVar[bool] = False  # training moves what was drawn: `moved` says where to
    mixes_queries: ClassVar[bool] = False  # a query's output depends on the others, padding among them if N != M
    pairs_tokens: ClassVar[bool] = False  # a query stands at a key of its own: which one depends on N and M

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the `inputs` that are the same for every token, for q with these heads."""
        return {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it needs beyond q, k and v."""
        return (*self.input_shapes(1, 1), *self.token_inputs)

    def needed(self, q: Tensor, k: Tensor) -> dict[str, tuple[int, ...]]:
        """Shapes of all `inputs` of a call."""
        return self.input_shapes(q.shape[1], q.shape[3]) | dict.fromkeys(self.token_inputs, tuple(k.shape[:3]))

    def draw(self, heads: int, head_dim: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Those of the `inputs` that are drawn at random and not learned."""
        return {}

    def moved(self, k: Tensor, call: Call) -> dict[str, Tensor]:
        """What its drawn inputs become after a training batch with these keys [B, H, M, d]."""
        return {}

    def initialize(self, name: str, tensor: Tensor) -> None:
        """Fill a learned input, in place, as training starts; by default as nn.Linear does."""
        bound = tensor.shape[-1] ** -0.5
        torch.nn.init.uniform_(tensor, -bound, bound)

    def lacks(self, is_causal: bool) -> str | None:
        """Why it has no causal form, or none but the causal one; None if it has what is asked."""
        return None

    @property
    def rows_sum_to_one(self) -> bool:
        """Whether adding a constant to v adds it to the output."""
        return True

    def default_scale(self, head_dim: int) -> float | None:
        """The factor on phi(q).phi(k); None where a factor would cancel."""
        return None

    def matrices(self, heads: int, head_dim: int) -> int:
        """How many weight matrices a sample has."""
        return heads

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        """What the fused kernels need to know about this mechanism; None if no kernel computes it."""
        return None

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        """Refuse what this mechanism cannot do."""

    def weights(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Explicit weights [B, H, N, M]: the specification."""
        raise NotImplementedError

    def combine(self, weights: Tensor, v: Tensor, call: Call) -> Tensor:
        """The output that explicit weights give."""
        return weights @ repeat_heads(v, weights.shape[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The output [B, H, N, e], by the fastest exact way in plain torch."""
        return self.combine(self.weights(q, k, call), v, call)

    def attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, call: Call
    ) -> tuple[Tensor, State]:
        """The causal output given what came before, and the state to go on from."""
        raise UnsupportedError(
            f"mechanism '{self.name}' has no state of fixed size: keep a KV cache and call attention(is_causal=True)"
        )


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, M, d] -> [B, H, M, d]: each key head serves H / G query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def in_forward_mode() -> bool:
    """Whether tangents may be at work: inside `forward_ad.dual_level`, `torch.func.jvp`, `jacfwd` or `hessian`."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether forward mode or a transform of torch.func is at work."""
    return in_forward_mode() or torch._C._are_functorch_transforms_active()


def readable(x: Tensor) -> bool:
    """Whether a check may look at the numbers of x: eager, on a CPU, outside vmap. Elsewhere it would cost a wait."""
    if torch.compiler.is_compiling():
        return False
    return type(x) is Tensor and x.is_cpu and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def sign(out: Tensor, state: State, mechanism: Mechanism) -> tuple[Tensor, State]:
    """An output and its state, which is marked with the mechanism that made it.

    A state is tensors alone, and those of two mechanisms may have one shape and mean different things. The mark is a
    string on the co-moment: it stays as long as the tensor does, and is gone after a file, a copy to another device or
    a compiled call. A state without a mark is judged by its shapes.
    """
    if not torch.compiler.is_compiling():
        state.comoment.softless_mechanism = _signature(mechanism)  # type: ignore[attr-defined]
    return out, state


def check_signed(state: State | None, mechanism: Mechanism) -> None:
    """Refuse the state of another mechanism, or of the same with other options."""
    if state is None or torch.compiler.is_compiling():
        return
    maker, asked = getattr(state.comoment, "softless_mechanism", None), _signature(mechanism)
    if maker is not None and maker != asked:
        raise ArgumentError(f"the state was made by {maker}, and {asked} cannot go on from it: it needs one of its own")


@lru_cache(maxsize=256)
def _signature(mechanism: Mechanism) -> str:
    """Name and options. Functions are told by their names, which are the same in every process."""
    options = [(each.name, getattr(mechanism, each.name)) for each in fields(mechanism)]
    numbers = [(name, float(value) if type(value) is int else value) for name, value in options]
    given = ", ".join(f"{name}={getattr(value, '__qualname__', repr(value))}" for name, value in numbers)
    return f"'{mechanism.name}'" + (f" ({given})" if given else "")
