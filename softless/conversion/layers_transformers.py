"""The attention layers of a model of transformers: each has the mechanism that `softless.transformers` gives it."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softless.conversion.layers import LABELS, LayerCall, Layers
from softless.conversion.samples import SampleSet
from softless.conversion.stand_ins import Candidate, Replacement
from softless.errors import ArgumentError, UnsupportedError, needs_extra
from softless.functional import attention
from softless.mechanisms import mechanism
from softless.probes.capture import capture
from softless.probes.examination import real_queries
from softless.probes.layer import Layer

SOFTMAX = mechanism("softmax")
HEADS: Sequence[tuple[tuple[str, ...], str]] = (
    (("ForCausalLM", "LMHeadModel"), "perplexity"),
    (("ForMaskedLM",), "masked"),
    (("Classification", "ClassificationWithTeacher"), "accuracy"),
)
SHORTEST, LONGEST = 256, 32768  # tokens


class TransformersLayers(Layers):
    """The layers of softmax attention of a model of transformers."""

    package, has_residual = "transformers", False

    def __init__(self, model: Any):
        with needs_extra("a conversion of this model works on models of transformers", "hf"):
            from transformers import PreTrainedModel

            from softless import transformers as ours
            from softless.transformers.attention import IMPLEMENTATION
        if not isinstance(model, PreTrainedModel):
            raise ArgumentError(
                f"model is a {type(model).__name__} and must be a model of softless, timm (ViT, DeiT, Swin) or "
                "transformers"
            )
        ours.check(model, SOFTMAX)
        self.model: Any = model
        self._ours = ours
        modules, mechanisms = ours.attentions(model), ours.mechanisms_of(model)
        self._numbers = [at for at, current in enumerate(mechanisms) if current.name == "softmax"]
        if not self._numbers:
            names = ", ".join(dict.fromkeys(current.name for current in mechanisms)) or "no attention at all"
            raise UnsupportedError(
                f"{type(model).__name__} has no layer of softmax attention to convert: it has {names}"
            )
        implementation = model.config._attn_implementation
        if len(self._numbers) < len(mechanisms) and implementation != IMPLEMENTATION:
            raise ArgumentError(
                f"attention implementation {implementation!r} ignores the mechanisms that {type(model).__name__} has: "
                f"call model.set_attn_implementation({IMPLEMENTATION!r}) first"
            )
        paths = list(modules)
        self.names = tuple(paths[at] for at in self._numbers)
        self.modules: dict[str, nn.Module] = {path: modules[path] for path in self.names}
        self.is_causal = any(bool(module.is_causal) for module in modules.values())
        self.first, self.kind = model.main_input_name, model.config.model_type
        self.pictures = self.first == "pixel_values"
        self._before = implementation, deepcopy(getattr(model.config, "softless", None))

    def check(self, candidate: Candidate) -> None:
        if candidate.local:
            raise UnsupportedError(
                f"candidate '{candidate.label}' adds a local residual, which models of transformers cannot save: it is "
                "for pictures in models of softless and timm"
            )
        self._ours.check(self.model, candidate.mechanism)

    def new(self, layer: int, candidate: Candidate) -> Replacement:
        like = next(self.model.parameters())
        return Replacement(candidate, self._ours.inputs_for(self.model, candidate.mechanism)).to(
            like.device, like.dtype
        )

    def put(self, layer: int, stand_in: Replacement | None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*do not drop weights")
            chosen = SOFTMAX if stand_in is None else stand_in.mechanism
            self._ours.set_mechanism(self.model, chosen, [self._numbers[layer]])
        if stand_in is not None:
            inputs: Any = self.modules[self.names[layer]].softless
            inputs.load_state_dict(stand_in.inputs.state_dict())

    def restore(self) -> None:
        super().restore()
        implementation, chosen = self._before
        if chosen is None:
            vars(self.model.config).pop("softless", None)
        else:
            self.model.config.softless = deepcopy(chosen)
        self.model.set_attn_implementation(implementation)

    def run(self, batch: SampleSet, *, model: Any = None, **how: Any) -> Any:
        return (model or self.model)(**{name: x for name, x in batch.items() if name != LABELS}, **how)

    def calls(self, batch: SampleSet) -> Iterator[LayerCall]:
        for at, layer, x in self._captured(batch):
            real = None if layer.key_mask is None else real_queries(layer)[:, None, :, None]
            yield LayerCall(at, softmax_output(layer), real, partial(mixed, layer, x))

    def _captured(self, batch: SampleSet) -> Iterator[tuple[int, Layer, Tensor]]:
        """Yield (number, q and k and v, tokens) of each layer on a batch; tokens are what its module reads."""
        read: dict[str, Tensor] = {}

        def keep(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read[name] = args[0] if args else kwargs["hidden_states"]

        with ExitStack() as stack, torch.no_grad():
            for name, module in self.modules.items():
                stack.callback(module.register_forward_pre_hook(partial(keep, name), with_kwargs=True).remove)
            run = stack.enter_context(capture(self.model))
            self.run(batch)
        layers_by_name = {layer.name: layer for layer in run.layers}
        for at, name in enumerate(self.names):
            layer = layers_by_name.get(name)
            if layer is None:
                raise UnsupportedError(f"the attention of {name} cannot be captured, so nothing can be fitted to it")
            if layer.bias is not None:
                raise UnsupportedError(
                    f"{name} adds a bias to its scores or hides keys one by one: no candidate can do that"
                )
            yield at, layer, read[name]

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def check_saving(self) -> None:
        pass

    def learned(self) -> list[nn.Module]:
        attached = (module._modules.get("softless") for module in self.modules.values())
        return [inputs for inputs in attached if inputs is not None]

    @property
    def has_logits(self) -> bool:
        return self.metric({}) != "cosine"

    @property
    def generates(self) -> bool:
        return self.is_causal and hasattr(self.model, "generation_config")

    @property
    def longest(self) -> int:
        return LONGEST if self.most_tokens == sys.maxsize else self.most_tokens

    def generated(self, prompts: Tensor, tokens: int) -> Tensor:
        written: Tensor = self.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, use_cache=True, pad_token_id=0,
        )  # fmt: skip
        return written[:, prompts.shape[1] :]

    @property
    def most_tokens(self) -> int:
        config = self.model.config
        return sys.maxsize if getattr(config, "rope_parameters", None) else int(config.max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def channels(self) -> int:
        return int(self.model.config.num_channels)

    @property
    def classes(self) -> int:
        return int(self.model.config.num_labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.metric({}), "cosine")))

    def metric(self, samples: SampleSet) -> str:
        kind = type(self.model).__name__
        return next((metric for ends, metric in HEADS if kind.endswith(ends)), "cosine")

    def tokens(self, samples: SampleSet) -> int:
        """Return the tokens of a sample: of a text its own, of an image about as many as a patch of 16 pixels gives."""
        first = next(iter(samples.values()))
        return int(first.shape[1]) if first.ndim == 2 else max(1, int(first[0, 0].numel()) // 256)

    def lengths(self, samples: SampleSet) -> Mapping[int, Callable[[], SampleSet]]:
        """Return texts that double, up to where learned positions end; one image."""
        if self.pictures:
            return {self.tokens(samples): lambda: {self.first: samples[self.first][:1].to(self.device)}}
        most = self.longest if self.longest == LONGEST else self.longest - 2  # RoBERTa's positions begin at 2
        counts = [SHORTEST << step for step in range(8) if SHORTEST << step <= most]
        return {tokens: partial(self._text, tokens) for tokens in counts or [most]}

    def _text(self, tokens: int) -> SampleSet:
        drawn = torch.randint(0, self.model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        return {self.first: drawn.to(self.device)}


def softmax_output(layer: Layer) -> Tensor:
    """Return what the softmax gives, without its matrix of weights."""
    mask, causal = layer.key_mask, layer.is_causal
    return attention(layer.q, layer.k, layer.v, "softmax", key_mask=mask, is_causal=causal, scale=layer.scale)


def mixed(layer: Layer, x: Tensor, stand_in: Replacement) -> Tensor:
    """Return what a stand-in gives."""
    causal, mask = layer.is_causal, layer.key_mask
    tensors = stand_in.inputs(x)
    return attention(layer.q, layer.k, layer.v, stand_in.mechanism, key_mask=mask, is_causal=causal, inputs=tensors)
