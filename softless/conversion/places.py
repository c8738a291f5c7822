"""Where attention sits in a model of images, ours or timm's, and how a layer there is replaced.

A replaced layer keeps the projections of the original, `qkv` and `proj`, and has the tensors of its stand-in beside
them. Swin's windows stay; its bias by relative position goes, because no linear mechanism takes one. So does the roll
of shifted windows, which hides pairs of tokens: the windows then reach over the border instead (softless.nn.windows).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import isqrt
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from softless.conversion.stand_ins import Candidate, Replacement
from softless.errors import ArgumentError, UnsupportedError
from softless.models.backbone import Backbone
from softless.nn import Attention
from softless.nn.inputs import Inputs
from softless.nn.mixing import Mixing

Arguments = tuple[Any, ...]
Kind = TypeVar("Kind", bound=Attention)
KEPT = "qkv", "q_norm", "k_norm", "proj", "proj_drop", "qk_conv"  # of the original
OWN, TIMM = "softless", "timm"  # where a model of images comes from


class AttentionPlace(ABC):
    """One attention layer in a model of images: how it is called, and how it is replaced."""

    def __init__(self, path: str, parent: Any, original: Any):
        self.path, self.parent, self.original = path, parent, original
        self.name = path.rpartition(".")[2]

    @property
    def sizes(self) -> tuple[int, int]:
        """The channels and the heads."""
        return self.original.qkv.in_features, self.original.num_heads

    def listen(self, keep: Callable[[Arguments], None]) -> RemovableHandle:
        """Give the arguments of each call to `keep`."""
        return self.original.register_forward_pre_hook(lambda _module, args: keep(args))

    def run(self, *args: Any) -> Tensor:
        """Run what is in the place now."""
        return getattr(self.parent, self.name)(*args)

    def new(self, candidate: Candidate, like: Tensor) -> Replacement:
        """Return a candidate in the sizes of the layer, not fitted yet, with the dtype and the device of a tensor."""
        dim, heads = self.sizes
        return Replacement(candidate, Inputs(candidate.mechanism, dim, heads, heads)).to(like.device, like.dtype)

    def put(self, stand_in: Replacement | None) -> None:
        setattr(self.parent, self.name, self.original if stand_in is None else self.linear(stand_in))

    @abstractmethod
    def linear(self, stand_in: Replacement) -> Attention:
        """Return the layer with a stand-in."""


class OwnPlace(AttentionPlace):
    """A layer of ours. It is called with tokens and their grid."""

    def linear(self, stand_in: Replacement) -> Attention:
        old = self.original
        attention = like(old, Attention, stand_in, kv_heads=old.kv_heads, shifted=old.shifted, window=old.window)
        attention.rotary = old.rotary
        return attention


class TimmPlace(AttentionPlace):
    """A layer of timm's ViT and DeiT. It is called with tokens, and knows the grid of the model."""

    def __init__(self, path: str, parent: Any, original: Any, grid: tuple[int, int], prefix: int):
        super().__init__(path, parent, original)
        self.grid, self.prefix = grid, prefix

    def linear(self, stand_in: Replacement) -> Attention:
        attention = like(self.original, TokenAttention, stand_in)
        attention.grid, attention.prefix = self.grid, self.prefix
        return attention


class TimmWindowPlace(TimmPlace):
    """A layer of timm's Swin. Its block cuts windows; with a stand-in, it passes the full picture as one window."""

    def __init__(self, path: str, parent: Any, original: Any):
        super().__init__(path, parent, original, parent.input_resolution, 0)
        self.cut = {name: getattr(parent, name) for name in ("window_size", "window_area", "shift_size", "attn_mask")}

    def listen(self, keep: Callable[[Arguments], None]) -> RemovableHandle:
        return self.parent.norm1.register_forward_hook(lambda _module, _args, out: keep((out,)))

    def run(self, *args: Any) -> Tensor:
        return self.parent._attn(*args)

    def put(self, stand_in: Replacement | None) -> None:
        super().put(stand_in)
        height, width = self.grid
        whole = {
            "window_size": (height, width), "window_area": height * width, "shift_size": (0, 0), "attn_mask": None
        }  # fmt: skip
        for name, value in (self.cut if stand_in is None else whole).items():
            setattr(self.parent, name, value)

    def linear(self, stand_in: Replacement) -> Attention:
        attention = like(
            self.original, TokenAttention, stand_in, window=self.cut["window_size"], shifted=any(self.cut["shift_size"])
        )
        attention.grid, attention.prefix = self.grid, self.prefix
        return attention


class TokenAttention(Attention):
    """Attention in a block of timm, which passes tokens without their grid."""

    grid: tuple[int, int]
    prefix: int

    def forward(  # type: ignore[override]  # as timm's blocks call it
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, mask: None = None
    ) -> Tensor:
        patches = x.shape[1] - self.prefix
        if self.grid[0] * self.grid[1] == patches:
            return super().forward(x, self.grid, attn_mask=attn_mask, is_causal=is_causal)
        side = isqrt(max(patches, 0))
        if side * side != patches:
            raise ArgumentError(
                f"a picture of {patches} patches is neither {self.grid[0]} x {self.grid[1]}, as the model was made "
                "for, nor a square"
            )
        return super().forward(x, (side, side), attn_mask=attn_mask, is_causal=is_causal)


def like(
    original: Any, kind: type[Kind], stand_in: Replacement, *, kv_heads: int | None = None,
    window: tuple[int, int] | None = None, shifted: bool = False,
) -> Kind:  # fmt: skip
    """Return attention that shares the projections of another, with the tensors of a stand-in."""
    dim, heads, candidate = original.qkv.in_features, original.num_heads, stand_in.candidate
    with torch.device("meta"):  # its own projections are dropped
        attention = kind(
            dim, heads, candidate.mechanism, candidate.local, kv_heads=kv_heads, shifted=shifted,
            window=None if window is None else max(window),
        )  # fmt: skip
    attention.window = window
    for name in KEPT:
        if getattr(original, name, None) is not None:
            setattr(attention, name, getattr(original, name))
    norms = (attention.q_norm, attention.k_norm)
    attention.norms_or_rotates = bool(
        getattr(original, "norms_or_rotates", not all(isinstance(norm, nn.Identity) for norm in norms))
    )
    attention.inputs, attention.residual = stand_in.inputs, stand_in.residual
    return attention.train(original.training)


def places_of(model: nn.Module) -> tuple[Sequence[AttentionPlace], int]:
    """Return the layers of softmax attention of a model of images, and the class tokens before its picture."""
    from timm.models import swin_transformer, vision_transformer

    if isinstance(model, Backbone):
        layers = [(path, part) for path, part in model.named_modules() if isinstance(part, Mixing)]
        return _own(model, layers), getattr(model, "num_prefix_tokens", 0)
    parts = dict(model.named_modules())
    if isinstance(model, vision_transformer.VisionTransformer):
        grid = tuple(model.patch_embed.grid_size)
        return [
            TimmPlace(path, parts[path.rpartition(".")[0]], part, grid, model.num_prefix_tokens)
            for path, part in parts.items()
            if isinstance(part, vision_transformer.Attention) and _plain(path, part)
        ], model.num_prefix_tokens
    if isinstance(model, swin_transformer.SwinTransformer):
        return [
            TimmWindowPlace(path, parts[path.rpartition(".")[0]], part)
            for path, part in parts.items()
            if isinstance(part, swin_transformer.WindowAttention) and _whole(path, parts[path.rpartition(".")[0]])
        ], 0
    raise UnsupportedError(
        f"softless does not know how to convert {type(model).__name__}: of models of images it knows its own, and "
        "VisionTransformer (ViT, DeiT) and SwinTransformer of timm"
    )


def _own(model: Backbone, layers: Sequence[tuple[str, Mixing]]) -> list[AttentionPlace]:
    """Return the layers of ours that are plain softmax, in the full picture or in windows."""
    from softless.models.swin import WindowAttention

    parts, places, others = dict(model.named_modules()), list[AttentionPlace](), list[str]()
    for path, part in layers:
        if part.mechanism.name != "softmax":
            continue
        if type(part) in (Attention, WindowAttention) and part.residual is None:
            places.append(OwnPlace(path, parts[path.rpartition(".")[0]], part))
        else:
            others.append(f"{path} ({type(part).__name__})")
    if not places and others:
        raise UnsupportedError(
            f"{type(model).__name__} has no softmax attention that can be converted: {others[0]} and "
            f"{len(others) - 1} more see a part of the keys"
        )
    return places


def _plain(path: str, part: Any) -> bool:
    """Return True, or raise if timm's attention has more than heads and norms."""
    extra = {
        "a gate": part.gate is not None, "a norm of its output": not isinstance(part.norm, nn.Identity),
        "heads that do not fill its channels": part.attn_dim != part.qkv.in_features,
    }  # fmt: skip
    if odd := [name for name, has in extra.items() if has]:
        raise UnsupportedError(f"{path} has {odd[0]}, and a converted layer would lose it")
    return True


def _whole(path: str, block: Any) -> bool:
    """Return True, or raise if a block of timm's Swin takes pictures of several sizes."""
    if block.dynamic_mask or block.always_partition:
        raise UnsupportedError(f"{path} takes pictures of several sizes, and a converted layer takes one")
    return True
