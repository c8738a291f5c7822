"""Every mechanism that the kernels take, tensors to try it on, the truth, and the ways the work can be cut.

The truth is the explicit weights in float64, differentiated by autograd, on the same rounded inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from softless import Mechanism, attention, attention_weights, attention_with_state, mechanism
from softless.functional import attention_qkv, attention_with_residual
from tests.numerics import eager
from tests.numerics.budget import worst
from tests.numerics.eager import Formula
from tests.variants import Variant

MAPS: dict[str, dict[str, Any]] = {
    "identity": {"phi": "identity"},
    "relu": {"phi": "relu"},
    "leaky_relu": {"phi": "leaky_relu"},
    "elu": {"phi": "elu"},
    "exp": {"phi": "exp"},
    "exp-half": {"phi": "exp", "t": 0.5},
    "softmax": {"phi": "softmax"},
    "relu-exp": {"phi": "relu", "phi_k": "exp"},
    "exp-relu": {"phi": "exp", "phi_k": "relu"},
    "elu-identity": {"phi": "elu", "phi_k": "identity"},
}


class Case(NamedTuple):
    """A mechanism; its name and options; its published formula as anyone would type it."""

    mechanism: Mechanism
    options: dict[str, Any]
    plain: Formula


def case(name: str, plain: Formula, **options: Any) -> Case:
    return Case(mechanism(name, **options), options, plain)


CASES: dict[str, Case] = {
    **{f"linear-{key}": case("linear", eager.linear(**maps), **maps) for key, maps in MAPS.items()},
    **{f"inline-{key}": case("inline", eager.inline(**maps), **maps) for key, maps in MAPS.items()},
    "none-elu": case("linear", eager.unnormalized("elu"), phi="elu", normalize="none"),
    "none-exp": case("linear", eager.unnormalized("exp"), phi="exp", normalize="none"),
    "none-softmax": case("linear", eager.unnormalized("softmax"), phi="softmax", normalize="none"),
    "taylor": case("taylor", eager.taylor),
    "efficient": case("efficient", eager.efficient),
}
LINEAR_SOFTMAX, INLINE_ELU = Variant("linear-softmax"), Variant("inline-elu")
NAMES = dict.fromkeys(CASES) | {name: name for name in (LINEAR_SOFTMAX, INLINE_ELU)}
CASES = {variant or name: CASES[name] for name, variant in NAMES.items()}
# Their denominators may change sign; they are held to a bar only where |mass| >= 0.1 sum |s|.
SIGN_CHANGING = ("linear-identity", "linear-leaky_relu", "linear-elu-identity")
# One of each reader, with and without a logarithm on either side.
CHOSEN = (
    "linear-elu",
    "linear-exp",
    "linear-relu-exp",
    "inline-identity",
    "inline-exp-relu",
    "none-elu",
    "none-exp",
    "taylor",
    "efficient",
)

# (tokens up to which a head is done whole, programs to aim for)
REGIMES = {"whole": (256, None), "spans": (0, None), "one span": (0, 1)}


@contextmanager
def regime(name: str) -> Iterator[None]:
    """Inside, short sequences are cut as long ones are: one program a tile, or all tiles of a head in one."""
    from softless.kernels.common import plan, tiles
    from softless.kernels.parallel import attend

    whole, most = REGIMES[name]
    spans = attend.spans

    def fewer(tokens: int, heads: int, step: int, programs: int = tiles.PROGRAMS) -> tuple[int, int]:
        return spans(tokens, heads, step, programs if most is None else most)

    plan.forget()
    with patch.object(tiles, "WHOLE", whole), patch.object(attend, "spans", fewer):
        yield
    plan.forget()


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that a plan allocates holds NaN, or 100 where numbers are integers."""
    from softless.kernels.common import plan

    allocate = plan.Allocate.__call__

    def spoil(step: plan.Allocate, slots: plan.Slots, device: torch.device) -> None:
        allocate(step, slots, device)
        slots[step.slot].fill_(torch.nan if step.dtype.is_floating_point else 100)

    with patch.object(plan.Allocate, "__call__", spoil):
        yield


def draw(
    queries: int,
    keys: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    groups: int | None = None,
    dims: tuple[int, int] = (8, 5),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q [B, H, N, d], k [B, G, M, d], v [B, G, M, e]."""
    keys, groups = queries if keys is None else keys, heads if groups is None else groups
    shapes = (heads, queries, dims[0]), (groups, keys, dims[0]), (groups, keys, dims[1])
    q, k, v = (torch.randn(batch, *shape).to(dtype) for shape in shapes)
    return q, k, v


def judged(case: str, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Rows [B, H, N] whose denominator keeps away from zero: sum |w| = sum |s| / |mass| is at most 10."""
    if case not in SIGN_CHANGING:
        return torch.ones(q.shape[:3], dtype=torch.bool)
    return attention_weights(q.double(), k.double(), CASES[case].mechanism, key_mask=key_mask).abs().sum(-1) <= 10


class Outcome(NamedTuple):
    """An output and its gradients."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run(case: str, qkv: Any, upstream: Tensor, backend: str = "triton", **call: Any) -> Outcome:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves, CASES[case].mechanism, backend=backend, **call)
    return Outcome(out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def truth(case: str, qkv: Any, upstream: Tensor, **call: Any) -> Outcome:
    return run(case, [x.double() for x in qkv], upstream.double(), "reference", **call)


def assert_true(case: str, qkv: Any, **call: Any) -> None:
    """float32 output and gradients of the kernels are the truth to 1e-5; unit upstream, judged rows."""
    q, k, v = qkv
    rows = judged(case, q, k, call.get("key_mask"))[..., None]
    upstream = torch.randn(*q.shape[:3], v.shape[3]) * rows
    ours, exact = run(case, qkv, upstream, **call), truth(case, qkv, upstream, **call)
    assert_near(ours.out * rows, exact.out * rows, "output")
    for name, mine, right in zip(("dq", "dk", "dv"), ours[1:], exact[1:], strict=True):
        assert_near(mine, right, name)


def assert_near(actual: Tensor, exact: Tensor, name: str) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == exact.shape
    error, size = worst(actual, exact), exact.abs().max().item() if exact.numel() else 0.0
    assert error <= 1e-5 * (1 + size), f"{name}: off by {error:.1e} where it reaches {size:.1e}"


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit."""
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


class Family(NamedTuple):
    """One kind of kernel: the tensors it takes, and the call that runs it on a backend."""

    draw: Callable[[], list[Tensor]]
    call: Callable[..., Tensor]


TOKENS, HEADS, GRID = 6, 2, (2, 3)


def _plain(name: str, **call: Any) -> Family:
    return Family(
        lambda: list(draw(TOKENS, batch=2, heads=HEADS, dims=(3, 4))),
        lambda q, k, v, **options: attention(q, k, v, name, **call, **options),
    )


def _rule(name: str) -> Family:
    return Family(
        lambda: [*draw(TOKENS, batch=2, heads=HEADS, dims=(3, 4)), torch.rand(2, HEADS, TOKENS)],
        lambda q, k, v, beta, **options: attention(q, k, v, name, is_causal=True, inputs={"beta": beta}, **options),
    )


def _stateful(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A prompt, then a single token that reads its state."""
    *prompt, last = zip(*(x.split([TOKENS - 1, 1], 2) for x in (q, k, v)), strict=True)
    first, state = attention_with_state(*prompt[0], "linear", **options)
    return torch.cat([first, attention_with_state(*last, "linear", state, **options)[0]], 2)


# Every family of kernels, for laws that hold for all of them; small, since each law has many cases.
FAMILIES: dict[str, Family] = {
    "linear": _plain("linear"),
    "inline": _plain("inline"),
    "taylor": _plain("taylor"),
    "efficient": _plain("efficient"),
    "causal linear": _plain("linear", is_causal=True),
    "causal inline": _plain("inline", is_causal=True),
    "causal taylor": _plain("taylor", is_causal=True),
    "causal efficient": _plain("efficient", is_causal=True),
    "a state": Family(_plain("linear").draw, _stateful),
    "delta": _rule("delta"),
    "efla": _rule("efla"),
    "local residual": Family(
        lambda: [*draw(TOKENS, batch=2, heads=HEADS, dims=(3, 4)), torch.randn(2, HEADS, 9, 4)],
        lambda q, k, v, taps, **options: attention_with_residual(q, k, v, taps, grid=GRID, **options),
    ),
    "packed": Family(
        lambda: [torch.randn(2, TOKENS, 3, HEADS, 4), torch.randn(2, HEADS, 9, 4)],
        lambda qkv, taps, **options: attention_qkv(qkv, taps=taps, grid=GRID, **options),
    ),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
