"""Plans: what an operator does on the device for tensors of one kind, found once and then repeated.

Which kernels an operator launches, on how many programs, with which tiles and into which memory depends on shapes,
strides, dtypes, the device and options, never on numbers. So the Python that decides this runs once, on tensors without
memory, while a `Recorder` writes down what it does. The plan repeats these steps:

    Allocate     memory for an output or for something between two kernels
    Launch       one kernel, compiled already, with the addresses filled in
    TorchStep    a PyTorch operation between kernels, such as the sum over parts
    Release      memory that no later step reads

A slot is one piece of memory: first the tensors that the operator is given, then what its steps allocate. A plan holds
no tensor. It is found by everything it was made for (`kind`), so it never runs on anything else.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._C._dynamo import guards
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from softless.kernels.common.arithmetic import INTERPRETED

MOST = 1024  # plans that an operator keeps; the oldest gives way
ALLOCATIONS = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}
empty_cuda: Any = getattr(guards, "_empty_strided_cuda", None)  # on the current device; half the time of torch.empty
IN_THREADS = not INTERPRETED.value and sys.version_info >= (3, 12, 2)  # before, two threads could not both parse Python
HOOKS = triton.knobs.runtime  # profilers put functions here that are called around each launch
Slots = list[Tensor | None]
recording: ContextVar["Recorder | None"] = ContextVar("recording", default=None)


def kind(x: Any) -> Any:
    """Return a hashable description of an argument. Two arguments with the same one are computed by the same steps."""
    if isinstance(x, Tensor):  # kernels are compiled for addresses that are multiples of 16, or not
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16
    if type(x) is list:
        return tuple(x)
    return x if x or type(x) is not float else repr(x)  # 0.0 equals -0.0


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the memory of a slot. The offset is in numbers, from the slot's first."""

    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, slots: Slots) -> Tensor:
        memory = slots[self.slot]
        assert memory is not None
        if self.offset == 0 and memory.shape == self.size and memory.stride() == self.stride:
            return memory
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.offset)


class Pointer:
    """Stands for a tensor while a kernel is compiled, and marks where its address goes."""

    def __init__(self, view: Place, remainder: int):
        self.view, self.dtype = view, view.dtype
        self.slot, self.bytes = view.slot, view.offset * view.dtype.itemsize
        self.address = (remainder + self.bytes) % 16

    def data_ptr(self) -> int:
        return self.address


class Allocate(NamedTuple):
    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, slots: Slots, device: int) -> None:
        if device >= 0:
            slots[self.slot] = empty_cuda(self.size, self.stride, self.dtype)
        else:
            slots[self.slot] = torch.empty_strided(self.size, self.stride, dtype=self.dtype)

    def reads(self) -> list[int]:
        return []


class Release(NamedTuple):
    slots: tuple[int, ...]

    def __call__(self, slots: Slots, device: int) -> None:
        for slot in self.slots:
            slots[slot] = None


class TorchStep(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # tensors as Places
    options: dict[str, Any]
    results: tuple[int, ...]  # slots; none for an operation in place

    def __call__(self, slots: Slots, device: int) -> None:
        place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
        options = {name: place if name == "device" else value for name, value in self.options.items()}
        out = self.function(*tree_map_only(Place, lambda view: view.of(slots), self.arguments), **options)
        for slot, x in zip(self.results, out if isinstance(out, tuple | list) else [out], strict=False):
            slots[slot] = x

    def reads(self) -> list[int]:
        return [x.slot for x in tree_leaves(self.arguments) if isinstance(x, Place)]


class Launch:
    """One kernel. Its arguments may be tuples; Pointers mark where tensors are."""

    def __init__(self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]):
        self.kernel, self.programs, self.arguments, self.constants = kernel, programs, arguments, constants
        self.pointers = [(at, x) for at, x in enumerate(arguments) if isinstance(x, Pointer)]
        self.tuples = [(at, x) for at, x in enumerate(arguments) if isinstance(x, tuple)]
        # (place, slot, bytes, the numbers that follow): most tuples are a tensor and its strides
        self.rows = [(at, x[0].slot, x[0].bytes, x[1:]) for at, x in self.tuples if _is_rows(x)]
        self.others = [(at, x) for at, x in self.tuples if not _is_rows(x)]
        if not INTERPRETED.value:
            self.compiled = kernel.warmup(*arguments, grid=(programs,), **constants)
            others = kernel.params[len(arguments) :]
            self.all = [*arguments, *(constants.get(each.name, each.default) for each in others)]

    def load(self, device: torch.device) -> None:
        """Wait for the compiler, and load the kernel's code."""
        self.compiled = self.compiled.result() if hasattr(self.compiled, "result") else self.compiled
        with on(device):
            self.run = self.compiled.run
        self.first = self.compiled.function, self.compiled.packed_metadata

    def __call__(self, slots: Slots, device: int) -> None:
        if INTERPRETED.value:
            arguments = [self._tensors(x, slots) for x in self.arguments]
            self.kernel[(self.programs,)](*arguments, **self.constants)
            return
        filled = self.all.copy()
        for at, x in self.pointers:
            filled[at] = slots[x.slot].data_ptr() + x.bytes  # type: ignore[union-attr]
        for at, slot, offset, numbers in self.rows:
            filled[at] = (slots[slot].data_ptr() + offset, *numbers)
        for at, parts in self.others:
            filled[at] = tuple(
                [slots[x.slot].data_ptr() + x.bytes if type(x) is Pointer else x for x in parts]  # type: ignore[union-attr]
            )
        stream = torch._C._cuda_getCurrentRawStream(device)
        enter, leave = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            grid = self.programs, 1, 1
            watched = self.compiled.launch_metadata(grid, stream, *filled)
            self.run(*grid, stream, *self.first, watched, enter, leave, *filled)
        else:
            self.run(self.programs, 1, 1, stream, *self.first, None, None, None, *filled)

    @staticmethod
    def _tensors(x: Any, slots: Slots) -> Any:
        if isinstance(x, Pointer):
            return x.view.of(slots)
        if not isinstance(x, tuple):
            return x
        parts = [Launch._tensors(part, slots) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)

    def reads(self) -> list[int]:
        parts = [x for _, x in self.pointers] + [x for _, parts in self.tuples for x in parts]
        return [x.slot for x in parts if isinstance(x, Pointer)]


def _is_rows(x: tuple[Any, ...]) -> bool:
    """Return whether a tuple is one tensor, followed by numbers."""
    return len(x) > 0 and isinstance(x[0], Pointer) and not any(isinstance(part, Pointer) for part in x[1:])


Step = Allocate | Release | TorchStep | Launch


class Plan:
    """Steps, and where their outputs are: in a slot of their own, in a view of one, or absent.

    device  the index of a GPU; -1 for the CPU, where Triton's interpreter runs the kernels
    """

    def __init__(self, device: int, slots: int, steps: Sequence[Step], outputs: Sequence[int | Place | None]):
        self.device, self.steps, self.outputs = device, steps, outputs
        self.empty: Slots = [None] * slots

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run the steps on the tensors among an operator's arguments; return its outputs, None for absent ones."""
        if self.device >= 0 and torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                return self._repeat(inputs)
        return self._repeat(inputs)

    def _repeat(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        slots: Slots = [*inputs, *self.empty]
        for step in self.steps:
            step(slots, self.device)
        return tuple([slots[x] if type(x) is int else x and x.of(slots) for x in self.outputs])  # type: ignore[union-attr]


class Recorder(TorchDispatchMode):
    """Inside, allocations, launches and PyTorch's operations on tensors without memory become steps."""

    def __init__(self, inputs: Sequence[Tensor], remainders: Sequence[int]):
        super().__init__()
        self.steps: list[Step] = []
        self.kept: list[Tensor] = []  # so that no two slots have the same storage
        self.slots: dict[int, int] = {}
        self.remainders = dict(enumerate(remainders))
        for x in inputs:
            self._slot(x)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from importing its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        new = [x for x in results if _storage(x) not in self.slots]
        if func.overloadpacket in ALLOCATIONS:
            self.steps += [Allocate(self._slot(x), tuple(x.shape), x.stride(), x.dtype) for x in new]
        elif new or func._schema.is_mutable:
            arguments = tree_map_only(Tensor, self.view, args)
            self.steps.append(TorchStep(func, arguments, kwargs or {}, tuple(self._slot(x) for x in new)))
        return out

    def _slot(self, x: Tensor) -> int:
        """Give a new piece of memory a slot."""
        self.kept.append(x)
        self.slots[_storage(x)] = len(self.slots)
        return self.slots[_storage(x)]

    def view(self, x: Tensor) -> Place:
        return Place(self.slots[_storage(x)], tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.steps.append(Launch(kernel, programs, tuple(map(self._pointers, arguments)), constants))

    def _pointers(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            view = self.view(x)
            return Pointer(view, self.remainders.get(view.slot, 0))
        if not isinstance(x, tuple):
            return x
        parts = map(self._pointers, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def record(run: Callable[..., Sequence[Tensor | None]], arguments: Sequence[Any]) -> Plan:
    """Return the plan of `run` for arguments of this kind. Its kernels are compiled in parallel, and loaded."""
    inputs = [x for x in arguments if isinstance(x, Tensor)]
    device = inputs[0].device
    empty = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs]
    recorder, each = Recorder(empty, [x.data_ptr() % 16 for x in inputs]), iter(empty)
    token = recording.set(recorder)
    try:
        with on(device), ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool) if IN_THREADS else nullcontext():
            with torch.no_grad(), recorder:
                out = run(*(next(each) if isinstance(x, Tensor) else x for x in arguments))
            launches = [] if INTERPRETED.value else [step for step in recorder.steps if isinstance(step, Launch)]
            new = {id(launch.compiled): launch for launch in launches if hasattr(launch.compiled, "result")}
            list(pool.map(lambda launch: launch.load(device), new.values()))
        for launch in launches:
            launch.load(device)
    finally:
        recording.reset(token)
    outputs = [None if x is None else recorder.view(x) for x in out]
    shown = [view for view in outputs if view is not None]
    steps = [_as_output(step, shown) for step in recorder.steps]
    alone = {(step.slot, step.size, step.stride) for step in steps if isinstance(step, Allocate)}
    places = [x.slot if x and x.offset == 0 and (x.slot, x.size, x.stride) in alone else x for x in outputs]
    return Plan(inputs[0].get_device(), len(recorder.slots) - len(inputs), _released(steps, len(inputs), shown), places)


def on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _as_output(step: Step, outputs: Sequence[Place]) -> Step:
    """Allocate an output in its own shape, so that no view is needed."""
    if isinstance(step, Allocate):
        for view in outputs:
            if view.slot == step.slot and view.offset == 0 and sorted(view.size) == sorted(step.size):
                return step._replace(size=view.size, stride=view.stride)
    return step


def _released(steps: Sequence[Step], inputs: int, outputs: Sequence[Place]) -> list[Step]:
    """Release the memory between kernels before the next is allocated."""
    last = {slot: at for at, step in enumerate(steps) for slot in step.reads()}  # type: ignore[union-attr]
    kept_slots = {*range(inputs), *(view.slot for view in outputs)}
    released: list[Step] = []
    dead: list[int] = []
    for at, step in enumerate(steps):
        if dead and not isinstance(step, Launch):
            released.append(Release(tuple(dead)))
            dead = []
        released.append(step)
        dead += [slot for slot, end in last.items() if end == at and slot not in kept_slots]
    return released


class Planned:
    """A function that repeats its plan for every call with arguments of a kind that it has seen."""

    def __init__(self, run: Callable[..., Sequence[Tensor | None]]):
        self.run, self.plans, self.lock = run, dict[Any, Plan](), Lock()
        ALL.append(self)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        return self.plan(*arguments)([x for x in arguments if isinstance(x, Tensor)])

    def plan(self, *arguments: Any) -> Plan:
        key = tuple([kind(x) for x in arguments])
        return self.plans.get(key) or self._remember(key, record(self.run, arguments))

    def _remember(self, key: Any, plan: Plan) -> Plan:
        with self.lock:
            while len(self.plans) >= MOST:
                del self.plans[next(iter(self.plans))]
            return self.plans.setdefault(key, plan)


ALL: list[Planned] = []


def forget() -> None:
    """Forget all plans: the tables that they were made from have changed."""
    for planned in ALL:
        planned.plans.clear()
