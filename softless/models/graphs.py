"""How graph tracers see the models: FX records one call of a `Whole` module, TorchScript calls back into Python.

A scripted model runs in the process that scripted it, on the same parameters. torch.compile and torch.export need none
of this: they trace through.
"""

from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from softless.errors import UnsupportedError

_numbers = count()
_scripted: WeakValueDictionary[int, Any] = WeakValueDictionary()


class CallsBack(nn.Module):
    """A module that TorchScript runs in Python: `compute`, found by number."""

    __jit_ignored_attributes__: ClassVar = ["compute"]  # copied to the scripted module, it keeps this one alive

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.number = -1

    def compute(self, x: Tensor, grid: list[int] | None = None) -> Tensor:
        raise NotImplementedError

    def __prepare_scriptable__(self) -> "CallsBack":
        self.number = next(_numbers)
        _scripted[self.number] = self
        return self


@register_notrace_module
class Whole(CallsBack):
    """Kept whole, on tokens or pictures."""

    def forward(self, x: Tensor, grid: list[int] | None = None) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return call_back(self.number, x, grid)
        else:  # noqa: RET505, TorchScript compiles only one branch
            return self.compute(x, grid)


@torch.jit.ignore
def call_back(number: int, x: Tensor, grid: list[int] | None) -> Tensor:
    """The Python module of that number computes."""
    if number not in _scripted:
        raise UnsupportedError("a scripted softless model runs only in the process that scripted it: use torch.export")
    return _scripted[number].compute(x, grid)
