"""Kernels read tensors as they lie in memory: R31.

Every family gives, bit for bit, what it gives for contiguous copies of the same numbers, forward and backward.
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import FAMILIES, assert_same, regime

pytestmark = pytest.mark.kernels


def strided(x: Tensor) -> Tensor:
    """Every second number of a row twice as long, and NaN between them."""
    wide = torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)
    return wide[..., ::2]


def offset(x: Tensor) -> Tensor:
    """The same numbers seven places into a larger storage, NaN before and after them."""
    wide = x.new_full((x.numel() + 14,), torch.nan)
    wide[7:-7] = x.flatten()
    return wide[7:-7].view(x.shape)


# Of any four in a row one has a last dimension that is not contiguous.
LAYOUTS = {
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension outermost": lambda x: x.mT.contiguous().mT,
    "tokens strided": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 3).flatten(2, 3)[:, :, ::2],
    "batch expanded": lambda x: x[:1].expand_as(x),
    "last dimension strided": strided,
    "heads expanded": lambda x: x[:, :1].expand_as(x),
    "offset": offset,
    "last dimension expanded": lambda x: x[..., :1].expand_as(x),
    "tokens expanded": lambda x: x[:, :, :1].expand_as(x),
    "flipped": lambda x: x.flip(-1),
}


def laid_out(tensors: list[Tensor], turn: int) -> list[Tensor]:
    """Each tensor in a layout of its own, from layout `turn` on."""
    layouts = list(LAYOUTS.values())
    return [layouts[(turn + i) % len(layouts)](x) if x.ndim > 3 else strided(x) for i, x in enumerate(tensors)]


def run(family: str, upstream: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Output and gradients; the tensors keep their strides."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    assert [x.stride() for x in leaves] == [x.stride() for x in tensors]
    out = FAMILIES[family].call(*leaves, backend="triton")
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def hold_to_its_copy(family: str, turn: int) -> None:
    given = laid_out([torch.randn(2, 2, 6, 4), *FAMILIES[family].draw()], turn)
    assert_same(run(family, *given), run(family, *(x.contiguous() for x in given)))


def turns() -> Iterator[object]:
    """One mixture of layouts for each family; make slow takes all."""
    for (i, family), turn in product(enumerate(FAMILIES), range(len(LAYOUTS))):
        yield pytest.param(family, turn, marks=[] if turn == 3 * i % 10 else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "turn"), list(turns()))
def test_layouts_give_what_contiguous_copies_give(family, turn):
    """Inputs and the upstream gradient, each in another layout."""
    hold_to_its_copy(family, turn)


@pytest.mark.parametrize("family", ["linear", "taylor", "local residual"])
def test_layouts_of_long_sequences_give_what_contiguous_copies_give(family):
    with regime("spans"):
        hold_to_its_copy(family, 1)


@pytest.mark.parametrize("family", ["linear", "causal linear", "causal taylor"])
def test_a_strided_key_mask_gives_what_its_copy_gives(family):
    tensors, mask = FAMILIES[family].draw(), torch.rand(2, 6) < 0.7
    found = [FAMILIES[family].call(*tensors, key_mask=each, backend="triton") for each in (mask, strided_mask(mask))]
    assert_same(found[:1], found[1:])


def strided_mask(mask: Tensor) -> Tensor:
    return torch.stack([mask, ~mask], -1).flatten(-2)[..., ::2]


OPTIMIZED = """
import torch
from tests.kernels.cases import FAMILIES
from tests.kernels.test_layouts import strided
torch.manual_seed(0)
assert False, "this line does not run under python -O"
for name in ("causal linear", "causal inline", "causal taylor"):
    family = FAMILIES[name]
    tensors = [strided(x) for x in family.draw()]
    found = family.call(*tensors, backend="triton")
    right = family.call(*(x.double() for x in tensors), backend="reference")
    print(name, (found - right).abs().max().item() < 1e-5)
"""


def test_layouts_give_what_contiguous_copies_give_under_optimized_python():
    """Under python -O no assert runs, so none may stand between a user's tensor and a wrong number."""
    done = subprocess.run([sys.executable, "-O", "-c", OPTIMIZED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"causal {name} True" for name in ("linear", "inline", "taylor")]
