"""Heal a converted model: all of it learns again what the original says, for some minutes.

    loss = KL(softmax(z) || softmax(z')) + mean over blocks of |h' - h|^2 / |h|^2

z are the logits of the original and h the outputs of its blocks. An encoder without a head has no logits to learn: its
output takes the place of one more block. Every weight learns, or with a rank r only the stand-ins and a matrix of rank
r beside every linear layer of a block: W + B A. Afterwards B A is added to W, so the model is no larger.

How many steps fit into the minutes is measured first and stored. The batch of a step depends on its number alone. So a
healing that was stopped goes on to the weights that it would have had.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softless.conversion.layers import LABELS, Layers
from softless.conversion.samples import SampleSet, count
from softless.errors import ArgumentError, NonFiniteError, shown
from softless.io import checkpoint
from softless.io.parts import stored

FULL_RATE, RATE, WARMUP = 1e-4, 1e-3, 0.05  # of every weight; of stand-ins and matrices of low rank; share of the steps
TOKENS, PATCHES = 4096, 12544  # per step, of text and of pictures
MOST_MINUTES, TIMED, SAVES = 1440.0, 2, 10  # steps that are timed; how often the state is stored
LINEAR = "Linear", "Conv1D"  # the latter is GPT-2's in transformers


@dataclass(frozen=True)
class Healing:
    """How a converted model is healed: for how many minutes, and with which rank; None trains every weight."""

    minutes: float
    rank: int | None = None

    def __post_init__(self) -> None:
        minutes = self.minutes
        if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes <= MOST_MINUTES:
            raise ArgumentError(
                f"heal is {shown(minutes)} and must be a number of minutes above 0 and at most {MOST_MINUTES:g}"
            )
        if self.rank is not None and (isinstance(self.rank, bool) or type(self.rank) is not int or self.rank < 1):
            raise ArgumentError(f"rank is {shown(self.rank)} and must be a whole number from 1 on, or None")


class Untouched:
    """A copy of the model from before anything was replaced: the teacher, and what `restore` puts back."""

    def __init__(self, layers: Layers):
        self.layers, self.teacher = layers, deepcopy(layers.model).eval().requires_grad_(False)
        self.learned = {name: x.requires_grad for name, x in layers.model.named_parameters()}

    def restore(self) -> None:
        """Give the model its softmax and every weight back, to the bit."""
        self.layers.restore()
        self.layers.model.load_state_dict(self.teacher.state_dict())
        for name, x in self.layers.model.named_parameters():
            x.requires_grad_(self.learned[name])


def heal(
    layers: Layers, untouched: Untouched, samples: SampleSet, how: Healing, *, size: int, seed: int,
    depends_on: Mapping[str, Any], work: Path | None, advance: Callable[[str, float], None],
) -> int:  # fmt: skip
    """Train the model, in which stand-ins are in place, and return the number of steps."""
    draw = partial(batch_of, samples, size=size, seed=seed, device=layers.device, flips=layers.pictures)
    with torch.enable_grad(), learning(layers, how.rank, seed) as groups:
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        rates = [group["lr"] for group in adam.param_groups]
        distance = Distance(layers, untouched.teacher)

        def measure() -> int:
            return steps_in(how.minutes, lambda step: distance(draw(step)).backward(), adam, layers.device)

        depends_on = {**depends_on, "minutes": how.minutes, "rank": how.rank, "size": size}
        total = measure() if work is None else stored(work / "heal.json", depends_on, measure)
        shelf, step = None if work is None else work / "heal", 0
        names = {id(x): name for name, x in layers.model.named_parameters()}
        weights = {names[id(x)]: x for group in adam.param_groups for x in group["params"]}
        if shelf and (before := checkpoint.newest(shelf)) is not None and before.state["asked"] == depends_on:
            step = _load(weights, adam, before)
        advance("healing", step / total)
        while step < total:
            for group, rate in zip(adam.param_groups, rates, strict=True):
                group["lr"] = rate * schedule((step + 1) / total)
            loss = distance(draw(step))
            if not torch.isfinite(loss):
                raise NonFiniteError(f"the loss is not a finite number after {step} steps of healing")
            loss.backward()
            nn.utils.clip_grad_norm_([*weights.values()], 1.0)
            adam.step()
            adam.zero_grad()
            step += 1
            if shelf and (step % max(1, total // SAVES) == 0 or step == total):
                checkpoint.save(shelf, step, _state(weights, adam), {"asked": depends_on}, keep=1)
            advance("healing", 1 / total)
    return total


def steps_in(minutes: float, step: Callable[[int], object], adam: torch.optim.Optimizer, device: torch.device) -> int:
    """Return how many steps fit into some minutes, after a few that learn nothing; the first of them is slower."""
    start = 0.0
    for number in range(1 + TIMED):
        start = start if number > 1 else time.monotonic()
        step(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    adam.zero_grad()
    return max(1, round(60 * minutes * TIMED / (time.monotonic() - start)))


class Distance:
    """The loss between a model and its teacher on a batch."""

    def __init__(self, layers: Layers, teacher: nn.Module):
        self.layers, self.teacher = layers, teacher
        self.blocks = sorted({name.rpartition(".")[0] for name in layers.names})

    def __call__(self, batch: SampleSet) -> Tensor:
        device = self.layers.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                right, before = self._run(self.teacher, batch)
            answer, after = self._run(self.layers.model, batch)
        real = batch.get("attention_mask")
        apart = [_relative(a, b, real) for a, b in zip(after, before, strict=True)]
        loss = torch.stack(apart).mean()
        if (z := getattr(right, "logits", None)) is None or not self.layers.has_logits:
            return loss
        z, own = _kept(z, real), _kept(answer.logits, real)
        return loss + F.kl_div(
            F.log_softmax(own.float(), -1), F.log_softmax(z.float(), -1), reduction="batchmean", log_target=True
        )

    def _run(self, model: nn.Module, batch: SampleSet) -> tuple[Any, list[Tensor]]:
        outputs: list[Tensor] = []

        def keep(_module: nn.Module, _args: Any, out: Any) -> None:
            outputs.append(out if isinstance(out, Tensor) else out[0])

        with ExitStack() as stack:
            for path in self.blocks:
                stack.callback(model.get_submodule(path).register_forward_hook(keep).remove)
            options = {"use_cache": False} if self.layers.is_causal else {}
            answer = self.layers.run({name: x for name, x in batch.items() if name != LABELS}, model=model, **options)
        if not self.layers.has_logits:
            outputs.append(answer.last_hidden_state if hasattr(answer, "last_hidden_state") else answer.logits)
        return answer, outputs


def _kept(x: Tensor, real: Tensor | None) -> Tensor:
    return x.flatten(0, -2) if real is None or x.ndim == 2 else x[real.bool()]


def _relative(out: Tensor, right: Tensor, real: Tensor | None) -> Tensor:
    out, right = (_kept(x, real if x.ndim == 3 else None).float() for x in (out, right))
    return (out - right).square().sum() / right.square().sum().clamp(min=torch.finfo(torch.float32).tiny)


def schedule(share: float) -> float:
    """Return the factor on the rate: a short rise, then half a cosine to zero.

    >>> schedule(0.05), round(schedule(1.0), 6)
    (1.0, 0.0)
    """
    if share < WARMUP:
        return share / WARMUP
    return 0.5 * (1 + cos(pi * (share - WARMUP) / (1 - WARMUP)))


def batch_of(samples: SampleSet, step: int, *, size: int, seed: int, device: torch.device, flips: bool) -> SampleSet:
    """Return the samples of a step, drawn with replacement; half of the pictures are mirrored."""
    draw = torch.Generator().manual_seed((seed << 24) + step)
    rows = torch.randint(count(samples), (min(size, count(samples)),), generator=draw)
    mirrored = torch.rand(len(rows), generator=draw) < 0.5
    batch = {name: x[rows.to(x.device)].to(device) for name, x in samples.items()}
    if flips:
        turned = mirrored.to(device)[:, None, None, None]
        batch = {name: torch.where(turned, x.flip(-1), x) if x.ndim == 4 else x for name, x in batch.items()}
    return batch


@contextmanager
def learning(layers: Layers, rank: int | None, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Let the model learn inside this context: give the groups of an optimizer, and merge what is of low rank after.

    Learned inputs and residuals of the stand-ins always learn, at the higher rate.
    """
    model = layers.model
    own = {id(x) for stand_in in layers.learned() for x in stand_in.parameters()}
    params = [(name, x) for name, x in model.named_parameters() if x.is_floating_point()]
    added, original = [x for _, x in params if id(x) in own], [x for _, x in params if id(x) not in own]
    lowered: list[nn.Module] = []
    if rank is not None:
        lowered = [part for path, part in model.named_modules() if layers.in_block(path) and _is_linear(part)]
        draw = torch.Generator().manual_seed(seed)
        for part in lowered:
            weight: Any = part.weight
            parametrize.register_parametrization(part, "weight", AddedRank(weight, rank, draw))
        added += [x for part in lowered for x in part.parametrizations.weight[0].parameters()]  # type: ignore[union-attr, index]
    for x in original:
        x.requires_grad_(rank is None)
    for x in added:
        x.requires_grad_(True)
    groups = [{"params": added, "lr": RATE}, {"params": original if rank is None else [], "lr": FULL_RATE}]
    try:
        yield [group for group in groups if group["params"]]
    finally:
        for part in lowered:
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)


class AddedRank(nn.Module):
    """W + B A. B begins at zero."""

    def __init__(self, weight: Tensor, rank: int, draw: torch.Generator):
        super().__init__()
        rows, columns = weight.shape
        drawn = torch.randn(rank, columns, generator=draw) * columns**-0.5
        self.a = nn.Parameter(drawn.to(weight.device, weight.dtype))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device, dtype=weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def _is_linear(part: nn.Module) -> bool:
    return type(part).__name__ in LINEAR and isinstance(getattr(part, "weight", None), nn.Parameter)


def _state(weights: Mapping[str, Tensor], adam: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    moments = {
        f"{name}:{key}": value for name, x in weights.items() for key, value in adam.state.get(x, {}).items()
    }  # fmt: skip
    return {"weights": {name: x.detach() for name, x in weights.items()}, "adam": moments}


@torch.no_grad()
def _load(weights: Mapping[str, Tensor], adam: torch.optim.Optimizer, saved: checkpoint.Checkpoint) -> int:
    for name, x in weights.items():
        x.copy_(saved.parts["weights"][name])
    for place, value in saved.parts["adam"].items():
        name, _, key = place.rpartition(":")
        adam.state[weights[name]][key] = value.to(weights[name].device if key != "step" else "cpu")
    return saved.step
