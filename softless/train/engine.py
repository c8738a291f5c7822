"""Make updates one at a time, and none from a loss or a gradient that is not finite.

    loss, gradients -> norm -> finite? -> AdamW -> averaged weights

Only the device knows whether loss and gradient are finite, and asking it would make the host wait at every update. So
the answer stays on the device, as the flag `found_inf` of the fused AdamW. Gradient scaling uses this flag too: if it
is set, parameters, moments and counters stay as they are. Once set, the flag stays set, so no later update is made. The
loop reads it (`failure`) before it logs, evaluates or saves, and the weights are still those of the last good update.
The averaged weights move in between, and are never saved.

In fp16, a gradient may overflow: the scaler skips that update and halves the scale. A training fails if the loss is not
finite, or after `MOST_OVERFLOWS` gradients in a row. After a failure every later loss is NaN, which the scaler skips.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from softless.errors import UnsupportedError
from softless.train.devices import Devices
from softless.train.settings import Settings
from softless.train.tasks import Loss, Tensors

# Inductor of torch 2.11 to 2.14 may move a padded buffer and still read it where it was: pytorch issue 194281.
COMPILE = {"comprehensive_padding": False}
MOST_OVERFLOWS = 20  # updates in a row that may overflow in fp16, which halve the scale from 2^16 to 2^-4
WARM = 3  # updates before the recorded one, in which libraries choose their kernels and take their memory


@dataclass(frozen=True)
class Failure:
    """The first update that was not made, because a number is not finite.

    overflows   gradients in a row that were not finite, this one included
    """

    step: int
    loss: float
    gradient_norm: float
    overflows: int


class Engine:
    """A model with its loss, optimizer, schedule and averaged weights."""

    def __init__(self, model: nn.Module, recipe: Settings, devices: Devices, loss: Loss, per_epoch: int):
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler
        from timm.utils import ModelEmaV3

        self.recipe, self.devices, self.loss, self.step = recipe, devices, loss, 0
        self.plain = model.to(devices.device)
        self.ema = ModelEmaV3(self.plain, recipe.ema, use_warmup=recipe.ema_warmup) if recipe.ema else None
        if recipe.compile:
            torch._dynamo.reset()  # models that this process compiled before count against its limit
            compile_blocks(self.plain) if devices.graph else self.plain.compile(options=COMPILE)
        self.model = devices.share(self.plain, *([self.ema.module] if self.ema else []))
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
        self.number = torch.zeros((), dtype=torch.float64, device=devices.device)  # the number of the update
        self.replay: Replay | None = None
        self.checked = devices.device.type != "cuda"

    @property
    def best_model(self) -> nn.Module:
        """Return the model to evaluate: with averaged weights if the recipe has them."""
        return self.plain if self.ema is None else self.ema.module

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[-1]["lr"]

    def update(self, batch: Any) -> None:
        """Learn from a batch of the task."""
        self.schedule.step_update(self.step)
        self.number.fill_(self.step)
        parts = self.loss.parts(batch, self.recipe.accumulate)
        if self.recipe.compile and not self.checked:
            self._check_kernels(parts[0])
        if self.devices.graph and self.replay is None:
            self.replay = self._recorded(parts)
        loss, norm = self._learn(parts) if self.replay is None else self.replay(parts)
        if self.ema is not None:
            self.ema.update(self.plain, self.step + 1 if self.recipe.ema_warmup else None)
        self.losses.append(loss)
        self.norms.append(norm)
        self.step += 1

    def failure(self) -> Failure | None:
        """Wait for the device, and return the first update that was not made."""
        failed, step, loss, norm, overflows = self.verdict.tolist()
        return Failure(int(step), loss, norm, int(overflows)) if failed else None

    def _learn(self, parts: list[Tensors]) -> tuple[Tensor, Tensor]:
        """Make an update from the parts of a batch; return its loss, and the norm of its gradient."""
        loss = self._backward(parts)
        if self.devices.scaler is not None:
            self.devices.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), self.recipe.clip or torch.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # fsdp: over the slices of all ranks
        self._judge(loss, norm)
        self._apply()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _check_kernels(self, part: Tensors) -> None:
        """Run the model once as it is, before it is compiled.

        A GPU without recorded evidence checks the kernels at a plain call. While torch.compile traces it cannot, so a
        training would run plain torch from then on.
        """
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.no_grad(), self.devices.autocast(), torch.random.fork_rng([self.devices.device]):
            self.loss(self.plain.eval(), part)
        self.plain.train()
        self.checked = True

    def _recorded(self, parts: list[Tensors]) -> "Replay":
        """Record an update of parts with these shapes.

        The updates before the recording run with the verdict "failed", so they leave weights and moments as they are.
        This method restores everything else that they change.
        """
        scaler, moved = self.devices.scaler, [self.verdict, self.overflows, *self.plain.buffers()]
        before = [tensor.clone() for tensor in moved]
        scale = None if scaler is None else scaler.state_dict()
        replay = Replay(self._learn, self.optimizer)
        self.verdict[0] = 1
        with torch.random.fork_rng(devices=[self.devices.device]):
            try:
                replay.record(parts)
            except RuntimeError as error:
                if "captur" not in str(error):
                    raise
                raise UnsupportedError(
                    "an update of this model cannot be recorded as a CUDA graph, because something in it waits for "
                    f"the GPU: train without --graph ({str(error).splitlines()[0]})"
                ) from error
        for tensor, old in zip(moved, before, strict=True):
            tensor.copy_(old)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
        return replay

    def _backward(self, parts: list[Tensors]) -> Tensor:
        total = torch.zeros((), device=self.devices.device)
        for index, part in enumerate(parts):
            with self.devices.part(self.model, last=index == len(parts) - 1):
                with self.devices.autocast():
                    loss = self.loss(self.model, part) / len(parts)
                if self.devices.scaler is None:
                    loss.backward()
                else:
                    self.devices.scaler.scale(torch.where(self.verdict[0] > 0, torch.nan, loss)).backward()
            total = total + loss.detach()
        self.devices.add_up([total])
        return total / self.devices.ranks

    def _judge(self, loss: Tensor, norm: Tensor) -> None:
        """Remember the first update that is not finite. All ranks have the same loss and norm, so the same verdict."""
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
    """Compile each block, and each module between stages. Equal blocks that drop paths alike share their code."""
    from softless.models.blocks import Stage

    stages = [part for part in model.modules() if isinstance(part, Stage)]
    within = {part for stage in stages for part in stage.modules()}
    between = [part for part in model.children() if any(part.children()) and within.isdisjoint(part.modules())]
    parts = [block for stage in stages for block in stage] + between or [model]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, len(parts))
    for part in parts:
        part.compile(dynamic=False, options=COMPILE)


class Replay:
    """An update recorded once as a CUDA graph, and replayed for batches of the same shape.

    The host starts a graph in microseconds, and would take milliseconds for its thousand kernels. A graph reads and
    writes fixed places in memory, so batches and learning rates are copied to these places, and results from them.

    learn       makes one update from the parts of a batch, and returns its loss and the norm of its gradient
    optimizer   the optimizer that `learn` steps; it must be `capturable`
    """

    def __init__(
        self, learn: Callable[[list[Tensors]], tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer
    ) -> None:
        self.learn, self.optimizer, self.graph = learn, optimizer, torch.cuda.CUDAGraph()
        self.inputs: list[Tensors] = []
        self.answers: tuple[Tensor, ...] = ()
        self.rates: list[Tensor] = []

    def __call__(self, parts: list[Tensors]) -> tuple[Tensor, ...]:
        for inputs, part in zip(self.inputs, parts, strict=True):
            for old, new in zip(inputs, part, strict=True):
                old.copy_(new)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.graph.replay()
        return tuple(answer.clone() for answer in self.answers)

    def record(self, parts: list[Tensors]) -> None:
        """Run `learn` WARM times, and then record it. The caller undoes the runs; recording changes nothing."""
        self.inputs = [tuple(tensor.clone() for tensor in part) for part in parts]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.rates = [torch.tensor(rate, device=parts[0][0].device) for rate in rates]
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has a stream of its own
        self._set_rates(self.rates)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self.learn(self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        gc.collect()  # freeing the graph of an earlier training during a recording would end the recording
        with torch.cuda.graph(self.graph):
            self.answers = self.learn(self.inputs)
        self._set_rates(rates)

    def _set_rates(self, rates: list[Tensor] | list[float]) -> None:
        for rate, group in zip(rates, self.optimizer.param_groups, strict=True):
            group["lr"] = rate
