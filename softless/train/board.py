"""The same numbers for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from softless.errors import MissingExtraError


class Board:
    """Curves in a folder; those after `step` are of an interrupted run and are hidden."""

    def __init__(self, folder: Path, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise MissingExtraError(
                "training writes TensorBoard files, and tensorboard is not installed: pip install 'softless[train]'"
            ) from None
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()
