"""The reversible stack: the plain stack's outputs and gradients, in the memory of one layer."""

import copy

import pytest
import torch
from torch import Tensor, nn

from softless import mechanism
from softless.errors import SoftlessError
from softless.nn import Attention, PreNorm, Reversible
from softless.nn.beyond.reversible import STEP
from softless.stopwatch import peak_bytes

DIM = 12
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so where a CPU has no bf16


class Dropped(nn.Module):
    """Attention, and dropout after it."""

    def __init__(self, made: str | object, rate: float):
        super().__init__()
        self.attend, self.drop = Attention(DIM, 3, made), nn.Dropout(rate)

    def forward(self, x: Tensor, **context: Tensor) -> Tensor:
        return self.drop(self.attend(x, **context))


def pair(made: str | object = "softmax", rate: float = 0.0) -> tuple[nn.Module, nn.Module]:
    feed = nn.Sequential(nn.Linear(DIM, 20), nn.GELU(), nn.Dropout(rate), nn.Linear(20, DIM))
    return PreNorm(DIM, Dropped(made, rate)), PreNorm(DIM, feed)


def on_grid(x: Tensor) -> Tensor:
    """A multiple of the step, with the gradient of x."""
    wide = x.double()
    return wide if x.dtype == torch.float64 else wide + ((wide / STEP).round() * STEP - wide).detach()


def plain(stack: Reversible, x: Tensor, **context: Tensor) -> Tensor:
    """The formula, whose activations autograd keeps."""
    x1, x2 = on_grid(x), on_grid(x)
    for f, g in zip(stack.f, stack.g, strict=True):
        x1 = x1 + on_grid(f(x2.to(x.dtype), **context))
        x2 = x2 + on_grid(g(x1.to(x.dtype)))
    return (x1.to(x.dtype) + x2.to(x.dtype)) / 2


def gradients(run, stack: Reversible, x: Tensor, **context: Tensor) -> tuple[Tensor, list[Tensor]]:
    """From the same random numbers: the output, and the gradients of x, of each parameter and of the context."""
    torch.manual_seed(1)
    out = run(stack, x, **context)
    given = [each for each in context.values() if each.requires_grad]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    torch.manual_seed(3)  # the backward pass starts from other random numbers than the forward pass
    return out, list(torch.autograd.grad((out * weight).sum(), [x, *stack.parameters(), *given]))


def reversible(stack: Reversible, x: Tensor, **context: Tensor) -> Tensor:
    return stack(x, **context)


MADE = ["softmax", "inline", mechanism("topk", k=3), "reformer", mechanism("emanet", bases=5, detach=False)]


@pytest.mark.parametrize("made", MADE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_a_reversible_stack_match_the_plain_stack(made, dtype):
    """To the bit, dropout and choices of keys included, where the sums are exact; float64 within its rounding."""
    stack = Reversible(pair(made, 0.2) for _ in range(5)).to(dtype)
    x = torch.randn(2, 30, DIM, dtype=dtype, requires_grad=True)
    mask = torch.rand(2, 30) > 0.3
    twin = copy.deepcopy(stack)
    out, mine = gradients(reversible, stack, x, key_mask=mask)
    expected, theirs = gradients(plain, twin, x, key_mask=mask)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, stack.buffers(), twin.buffers()))
    for ours, other in zip(mine, theirs, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-11)
        else:
            assert torch.equal(ours, other)


def test_a_stack_of_two_streams_is_the_recursion_by_hand():
    """Without the grid's help: two layers of float64, written out."""
    stack = Reversible(pair() for _ in range(2)).double()
    x1, x2 = torch.randn(2, 2, 7, DIM, dtype=torch.float64, requires_grad=True).unbind()
    y1 = x1 + stack.f[0](x2)
    y2 = x2 + stack.g[0](y1)
    z1 = y1 + stack.f[1](y2)
    z2 = y2 + stack.g[1](z1)
    found = stack.streams(x1, x2)
    for ours, exact in zip(found, (z1, z2), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stack(x1), sum(stack.streams(x1, x1)) / 2, rtol=1e-12, atol=1e-12)


def test_the_grid_is_finer_than_float32_sees():
    stack = Reversible(pair() for _ in range(4))
    x = torch.randn(2, 30, DIM)
    exact = stack.double()(x.double())
    error = (stack.float()(x) - exact).abs().max()
    assert error <= 8 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_autocast_is_that_of_the_forward_pass():
    """Whether the backward pass runs within it or, as it should, outside."""
    stack = Reversible(pair(rate=0.1) for _ in range(3))
    x = torch.randn(2, 9, DIM, requires_grad=True)

    def cast(run):
        def call(*args, **context):
            with torch.autocast("cpu", torch.bfloat16):
                return run(*args, **context)

        return call

    out, mine = gradients(cast(reversible), stack, x)
    expected, theirs = gradients(cast(plain), stack, x)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, mine, theirs))
    assert not torch.equal(out, stack(x))
    torch.manual_seed(1)
    inside = stack(x)
    with torch.autocast("cpu", torch.bfloat16):
        here = torch.autograd.grad(inside.sum(), list(stack.parameters()))
    torch.manual_seed(1)
    outside = torch.autograd.grad(stack(x).sum(), list(stack.parameters()))
    assert all(map(torch.equal, here, outside))


def test_recomputing_does_not_advance_the_random_numbers():
    stack, x = Reversible(pair(rate=0.5) for _ in range(2)), torch.randn(2, 9, DIM, requires_grad=True)
    out = stack(x)
    torch.manual_seed(5)
    out.sum().backward()
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_tensors_given_besides_x_get_their_gradients():
    stack = Reversible(pair() for _ in range(3)).double()
    x = torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9, 9, dtype=torch.float64, requires_grad=True)
    mine, theirs = (gradients(run, stack, x, bias=2 * bias)[1] for run in (reversible, plain))
    torch.testing.assert_close(mine[-1], theirs[-1], rtol=1e-10, atol=1e-11)
    assert mine[-1].any()


def test_layers_may_share_their_weights_and_some_may_be_frozen():
    f, g = pair()
    for parameter in g.parameters():
        parameter.requires_grad_(False)
    stack, x = Reversible([(f, g)] * 3), torch.randn(2, 9, DIM, requires_grad=True)
    expected = plain(stack, x)
    learned = [each for each in stack.parameters() if each.requires_grad]
    theirs = torch.autograd.grad(expected.sum(), [x, *learned])
    assert all(map(torch.equal, torch.autograd.grad(stack(x).sum(), [x, *learned]), theirs))


def test_a_running_mean_is_updated_once_per_step():
    class Normed(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT).mT

    stack, twin = (Reversible([(nn.Linear(DIM, DIM), Normed(DIM))]) for _ in range(2))
    twin.load_state_dict(stack.state_dict())
    x = torch.randn(2, 9, DIM, requires_grad=True)
    stack(x).sum().backward()
    plain(twin, x)
    for ours, other in zip(stack.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, other)


def held(depth: int, run) -> int:
    """Most bytes of a training step beyond the gradients of the parameters."""
    stack = Reversible(pair("inline") for _ in range(depth))
    x = torch.randn(1, 2048, DIM, requires_grad=True)
    return peak_bytes(lambda: run(stack, x).sum().backward(), x.device)


def test_memory_is_flat_in_depth():
    assert held(8, reversible) <= 1.05 * held(2, reversible)
    assert held(8, plain) >= 2 * held(2, plain)  # the measure would notice


def test_a_reversible_stack_saves_nothing_without_gradients():
    stack, x = Reversible(pair() for _ in range(3)), torch.randn(2, 9, DIM)
    with torch.no_grad():
        out = stack(x)
    assert not out.requires_grad
    assert torch.equal(out, stack(x))


def test_the_graph_may_be_used_twice_but_not_differentiated_twice():
    stack, x = Reversible([pair()]), torch.randn(2, 9, DIM, requires_grad=True)
    out = stack(x).square().sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(out, x, retain_graph=True)[0])
    (again,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        again.sum().backward()


class Shifted(nn.Module):
    """Attention with tensors in every kind of argument."""

    def __init__(self):
        super().__init__()
        self.attend = Attention(DIM, 3)

    def forward(self, x: Tensor, key_mask: Tensor, shift: Tensor, more: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        one, two = more["pair"]
        return self.attend(x + shift + one * two, key_mask=key_mask)


@pytest.mark.parametrize("name", ["key_mask", "shift", "more"])
def test_an_argument_changed_in_place_before_the_backward_pass_is_named(name):
    """The backward pass runs F again: with another mask its gradients would be those of another function."""
    stack, x = Reversible((Shifted(), nn.Linear(DIM, DIM)) for _ in range(2)), torch.randn(2, 9, DIM)
    given = {"key_mask": torch.ones(2, 9).bool(), "shift": torch.randn(DIM)}
    given["more"] = {"pair": (torch.randn(DIM), torch.randn(DIM))}
    out = stack(x, **given).sum()
    changed = given[name]["pair"][1] if name == "more" else given[name]
    changed[..., :4] = 0
    with pytest.raises(SoftlessError, match=f"^{name} was changed in place between the forward and the backward pass"):
        out.backward()


def test_a_tensor_inside_an_argument_gets_its_gradient():
    stack, x = Reversible((Shifted(), nn.Linear(DIM, DIM)) for _ in range(2)), torch.randn(2, 9, DIM)
    one, two = torch.randn(2, DIM).unbind()
    found = []
    for run in (reversible, plain):
        leaf = one.clone().requires_grad_()
        given = {"key_mask": torch.ones(2, 9).bool(), "shift": torch.zeros(DIM), "more": {"pair": (leaf, two)}}
        found.append(torch.autograd.grad(run(stack, x, **given).sin().sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_a_reversible_stack_runs_in_inference_mode():
    stack, x = Reversible([pair()]), torch.randn(2, 9, DIM)
    with torch.inference_mode():
        assert torch.equal(stack(x, key_mask=torch.ones(2, 9).bool()), stack(x))


def test_a_reversible_stack_ignores_padding_and_the_rest_of_the_batch():
    stack, x = Reversible(pair() for _ in range(3)).double(), torch.randn(2, 9, DIM, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    out = stack(x, key_mask=mask)
    alone = stack(x[1:, :6])
    torch.testing.assert_close(out[1:, :6], alone, rtol=1e-12, atol=1e-12)
    poisoned = torch.where(mask[..., None], x, 1e4)
    torch.testing.assert_close(stack(poisoned, key_mask=mask)[mask], out[mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([nn.Identity()], r"pair 0 is \(Identity\) and must be two modules"),
        ([(nn.Identity(),)], "pair 0 .* must be two modules"),
        ([(nn.Identity(), nn.Identity()), (nn.Identity(), torch.relu)], "pair 1 .* must be two modules"),
    ],
)
def test_layers_that_are_not_pairs_of_modules_are_refused(pairs, words):
    with pytest.raises(SoftlessError, match=words):
        Reversible(pairs)


def test_a_module_that_changes_the_shape_is_named():
    with pytest.raises(SoftlessError, match=r"Linear returned \[2, 9, 5\] .* \[2, 9, 12\]"):
        Reversible([(nn.Identity(), nn.Linear(DIM, 5))])(torch.randn(2, 9, DIM))
