"""Capture: run a model as it is, and see every attention call of it.

    with capture(model) as captured:
        model(images)
    captured.layers                         one `Layer` a call, in the order they ran

Outputs are the model's own, to the bit. With `edit`, every layer's output is what the edited weights give instead:

    with capture(model, edit=lambda layer, weights: weights.roll(1, -1)): ...

Our models are known by their layers; timm's, Hugging Face's and others by the calls of PyTorch that softmax attention
is made of (`adapters.watching`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softless.errors import UnsupportedError
from softless.nn.mixing import Mixing
from softless.probes.adapters.ours import mixing_kept
from softless.probes.adapters.picture import picture, pixels
from softless.probes.adapters.trails import version_of
from softless.probes.adapters.watching import Watch
from softless.probes.layer import Layer

CALLED = ("attn", "attention", "self_attn", "self_attention")
Edit = Callable[[Layer, Tensor], Tensor]  # a layer and its weights [B, C, N, M]; the weights to use


class Captured:
    """What a model's latest forward did."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[Layer] = []
        self.stamps: list[tuple[int | None, ...]] = []  # versions of each one's q, k and v
        self.modules = dict(model.named_modules())
        self.running: list[tuple[str, nn.Module]] = []  # modules that are in their forward, the innermost last
        self.seen: dict[str, nn.Module] = {}  # modules that ran and are called attention
        self.unread: dict[int, str] = {}  # softmaxes of scores, and the module of each; those captured are gone
        self.image: tuple[int, int] | None = None

    @property
    def missed(self) -> dict[str, nn.Module]:
        """Modules whose attention was not captured.

        They took a softmax of scores in a way that is not known, or are called attention and took none.
        """
        missed = {name: self.modules[name] for name in self.unread.values()}
        found = {*missed, *(layer.name for layer in self.calls)}
        silent = {
            name: module
            for name, module in self.seen.items()
            if not any(f"{one}.".startswith(f"{other}.") for at in found for one, other in ((at, name), (name, at)))
        }
        return missed | silent

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Of the latest call of the model, in order. A module that ran twice has two, the second named `path (2)`."""
        counts: Counter[str] = Counter()
        named = []
        for layer in self.calls:
            counts[layer.name] += 1
            again = counts[layer.name]
            named.append(layer if again == 1 else replace(layer, name=f"{layer.name} ({again})"))
        return tuple(named)

    def watched(self) -> bool:
        """Whether a module runs whose attention must be found out: not ours, which says what it mixes."""
        return bool(self.running) and not isinstance(self.running[-1][1], Mixing)

    def module(self) -> str:
        """The innermost module's path."""
        return self.running[-1][0]

    def miss(self, softmax: int) -> None:
        """Attention with this softmax counts as missed until it is found."""
        self.unread[softmax] = self.module()

    def find(self, softmax: int) -> None:
        self.unread.pop(softmax, None)

    def where(self, tokens: int) -> dict[str, Any]:
        """The innermost module's path, and how its tokens lie in the picture."""
        grid, prefix = picture([module for _, module in self.running], self.image, tokens)
        return {"name": self.running[-1][0], "grid": grid, "prefix": prefix}

    def enter(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if module is self.model:
            self.calls, self.stamps, self.running, self.image = [], [], [], pixels(args, kwargs)
            self.seen, self.unread = {}, {}
        self.running.append((name, module))
        if "Attention" in type(module).__name__ or name.rpartition(".")[2] in CALLED:
            self.seen[name] = module

    def leave(self, module: nn.Module, _args: Any, out: Any) -> None:
        if self.running and self.running[-1][1] is module:
            self.running.pop()
        if module is self.model and out is not None:
            self.drop_changed()
            if not self.calls:
                raise UnsupportedError(nothing_found(module, self.missed))

    def add(self, layer: Layer) -> None:
        self.calls.append(layer)
        self.stamps.append(stamp(layer))

    def drop_changed(self) -> None:
        """Layers whose q, k or v the model changed in place after it used them are missed."""
        kept = [layer for layer, was in zip(self.calls, self.stamps, strict=True) if stamp(layer) == was]
        for number, layer in enumerate(layer for layer in self.calls if layer not in kept):
            self.unread[-1 - number] = layer.name
        self.calls, self.stamps = kept, [stamp(layer) for layer in kept]


@contextmanager
def capture(model: nn.Module, *, edit: Edit | None = None) -> Iterator[Captured]:
    """Within, every call of the model is captured; afterwards the model is as it was.

    >>> import torch, softless
    >>> from softless.probes.capture import capture
    >>> model = softless.create_model("deit_tiny", img_size=32).eval()
    >>> with torch.no_grad(), capture(model) as captured:
    ...     logits = model(torch.randn(1, 3, 32, 32))
    >>> layer = captured.layers[0]
    >>> layer.name, layer.q.shape, layer.grid, layer.prefix
    ('blocks.0.attn', torch.Size([1, 3, 5, 64]), (2, 2), 1)

    A compiled model runs uncompiled meanwhile. Raises `UnsupportedError` where a call of the model used no attention
    that is known.
    """
    captured = Captured(model)

    def keep(layer: Layer) -> Tensor | None:
        captured.add(layer)
        if edit is None:
            return None
        out = layer.combined(edit(layer, layer.weights()))
        return out if layer.local is None else out + layer.local

    with ExitStack() as stack:
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code makes no calls to watch
        for name, module in model.named_modules():
            if module is not model and is_leaf_of_torch(module):
                continue
            stack.callback(module.register_forward_pre_hook(partial(captured.enter, name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(captured.leave, always_call=True).remove)
        stack.enter_context(mixing_kept(model, keep))
        stack.enter_context(Watch(keep, captured))
        yield captured


def stamp(layer: Layer) -> tuple[int | None, ...]:
    return tuple(map(version_of, (layer.q, layer.k, layer.v)))


def is_leaf_of_torch(module: nn.Module) -> bool:
    """A layer of PyTorch's without parts has no attention inside, and one with hooks may be computed another way."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())


def nothing_found(model: nn.Module, missed: dict[str, nn.Module]) -> str:
    """Why there is nothing to look at, and what there is."""
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
