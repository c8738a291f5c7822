"""Throughput and memory of a whole model, every way to compute it, on the same images.

    ours      the model
    plain     its linear attention by the plain formulas, as its authors run it (softless.bench.remix)
    softmax   its twin of the same shape, with softmax and no local residual
    timm      timm's model of the same family and size, where it has one

images    a second: batch / median seconds of a call, or of forward and backward together
ratio     images a second / those of the softmax twin, compiled or not as the row is
memory    most bytes held at once: the weights, and what a call makes

Whoever cannot take part stays on the list, with the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from softless.bench import remix
from softless.bench.contest import Job, Trial, try_all
from softless.bench.contestants import FREE_SHARE, OURS, PLAIN, sentence
from softless.bench.memory import free_bytes
from softless.bench.stopwatch import Tick, Timing
from softless.errors import ArgumentError, SoftlessError
from softless.mechanisms import resolve
from softless.models import create_model, customize

SOFTMAX, TIMM = "softmax", "timm"
LIVE, SAVED = 24, 40  # numbers a token and channel alive at once in a block, and kept of each for the backward pass

TIMM_NAMES = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "deit_base": "deit_base_patch16_224",
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swin_small": "swin_small_patch4_window7_224",
    "swin_base": "swin_base_patch4_window7_224",
    "swin_base_384": "swin_base_patch4_window12_384",
}
NOT_IN_TIMM = {"pvt": "timm has PVT v2, another architecture", "cswin": "timm has no CSwin"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for everyone. `window` is that of the mixed blocks; None is the model's own."""

    image_size: tuple[int, int]
    batch: int
    window: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str = "auto"

    @property
    def images(self) -> Tensor:
        """Normal images, the same on every run."""
        size, generator = (self.batch, 3, *self.image_size), torch.Generator(self.device).manual_seed(0)
        return torch.randn(size, generator=generator, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Entrant:
    """A model that takes part, or the reason why it is not there. `role`: ours | plain | softmax | timm."""

    label: str
    role: str
    compiled: bool = False
    model: nn.Module | None = None
    absent: str | None = None


@dataclass(frozen=True)
class ModelResult:
    """What one entrant took; `skipped` says why there are no numbers."""

    label: str
    role: str
    compiled: bool
    parameters: int | None = None
    timing: Timing | None = None
    images_per_second: float | None = None
    ratio: float | None = None
    memory_bytes: int | None = None
    skipped: str | None = None


def entrants(name: str, options: Mapping[str, Any], setting: Setting, *, compiled: bool) -> list[Entrant]:
    """Everyone for one setting; with `compiled`, each one compiled too."""
    if compiled:
        torch.compiler.reset()  # each size is compiled for itself, and a sweep never reaches the recompile limit
    everyone = [
        ours(name, options, setting),
        plainly(name, options, setting),
        twin(name, options, setting),
        timms(name, setting),
    ]
    return [each for entrant in everyone for each in (entrant, *[as_compiled(entrant)] * compiled)]


def ours(name: str, options: Mapping[str, Any], setting: Setting) -> Entrant:
    """The model, its linear attention on the backend that was asked for."""
    return Entrant(name, OURS, model=remix.by_backend(_make(name, options, setting), setting.backend))


def plainly(name: str, options: Mapping[str, Any], setting: Setting) -> Entrant:
    """The model, its linear attention by the plain formulas."""
    entrant, model = Entrant("plain formulas", PLAIN), _make(name, options, setting)
    if not remix.linear_layers(model):
        return replace(entrant, absent=f"{name} has no linear attention to write plainly")
    try:
        return replace(entrant, model=remix.by_plain_formulas(model))
    except SoftlessError as error:
        return replace(entrant, absent=str(error))


def twin(name: str, options: Mapping[str, Any], setting: Setting) -> Entrant:
    """The same shape with softmax in the place of the mechanism, and no local residual."""
    entrant, config = Entrant("softmax twin", SOFTMAX), customize(name, **options)
    if not any(config.mixed) or (resolve(config.mechanism).name == "softmax" and not config.local):
        return replace(entrant, absent=f"{name} is softmax attention itself")
    return replace(entrant, model=_make(name, {**options, "mechanism": "softmax", "local": False}, setting))


def timms(name: str, setting: Setting) -> Entrant:
    """timm's model of this family and size, for these images and windows."""
    ancestor = name.removeprefix("inline_")
    family = ancestor.partition("_")[0]
    if family in NOT_IN_TIMM:
        return Entrant("timm", TIMM, absent=NOT_IN_TIMM[family])
    import timm

    label, known = f"timm {ancestor}", {"img_size": setting.image_size}
    windowed = {} if setting.window is None else {"window_size": setting.window}
    try:
        with torch.device(setting.device):
            model = timm.create_model(TIMM_NAMES[ancestor], **known, **windowed)
        return Entrant(label, TIMM, model=model.eval().to(setting.dtype))
    except Exception as error:  # noqa: BLE001 - sizes it cannot take fail in its own ways
        return Entrant(label, TIMM, absent=sentence(error))


def as_compiled(entrant: Entrant) -> Entrant:
    """The same model under torch.compile."""
    model = entrant.model
    if model is not None:
        model = torch.compile(model, fullgraph=True, dynamic=False)  # type: ignore[assignment]
    return replace(entrant, label=f"{entrant.label}, compiled", compiled=True, model=model)


def model_contest(
    everyone: list[Entrant],
    setting: Setting,
    *,
    train: bool = False,
    repeats: int = 10,
    tick: Tick = lambda _: None,
) -> list[ModelResult]:
    """Measure everyone. `tick` is told each label `repeats + 1` times, to show progress."""
    images, device = setting.images, torch.device(setting.device)
    jobs = {
        each.label: str(each.absent) if each.model is None else model_job(each.model, images, train)
        for each in everyone
    }
    roles = {each.label: each.role for each in everyone}
    height, width = setting.image_size
    where = f"at {setting.batch} images of {height} x {width}"
    trials = try_all(jobs, roles, device, where=where, repeats=repeats, tick=tick)
    twins = {each.compiled: trials[each.label] for each in everyone if each.role == SOFTMAX}

    def result(each: Entrant) -> ModelResult:
        trial, reference = trials[each.label], twins.get(each.compiled)
        if isinstance(trial, str) or each.model is None:
            return ModelResult(each.label, each.role, each.compiled, skipped=str(trial))
        seconds, weights = trial.timing.seconds, list(each.model.parameters())
        return ModelResult(
            each.label,
            each.role,
            each.compiled,
            sum(weight.numel() for weight in weights),
            trial.timing,
            setting.batch / seconds,
            reference.timing.seconds / seconds if isinstance(reference, Trial) else None,
            sum(weight.nbytes for weight in weights) + trial.peak_bytes,
        )

    return [result(each) for each in everyone]


def model_job(model: nn.Module, images: Tensor, train: bool) -> Job:
    """The call to time: logits, or logits and the gradients of all weights."""
    model.train(train)
    run: Callable[[Tensor], Tensor] = model
    if not train:
        return torch.no_grad()(lambda: (run(images),))
    weights = list(model.parameters())

    def job() -> tuple[Tensor, ...]:
        logits = run(images)
        return logits, *torch.autograd.grad(logits.float().square().mean(), weights)

    return job


def check_memory(name: str, options: Mapping[str, Any], setting: Setting, *, train: bool) -> None:
    """Refuse images that do not fit before any are made."""
    free = free_bytes(torch.device(setting.device))
    needed = max(_blocks(name, options, setting), default=0) * LIVE
    needed += sum(_blocks(name, options, setting)) * SAVED * train
    if free is not None and needed > FREE_SHARE * free:
        height, width = setting.image_size
        raise ArgumentError(
            f"{setting.batch} images of {height} x {width} need about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB "
            "are free: give a smaller --batch or --image-size"
        )


def _blocks(name: str, options: Mapping[str, Any], setting: Setting) -> Iterator[int]:
    """Bytes of the tokens of every block."""
    config = customize(name, **options)
    for stage, (dim, depth) in enumerate(zip(config.dims, config.depths, strict=True)):
        height, width = (-(-side // (config.patch * 2**stage)) for side in setting.image_size)
        yield from [setting.batch * height * width * dim * max(4, setting.dtype.itemsize)] * depth


def _make(name: str, options: Mapping[str, Any], setting: Setting) -> nn.Module:
    windowed: dict[str, Any] = {} if setting.window is None else {"window": setting.window}
    model = create_model(name, **options, **windowed, img_size=setting.image_size, device=setting.device)
    return model.eval().to(setting.dtype)
