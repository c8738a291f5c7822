"""Weights from a file that `torch.save` wrote, read without unpickling.

A checkpoint is a dictionary of tensors, or a dictionary that holds some beside an optimizer, an epoch and whatever
object its authors used for settings. In the pickle a tensor is a note of where its numbers are:

    _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)
    element (i, j, ...) is number  offset + i stride_0 + j stride_1 + ...  of the storage

The note is believed only as far as the storage's bytes reach, and only if no two elements share a number.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless.errors import FileError
from softless.io.archive import Archive, open_archive
from softless.io.inert import Call, Name, Reference, read_pickle

KEYS = ("state_dict_ema", "model", "state_dict")
"""Where weights are looked for, in this order; then the file itself."""

TENSOR, PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
FLOAT8 = {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
READ = {*DTYPES.values(), *FLOAT8, torch.uint16, torch.uint32, torch.uint64}
"""What a safetensors file may hold: torch cannot convert the dtypes of less than a byte."""

UNDERSTOOD = {TENSOR, PARAMETER, "collections.OrderedDict", *DTYPES}
MOST_DIMENSIONS = 64


class Checkpoint(NamedTuple):
    """One dictionary of tensors, the key it stood under, and the foreign names the file holds beside it."""

    key: str | None
    tensors: dict[str, Tensor]
    ignored: tuple[str, ...]


def read_torch(path: Path, key: str | None = None) -> Checkpoint:
    """The weights in a file of `torch.save`: those under `key`, or the first of KEYS."""
    with open_archive(path) as archive:
        content, names = read_pickle(bytes(archive.read("data.pkl")))
        found, entries = _choose(content, key)
        where = "it" if found is None else repr(found)
        strangers = [f"{_show(name)} ({_kind(value)})" for name, value in entries.items() if not _is_entry(name, value)]
        if strangers:
            raise FileError(f"{where} should hold only tensors by name, and holds {', '.join(strangers)}")
        storages: dict[str, bytearray] = {}
        tensors = {name: _tensor(name, value, archive, storages) for name, value in entries.items()}
    return Checkpoint(found, tensors, tuple(name for name in names if name not in UNDERSTOOD))


def _choose(content: Any, key: str | None) -> tuple[str | None, dict[Any, Any]]:
    if not isinstance(content, dict):
        raise FileError(f"it holds {_kind(content)}, not a dictionary of tensors")
    for candidate in KEYS if key is None else (key,):
        value = content.get(candidate)
        if isinstance(value, dict):
            return candidate, value
        if value is not None and not _is_tensor(value):
            raise FileError(f"{candidate!r} is {_kind(value)}, not a dictionary of tensors")
    if key is None and any(map(_is_tensor, content.values())):
        return None, content
    asked = f"under {' or '.join(map(repr, KEYS))}, nor is it one" if key is None else f"under {key!r}"
    held = ", ".join(f"{_show(name)} ({_kind(value)})" for name, value in content.items()) or "nothing"
    hint = ", and key= can name another" if any(isinstance(value, dict) for value in content.values()) else ""
    raise FileError(f"it has no dictionary of tensors {asked}: it holds {held}{hint}")


def _tensor(name: str, note: Call, archive: Archive, storages: dict[str, bytearray]) -> Tensor:
    """A view of the storage that the note names."""
    if note.name == PARAMETER:
        note = note.arguments[0]
    match note.arguments:
        case (
            Reference(("storage", Name(kind), str(key), _, _)),
            int(offset),
            tuple(size),
            tuple(stride),
            _,
            _,
        ) if kind in DTYPES:
            if key not in storages:
                storages[key] = archive.read(f"data/{key}")
            dtype, data = DTYPES[kind], storages[key]
        case _:
            raise FileError(f"{name!a} is not a plain tensor")
    count = len(data) // dtype.itemsize
    _check_layout(name, count, offset, size, stride)
    if 0 in size:
        return torch.empty(size, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype, count=count).as_strided(size, stride, offset)


def _check_layout(name: str, count: int, offset: int, size: tuple[Any, ...], stride: tuple[Any, ...]) -> None:
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or len(size) > MOST_DIMENSIONS or not all(type(n) is int for n in numbers):
        raise FileError(f"{name!a} has no layout that a tensor can have")
    if min(numbers) < 0 or max(numbers) >= 2**63 or math.prod(n for n in size if n) >= 2**63:
        raise FileError(f"{name!a} has a negative or impossible size, stride or offset")
    if 0 in size:
        return
    reach = 0
    for step, length in sorted((step, length) for step, length in zip(stride, size, strict=True) if length > 1):
        if step <= reach:
            raise FileError(f"{name!a} has size {list(size)} and stride {list(stride)}: its elements overlap")
        reach += step * (length - 1)
    if offset + reach >= count:
        raise FileError(f"{name!a} has size {list(size)}, and its storage only {count} numbers")


def _is_entry(name: Any, value: Any) -> bool:
    return isinstance(name, str) and _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    """A note of a tensor, or of a parameter that wraps one."""
    if isinstance(value, Call) and value.name == PARAMETER and isinstance(value.arguments, tuple) and value.arguments:
        value = value.arguments[0]
    return isinstance(value, Call) and value.name == TENSOR


def _kind(value: Any) -> str:
    if _is_tensor(value):
        return "a tensor"
    if isinstance(value, Call):
        return f"a pickled {value.name!a}"
    return "a dictionary" if isinstance(value, dict) else f"a value of type {type(value).__name__}"


def _show(name: Any) -> str:
    return ascii(name) if isinstance(name, str | int) else "a key that is no string"
