"""The attention layers of a model of transformers: give one of them a mechanism, take it back, save the model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from softless.errors import ArgumentError, UnsupportedError, needs_extra
from softless.mechanisms import Mechanism, mechanism
from softless.nn.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOFTMAX = mechanism("softmax")


class Layers:
    """The layers of softmax attention in a model, which `put` gives another mechanism and `restore` gives back.

    names       paths of their modules, in order
    is_causal   whether a token sees only those before it
    """

    def __init__(self, model: "PreTrainedModel"):
        with needs_extra("a conversion works on models of transformers", "hf"):
            from transformers import PreTrainedModel

            from softless import transformers as ours
        if not isinstance(model, PreTrainedModel):
            raise ArgumentError(f"model is a {type(model).__name__} and must be a model of transformers")
        ours.check(model, SOFTMAX)
        self.model, self._ours = model, ours
        modules, held = ours.attentions(model), ours.mechanisms_of(model)
        self._numbers = [at for at, made in enumerate(held) if made.name == "softmax"]
        if not self._numbers:
            names = ", ".join(dict.fromkeys(made.name for made in held)) or "no attention at all"
            raise UnsupportedError(
                f"{type(model).__name__} has no layer of softmax attention to convert: it has {names}"
            )
        paths = list(modules)
        self.names = tuple(paths[at] for at in self._numbers)
        self.modules: dict[str, nn.Module] = {path: modules[path] for path in self.names}
        self.is_causal = any(bool(module.is_causal) for module in modules.values())
        self._before = model.config._attn_implementation, deepcopy(getattr(model.config, "softless", None))

    def __len__(self) -> int:
        return len(self.names)

    def check(self, made: Mechanism) -> None:
        """Raise if the model cannot have this mechanism."""
        self._ours.check(self.model, made)

    def inputs(self, made: Mechanism) -> Inputs:
        """Return new inputs of a mechanism, in the sizes of a layer."""
        like = next(self.model.parameters())
        return self._ours.inputs_for(self.model, made).to(like.device, like.dtype)

    def put(self, layer: int, inputs: Inputs | None) -> None:
        """Give a layer a mechanism with the inputs it learned, or its softmax back."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*do not drop weights")
            made = SOFTMAX if inputs is None else inputs.mechanism
            self._ours.set_mechanism(self.model, made, [self._numbers[layer]])
        if inputs is not None:
            held: Any = self.modules[self.names[layer]].softless
            held.load_state_dict(inputs.state_dict())

    @contextmanager
    def having(self, chosen: dict[int, Inputs]) -> Iterator[None]:
        """Give some layers a mechanism inside this context."""
        try:
            for layer, inputs in chosen.items():
                self.put(layer, inputs)
            yield
        finally:
            for layer in chosen:
                self.put(layer, None)

    def restore(self) -> None:
        """Give every layer its softmax back. The model is as it was, to the bit."""
        for layer in range(len(self)):
            self.put(layer, None)
        implementation, chosen = self._before
        if chosen is None:
            vars(self.model.config).pop("softless", None)
        else:
            self.model.config.softless = deepcopy(chosen)
        self.model.set_attn_implementation(implementation)

    def save(self, folder: Path) -> None:
        """Write config.json and the weights into a folder."""
        self.model.save_pretrained(folder)
