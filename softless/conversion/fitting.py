"""Fit what candidates learn to the outputs of the softmax, layer by layer, while the model reads its data once.

    batch -> model -> o, what the softmax gave in each layer -> one step of Adam on |o' - o|^2 / |o|^2

o is the output of the heads in models of transformers, and the output of the whole layer in models of images.
A batch is dropped before the next one comes, so memory depends on the size of a batch and not on the data. Candidates
that learn nothing take no steps. The last batches are not learned from: they measure the error of every candidate, and
how wide the scores are, which the probe would rank layers by.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.conversion.layers import Layers
from softless.conversion.samples import SampleSet, batches, count
from softless.conversion.stand_ins import Candidate, Replacement
from softless.errors import UnsupportedError
from softless.io import checkpoint
from softless.probes.capture import capture
from softless.probes.examination import real_queries
from softless.probes.score_range import spread

RATE, RESIDUAL_RATE, BETAS, STEPS = 3e-2, 1e-3, (0.8, 0.9), 40  # so few steps need a short memory
SAVE_EVERY, PROBED = 10, 4  # steps; batches whose scores are probed
Advance = Callable[[str, float], None]


class Fitted(NamedTuple):
    """The best candidate of one layer, and the relative error of the output of each."""

    name: str
    stand_in: Replacement | None  # None if no candidate has a finite error
    errors: dict[str, float | None]
    first_order_error: float  # what the range probe says


class Fitting:
    """The candidates of every layer, and their optimizers."""

    def __init__(self, layers: Layers, candidates: Mapping[str, Candidate], steps: int, seed: int):
        self.layers, self.steps, self.done = layers, steps, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stand_ins = [
                {name: layers.new(at, candidate) for name, candidate in candidates.items()} for at in range(len(layers))
            ]
        self.learned = [
            {
                name: torch.optim.Adam(groups(stand_in), betas=BETAS)
                for name, stand_in in stand_ins.items()
                if [*stand_in.parameters()]
            }
            for stand_ins in self.stand_ins
        ]

    def step(self, batch: SampleSet) -> None:
        """Take one step of Adam with every candidate that learns."""
        left = 1 - self.done / self.steps
        for call in self.layers.calls(batch):
            for name, adam in self.learned[call.layer].items():
                for group in adam.param_groups:
                    group["lr"] = left * group["begins"]
                adam.zero_grad()
                with torch.enable_grad():
                    error = relative(call.replaced(self.stand_ins[call.layer][name]), call.output, call.real)
                    error.backward(inputs=[*self.stand_ins[call.layer][name].parameters()])
                if torch.isfinite(error):
                    adam.step()
        self.done += 1

    @torch.no_grad()
    def errors(self, batch: SampleSet) -> list[dict[str, float]]:
        """Return the error of every candidate of every layer."""
        return [
            {
                name: float(relative(call.replaced(stand_in), call.output, call.real))
                for name, stand_in in self.stand_ins[call.layer].items()
            }
            for call in self.layers.calls(batch)
        ]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return everything a later process needs to go on: parameters, and the moments of Adam."""
        parts: dict[str, dict[str, Tensor]] = {"stand_ins": {}, "adam": {}}
        for at, stand_ins in enumerate(self.stand_ins):
            for number, (name, stand_in) in enumerate(stand_ins.items()):
                here = f"{at}.{number}"
                parts["stand_ins"] |= {f"{here}.{key}": x.detach() for key, x in stand_in.state_dict().items()}
                if name in self.learned[at]:
                    state = self.learned[at][name].state_dict()["state"]
                    parts["adam"] |= {
                        f"{here}.{i}.{key}": x for i, moments in state.items() for key, x in moments.items()
                    }
        return parts

    def load(self, parts: Mapping[str, Mapping[str, Tensor]], done: int) -> None:
        """Go on after `done` steps."""
        self.done = done
        for at, stand_ins in enumerate(self.stand_ins):
            for number, (name, stand_in) in enumerate(stand_ins.items()):
                here = f"{at}.{number}."
                stand_in.load_state_dict(_below(here, parts["stand_ins"]))
                if name in self.learned[at]:
                    state: dict[int, dict[str, Tensor]] = {}
                    for key, x in _below(here, parts["adam"]).items():
                        i, _, moment = key.partition(".")
                        state.setdefault(int(i), {})[moment] = x
                    adam = self.learned[at][name]
                    adam.load_state_dict(adam.state_dict() | {"state": state})


def fit(
    layers: Layers, candidates: Mapping[str, Candidate], samples: SampleSet, *, steps: int, size: int, seed: int,
    depends_on: Mapping[str, Any], work: Path | None, advance: Advance,
) -> list[Fitted]:  # fmt: skip
    """Return the best candidate of every layer; a fit that was stopped goes on from the last steps that were stored."""
    fitting, held_out = Fitting(layers, candidates, steps, seed), max(1, count(samples) // 5)
    learned = {name: x[:-held_out] for name, x in samples.items()}
    tested = {name: x[-held_out:] for name, x in samples.items()}
    steps = steps if any(fitting.learned) else 0
    shelf, device = None if work is None else work / "fit", layers.device
    if shelf is not None and (before := checkpoint.newest(shelf)) is not None and before.state["asked"] == depends_on:
        fitting.load(before.parts, before.step)
    advance("fitting", fitting.done)
    feed = _again_and_again(learned, size, device)
    for _ in range(fitting.done % max(1, -(-count(learned) // size))):
        next(feed)
    while fitting.done < steps:
        fitting.step(next(feed))
        if shelf is not None and (fitting.done % SAVE_EVERY == 0 or fitting.done == steps):
            checkpoint.save(shelf, fitting.done, fitting.tensors(), {"asked": depends_on}, keep=1)
        advance("fitting", 1)
    few = [*islice(batches(tested, size, device), PROBED)]
    return _best(fitting, few, advance)


def _best(fitting: Fitting, tested: list[SampleSet], advance: Advance) -> list[Fitted]:
    """Return the candidate with the smallest error of each layer."""
    errors: list[list[dict[str, float]]] = []
    for batch in tested:
        errors.append(fitting.errors(batch))
        advance("comparing candidates", 1)
    ranges = _ranges(fitting.layers, tested[0])
    fitted = []
    for at, stand_ins in enumerate(fitting.stand_ins):
        means = {name: sum(batch[at][name] for batch in errors) / len(errors) for name in stand_ins}
        finite = {name: error for name, error in means.items() if isfinite(error)}
        best = min(finite, key=lambda name: finite[name]) if finite else ""
        shown = {name: finite.get(name) for name in means}
        fitted.append(Fitted(best, stand_ins[best] if best else None, shown, ranges[at]))
    return fitted


@torch.no_grad()
def _ranges(layers: Layers, batch: SampleSet) -> list[float]:
    """Return the first-order error of each layer, as the probe measures it."""
    with capture(layers.model) as run:
        layers.run(batch)
    layers_by_name = {layer.name: layer for layer in run.layers}
    if lost := [name for name in layers.names if name not in layers_by_name]:
        raise UnsupportedError(f"the attention of {lost[0]} cannot be captured, so nothing can be fitted to it")
    errors = []
    for layer in map(layers_by_name.__getitem__, layers.names):
        rows = spread(layer.scores())["first_order_error"].transpose(1, 2)  # [B, N, H]
        errors.append(float(rows[real_queries(layer)].mean()))
    return errors


def groups(stand_in: Replacement) -> list[dict[str, Any]]:
    """Return what Adam learns, with the rates it begins with."""
    parts = [(stand_in.inputs, RATE), (stand_in.residual, RESIDUAL_RATE)]
    param_groups = [
        {"params": [*part.parameters()], "lr": rate, "begins": rate} for part, rate in parts if part is not None
    ]
    return [group for group in param_groups if group["params"]]


def relative(out: Tensor, right: Tensor, real: Tensor | None) -> Tensor:
    """Return |out - right|^2 / |right|^2 over the real tokens."""
    wrong, size = out - right, right
    if real is not None:
        wrong, size = torch.where(real, wrong, 0.0), torch.where(real, size, 0.0)
    total = size.float().square().sum()
    return wrong.float().square().sum() / torch.where(total > 0, total, 1.0)


def _again_and_again(samples: SampleSet, size: int, device: torch.device) -> Iterator[SampleSet]:
    while True:
        yield from batches(samples, size, device)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
