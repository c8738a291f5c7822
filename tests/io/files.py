"""Models small enough to look at, files as users have them, and files as attackers make them."""

import io
import pickle
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Parameters, buffers, an integer, a scalar and an empty tensor: everything a file must carry."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.gain = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        nn.init.normal_(self.norm.weight)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    """Bit for bit: NaN equals itself."""
    found = model.state_dict()
    return list(found) == list(expected) and all(
        found[name].shape == tensor.shape
        and found[name].dtype == tensor.dtype
        and found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
        for name, tensor in expected.items()
    )


@contextmanager
def foreign_class(module: str, name: str, **members: object) -> Iterator[type]:
    """A class that can be imported inside, and not afterwards: the authors' settings object, or an attacker's."""
    parts = module.split(".")
    packages = [".".join(parts[: i + 1]) for i in range(len(parts))]
    made = type(name, (dict,), {"__module__": module, **members})
    for package in packages:
        sys.modules[package] = ModuleType(package)
    setattr(sys.modules[module], name, made)
    try:
        yield made
    finally:
        for package in packages:
            del sys.modules[package]


def saved(content: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def repack(data: bytes, **records: bytes | None) -> bytes:
    """The same zip with some records replaced, or left out, and every checksum right. `data__0` is data/0."""
    changed = {name.replace("__", "/").replace("_pkl", ".pkl"): value for name, value in records.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for record in old.infolist():
            name = record.filename.partition("/")[2]
            content = changed.pop(name, old.read(record))
            if content is not None:
                new.writestr(record.filename, content)
        for name, content in changed.items():
            new.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def record(data: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(f"archive/{name}")


def body(value: object, protocol: int = 2) -> bytes:
    """The program that makes a value, without memo, header, frame and STOP: it can stand anywhere in another."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol)
    pickler.fast = True
    pickler.dump(value)
    text = buffer.getvalue()[2:-1]
    return text[9:] if text[:1] == b"\x95" else text


def write(folder: Path, data: bytes, name: str = "weights.pth") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path
