"""Capture: run a model as it is and record every attention call.

    with capture(model) as captured:
        model(images)
    captured.layers                         one `Layer` per call, in the order they ran

The model's outputs stay the same, to the bit. With `edit`, each layer's output is computed from edited weights:

    with capture(model, edit=lambda layer, weights: weights.roll(1, -1)): ...

Layers of this library report what they mix. In timm's, Hugging Face's and other models, `watching` recognizes softmax
attention by the PyTorch calls that it is made of.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softless.algebra.neighbors import local_residual
from softless.backends import hide
from softless.errors import UnsupportedError
from softless.nn.global_tokens import LongformerAttention
from softless.nn.mixing import AttentionCall, Grid, Heads, Mixing, as_heads
from softless.probes.layer import Captured, Keep, Layer
from softless.probes.watching import AttentionWatcher

Edit = Callable[[Layer, Tensor], Tensor]  # takes a layer and its weights [B, C, N, M], returns the weights to use


@contextmanager
def capture(model: nn.Module, *, edit: Edit | None = None) -> Iterator[Captured]:
    """Record every attention call of a model inside the block; afterwards the model is as it was.

    Args:
        model: any `nn.Module`, ours or not. A compiled model runs uncompiled inside the block.
        edit: takes a `Layer` and its weights [B, C, N, M] and returns the weights to use instead. Default: None, which
            changes nothing.

    Raises `UnsupportedError` if a call of the model used no attention that can be captured.

    >>> import torch, softless
    >>> from softless.probes.capture import capture
    >>> model = softless.create_model("deit_tiny", img_size=32).eval()
    >>> with torch.no_grad(), capture(model) as captured:
    ...     logits = model(torch.randn(1, 3, 32, 32))
    >>> layer = captured.layers[0]
    >>> layer.name, layer.q.shape, layer.grid, layer.prefix
    ('blocks.0.attn', torch.Size([1, 3, 5, 64]), (2, 2), 1)
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
            # PyTorch's leaf layers hold no attention, and hooks on them may change how they are computed.
            if module is not model and type(module).__module__.startswith("torch.nn.") and not any(module.children()):
                continue
            stack.callback(module.register_forward_pre_hook(partial(captured.enter, name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(captured.leave, always_call=True).remove)
        stack.enter_context(_own_layers(model, keep))
        stack.enter_context(AttentionWatcher(keep, captured))
        yield captured


@contextmanager
def _own_layers(model: nn.Module, keep: Keep) -> Iterator[None]:
    """Give every layer of this library to `keep` as it runs."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Mixing)}
    before = {name: vars(module)["mix"] for name, module in layers.items() if "mix" in vars(module)}
    for name, module in layers.items():
        module.mix = partial(_mix, name, module, module.mix, keep)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, module in layers.items():
            del module.mix
            if name in before:
                module.mix = before[name]  # type: ignore[method-assign]


def _mix(
    name: str,
    module: Mixing,
    mix: Callable[..., Tensor],
    keep: Keep,
    qkv: Tensor | Heads,
    grid: Grid | None = None,
    **options: Any,
) -> Tensor:
    call, cut = module.as_call(qkv, grid, **options)
    edited = keep(_own_layer(name, module, call))
    if edited is None:
        return mix(qkv, grid, **options)
    out = edited.transpose(1, 2).flatten(2)  # [B, N, C]
    return out if cut is None else cut.join(out)


def _own_layer(name: str, module: Mixing, call: AttentionCall) -> Layer:
    if isinstance(module, LongformerAttention):
        raise UnsupportedError(
            f"'{name}' is a LongformerAttention, which has two sets of q, k and v, and a probe reads one set: "
            "softless.nn.maps returns its weights"
        )
    q, k, v = as_heads(call.qkv)
    taps, _ = module.taps(call.source, call.grid, call.key_mask, call.is_causal)
    local, prefix = None, 0
    if call.grid is not None:
        prefix = q.shape[2] - call.grid[0] * call.grid[1]
        if taps is not None:
            local = local_residual(hide(v, call.key_mask), taps, call.grid, prefix)
    return Layer(
        name,
        q,
        k,
        v,
        module.mechanism,
        bias=None if call.bias is None else call.bias[(None,) * (4 - call.bias.ndim)],
        key_mask=call.key_mask,
        is_causal=call.is_causal,
        inputs=module.inputs(call.source) or None,
        grid=call.grid and (call.grid[0], call.grid[1]),
        prefix=prefix,
        local=local,
    )
