"""The file system failing on purpose: at its n-th call, a kill or an error in the call's place.

Everything softless.io writes passes through these functions of `os`, pathlib's and shutil's calls included.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CALLS = ("open", "write", "fsync", "close", "mkdir", "replace", "rename", "unlink", "rmdir", "ftruncate")


class Counter:
    """How many calls were made, and which."""

    def __init__(self) -> None:
        self.names: list[str] = []


@contextmanager
def calls(at: int | None = None, error: int | None = None, torn: bool = False) -> Iterator[Counter]:
    """Count the calls. At number `at`, raise OSError(error), or die by SIGKILL if that is None.

    torn  a write that fails or is killed has written half of its bytes
    """
    counter = Counter()

    def watched(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter.names.append(name)
            if len(counter.names) - 1 == at:
                if name == "write" and torn:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                if error is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "close":
                    real(*args)
                raise OSError(error, os.strerror(error))
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield counter
