"""One device or many: accelerate starts the process group and casts, and DDP or FSDP2 shares a model out.

    none   one process
    ddp    every rank has the complete model, and gradients are averaged
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

from softless.errors import ArgumentError, needs_extra
from softless.machine import pick_device
from softless.train.settings import Precision

Sharing = Literal["ddp", "fsdp"]
T = TypeVar("T")
PATIENCE = timedelta(minutes=10)  # how long a rank waits for the others, which may be compiling or saving


def runnable(precision: Precision, device: str) -> Precision:
    """Return this precision, or fp32 instead of fp16 on a CPU, which has no fp16."""
    return "fp32" if precision == "fp16" and pick_device(device) == "cpu" else precision


class Devices:
    """The device of this process, and the ranks that train the same model."""

    def __init__(
        self, device: str = "auto", precision: Precision = "fp32", sharing: Sharing = "ddp", graph: bool = False
    ):
        with needs_extra("training uses accelerate", "models,train"):
            from accelerate import Accelerator, InitProcessGroupKwargs
            from accelerate.state import AcceleratorState
        on_cpu = pick_device(device) == "cpu"
        if precision != runnable(precision, device):
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
            raise ArgumentError("fsdp runs in bf16 or fp32: sharded gradients cannot be scaled, which fp16 needs")
        self.scaler = self.accelerator.scaler
        self.graph = graph
        if graph and (on_cpu or self.ranks > 1):
            have = "a CPU" if on_cpu else f"{self.ranks} ranks"
            raise ArgumentError(f"a CUDA graph needs one CUDA device, and this training has {have}: leave out --graph")

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, model: nn.Module, *copies: nn.Module) -> nn.Module:
        """Return the module to call in training; `copies`, such as averaged weights, are sharded like the model."""
        if self.sharing == "fsdp":
            for module in (model, *copies):
                shard(module, self.device)
        elif self.sharing == "ddp":
            return self.accelerator.prepare_model(model)
        return model

    def autocast(self) -> Any:
        return self.accelerator.autocast()

    @contextmanager
    def part(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Enclose the passes of one part of a batch: ranks exchange gradients after the last part only."""
        if self.sharing == "fsdp":
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield
        elif self.sharing == "ddp" and not last:
            with model.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over ranks, in place."""
        if self.ranks > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def gather(self, own: T) -> list[T]:
        """Return the objects of all ranks."""
        from accelerate.utils import gather_object

        return gather_object([own]) if self.ranks > 1 else [own]

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.ranks > 1:
            self.accelerator.wait_for_everyone()


def leave() -> None:
    """Leave the process group. All ranks must call this, because NCCL waits for each; a failed rank just exits."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module, device: torch.device) -> None:
    """Give every rank a slice of each parameter: block by block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from softless.models.blocks import Stage

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for stage in [module for module in model.modules() if isinstance(module, Stage)]:
        for block in stage:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def by_blas(precision: Precision = "fp32") -> Iterator[None]:
    """Let BLAS multiply small float32 matrices on an Arm processor; half precision needs oneDNN.

    On Arm, PyTorch computes each float32 product A B^T with oneDNN and the Arm Compute Library, which starts a team of
    threads for it, whatever `torch.set_num_threads` says. That takes 0.1 to 0.6 ms, where BLAS takes 0.003 ms for a
    head of 65 tokens. The backward pass of linear attention has two such products per head. Without oneDNN an update of
    the digits' InLine twin takes 1/6 of the time, and an update of DeiT-T 6/7.
    """
    mkldnn, before = torch.backends.mkldnn, torch.backends.mkldnn.enabled
    if precision == "fp32" and mkldnn.is_acl_available():
        mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        mkldnn.enabled = before
