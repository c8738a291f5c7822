"""A pickle read as data: a machine that has every instruction but the call.

A pickle is a program for a small stack machine. Most instructions push a number or a string, or fill a list or a
dictionary. A few import a name and call it, and that is how loading a file runs code. Here those few only take notes:

    GLOBAL os system              Name("os.system")           nothing is imported
    REDUCE, NEWOBJ, INST, OBJ     Call("os.system", (...))    nothing is called
    BUILD                         the state is dropped        no __setstate__ sees it
    BINPERSID                     Reference(...)              nothing is looked up

so what comes out is None, bool, int, float, str, bytes, tuple, list, dict, Name, Call and Reference, whatever went in.
That is the protection. Beyond it, a pickle that so much as names a function of the standard library is refused: no
checkpoint has a use for one, most attacks do, and the user should hear of it.

Nothing here recurses, so nesting and cycles do no harm; an instruction makes a few small objects, and there is a limit
to the instructions.
"""

import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from softless.errors import FileError

MOST_INSTRUCTIONS = 2_000_000  # InLine-CSwin-B with its average and its optimizer takes 112,091
LARGEST_NUMBER = 2**32  # as a key: larger integers can be chosen to collide, and filling the dictionary takes hours

VALUES = {
    "_codecs": "encode",
    "argparse": "Namespace",
    "builtins": "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "copyreg": "_reconstructor",
    "datetime": "date datetime timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial",
    "pathlib": "PosixPath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "PosixPath PurePosixPath PureWindowsPath WindowsPath",
    "types": "SimpleNamespace",
    "uuid": "UUID",
}
"""What a checkpoint may name in the standard library: values, and what makes them."""

PYTHON_2 = {"__builtin__": "builtins", "cPickle": "pickle", "commands": "subprocess", "copy_reg": "copyreg"}
"""Old names of modules, which pickles of protocol 2 still use."""


@dataclass(frozen=True, eq=False, repr=False)
class Name:
    """What a pickle would have imported: `torch.FloatStorage`."""

    full: str


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """What a pickle would have called, and with what."""

    name: str
    arguments: Any


@dataclass(frozen=True, eq=False, repr=False)
class Reference:
    """What a pickle says is kept elsewhere: a storage, in torch's files."""

    identity: Any


def read_pickle(data: bytes) -> tuple[Any, tuple[str, ...]]:
    """The value a pickle describes, and the names it would have imported."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        (value,) = machine.stack
    except FileError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, Warning) as error:
        raise FileError("its pickle is damaged") from error
    return value, tuple(machine.names)


class _Machine:
    def __init__(self) -> None:
        self.steps = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.names: dict[str, None] = {}

    def step(self, instruction: str, argument: Any) -> None:
        self.steps += 1
        if self.steps > MOST_INSTRUCTIONS:
            raise FileError(f"its pickle has more than {MOST_INSTRUCTIONS} instructions, and no checkpoint has")
        if instruction not in _RULES:
            raise FileError(f"its pickle has the instruction {instruction}, and no checkpoint has")
        _RULES[instruction](self, argument)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        keep = len(self.stack) - count
        if keep < 0:
            raise IndexError
        taken, self.stack[keep:] = self.stack[keep:], []
        return taken

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def remember(self, place: int) -> None:
        if not 0 <= place < LARGEST_NUMBER:
            raise IndexError
        self.memo[place] = self.stack[-1]

    def name(self, module: Any, name: Any) -> Name:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError
        module = PYTHON_2.get(module, module)
        full = f"{module}.{name}"
        if module.partition(".")[0] in sys.stdlib_module_names and name not in VALUES.get(module, "").split():
            raise FileError(f"its pickle names {full!a}, which is code and not a value: do not trust this file")
        self.names[full] = None
        return Name(full)

    def call(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, Name):
            raise TypeError
        empty = function.full == "collections.OrderedDict" and arguments == ()
        self.push({} if empty else Call(function.full, arguments))

    def call_first(self, function: Any, *arguments: Any) -> None:
        self.call(function, arguments)

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Call):
            raise TypeError

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(_pairs(items))
        elif not isinstance(target, Call):
            raise TypeError


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _key(key: Any) -> Any:
    """Strings and integers; to hash anything else may overflow the stack, so it becomes a key like no other."""
    number = isinstance(key, int) and abs(key) < LARGEST_NUMBER
    return key if number or isinstance(key, str) else Name("no key")


_Rules = dict[str, Callable[[_Machine, Any], object]]
_LITERALS: _Rules = dict.fromkeys(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
     "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
     "BINBYTES8", "BYTEARRAY8"), _Machine.push
)  # fmt: skip
_RULES: _Rules = _LITERALS | {
    "PROTO": lambda _machine, _version: None,
    "FRAME": lambda _machine, _length: None,
    "STOP": lambda _machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_SET": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "POP": lambda machine, _: machine.pop(1),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "APPEND": lambda machine, _: machine.extend(machine.pop(1)),
    "SETITEM": lambda machine, _: machine.update(machine.pop(2)),
    "MARK": lambda machine, _: machine.mark(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "FROZENSET": lambda machine, _: machine.push(machine.since_mark()),
    "DICT": lambda machine, _: machine.push(_pairs(machine.since_mark())),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEMS": lambda machine, _: machine.update(machine.since_mark()),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, place: machine.push(machine.memo[place])),
    "GLOBAL": lambda machine, words: machine.push(machine.name(*words.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, _: machine.push(machine.name(*machine.pop(2))),
    "REDUCE": lambda machine, _: machine.call(*machine.pop(2)),
    "NEWOBJ": lambda machine, _: machine.call(*machine.pop(2)),
    "NEWOBJ_EX": lambda machine, _: machine.call(*machine.pop(3)[:2]),
    "INST": lambda machine, words: machine.call(machine.name(*words.split(" ", 1)), machine.since_mark()),
    "OBJ": lambda machine, _: machine.call_first(*machine.since_mark()),
    "BUILD": lambda machine, _: machine.pop(1),
    "PERSID": lambda machine, identity: machine.push(Reference(identity)),
    "BINPERSID": lambda machine, _: machine.push(Reference(*machine.pop(1))),
}
