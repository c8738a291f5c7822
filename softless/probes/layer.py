"""`Layer`, one attention call of a model as it happened, and `Captured`, all calls of a forward.

    scores_ij  = scale q_i.k_j + bias_ij            what a softmax would see; -inf where i may not see j
    weights    = mechanism(scores)                  explicit, of the layer's own mechanism
    output     = weights v  [+ local]               local: the part that InLine's local residual added

Shapes: B batch (windows folded into it, as the model did), H heads, G key heads, N queries, M keys, D and E channels.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softless.algebra.precision import widen
from softless.algebra.state import visible
from softless.backends import hide
from softless.errors import UnsupportedError
from softless.functional import attention_weights
from softless.mechanisms import Mechanism
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.softmax import Softmax
from softless.nn.mixing import Mixing
from softless.probes.trails import version_of
from softless.validation import prepare

Grid = tuple[int, int]
ATTENTION_NAMES = ("attn", "attention", "self_attn", "self_attention")
MOST_PREFIX = 16  # class, distillation and register tokens; more of them means that the grid does not fit


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention call that `capture` recorded.

    >>> import torch, softless
    >>> from softless.probes.layer import Layer
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()                   # [B, H, N, D]
    >>> layer = Layer("mine", q, k, v, softless.mechanism("softmax"), grid=(2, 3))
    >>> layer.scores().shape, torch.allclose(layer.output(), softless.attention(q, k, v, "softmax"), atol=1e-6)
    (torch.Size([1, 2, 6, 6]), True)
    """

    name: str  # path of the module
    q: Float[Tensor, "b h n d"]  # as attention saw it, after rotary positions
    k: Float[Tensor, "b g m d"]
    v: Float[Tensor, "b g m e"]
    mechanism: Mechanism
    scale: float | None = None  # None for the mechanism's own
    bias: Float[Tensor, "#b #h #n #m"] | None = None
    key_mask: Bool[Tensor, "b m"] | None = None
    is_causal: bool = False
    inputs: dict[str, Tensor] | None = None
    grid: Grid | None = None  # rows and columns of patches, of one window where the layer has windows
    prefix: int = 0  # class and register tokens before the grid
    local: Float[Tensor, "b h n e"] | None = None

    def scores(self) -> Float[Tensor, "b h n m"]:
        """Return the scores that a softmax would see, in float32 or wider."""
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
        """Return the explicit weights: one matrix per head (hydra: one per channel)."""
        return attention_weights(self.q, self.k, self.mechanism, **self._options())

    def output(self) -> Float[Tensor, "b h n e"]:
        """Return weights v, without the local residual."""
        return self.combined(self.weights())

    def combined(self, weights: Float[Tensor, "b c n m"]) -> Float[Tensor, "b h n e"]:
        """Return the output that other weights would give."""
        v = hide(self.v, self.key_mask)
        return self.mechanism.combine(widen(weights), widen(v), self._call()).to(self.v.dtype)

    def picture(self) -> Grid | None:
        """Return the grid if queries and keys are both the prefix and all patches of one image, else None."""
        if self.grid is None:
            return None
        tokens = self.prefix + self.grid[0] * self.grid[1]
        return self.grid if tokens == self.q.shape[2] == self.k.shape[2] else None

    def select(self, samples: slice) -> "Layer":
        """Return the same layer on a part of its batch."""
        fields = ("q", "k", "v", "key_mask", "local")
        parts = {name: x[samples] for name in fields if (x := getattr(self, name)) is not None}
        inputs = self.inputs and {
            name: x[samples] if name in self.mechanism.token_inputs else x for name, x in self.inputs.items()
        }
        bias = self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[samples]
        return replace(self, **parts, inputs=inputs, bias=bias)

    def _call(self) -> Call:
        return prepare(self.q, self.k, self.v, self.mechanism, **self._options(), backend="auto")[1]

    def _options(self) -> dict[str, Any]:
        return {
            "is_causal": self.is_causal,
            "key_mask": self.key_mask,
            "bias": self.bias,
            "scale": self.scale,
            "inputs": self.inputs,
            "grid": self.grid if self.mechanism.reads_grid else None,
        }


Keep = Callable[[Layer], Tensor | None]  # records a layer; a tensor that it returns replaces the layer's output


class Captured:
    """The attention calls of a model's latest forward, which `capture` fills while the model runs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[Layer] = []
        self.versions: list[tuple[int | None, ...]] = []  # of q, k and v of each call
        self.modules = dict(model.named_modules())
        self.running: list[tuple[str, nn.Module]] = []  # modules that are in their forward, the innermost last
        self.seen: dict[str, nn.Module] = {}  # modules that ran and are called attention
        self.unread: dict[int, str] = {}  # softmaxes of scores that were not captured, and the module of each
        self.image: tuple[int, int] | None = None

    @property
    def missed(self) -> dict[str, nn.Module]:
        """Modules whose attention was not captured.

        They took a softmax of scores in a way that is not known, or are called attention and took none.
        """
        missed = {name: self.modules[name] for name in self.unread.values()}
        read = {*missed, *(layer.name for layer in self.calls)}
        silent = {
            name: module
            for name, module in self.seen.items()
            if not any(f"{a}.".startswith(f"{b}.") for path in read for a, b in ((path, name), (name, path)))
        }
        return missed | silent

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers of the latest call of the model, in order. The second call of a module is named `path (2)`."""
        counts: Counter[str] = Counter()
        named = []
        for layer in self.calls:
            counts[layer.name] += 1
            number = counts[layer.name]
            named.append(layer if number == 1 else replace(layer, name=f"{layer.name} ({number})"))
        return tuple(named)

    def watched(self) -> bool:
        """Return whether calls of PyTorch must be watched now: not inside our layers, which report what they mix."""
        return bool(self.running) and not isinstance(self.running[-1][1], Mixing)

    def module(self) -> str:
        """Return the path of the innermost running module."""
        return self.running[-1][0]

    def miss(self, softmax: int) -> None:
        """Count this softmax as missed until `find` is called for it."""
        self.unread[softmax] = self.module()

    def find(self, softmax: int) -> None:
        """Count this softmax as captured."""
        self.unread.pop(softmax, None)

    def place(self, tokens: int) -> tuple[str, Grid | None, int]:
        """Return the path of the innermost running module, and the grid and prefix of its tokens."""
        grid, prefix = token_grid([module for _, module in self.running], self.image, tokens)
        return self.module(), grid, prefix

    def enter(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note that a module's forward begins."""
        if module is self.model:
            self.calls, self.versions, self.running, self.image = [], [], [], pixel_size(args, kwargs)
            self.seen, self.unread = {}, {}
        self.running.append((name, module))
        if "Attention" in type(module).__name__ or name.rpartition(".")[2] in ATTENTION_NAMES:
            self.seen[name] = module

    def leave(self, module: nn.Module, _args: Any, out: Any) -> None:
        """Note that a module's forward ends."""
        if self.running and self.running[-1][1] is module:
            self.running.pop()
        if module is self.model and out is not None:
            self.drop_changed()
            if not self.calls:
                raise UnsupportedError(_nothing_captured(module, self.missed))

    def add(self, layer: Layer) -> None:
        self.calls.append(layer)
        self.versions.append(_versions(layer))

    def drop_changed(self) -> None:
        """Move layers whose q, k or v the model changed in place after their use to those that are missed."""
        unchanged = [layer for layer, then in zip(self.calls, self.versions, strict=True) if _versions(layer) == then]
        for number, layer in enumerate(layer for layer in self.calls if layer not in unchanged):
            self.unread[-1 - number] = layer.name
        self.calls, self.versions = unchanged, [_versions(layer) for layer in unchanged]


def pixel_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Grid | None:
    """Return height and width of the first [B, C, H, W] tensor among a model's arguments."""
    images = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 4)
    return next(((x.shape[2], x.shape[3]) for x in images), None)


def token_grid(running: Sequence[nn.Module], image: Grid | None, tokens: int) -> tuple[Grid | None, int]:
    """Return (grid, prefix) for the tokens of the innermost of the running modules, or (None, 0) if they are no image.

    In windows, the grid is the window's, which timm's Swin keeps on the layer and Hugging Face's on the block around
    it. Otherwise it is pixels / patch size, from timm's `patch_embed` or Hugging Face's `config`, and the tokens that
    are left over are the prefix.
    """
    for module in reversed(running):
        window = _pair(getattr(module, "window_size", None))
        if window is not None and window[0] * window[1] == tokens:
            return window, 0
    patch = next(filter(None, map(_patch_size, running)), None)
    if image is None or patch is None:
        return None, 0
    height, width = (-(-side // by) for side, by in zip(image, patch, strict=True))
    prefix = tokens - height * width
    return ((height, width), prefix) if 0 <= prefix <= MOST_PREFIX else (None, 0)


def _patch_size(model: nn.Module) -> Grid | None:
    embed, config = getattr(model, "patch_embed", None), getattr(model, "config", None)
    return _pair(getattr(embed, "patch_size", None)) or _pair(getattr(config, "patch_size", None))


def _pair(sides: Any) -> Grid | None:
    sides = (sides, sides) if isinstance(sides, int) else tuple(sides) if isinstance(sides, tuple | list) else ()
    return (sides[0], sides[1]) if len(sides) == 2 and all(isinstance(side, int) for side in sides) else None


def _versions(layer: Layer) -> tuple[int | None, ...]:
    return tuple(map(version_of, (layer.q, layer.k, layer.v)))


def _nothing_captured(model: nn.Module, missed: dict[str, nn.Module]) -> str:
    kind = type(model).__name__
    if missed:
        (name, module), more = next(iter(missed.items())), len(missed) - 1
        return (
            f"the attention of {kind} cannot be captured: {name} ({type(module).__name__})"
            f"{f' and {more} more' if more else ''} used neither F.scaled_dot_product_attention nor "
            "softmax(scale q k^T + bias) v written out"
        )
    parts = sorted({type(module).__name__ for module in model.modules() if not any(module.children())})
    return f"{kind} has no attention: it is made of {', '.join(parts[:6])}{', ...' if len(parts) > 6 else ''}"
