"""One device or many: accelerate starts the processes' group and casts; DDP or FSDP2 shares a model out.

    none   one process
    ddp    every rank has the whole model; gradients are averaged
    fsdp   every rank has a slice of each parameter (torch's fully_shard), on CPUs too, where accelerate refuses

Start several with `torchrun --nproc-per-node 2 -m softless train ...` or `accelerate launch -m softless train ...`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from softless.errors import ArgumentError, MissingExtraError
from softless.train.recipe import Precision

Sharing = Literal["ddp", "fsdp"]
T = TypeVar("T")
PATIENCE = timedelta(minutes=10)  # of a rank that waits for the others, who may be compiling or saving


def _on_cpu(where: str) -> bool:
    return where == "cpu" or not torch.cuda.is_available()


def runnable(precision: Precision, where: str) -> Precision:
    """This precision, or the next one up that this device has: a CPU has no fp16."""
    return "fp32" if precision == "fp16" and _on_cpu(where) else precision


class Devices:
    """Where a model runs and who else runs it."""

    def __init__(
        self, where: str = "auto", precision: Precision = "fp32", sharing: Sharing = "ddp", graph: bool = False
    ):
        try:
            from accelerate import Accelerator, InitProcessGroupKwargs
            from accelerate.state import AcceleratorState
        except ModuleNotFoundError:
            raise MissingExtraError(
                "training uses accelerate, and it is not installed: pip install 'softless[models,train]'"
            ) from None
        if where == "cuda" and not torch.cuda.is_available():
            raise ArgumentError("device 'cuda' was asked for, and torch finds no CUDA device")
        on_cpu = _on_cpu(where)
        if precision != runnable(precision, where):
            raise ArgumentError("precision 'fp16' needs a CUDA device: bf16 and fp32 run on a CPU")
        AcceleratorState._reset_state()  # a process may train twice, and in another precision
        self.accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision="no" if precision == "fp32" else precision,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
        self.device: torch.device = torch.device("cpu") if on_cpu else self.accelerator.device
        self.rank, self.ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.sharing: Sharing | None = sharing if self.ranks > 1 else None
        if self.sharing == "fsdp" and precision == "fp16":
            raise ArgumentError("fsdp runs in bf16 or fp32: fp16 scales its gradients, which sharded ones are not")
        self.scaler = self.accelerator.scaler
        self.graph = graph
        if graph and (on_cpu or self.ranks > 1):
            have = "a CPU" if on_cpu else f"{self.ranks} ranks"
            raise ArgumentError(f"a CUDA graph is of one CUDA device, and this training has {have}: leave out --graph")

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, model: nn.Module, *copies: nn.Module) -> nn.Module:
        """What is called to train the model; `copies`, such as averaged weights, are sharded as it is."""
        if self.sharing == "fsdp":
            for each in (model, *copies):
                shard(each, self.device)
        elif self.sharing == "ddp":
            return self.accelerator.prepare_model(model)
        return model

    def autocast(self) -> Any:
        return self.accelerator.autocast()

    @contextmanager
    def part(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a part of a batch: gradients are exchanged after the last."""
        if self.sharing == "fsdp":
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield
        elif self.sharing == "ddp" and not last:
            with model.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sums over ranks, in place."""
        if self.ranks > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def gather(self, own: T) -> list[T]:
        """What every rank has."""
        from accelerate.utils import gather_object

        return gather_object([own]) if self.ranks > 1 else [own]

    def any(self, flag: Tensor) -> Tensor:
        """Whether it is set on any rank."""
        if self.ranks > 1:
            number = flag.float()
            dist.all_reduce(number, dist.ReduceOp.MAX)
            return number > 0
        return flag

    def wait(self) -> None:
        """For every rank to come here."""
        if self.ranks > 1:
            self.accelerator.wait_for_everyone()


def leave() -> None:
    """The group, where all ranks come to the end: NCCL waits for each of them, so one that fails alone just ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module, device: torch.device) -> None:
    """A slice of each parameter for each rank: block by block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from softless.models.blocks import Stage

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for stage in [module for module in model.modules() if isinstance(module, Stage)]:
        for block in stage:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
