"""Every way to differentiate or map a call that the kernels take: right, or refused in one sentence (R30).

`auto` finds a way. On a GPU it takes the kernels in reverse mode and torch under a transform; here it is made to
prefer them as it does there.
"""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from softless import backends
from softless.errors import BackendError, UnsupportedError
from tests.kernels.cases import FAMILIES, every_family

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # vmap over what has no rule
    pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning"),  # torch's own forward mode imports it
]

REFUSED = "^backend 'triton' was asked for and cannot run: .*(transforms|forward-mode).*; 'auto' runs torch here$"


@pytest.fixture(autouse=True)
def auto_takes_kernels() -> Iterator[None]:
    """`auto` looks at the device alone; inside, tensors of the CPU count as those of a GPU."""
    with patch.object(backends, "on_gpu", lambda q: True):  # noqa: ARG005
        yield


def forward(family: str, backend: str) -> Callable[..., Tensor]:
    """The family's call as a function of its tensors alone."""
    return lambda *tensors: FAMILIES[family].call(*tensors, backend=backend)


def reverse(call: Callable[..., Tensor], tensors: list[Tensor], along: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    return list(torch.autograd.grad(call(*leaves).square().sum(), leaves))


def dual(call: Callable[..., Tensor], tensors: list[Tensor], along: list[Tensor]) -> list[Tensor]:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(call(*map(forward_ad.make_dual, tensors, along)))
        assert out.tangent is not None
        return [out.primal.clone(), out.tangent.clone()]


def last_dual(call: Callable[..., Tensor], tensors: list[Tensor], along: list[Tensor]) -> list[Tensor]:
    """Only the last tensor moves: values, taps or beta."""
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(call(*tensors[:-1], forward_ad.make_dual(tensors[-1], along[-1])))
        assert out.tangent is not None
        return [out.primal.clone(), out.tangent.clone()]


def pulled(call: Callable[..., Tensor], tensors: list[Tensor], along: list[Tensor]) -> list[Tensor]:
    out, pull = torch.func.vjp(call, *tensors)
    return list(pull(torch.ones_like(out)))


TRANSFORMS: dict[str, Callable[..., list[Tensor]]] = {
    "reverse": reverse,
    "forward_ad": dual,
    "forward_ad of the last": last_dual,
    "grad": lambda f, x, _: list(torch.func.grad(lambda *x: f(*x).square().sum(), tuple(range(len(x))))(*x)),
    "vjp": pulled,
    "jvp": lambda f, x, along: list(torch.func.jvp(f, tuple(x), tuple(along))),
    "jacrev": lambda f, x, _: [torch.func.jacrev(lambda *x: f(*x).sum((0, 2, 3)))(*x)],
    "vmap": lambda f, x, along: [torch.func.vmap(f)(*(torch.stack(pair) for pair in zip(x, along, strict=True)))],
}


@every_family
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_auto_gives_the_right_derivative_under_every_transform(family, transform):
    torch.manual_seed(0)
    tensors, along = FAMILIES[family].draw(), FAMILIES[family].draw()
    wide = [[x.double() for x in each] for each in (tensors, along)]
    right = TRANSFORMS[transform](forward(family, "torch"), *wide)
    found = TRANSFORMS[transform](forward(family, "auto"), tensors, along)
    for mine, exact in zip(found, right, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@every_family
@pytest.mark.parametrize("transform", [each for each in TRANSFORMS if each != "reverse"])
def test_backend_triton_refuses_transforms_in_one_sentence(family, transform):
    tensors, along = FAMILIES[family].draw(), FAMILIES[family].draw()
    with pytest.raises(BackendError, match=REFUSED):
        TRANSFORMS[transform](forward(family, "triton"), tensors, along)


@pytest.mark.parametrize("family", ["linear", "causal linear", "delta"])
def test_a_batch_of_upstream_gradients_is_refused_in_one_sentence(family):
    leaves = [x.requires_grad_() for x in FAMILIES[family].draw()]
    out = forward(family, "triton")(*leaves)
    with pytest.raises(UnsupportedError, match="takes one upstream gradient at a time"):
        torch.autograd.grad(out, leaves, torch.ones(2, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("family", ["linear", "causal linear", "delta"])
def test_a_forward_mode_upstream_gradient_is_refused_in_one_sentence(family):
    leaves = [x.requires_grad_() for x in FAMILIES[family].draw()]
    out = forward(family, "triton")(*leaves)
    with forward_ad.dual_level():
        upstream = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(UnsupportedError, match="takes one upstream gradient at a time"):
            torch.autograd.grad(out, leaves, upstream)


def test_an_open_dual_level_without_duals_is_not_refused():
    """Tensors that no derivative follows run on the kernels as ever."""
    tensors = FAMILIES["linear"].draw()
    with forward_ad.dual_level():
        inside = forward("linear", "triton")(*tensors)
    assert torch.equal(inside, forward("linear", "triton")(*tensors))
