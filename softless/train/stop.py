"""Ctrl-C, or the SIGTERM of a machine that is taken away: the update ends, the state is saved, the program stops."""

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
    """While it is entered, both are noted, and a second Ctrl-C stops at once. `saving` says that the state is written.

    A second SIGTERM does not: a scheduler sends it to every process, and torchrun passes its own on.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = self.saving = False
        self.before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {each: signal.signal(each, self._note) for each in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    def agreed(self, devices: Devices, step: int, every: int) -> bool:
        """Whether to stop here. Ranks are asked together, every few updates, or one would wait for the others."""
        if devices.ranks == 1:
            return self.asked
        return step % every == 0 and bool(devices.any(torch.tensor(self.asked, device=devices.device)))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
