"""Measure throughput and memory of a model, every way to compute it, on the same images.

    ours      the model
    plain     its linear attention by the plain formulas, and the local residual as convolutions with many groups, as
              its authors run it
    softmax   its twin of the same shape, with softmax and no local residual
    timm      timm's model of the same family and size, if timm has one
    bound     the softmax twin with q + k + v instead of attention: no attention can be faster (if asked for)

With a task, each model is the backbone of the same head (`model_heads`), and the time is that of both.

images    images per second: batch / median seconds of a call, or of forward and backward together
ratio     images per second / those of the softmax twin; a compiled model is compared with the compiled twin
memory    most bytes held at once: the weights, and what a call allocates

A model that cannot take part stays on the list with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softless.bench.anatomy import SOFTMAX_TWIN, has_softmax_twin
from softless.bench.contest import Job, TimingRow, Trial, times, try_all
from softless.bench.contestants import OURS, PLAIN, sentence
from softless.bench.formulas import plain, plain_padded, plain_residual, plain_taps
from softless.bench.model_heads import in_head
from softless.errors import ArgumentError, SoftlessError
from softless.models import create_model, customize
from softless.nn.mixing import AttentionCall, Mixing, as_heads
from softless.stopwatch import Tick, shortage

SOFTMAX, TIMM, BOUND = "softmax", "timm", "bound"
# Numbers per token and channel: alive at once in a block, and saved per block for the backward pass.
LIVE, SAVED = 24, 40

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
    """The images, dtype, device and head that all entrants share.

    window   replaces that of the mixed blocks unless None
    head     the name of a head of segmentation or detection; None is the classifier
    bound    whether the model without attention takes part
    """

    image_size: tuple[int, int]
    batch: int
    window: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str = "auto"
    head: str | None = None
    bound: bool = False

    @property
    def images(self) -> Tensor:
        """Normal images, the same in every run."""
        size, generator = (self.batch, 3, *self.image_size), torch.Generator(self.device).manual_seed(0)
        return torch.randn(size, generator=generator, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Entrant:
    """A model that takes part, or the reason why it cannot. `role`: ours | plain | softmax | timm | bound."""

    label: str
    role: str
    compiled: bool = False
    model: nn.Module | None = None
    absent: str | None = None


class ModelRow(TimingRow):
    """The measurements of one entrant; `skipped` is the reason if there are none."""

    label: str
    role: str  # ours | plain | softmax | timm | bound
    compiled: bool
    parameters: int | None
    images_per_second: float | None
    ratio: float | None
    eager_images_per_second: float | None  # CUDA: ordinary calls, launches included
    memory_bytes: int | None
    skipped: str | None


def entrants(name: str, options: Mapping[str, Any], setting: Setting, *, compiled: bool) -> list[Entrant]:
    """Return all entrants for one setting; with `compiled`, each one also compiled."""
    if compiled:
        torch.compiler.reset()  # each size is compiled separately, so a sweep never reaches the recompile limit
    eager = [*(make(name, options, setting) for make in (ours, plainly, twin)), timms(name, setting)]
    if setting.bound:
        eager.append(bound(name, options, setting))
    return [version for entrant in eager for version in (entrant, *[as_compiled(entrant)] * compiled)]


def ours(name: str, options: Mapping[str, Any], setting: Setting) -> Entrant:
    """Return the model, with its linear attention on the setting's backend."""
    return Entrant(name, OURS, model=by_backend(_make(name, options, setting), setting.backend))


def plainly(name: str, options: Mapping[str, Any], setting: Setting) -> Entrant:
    """Return the model with its linear attention by the plain formulas."""
    entrant, model = Entrant("plain formulas", PLAIN), _make(name, options, setting)
    if not linear_layers(model):
        return replace(entrant, absent=f"{name} has no linear attention to write plainly")
    try:
        return replace(entrant, model=by_plain_formulas(model))
    except SoftlessError as error:
        return replace(entrant, absent=str(error))


def twin(name: str, options: Mapping[str, Any], setting: Setting) -> Entrant:
    """Return the same shape with softmax instead of the mechanism, and no local residual."""
    entrant = Entrant("softmax twin", SOFTMAX)
    if not has_softmax_twin(customize(name, **options)):
        return replace(entrant, absent=f"{name} is softmax attention itself")
    return replace(entrant, model=_make(name, {**options, **SOFTMAX_TWIN}, setting))


def timms(name: str, setting: Setting) -> Entrant:
    """Return timm's model of this family and size, for these images and windows."""
    ancestor = name.removeprefix("inline_")
    family = ancestor.partition("_")[0]
    if family in NOT_IN_TIMM:
        return Entrant("timm", TIMM, absent=NOT_IN_TIMM[family])
    import timm

    label, windowed = f"timm {ancestor}", {} if setting.window is None else {"window_size": setting.window}
    try:
        with torch.device(setting.device):
            if setting.head is not None:
                return Entrant(label, TIMM, model=_make(TIMM_NAMES[ancestor], windowed, replace(setting, window=None)))
            model = timm.create_model(TIMM_NAMES[ancestor], img_size=setting.image_size, **windowed)
        return Entrant(label, TIMM, model=model.eval().to(setting.dtype))
    except Exception as error:  # noqa: BLE001 - sizes it cannot take fail in its own ways
        return Entrant(label, TIMM, absent=sentence(error))


def bound(name: str, options: Mapping[str, Any], setting: Setting) -> Entrant:
    """Return the same shape without attention: q + k + v instead of it, and no local residual."""
    shape = {**options, **SOFTMAX_TWIN} if has_softmax_twin(customize(name, **options)) else options
    model = _make(name, shape, setting)
    for layer in (module for module in model.modules() if isinstance(module, Mixing)):
        layer._mix = _add  # type: ignore[method-assign]
    return Entrant("no attention", BOUND, model=model)


def as_compiled(entrant: Entrant) -> Entrant:
    """Return the same model under torch.compile."""
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
) -> list[ModelRow]:
    """Measure every entrant. `tick` gets each label `repeats + 1` times, to show progress."""
    images, device = setting.images, torch.device(setting.device)
    jobs = {
        entrant.label: str(entrant.absent) if entrant.model is None else model_job(entrant.model, images, train)
        for entrant in everyone
    }
    roles = {entrant.label: entrant.role for entrant in everyone}
    height, width = setting.image_size
    where = f"at {setting.batch} images of {height} x {width}"
    trials = try_all(jobs, roles, device, where=where, repeats=repeats, tick=tick)
    twins = {entrant.compiled: trials[entrant.label] for entrant in everyone if entrant.role == SOFTMAX}

    def row(entrant: Entrant) -> ModelRow:
        trial, reference = trials[entrant.label], twins.get(entrant.compiled)
        timing = trial.timing if isinstance(trial, Trial) else None
        eager = None if timing is None else timing.eager_seconds
        weights = [] if entrant.model is None else list(entrant.model.parameters())
        return {
            "label": entrant.label,
            "role": entrant.role,
            "compiled": entrant.compiled,
            "parameters": None if timing is None else sum(weight.numel() for weight in weights),
            "images_per_second": None if timing is None else setting.batch / timing.seconds,
            "ratio": reference.timing.seconds / timing.seconds if timing and isinstance(reference, Trial) else None,
            **times(timing),
            "eager_images_per_second": None if eager is None else setting.batch / eager,
            "memory_bytes": sum(w.nbytes for w in weights) + trial.peak_bytes if isinstance(trial, Trial) else None,
            "skipped": trial if isinstance(trial, str) else None,
        }

    return [row(entrant) for entrant in everyone]


def model_job(model: nn.Module, images: Tensor, train: bool) -> Job:
    """Return the call to time. It gives the logits, or the logits and the gradients of all weights."""
    model.train(train)
    run: Callable[[Tensor], Tensor] = model
    if not train:
        return torch.no_grad()(lambda: (run(images),))
    weights = list(model.parameters())

    def job() -> tuple[Tensor, ...]:
        logits = run(images)
        gradients = torch.autograd.grad(logits.float().square().mean(), weights, allow_unused=True)
        return logits, *(gradient for gradient in gradients if gradient is not None)  # the bound reads no bias

    return job


def check_images(name: str, options: Mapping[str, Any], setting: Setting, *, train: bool) -> None:
    """Refuse images that do not fit in memory, before any are made."""
    config, blocks = customize(name, **options), []  # bytes of the tokens of every block
    for stage, (dim, depth) in enumerate(zip(config.dims, config.depths, strict=True)):
        height, width = (-(-side // (config.patch * 2**stage)) for side in setting.image_size)
        blocks += [setting.batch * height * width * dim * max(4, setting.dtype.itemsize)] * depth
    needed = max(blocks, default=0) * LIVE + sum(blocks) * SAVED * train
    if missing := shortage(needed, setting.device):
        size = f"{setting.batch} images of {setting.image_size[0]} x {setting.image_size[1]}"
        raise ArgumentError(f"{size} need about {missing}: give a smaller --batch or --image-size")


def _make(name: str, options: Mapping[str, Any], setting: Setting) -> nn.Module:
    windowed: dict[str, Any] = {} if setting.window is None else {"window": setting.window}
    if setting.head is not None:
        return in_head(name, {**options, **windowed}, setting.head, setting.image_size, setting.dtype, setting.device)
    model = create_model(name, **options, **windowed, img_size=setting.image_size, device=setting.device)
    return model.eval().to(setting.dtype)


def by_plain_formulas(model: nn.Module) -> nn.Module:
    """Make a model compute its linear attention by the plain formulas, in place.

    A mechanism without a plain formula raises before anything is changed. Softmax layers stay as they are.
    """
    layers = linear_layers(model)
    for layer in layers:
        plain(layer.mechanism)
    for layer in layers:
        layer._mix = partial(_mix_plainly, layer)  # type: ignore[method-assign]
        if layer.residual is not None:
            layer.residual.taps = partial(plain_taps, layer.residual)  # type: ignore[method-assign]
    return model


def by_backend(model: nn.Module, backend: str) -> nn.Module:
    """Make a model compute its linear attention on one backend, in place."""
    for layer in linear_layers(model):
        layer.backend = backend
    return model


def linear_layers(model: nn.Module) -> list[Mixing]:
    """Return the layers whose attention is kernelized."""
    layers = (module for module in model.modules() if isinstance(module, Mixing))
    return [layer for layer in layers if layer.mechanism.family == "kernelized"]


def _add(call: AttentionCall) -> Tensor:
    """Return q + k + v; where keys are fewer than queries, q + mean(k + v)."""
    q, k, v = as_heads(call.qkv)
    added = k + v
    if k.shape[-2] != q.shape[-2]:
        added = added.mean(-2, keepdim=True)
    return (q + added).transpose(1, 2).flatten(2)  # [B, N, C]


def _mix_plainly(layer: Mixing, call: AttentionCall) -> Tensor:
    q, k, v = as_heads(call.qkv)
    mechanism, mask = layer.mechanism, call.key_mask
    taps, prefix = layer.taps(call.source, call.grid, mask)
    out = (plain(mechanism) if mask is None else plain_padded(mechanism, mask))(q, k, v)
    if taps is not None:
        assert call.grid is not None
        out = out + plain_residual(v, taps, call.grid, prefix)
    return out.transpose(1, 2).flatten(2)  # [B, N, C]
