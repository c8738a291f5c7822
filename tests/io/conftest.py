"""Python's audit hook watches for what an attack would do."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

import pytest
import torch

import softless

DEEDS = ("exec", "compile", "os.", "subprocess.", "socket.", "shutil.", "pickle.find_class", "ctypes.", "pty.")
HARMLESS = ("os.listdir", "os.scandir")  # what an import looks for
LISTENERS: list[list[str]] = []


def listen(event: str, arguments: tuple[object, ...]) -> None:
    if not LISTENERS:
        return
    writes = event == "open" and isinstance(arguments[1], str) and arguments[1].strip("rbtU")
    if writes or (event.startswith(DEEDS) and event not in HARMLESS):
        LISTENERS[-1].append(event)


sys.addaudithook(listen)
for module in ("safetensors.torch", "encodings.cp437", "encodings.raw_unicode_escape"):
    import_module(module)  # an import runs code, and the first call would import these
with tempfile.NamedTemporaryFile() as file:  # torch.load imports more
    torch.save(torch.nn.Linear(1, 1).state_dict(), file.name)
    softless.load_weights(torch.nn.Linear(1, 1), file.name)


@contextmanager
def watching() -> Iterator[list[str]]:
    LISTENERS.append([])
    try:
        yield LISTENERS[-1]
    finally:
        LISTENERS.pop()


@pytest.fixture
def watch() -> Callable[[], AbstractContextManager[list[str]]]:
    """`with watch() as deeds`: the code run, files written, processes and sockets made inside."""
    return watching
