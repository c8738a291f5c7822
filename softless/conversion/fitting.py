"""Fit what candidates learn to the outputs of the softmax, layer by layer, while the model reads its data once.

    batch -> model -> q, k, v of each layer -> o, what the softmax gave -> one step of Adam on |o' - o|^2 / |o|^2

A batch is dropped before the next one comes, so memory depends on the size of a batch and not on the data. Candidates
that learn nothing take no steps. The last batches are not learned from: they measure the error of every candidate, and
how wide the scores are, which the probe would rank layers by.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softless.conversion.layers import Layers
from softless.conversion.samples import SampleSet, batches, count
from softless.errors import UnsupportedError
from softless.functional import attention
from softless.io import checkpoint
from softless.mechanisms import Mechanism
from softless.nn.inputs import Inputs
from softless.probes.capture import capture
from softless.probes.examination import real_queries
from softless.probes.layer import Layer
from softless.probes.score_range import spread

RATE, STEPS = 1e-2, 40
SAVE_EVERY, PROBED = 10, 4  # steps; batches whose scores are probed
Advance = Callable[[str, float], None]


class Fitted(NamedTuple):
    """The best candidate of one layer, and the relative error of the output of each."""

    name: str
    inputs: Inputs | None  # None if no candidate has a finite error
    errors: dict[str, float | None]
    first_order_error: float  # what the range probe says


class Fitting:
    """The candidates of every layer, and their optimizers."""

    def __init__(self, layers: Layers, candidates: Mapping[str, Mechanism], steps: int, seed: int):
        self.layers, self.steps, self.done = layers, steps, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inputs = [{name: layers.inputs(made) for name, made in candidates.items()} for _ in layers.names]
        self.learned = [
            {name: torch.optim.Adam(held.parameters(), RATE) for name, held in of.items() if [*held.parameters()]}
            for of in self.inputs
        ]

    def step(self, batch: SampleSet) -> None:
        """Take one step of Adam with every candidate that learns."""
        for at, layer, x in captured(self.layers, batch):
            right, real = softmax_output(layer), real_queries(layer)
            for name, adam in self.learned[at].items():
                for group in adam.param_groups:
                    group["lr"] = RATE * (1 - self.done / self.steps)
                adam.zero_grad()
                with torch.enable_grad():
                    error = relative(mixed(layer, self.inputs[at][name], x), right, real)
                    error.backward()
                if torch.isfinite(error):
                    adam.step()
        self.done += 1

    @torch.no_grad()
    def errors(self, batch: SampleSet) -> list[dict[str, float]]:
        """Return the error of every candidate of every layer."""
        found: list[dict[str, float]] = []
        for at, layer, x in captured(self.layers, batch):
            right, real = softmax_output(layer), real_queries(layer)
            found.append(
                {name: float(relative(mixed(layer, held, x), right, real)) for name, held in self.inputs[at].items()}
            )
        return found

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return everything a later process needs to go on: parameters, and the moments of Adam."""
        parts: dict[str, dict[str, Tensor]] = {"inputs": {}, "adam": {}}
        for at, of in enumerate(self.inputs):
            for number, (name, held) in enumerate(of.items()):
                here = f"{at}.{number}"
                parts["inputs"] |= {f"{here}.{key}": x.detach() for key, x in held.state_dict().items()}
                if name in self.learned[at]:
                    state = self.learned[at][name].state_dict()["state"]
                    parts["adam"] |= {f"{here}.{i}.{key}": x for i, one in state.items() for key, x in one.items()}
        return parts

    def load(self, parts: Mapping[str, Mapping[str, Tensor]], done: int) -> None:
        """Go on after `done` steps."""
        self.done = done
        for at, of in enumerate(self.inputs):
            for number, (name, held) in enumerate(of.items()):
                here = f"{at}.{number}."
                held.load_state_dict(_below(here, parts["inputs"]))
                if name in self.learned[at]:
                    state: dict[int, dict[str, Tensor]] = {}
                    for key, x in _below(here, parts["adam"]).items():
                        i, _, moment = key.partition(".")
                        state.setdefault(int(i), {})[moment] = x
                    adam = self.learned[at][name]
                    adam.load_state_dict(adam.state_dict() | {"state": state})


def fit(
    layers: Layers, candidates: Mapping[str, Mechanism], samples: SampleSet, *, steps: int, size: int, seed: int,
    asked: Mapping[str, Any], work: Path | None, advance: Advance,
) -> list[Fitted]:  # fmt: skip
    """Return the best candidate of every layer; a fit that was stopped goes on from the last steps that were stored."""
    fitting, held_out = Fitting(layers, candidates, steps, seed), max(1, count(samples) // 5)
    learned = {name: x[:-held_out] for name, x in samples.items()}
    tested = {name: x[-held_out:] for name, x in samples.items()}
    steps = steps if any(fitting.learned) else 0
    shelf, device = None if work is None else work / "fit", next(layers.model.parameters()).device
    if shelf is not None and (before := checkpoint.newest(shelf)) is not None and before.state["asked"] == asked:
        fitting.load(before.parts, before.step)
    advance("fitting", fitting.done)
    feed = _again_and_again(learned, size, device)
    for _ in range(fitting.done % max(1, -(-count(learned) // size))):
        next(feed)
    while fitting.done < steps:
        fitting.step(next(feed))
        if shelf is not None and (fitting.done % SAVE_EVERY == 0 or fitting.done == steps):
            checkpoint.save(shelf, fitting.done, fitting.tensors(), {"asked": asked}, keep=1)
        advance("fitting", 1)
    few = list(batches(tested, size, device))[:PROBED]
    return _best(fitting, few, advance)


def _best(fitting: Fitting, tested: list[SampleSet], advance: Advance) -> list[Fitted]:
    """Return the candidate with the smallest error of each layer."""
    errors: list[list[dict[str, float]]] = []
    for batch in tested:
        errors.append(fitting.errors(batch))
        advance("comparing candidates", 1)
    ranges = _ranges(fitting.layers, tested[0])
    found = []
    for at, of in enumerate(fitting.inputs):
        means = {name: sum(batch[at][name] for batch in errors) / len(errors) for name in of}
        finite = {name: error for name, error in means.items() if isfinite(error)}
        best = min(finite, key=lambda name: finite[name]) if finite else ""
        shown = {name: finite.get(name) for name in means}
        found.append(Fitted(best, of[best] if best else None, shown, ranges[at]))
    return found


@torch.no_grad()
def _ranges(layers: Layers, batch: SampleSet) -> list[float]:
    """Return the first-order error of each layer, as the probe measures it."""
    found = []
    for _, layer, _ in captured(layers, batch):
        rows = spread(layer.scores())["first_order_error"].transpose(1, 2)  # [B, N, H]
        found.append(float(rows[real_queries(layer)].mean()))
    return found


def captured(layers: Layers, batch: SampleSet) -> Iterator[tuple[int, Layer, Tensor]]:
    """Yield (number, q and k and v, tokens) of each layer of the model on a batch; tokens are what its module reads."""
    read: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read[name] = args[0] if args else kwargs["hidden_states"]

    with ExitStack() as stack, torch.no_grad():
        for name, module in layers.modules.items():
            stack.callback(module.register_forward_pre_hook(partial(keep, name), with_kwargs=True).remove)
        run = stack.enter_context(capture(layers.model))
        layers.model(**{name: x for name, x in batch.items() if name != "labels"})
    found = {layer.name: layer for layer in run.layers}
    for at, name in enumerate(layers.names):
        layer = found.get(name)
        if layer is None:
            raise UnsupportedError(f"the attention of {name} cannot be captured, so nothing can be fitted to it")
        if layer.bias is not None:
            raise UnsupportedError(
                f"{name} adds a bias to its scores or hides keys one by one: no candidate can do that"
            )
        yield at, layer, read[name]


def softmax_output(layer: Layer) -> Tensor:
    """Return what the softmax gives, without its matrix of weights."""
    mask, causal = layer.key_mask, layer.is_causal
    return attention(layer.q, layer.k, layer.v, "softmax", key_mask=mask, is_causal=causal, scale=layer.scale)


def mixed(layer: Layer, inputs: Inputs, x: Tensor) -> Tensor:
    """Return what a candidate gives."""
    causal, mask = layer.is_causal, layer.key_mask
    tensors = inputs(x)
    return attention(layer.q, layer.k, layer.v, inputs.mechanism, key_mask=mask, is_causal=causal, inputs=tensors)


def relative(out: Tensor, right: Tensor, real: Tensor) -> Tensor:
    """Return |out - right|^2 / |right|^2 over the real tokens [B, N] of [B, H, N, d]."""
    real = real[:, None, :, None]
    wrong = torch.where(real, out - right, 0.0).float().square().sum()
    size = torch.where(real, right, 0.0).float().square().sum()
    return wrong / torch.where(size > 0, size, 1.0)


def _again_and_again(samples: SampleSet, size: int, device: torch.device) -> Iterator[SampleSet]:
    while True:
        yield from batches(samples, size, device)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
