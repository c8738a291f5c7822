"""Linear attention inside Hugging Face transformers. Importing this module registers it, and nothing else does.

    import softless.transformers
    model = AutoModelForCausalLM.from_pretrained(folder)
    softless.transformers.set_mechanism(model, "linear", layers=range(4, 12))
    model.generate(**tokens)                # states of constant size in those layers, keys and values in the others
    model.save_pretrained(folder)           # config.softless travels with the weights, and so do learned inputs

The attention implementation is called "softless". Layers without a mechanism of their own keep softmax.
"""

import warnings
from collections.abc import Iterable
from dataclasses import fields
from functools import wraps
from typing import Any

from torch import nn

from softless.errors import ArgumentError, SoftlessError, UnsupportedError, needs_extra
from softless.mechanisms import PLAIN, Mechanism, resolve
from softless.mechanisms import mechanism as make
from softless.nn.inputs import Inputs

with needs_extra("softless.transformers works inside transformers", "hf"):
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from softless.transformers.attention import IMPLEMENTATION, attend, give_inputs, give_pack, mask, no_weights
from softless.transformers.cache import StateLayer

__all__ = ["ARCHITECTURES", "StateLayer", "attentions", "check", "inputs_for", "mechanisms_of", "set_mechanism"]

CAUSAL = "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"
ENCODERS = "bert", "deit", "roberta", "vit"
BEFORE = "_softless_before"  # the attention implementation before ours
ARCHITECTURES = (*CAUSAL, *ENCODERS)


def set_mechanism(
    model: PreTrainedModel, mechanism: str | Mechanism, layers: Iterable[int] | None = None, **options: Any
) -> None:
    """Give layers of a transformers model another attention, in place.

    >>> import softless.transformers
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    >>> softless.transformers.set_mechanism(model, "linear", layers=[1, 2], phi="relu")
    >>> [mechanism.name for mechanism in softless.transformers.mechanisms_of(model)]
    ['softmax', 'linear', 'linear']

    Args:
        model: A model of transformers, with or without a head; `ARCHITECTURES` lists the types.
        mechanism: A name from `list_mechanisms()`, or `mechanism(name, **options)`. "softmax" restores a layer. In a
            causal model it must carry a state.
        layers: Numbers of layers, the first is 0. Default: None, all layers.
        options: Options of a mechanism that is given by its name.

    What a mechanism learns becomes a parameter of the model: `...self_attn.softless.NAME` in its checkpoint.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"model is a {type(model).__name__} and must be a model of transformers")
    if isinstance(mechanism, Mechanism) and options:
        raise ArgumentError(f"options {', '.join(options)} were passed beside a mechanism, which has its own")
    resolved = resolve(mechanism) if isinstance(mechanism, Mechanism) else make(mechanism, **options)
    check(model, resolved)
    count = len(attentions(model))
    wanted = range(count) if layers is None else sorted({_layer(index, count) for index in _several(layers)})
    entry = None if resolved.name == "softmax" and resolved == make("softmax") else _entry(resolved)
    _warn_of_dropout(model, resolved)
    chosen = dict(getattr(model.config, "softless", None) or {})
    for index in wanted:
        chosen.pop(str(index), None)
        if entry is not None:
            chosen[str(index)] = entry
    model.config.softless = {key: chosen[key] for key in sorted(chosen, key=int)}
    equip(model)


def mechanisms_of(model: PreTrainedModel) -> list[Mechanism]:
    """Return the mechanism of every layer, in order."""
    own = [attention._modules.get("softless") for attention in attentions(model).values()]
    return [make("softmax") if inputs is None else inputs.mechanism for inputs in own]  # type: ignore[misc]


def equip(model: PreTrainedModel) -> None:
    """Give every layer the mechanism that `config.softless` names, unless it has it."""
    if getattr(model.config, "softless", None) is None:
        return
    parts = attentions(model)
    chosen = _chosen(model, len(parts))
    for index, attention in enumerate(parts.values()):
        wanted, inputs = chosen.get(index), attention._modules.get("softless")
        if wanted != getattr(inputs, "mechanism", None):
            _hold(attention, wanted, model)
    base = model.base_model
    for hook in (no_weights, give_pack):
        if hook not in base._forward_pre_hooks.values():
            base.register_forward_pre_hook(hook, with_kwargs=True)
    _switch(model, ours=bool(chosen))


def _switch(model: PreTrainedModel, *, ours: bool) -> None:
    """Let a model attend with our implementation, or with the one that it had before.

    The latter is kept in the model without a head, which its parts share, and not in the config, which is saved.
    """
    base: Any = model.base_model
    before, now = getattr(base, BEFORE, None), model.config._attn_implementation
    if ours:
        if now != IMPLEMENTATION:
            setattr(base, BEFORE, now)
        model.set_attn_implementation(IMPLEMENTATION)
    elif now == IMPLEMENTATION and before is not None:
        model.set_attn_implementation(before)


def _chosen(model: PreTrainedModel, count: int) -> dict[int, Mechanism]:
    """Return the mechanisms that `config.softless` names, by layer."""
    chosen = model.config.softless
    try:
        mechanisms = {int(index): make(entry["name"], **entry["options"]) for index, entry in chosen.items()}
    except SoftlessError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArgumentError(
            f'config.softless is {chosen!r} and must be {{"LAYER": {{"name": NAME, "options": {{...}}}}}}'
        ) from error
    for index, mechanism in mechanisms.items():
        check(model, mechanism)
        _layer(index, count)
    return mechanisms


def _hold(attention: nn.Module, wanted: Mechanism | None, model: PreTrainedModel) -> None:
    """Put a mechanism with its inputs into an attention module, or take it out."""
    attention._modules.pop("softless", None)
    if wanted is None:
        return
    like = next(attention.parameters())
    attention.softless = inputs_for(model, wanted).train(attention.training).to(like.device, like.dtype)
    if give_inputs not in attention._forward_pre_hooks.values():
        attention.register_forward_pre_hook(give_inputs, with_kwargs=True)


def inputs_for(model: PreTrainedModel, mechanism: Mechanism) -> Inputs:
    """Return new inputs of a mechanism, in the sizes of one layer of a model."""
    heads, dim = model.config.num_attention_heads, model.config.hidden_size
    head_dim = getattr(model.config, "head_dim", None) or dim // heads
    return Inputs(mechanism, dim, heads, getattr(model.config, "num_key_value_heads", None) or heads, head_dim=head_dim)


def attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return every self-attention module by its path, in order: transformers says of each whether it is causal."""
    parts = model.named_modules()
    return {path: part for path, part in parts if hasattr(part, "is_causal") and not isinstance(part, PreTrainedModel)}


def check(model: PreTrainedModel, mechanism: Mechanism) -> None:
    """Raise if this model cannot have this mechanism."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedError(
            f"softless does not know architecture {config.model_type!r}: it knows {', '.join(ARCHITECTURES)}"
        )
    if getattr(config, "add_cross_attention", False) or getattr(config, "reorder_and_upcast_attn", False):
        option = "add_cross_attention" if getattr(config, "add_cross_attention", False) else "reorder_and_upcast_attn"
        raise UnsupportedError(f"the model has {option}=True, and softless replaces self-attention without it")
    causal = any(attention.is_causal for attention in attentions(model).values())
    lack = mechanism.lacks(causal)
    if causal and mechanism.name != "softmax" and not mechanism.carries_state:
        decode = ", ".join(name for name, plain in PLAIN.items() if plain.carries_state)
        raise UnsupportedError(
            f"{type(model).__name__} is causal, and mechanism '{mechanism.name}' "
            f"{lack or 'has no state to decode from'}; with their defaults, these decode: {decode}"
        )
    if mechanism.reads_grid and mechanism.needs_grid:
        raise UnsupportedError(
            f"mechanism '{mechanism.name}' needs a picture, and transformers passes tokens without one"
        )
    if lack is not None:
        raise UnsupportedError(f"{type(model).__name__} is not causal, and mechanism '{mechanism.name}' {lack}")


def _several(layers: Any) -> Iterable[Any]:
    if isinstance(layers, Iterable) and not isinstance(layers, str):
        return layers
    raise ArgumentError(f"layers is {layers!r} and must be a list of numbers, such as [0, 1]")


def _layer(index: Any, count: int) -> int:
    if isinstance(index, bool) or not hasattr(index, "__index__") or not 0 <= int(index) < count:
        raise ArgumentError(f"layer {index!r} does not exist: the model has layers 0 to {count - 1}")
    return int(index)


def _entry(mechanism: Mechanism) -> dict[str, Any]:
    """Return a mechanism as config.json holds it."""
    options = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}
    unsaved = [name for name, value in options.items() if callable(value)]
    if unsaved:
        raise UnsupportedError(
            f"{unsaved[0]} of mechanism '{mechanism.name}' is a function, which no config.json can hold"
        )
    return {"name": mechanism.name, "options": options}


def _warn_of_dropout(model: PreTrainedModel, mechanism: Mechanism) -> None:
    names = "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"
    for name in names:
        if mechanism.family != "scored" and getattr(model.config, name, None):
            warnings.warn(
                f"{name} is {getattr(model.config, name)}, and layers with '{mechanism.name}' do not drop weights: "
                "they have none to drop",
                stacklevel=3,
            )


def _also(name: str, step: Any) -> None:
    """Let a method of all models also take a step of ours, once."""
    before = getattr(PreTrainedModel, name)
    if getattr(before, "softless", False):
        return

    @wraps(before)
    def after(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        result = before(self, *args, **kwargs)
        step(self, *args)
        return result

    after.softless = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, after)


def _initialize(_model: PreTrainedModel, module: nn.Module, *_: Any) -> None:
    """Initialize what a checkpoint of the model without the mechanism did not hold."""
    if isinstance(module, Inputs):
        for name, parameter in module.named_parameters(recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                module.mechanism.initialize(name, parameter.data)


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, mask)
_also("post_init", equip)  # from_pretrained builds a model from its config, and then loads its weights
_also("_initialize_weights", _initialize)
