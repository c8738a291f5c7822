"""One update at a time, and none with a number that is not finite.

    loss, gradients -> norm -> finite? -> AdamW -> averaged weights

Whether loss and gradient are finite is known on the device only, and asking would make the host wait at every update.
So the answer stays there: it is handed to the fused AdamW as `found_inf`, the flag by which gradient scaling makes it
leave parameters, moments and counters as they are. The flag sticks. Every later update is left out too, so that the
weights remain those of the last good update until the loop reads the flag (`failure`), at the latest before it logs,
evaluates or saves. Averaged weights move in between, and are never saved.

In fp16 a gradient that overflows is ordinary: the scaler skips that update and halves the scale. There the loss must be
finite, and a gradient now and then: `MOST_OVERFLOWS` in a row are no matter of scale. After a failure every later loss
is made NaN, which the scaler skips too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softless.train.devices import Devices
from softless.train.objective import Objective
from softless.train.recipe import Recipe
from softless.train.replay import Batch, Replay

# Inductor of torch 2.11 to 2.14 may lay a padded buffer out anew and still read it where it was: pytorch issue 194281.
COMPILE = {"comprehensive_padding": False}
MOST_OVERFLOWS = 20  # updates in a row that may overflow in fp16: the scale begins at 2^16, and 2^-4 is left of it


@dataclass(frozen=True)
class Failure:
    """The first update that a loss or gradient which is not finite forbids; the last of `overflows` in a row."""

    step: int
    loss: float
    gradient_norm: float
    overflows: int


class Engine:
    """A model, its optimizer, schedule and averaged weights."""

    def __init__(self, model: nn.Module, recipe: Recipe, devices: Devices, objective: Objective, per_epoch: int):
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler
        from timm.utils import ModelEmaV3

        self.recipe, self.devices, self.objective, self.step = recipe, devices, objective, 0
        self.plain = model.to(devices.device)
        if recipe.channels_last:
            self.plain.to(memory_format=torch.channels_last)
        self.ema = ModelEmaV3(self.plain, recipe.ema, use_warmup=recipe.ema_warmup) if recipe.ema else None
        if recipe.compile:
            torch._dynamo.reset()  # models this process trained before count against the limit of what it compiles
            compile_blocks(self.plain) if devices.graph else self.plain.compile(options=COMPILE)
        self.model = devices.share(self.plain, *([self.ema.module] if self.ema else []))
        if objective.teacher is not None:
            objective.teacher.to(devices.device)
        self.optimizer = create_optimizer_v2(
            self.plain, opt="adamw", lr=recipe.lr, weight_decay=recipe.weight_decay,
            betas=(recipe.beta1, recipe.beta2), fused=True, capturable=devices.graph,
        )  # fmt: skip
        self.schedule = CosineLRScheduler(
            self.optimizer, t_initial=max(2, recipe.epochs * per_epoch), lr_min=recipe.min_lr, t_in_epochs=False,
            warmup_t=recipe.warmup_epochs * per_epoch, warmup_lr_init=recipe.warmup_lr,
        )  # fmt: skip
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.overflows = torch.zeros((), dtype=torch.int64, device=devices.device)  # gradients in a row, not finite
        self.verdict = torch.zeros(5, dtype=torch.float64, device=devices.device)  # failed, and a Failure's numbers
        self.number = torch.zeros((), dtype=torch.float64, device=devices.device)  # of the update
        self.replay: Replay | None = None

    @property
    def best_model(self) -> nn.Module:
        """The weights to evaluate: the averaged ones where there are any."""
        return self.plain if self.ema is None else self.ema.module

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[-1]["lr"]

    def update(self, pixels: Tensor, labels: Tensor) -> None:
        """Pixels [B, 3, H, W] as the model sees them, labels [B]."""
        self.schedule.step_update(self.step)
        self.number.fill_(self.step)
        if self.recipe.channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        parts = zip(pixels.chunk(self.recipe.accumulate), labels.chunk(self.recipe.accumulate), strict=True)
        batch = [self.objective.mix(*part) for part in parts]
        if self.devices.graph and self.replay is None:
            self.replay = self._recorded(batch)
        loss, norm = self._learn(batch) if self.replay is None else self.replay(batch)
        if self.ema is not None:
            self.ema.update(self.plain, self.step + 1 if self.recipe.ema_warmup else None)
        self.losses.append(loss)
        self.norms.append(norm)
        self.step += 1

    def failure(self) -> Failure | None:
        """Wait for the device, and say whether an update was left out."""
        failed, step, loss, norm, overflows = self.verdict.tolist()
        return Failure(int(step), loss, norm, int(overflows)) if failed else None

    def _learn(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """An update by parts of pixels and targets: its loss, and the norm of its gradient."""
        loss = self._backward(batch)
        if self.devices.scaler is not None:
            self.devices.scaler.unscale_(self.optimizer)
        norm = _whole(nn.utils.clip_grad_norm_(self.plain.parameters(), self.recipe.clip or torch.inf))
        self._judge(loss, norm)
        self._apply()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _recorded(self, batch: Batch) -> Replay:
        """Updates like that of this batch. Those that come before the recording find the verdict given: they leave
        weights and moments as they are. What else they move is put back.
        """
        scaler, moved = self.devices.scaler, [self.verdict, self.overflows, *self.plain.buffers()]
        before = [tensor.clone() for tensor in moved]
        scale = None if scaler is None else scaler.state_dict()
        replay = Replay(self._learn, self.optimizer)
        self.verdict[0] = 1
        with torch.random.fork_rng(devices=[self.devices.device]):
            replay.record(batch)
        for tensor, old in zip(moved, before, strict=True):
            tensor.copy_(old)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
        return replay

    def _backward(self, batch: Batch) -> Tensor:
        total = torch.zeros((), device=self.devices.device)
        for index, (pixels, targets) in enumerate(batch):
            with self.devices.part(self.model, last=index == len(batch) - 1):
                with self.devices.autocast():
                    loss = self.objective(self.model, pixels, targets) / len(batch)
                if self.devices.scaler is None:
                    loss.backward()
                else:
                    self.devices.scaler.scale(torch.where(self.verdict[0] > 0, torch.nan, loss)).backward()
            total = total + loss.detach()
        self.devices.add_up([total])
        return total / self.devices.ranks

    def _judge(self, loss: Tensor, norm: Tensor) -> None:
        """Keep the first update that is not finite. Both numbers are those of all ranks, and so is the verdict."""
        self.overflows.copy_(torch.where(torch.isfinite(norm), 0, self.overflows + 1))
        bad = ~torch.isfinite(loss) | (self.overflows > (0 if self.devices.scaler is None else MOST_OVERFLOWS))
        numbers = self.number, loss.double(), norm.double(), self.overflows.double()
        now = torch.stack([torch.ones_like(self.number), *numbers])
        self.verdict.copy_(torch.where((self.verdict[0] == 0) & bad, now, self.verdict))

    def _apply(self) -> None:
        if self.devices.scaler is not None:
            self.devices.scaler.step(self.optimizer)
            self.devices.scaler.update()
            return
        fused: Any = self.optimizer
        fused.found_inf = self.verdict[0].float()
        fused.step()
        del fused.found_inf


def compile_blocks(model: nn.Module) -> None:
    """Block by block, and what lies between stages: equal blocks share what is compiled, if they drop paths alike."""
    from softless.models.blocks import Stage

    stages = [part for part in model.modules() if isinstance(part, Stage)]
    within = {part for stage in stages for part in stage.modules()}
    between = [part for part in model.children() if any(part.children()) and within.isdisjoint(part.modules())]
    parts = [block for stage in stages for block in stage] + between or [model]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, len(parts))
    for part in parts:
        part.compile(dynamic=False, options=COMPILE)


def _whole(norm: Tensor) -> Tensor:
    """The norm of all slices, where parameters are sharded."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
