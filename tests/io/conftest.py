"""What an attack would do is watched for, by Python itself."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

import pytest

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
for module in ("safetensors.torch", "softless.io", "encodings.cp437", "encodings.raw_unicode_escape"):
    import_module(module)  # an import runs code, and these would come at a first call


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
