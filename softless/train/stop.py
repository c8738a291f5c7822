"""Ctrl-C: the update in progress ends, the state is saved, and only then the program stops."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import torch

from softless.train.devices import Devices


class Interrupted(KeyboardInterrupt):
    """A training was interrupted, and saved."""

    def __init__(self, step: int, total: int):
        super().__init__(f"stopped after update {step} of {total}")
        self.step, self.total = step, total


class Stop:
    """While it is entered, the first Ctrl-C is noted, and the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before: object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)  # type: ignore[arg-type]

    def agreed(self, devices: Devices, step: int, every: int) -> bool:
        """Whether to stop here. Ranks are asked together, every few updates, or one would wait for the others."""
        if devices.ranks == 1:
            return self.asked
        return step % every == 0 and bool(devices.any(torch.tensor(self.asked, device=devices.device)))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
