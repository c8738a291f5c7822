"""A conversion from beginning to end: fit, measure, choose, prove.

Every step is stored in a work folder, so that the same call continues where it stopped:

    WORK/fit/            what candidates learned, every few steps
    WORK/choose/*.json   the damage of a set of layers, sample by sample
    WORK/prove/*.json    the same on the part that proves
    WORK/cost.json       seconds and bytes of both models
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from softless.conversion import choosing, fitting, healing
from softless.conversion.candidates import candidates_for
from softless.conversion.checking import checked
from softless.conversion.choosing import Ruler
from softless.conversion.cost import REPEATS, measure_cost
from softless.conversion.document import ConversionSettings, LayerReport, assemble
from softless.conversion.healing import Healing, Untouched
from softless.conversion.layers import Layers
from softless.conversion.layers_images import ImageLayers, knows
from softless.conversion.maps import Looks
from softless.conversion.metrics import metric_of
from softless.conversion.proving import prove
from softless.conversion.samples import SampleSet, as_set, count, split
from softless.conversion.saving import save
from softless.errors import ArgumentError, shown
from softless.io.parts import stored
from softless.mechanisms import Mechanism
from softless.probes.interventions import evaluating

FIT_TOKENS, MEASURE_TOKENS = 512, 1024  # tokens of text per step of Adam, and per batch that is measured
FIT_PATCHES, MEASURE_PATCHES = 4096, 8192  # the same for pictures
FIT_WORK = 4.0  # a step of the fit, in passes over as many samples
HEAL_WORK = 20.0  # all steps of healing, in passes over a part: how many there are is not known before
COST_WORK = 2.0 * (REPEATS + 1)  # timing a length, in passes over as many tokens


class ConversionWatcher(Protocol):
    """Receives the progress of a conversion."""

    def __call__(self, label: str, amount: float) -> None:
        """Note that `amount` more of the work is done; `label` says what is being done."""


@dataclass
class Conversion:
    """A model with converted layers, and how it was found: what `softless.convert` returns.

    >>> import softless
    >>> from dataclasses import fields
    >>> [field.name for field in fields(softless.Conversion) if field.repr]
    ['model', 'layers', 'document']

    model      the model that was given, with the chosen layers converted
    layers     one report per layer of softmax attention, in order
    document   everything that was measured, as conversion.json holds it
    """

    model: nn.Module
    layers: tuple[LayerReport, ...]
    document: dict[str, Any]
    _places: Layers = field(repr=False)
    _untouched: Untouched | None = field(default=None, repr=False)

    @property
    def kept_promise(self) -> bool:
        """Whether the harm on the part that proves is inside the budget."""
        return bool(self.document["promise_kept"])

    def undo(self) -> None:
        """Give every layer its softmax and its weights back: the model is as it was before, to the bit."""
        (self._untouched or self._places).restore()

    def save(self, folder: str | Path, *also: Any) -> None:
        """Write the model and conversion.json into a new folder, all at once.

        `softless.load_converted(folder)` loads it. So does `from_pretrained(folder)` after
        `import softless.transformers`, if it is a model of transformers. A tokenizer that is passed is saved beside it.
        """
        save(self._places, self.document, Path(folder), also)


@dataclass(frozen=True)
class ConversionPlan(ConversionSettings):
    """A conversion whose options are checked."""

    count: int | None
    heal: Healing | None
    compare: bool
    work: Path | None

    @property
    def step(self) -> int:
        """How many samples a step of the fit reads."""
        return max(1, (FIT_PATCHES if self.layers.pictures else FIT_TOKENS) // self.tokens)

    @property
    def work_of(self) -> dict[str, float]:
        """How much work one more of these is, in passes over the part that chooses."""
        samples = count(self.parts.choose)
        batch, token = self.step / samples, 1 / (samples * self.tokens)
        return {
            "fitting": FIT_WORK * batch, "comparing candidates": FIT_WORK * batch, "healing": HEAL_WORK,
            "timing": COST_WORK * token,
        }  # fmt: skip

    @property
    def amount(self) -> float:
        """The most work there is: the sum of all amounts that a `ConversionWatcher` receives."""
        layers, work_of = len(self.layers), self.work_of
        total = work_of["fitting"] * self.steps + work_of["comparing candidates"] * fitting.PROBED + 2 * layers + 1 + 2
        total += (2 + HEAL_WORK if self.heal else 0) + (2 if self.layers.generates else 0)
        if self.compare:
            total += (4 + choosing.RANDOM_ORDERS) * len(choosing.counts(layers, layers // 2))
            total += work_of["timing"] * sum(self.layers.lengths(self.parts.prove))
        return total

    def run(self, watch: ConversionWatcher) -> Conversion:
        """Fit, measure, choose and prove; the model keeps its softmax and its weights if that fails."""
        untouched = Untouched(self.layers) if self.heal else None
        try:
            with evaluating(self.layers.model):
                return self._run(watch, untouched)
        except BaseException:
            (untouched or self.layers).restore()
            raise

    def _run(self, watch: ConversionWatcher, untouched: Untouched | None) -> Conversion:
        start, pictures = time.monotonic(), self.layers.pictures
        size = max(1, (MEASURE_PATCHES if pictures else MEASURE_TOKENS) // self.tokens)
        depends_on = {
            "model": fingerprint(dict(self.layers.model.state_dict())), "data": fingerprint(self._data()),
            "candidates": {name: repr(candidate) for name, candidate in self.candidates.items()}, "steps": self.steps,
            "seed": self.seed, "metric": self.metric.name, "torch": torch.__version__,
            "adam": [fitting.RATE, fitting.RESIDUAL_RATE, *fitting.BETAS],
        }  # fmt: skip
        work_of = self.work_of
        advance: ConversionWatcher = lambda label, amount: watch(label, work_of.get(label, 1.0) * amount)  # noqa: E731
        fitted = fitting.fit(
            self.layers, self.candidates, self.parts.fit, steps=self.steps, size=self.step,
            seed=self.seed, depends_on=depends_on, work=self.work, advance=advance,
        )  # fmt: skip

        def ruler(name: str, samples: SampleSet) -> Ruler:
            return Ruler(
                self.layers, fitted, self.metric, samples, name=name, size=size, depends_on=depends_on, work=self.work,
                advance=advance,
            )  # fmt: skip

        choose, prover = ruler("choose", self.parts.choose), ruler("prove", self.parts.prove)
        alone = choosing.alone(choose)
        order = choosing.ranked(alone)
        frontier = choosing.add(choose, order, self.budget)
        inside = max((number for number, harm in frontier.items() if choosing.inside(harm, self.budget)), default=0)
        number = inside if self.count is None else min(self.count, len(order))
        chosen, compared = sorted(order[:number]), {}
        counts = choosing.counts(len(self.layers), number)
        if self.compare:
            named = {choosing.MEASURED: order, **choosing.orders(fitted, self.seed)}
            compared = choosing.compare(choose, named, counts)
        cost = self._cost(depends_on, chosen, choosing.stand_ins_of(fitted, chosen), advance)
        before, looks = prover.before, Looks(self.layers, self.parts.prove, chosen)
        proof = prove(
            choose, prover, fitted, chosen, heal=self.heal, untouched=untouched, learn=self.parts.fit, seed=self.seed,
            advance=advance, size=max(1, (healing.PATCHES if pictures else healing.TOKENS) // self.tokens),
        )  # fmt: skip
        document = assemble(
            self, fitted=fitted, alone=alone, order=order, chosen=chosen, frontier=frontier, counts=counts,
            compared=compared, proof=proof, before=before, cost=cost, seconds=time.monotonic() - start,
            looks=looks.compared(),
        )  # fmt: skip
        reports = tuple(LayerReport.of(row) for row in document["layers"])
        return Conversion(self.layers.model, reports, document, self.layers, untouched)

    def _data(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": x for name, part in self.parts._asdict().items() for key, x in part.items()}

    def _cost(
        self, depends_on: Mapping[str, Any], chosen: Sequence[int], stand_ins: Any, advance: ConversionWatcher
    ) -> Any:
        """Return the seconds and bytes of both models at growing lengths; none if nothing was converted."""
        if not chosen or not self.compare:
            return []
        measure = lambda: measure_cost(self.layers, stand_ins, self.parts.prove, advance)  # noqa: E731
        if self.work is None:
            return measure()
        return stored(self.work / "cost.json", {**depends_on, "layers": list(chosen)}, measure)


def layers_of(model: Any) -> Layers:
    """Return the layers of a model, or raise an error that lists the known architectures."""
    if isinstance(model, nn.Module) and knows(model):
        return ImageLayers(model)
    from softless.conversion.layers_transformers import TransformersLayers  # imports transformers

    return TransformersLayers(model)


def plan(
    model: nn.Module, data: Tensor | Mapping[str, Tensor], *, budget: float = 0.01,
    candidates: Sequence[str | Mechanism] | None = None, metric: str | None = None, steps: int = fitting.STEPS,
    layers: int | None = None, heal: float | None = None, rank: int | None = None, compare: bool = False,
    seed: int = 0, work: str | Path | None = None,
) -> ConversionPlan:  # fmt: skip
    """Check everything that can be checked before any work."""
    budget = check_budget(budget)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps is {shown(steps)} and must be a whole number from 1 on")
    if layers is not None and (type(layers) is not int or layers < 1):
        raise ArgumentError(f"layers is {shown(layers)} and must be a whole number from 1 on, or None")
    if heal is None and rank is not None:
        raise ArgumentError(f"rank is {shown(rank)}, and nothing is healed: give heal, in minutes")
    healed = None if heal is None else Healing(heal, rank)
    places = layers_of(model)
    if layers is not None and layers > len(places):
        raise ArgumentError(f"layers is {layers}, and the model has {len(places)} layers of softmax attention")
    given = as_set(data, places.first)
    samples = checked(places, given, measured := metric_of(places, given, metric))
    tokens = places.tokens(samples)
    chosen, parts = candidates_for(places, candidates, tokens), split(samples, seed)
    return ConversionPlan(
        layers=places, count=layers, heal=healed, parts=parts, metric=measured, candidates=chosen, budget=budget,
        steps=steps, seed=seed, tokens=tokens, compare=compare, work=None if work is None else Path(work),
    )  # fmt: skip


def check_budget(budget: object) -> float:
    """Return the budget as a share, or raise."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ArgumentError(f"budget is {shown(budget)} and must be above 0 and at most 1: 0.01 is one percent")
    return float(budget)


def convert(
    model: nn.Module, data: Tensor | Mapping[str, Tensor], *, budget: float = 0.01,
    candidates: Sequence[str | Mechanism] | None = None, metric: str | None = None, steps: int = fitting.STEPS,
    layers: int | None = None, heal: float | None = None, rank: int | None = None, compare: bool = False,
    seed: int = 0, work: str | Path | None = None, watch: ConversionWatcher | None = None,
) -> Conversion:  # fmt: skip
    """Make layers of a trained softmax model linear, as many as the budget allows, and prove it on unseen data.

    >>> import torch, softless
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    >>> tokens = torch.randint(3, 50, (24, 16))                              # [batch, tokens]
    >>> conversion = softless.convert(model, tokens, budget=0.05, candidates=["linear"], steps=2)
    >>> [layer.converted for layer in conversion.layers], conversion.kept_promise
    ([True, True], True)
    >>> conversion.undo()

    Args:
        model: A model of softless, a ViT, DeiT or Swin of timm, or a model of transformers of an architecture that
            `softless.transformers` knows. It is changed in place.
        data: Samples: a tensor [samples, ...], or a dictionary of tensors for the model's forward with samples in the
            first dimension; `pixel_values` for models of softless and timm. Models of masked tokens and classifiers
            need `labels`. A random half fits, a quarter chooses and a quarter proves.
        budget: The most the model may lose, from above 0 to 1. What is counted depends on the metric: the relative
            growth of the perplexity, 1 - cosine, or the loss of accuracy. Default: 0.01, one percent.
        candidates: Mechanisms to try, by name or made by `mechanism(...)`; "inline+local" adds the local residual.
            Default: None, those of the table.
        metric: "perplexity", "masked", "cosine" or "accuracy". Default: None, the one that fits the model.
        steps: Steps of Adam for what candidates learn. Default: 40.
        layers: How many layers to convert, in the order of their damage. The budget is then only judged. Default: None,
            as many as the budget allows.
        heal: Minutes in which the whole model learns again what the original says, on the part that fits. Default:
            None, no healing.
        rank: Healing learns a matrix of this rank beside every linear layer. Default: None, it learns every weight.
        compare: Also measure other orders of the layers (first, last, every second, probe, random), and seconds and
            bytes of both models at growing lengths.
        seed: Of the split, and of what candidates begin with.
        work: Folder where steps are stored. The same call with the same folder continues. Default: None, nowhere.
        watch: Is called with a label and an amount of work done. Default: None.

    Raises a child of `SoftlessError` and leaves the model as it was if it cannot be converted.
    """
    chosen = plan(
        model, data, budget=budget, candidates=candidates, metric=metric, steps=steps, layers=layers, heal=heal,
        rank=rank, compare=compare, seed=seed, work=work,
    )  # fmt: skip
    return chosen.run(watch or (lambda _label, _amount: None))


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of tensors and their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {list(x.shape)} {x.dtype}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy().data if x.numel() else b"")
    return digest.hexdigest()
