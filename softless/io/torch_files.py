"""Read tensors from a file that `torch.save` wrote, without running any code in the file.

Such a file is a zip file:

    NAME/data.pkl       a pickle: names, shapes, strides, and which storage holds which tensor
    NAME/data/0, 1...   the numbers of each storage

`torch.load(weights_only=True)` builds the tensors and calls nothing else in the pickle. Three checks surround it:

    before  the zip file: no compressed, overlapping or doubled record, and every checksum matches
    before  the pickle: its length, its nesting and the memory that its calls can take
    after   the tensors: no special kinds of tensor, and no two elements that share a number

A class that torch does not know, such as the settings object of a training script, becomes an empty stand-in.
"""

import pickletools
import re
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from softless.errors import FileError

KEYS = ("state_dict_ema", "model", "state_dict")  # where weights are looked for, in this order, before the file itself

_WHOLE_BYTES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128"
)
DTYPES = {getattr(torch, name) for name in _WHOLE_BYTES.split()}
DTYPES |= {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
"""The dtypes that can be read: torch cannot convert a dtype of less than a byte."""

MOST_INSTRUCTIONS = 2_000_000  # the pickle of InLine-CSwin-B with its average and its optimizer has 112,091
MOST_NESTING = 1_000  # Python overflows its stack when it hashes a tuple that is nested 100,000 deep
MOST_COPIES = 16  # how many times the size of the pickle its calls may copy

VALUES = re.compile(
    r"argparse\.Namespace|collections\.(defaultdict|deque)|copyreg\._reconstructor|decimal\.Decimal|uuid\.UUID"
    r"|datetime\.(date|datetime|timedelta|timezone)|fractions\.Fraction|functools\.partial|types\.SimpleNamespace"
    r"|builtins\.(bool|bytes|dict|float|frozenset|int|list|object|range|slice|str|tuple)"
    r"|pathlib\.(Posix|PurePosix|Windows|PureWindows)Path"
)
"""Names of the standard library that a checkpoint may hold. Every other one is a sign of an attack."""

ALIASES = {"__builtin__": "builtins", "cPickle": "pickle", "commands": "subprocess", "copy_reg": "copyreg"}
ALIASES |= {"pathlib._local": "pathlib"}
"""Other names of modules: their names in Python 2, which protocol 2 uses, and in Python 3.13."""

_one_at_a_time = threading.Lock()  # safe_globals and catch_warnings change the state of the process


class TensorDict(NamedTuple):
    """Tensors by name, the key under which the file has them, and the foreign names that were not imported."""

    key: str | None
    tensors: dict[str, Tensor]
    ignored: tuple[str, ...]


def read_torch(path: Path, key: str | None = None) -> TensorDict:
    """Return the weights under `key`, or under the first of KEYS, in a file that `torch.save` wrote."""
    with path.open("rb") as file, _one_at_a_time, warnings.catch_warnings(action="ignore"):
        pickle = _checked_pickle(file)
        with _explained("its pickle is damaged"):
            containers = _check_pickle(pickle)
        with _explained("torch.load refuses it"):
            file.seek(0)
            names = sorted(get_unsafe_globals_in_checkpoint(file))
            _refuse_code(names)
            file.seek(0)
            with safe_globals([(_stand_in(name, containers.get(name)), name) for name in names]):
                content = torch.load(file, map_location="cpu", weights_only=True)
    chosen, entries = _choose(content, key)
    where = "it" if chosen is None else repr(chosen)
    others = {name: x for name, x in entries.items() if not (isinstance(name, str) and isinstance(x, Tensor))}
    if others:
        raise FileError(f"{where} should hold only tensors by name, and holds {_content(others)}")
    for name, tensor in entries.items():
        _check_tensor(name, tensor)
    return TensorDict(chosen, {name: tensor.detach() for name, tensor in entries.items()}, tuple(names))


def _checked_pickle(file: Any) -> bytes:
    """Return the pickle in a zip file, after a check that no record is compressed, doubled or damaged.

    torch compresses nothing, so the records of an honest file together are smaller than the file. It does not compare
    checksums. An unusual zip file is refused too, because torch and Python may read it differently.
    """
    with _explained("it begins as a zip file and does not end as one: it is cut short or damaged"):
        archive = ZipFile(file)
        records = archive.infolist()
        size = file.seek(-22, 2) + 22
        ends = file.read(4) == b"PK\x05\x06"  # where the directory of a zip file ends, if nothing follows it
    names = [record.filename for record in records]
    if len({name.lower() for name in names}) < len(names):
        raise FileError("two of its records have the same name")
    if sum(record.file_size for record in records) > size:
        raise FileError("its records claim more bytes than the file has")
    folders = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
    if len(folders) != 1 or not all(name.startswith(folders[0]) for name in names):
        raise FileError("it is a zip file, but not one that torch.save wrote: it has no single data.pkl")
    if not ends or min(record.header_offset for record in records):
        raise FileError("it is a zip file with other data before or behind it")
    for record in records:
        if record.compress_type != ZIP_STORED or record.compress_size != record.file_size:
            raise FileError(f"its record {record.filename!a} is compressed, and torch compresses nothing")
    with _explained("one of its records is damaged"):
        if damaged := archive.testzip():
            raise FileError(f"its record {damaged!a} is damaged")
        return archive.read(folders[0] + "data.pkl")


@dataclass(slots=True)
class _Value:
    """A value on the stack of a pickle: how deeply it is nested, how large it is, and the name of its class."""

    depth: int = 0
    size: int = 1
    name: str = ""

    def take(self, values: list["_Value"]) -> None:
        self.depth = max([self.depth, *(value.depth + 1 for value in values)])
        self.size += sum(value.size for value in values)
        if self.depth > MOST_NESTING:
            raise FileError(f"its pickle has values nested more than {MOST_NESTING} deep, and no checkpoint has")


def _check_pickle(data: bytes) -> dict[str, type]:
    """Raise an error for a pickle that could crash torch.load or exhaust the memory.

    A pickle is a program for a stack machine. This function follows only the sizes of the values on the stack. It
    returns the foreign names whose objects are filled as dictionaries or lists, because torch.load fills only these.
    """
    containers: dict[str, type] = {}
    copied = 0
    for instruction, value, arguments in _steps(data):
        if instruction in ("SETITEM", "SETITEMS", "APPEND", "APPENDS"):
            containers[value.name] = OrderedDict if "ITEM" in instruction else list
        elif instruction in ("REDUCE", "NEWOBJ"):
            copied += sum(argument.size for argument in arguments)
            if copied > MOST_COPIES * len(data):
                raise FileError("its pickle copies one value many times, and no checkpoint does")
        elif value.name.endswith(".bytearray"):
            raise FileError("its pickle makes a bytearray, which can claim any amount of memory")
    return containers


def _steps(data: bytes) -> Iterator[tuple[str, _Value, list[_Value]]]:
    """Yield each instruction that leaves a value, the value, and the values that went into it."""
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[Any, _Value] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name, before = opcode.name, opcode.stack_before
        if count == 0 and (name, argument) not in (("PROTO", 2), ("PROTO", 3)):
            protocol = argument if name == "PROTO" else "0 or 1"
            raise FileError(
                f"its pickle has protocol {protocol}, and torch.load(weights_only=True) reads 2 and 3: "
                "torch.save writes 2 unless it is called with pickle_protocol"
            )
        if count >= MOST_INSTRUCTIONS:
            raise FileError(f"its pickle has more than {MOST_INSTRUCTIONS} instructions, and no checkpoint has")
        if name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        else:
            marked = pickletools.markobject in before
            start = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
            if start < 0:
                raise IndexError
            taken, stack[start:] = stack[start:], []
            if name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
                value, taken = taken[0], taken[1:]
            else:
                value = _Value(size=1 + len(argument) if isinstance(argument, str | bytes) else 1)
                value.name = str(argument).replace(" ", ".") if name == "GLOBAL" else ""
            if name in ("REDUCE", "NEWOBJ"):
                value.name = taken[0].name
            value.take(taken)
            stack += [value] * len(opcode.stack_after)
            yield name, value, taken


def _refuse_code(names: list[str]) -> None:
    """Raise an error if a file names code of the standard library, which torch.load would not run: warn the user."""
    for full in names:
        module, _, name = full.rpartition(".")
        module = ALIASES.get(module, module)
        if module.partition(".")[0] in sys.stdlib_module_names and not VALUES.fullmatch(f"{module}.{name}"):
            raise FileError(f"its pickle names {full!a}, which is code and not a value: do not trust this file")


def _stand_in(name: str, container: type | None) -> type:
    """Return a class for torch.load to use for a foreign class or function: its objects keep no state."""

    class StandIn:
        foreign_name = name

        def __new__(cls, *_arguments: Any, **_options: Any) -> Any:
            if container is None:
                return super().__new__(cls)
            value = container()
            if container is OrderedDict:
                value.foreign_name = name
            return value

        def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

        def __setstate__(self, _state: Any) -> None: ...

    return StandIn


def _choose(content: Any, key: str | None) -> tuple[str | None, dict[Any, Any]]:
    if not _is_dictionary(content):
        raise FileError(f"it holds {_kind(content)}, not a dictionary of tensors")
    for candidate in KEYS if key is None else (key,):
        value = content.get(candidate)
        if _is_dictionary(value):
            return candidate, value
        if value is not None and not isinstance(value, Tensor):
            raise FileError(f"{candidate!r} is {_kind(value)}, not a dictionary of tensors")
    if key is None and any(isinstance(value, Tensor) for value in content.values()):
        return None, content
    where = f"under {' or '.join(map(repr, KEYS))}, nor is it one" if key is None else f"under {key!r}"
    hint = ", and key= can name another" if any(map(_is_dictionary, content.values())) else ""
    raise FileError(f"it has no dictionary of tensors {where}: it holds {_content(content) or 'nothing'}{hint}")


def _check_tensor(name: str, tensor: Tensor) -> None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.dtype not in DTYPES:
        raise FileError(f"{name!a} is not a plain tensor")
    reach, size, stride = 0, list(tensor.shape), list(tensor.stride())
    dimensions = sorted(zip(stride, size, strict=True)) if tensor.numel() else []
    for step, length in dimensions:
        if length == 1:
            continue
        if step <= reach:
            raise FileError(f"{name!a} has size {size} and stride {stride}: its elements overlap")
        reach += step * (length - 1)


def _is_dictionary(value: Any) -> bool:
    return isinstance(value, dict) and not hasattr(value, "foreign_name")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(name := getattr(value, "foreign_name", None), str):
        return f"a pickled {name!a}"
    return "a dictionary" if isinstance(value, dict) else f"a value of type {type(value).__name__}"


def _content(entries: dict[Any, Any]) -> str:
    names = ((ascii(name) if isinstance(name, str | int) else "a key that is no string") for name in entries)
    return ", ".join(f"{name} ({_kind(value)})" for name, value in zip(names, entries.values(), strict=True))


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Turn any error into a FileError, because a damaged file makes zipfile and torch raise errors of many kinds."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        # torch's message is a page of advice, with the reason after these words.
        reason = (str(error).partition("WeightsUnpickler error:")[2] or str(error)).strip().partition("\n")[0]
        raise FileError(f"{problem} ({reason[:200] or type(error).__name__})") from error
