"""Ctrl-C ends the program within three seconds, whatever it is doing.

Python runs the handler of a signal between two of its own instructions. A backward pass, a compiler or a library that
swallows `KeyboardInterrupt` can delay it for minutes. So Ctrl-C also wakes a second thread, through
`signal.set_wakeup_fd`, and this thread ends the process if it has not ended by itself. Nothing is lost, because
trainings and studies can be killed at any moment and resumed.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERRUPTED = 130
PATIENCE = 1.5  # seconds that a program has to end by itself
LONGEST_SAVE = 60.0  # seconds
SHOW_CURSOR = "\x1b[?25h"


class CtrlCWatch:
    """A thread that ends the program after Ctrl-C.

    says        the line to print if the thread has to end the program; a command sets it
    is_saving   returns whether a checkpoint is being written, which may take longer; a command sets it
    """

    def __init__(self) -> None:
        self.says = ""
        self.is_saving: Callable[[], bool] = lambda: False

    def start(self) -> None:
        """Start the thread, unless this process is one of several ranks, which save together."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _listen(self, read: int) -> None:
        while signal.SIGINT not in os.read(read, 64):
            pass
        time.sleep(PATIENCE)
        longest = time.monotonic() + LONGEST_SAVE
        while self.is_saving() and time.monotonic() < longest:
            time.sleep(0.05)
        end(self.says)


WATCH = CtrlCWatch()


@contextmanager
def continues() -> Iterator[None]:
    """Say on Ctrl-C that the same command continues: one update is lost at most."""
    WATCH.says = "stopped: the same command continues"
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"{WATCH.says}\n")
        raise


def end(says: str = "") -> NoReturn:
    """Exit with 130 at once: an orderly exit of a process with torch takes seconds."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{SHOW_CURSOR}")  # erases the line of a progress bar, which hides the cursor
    if says:
        sys.stderr.write(f"{says}\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(INTERRUPTED)
