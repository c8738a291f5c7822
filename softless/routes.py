"""The route of a call: its arguments checked and its backend chosen, once for every kind of call.

What `validation` checks and what `backends` chooses depends on shapes, dtypes, devices and options, never on numbers.
So the answer for one call is kept for all calls that agree in these. A call with anything else is checked anew, and a
call that raises keeps nothing.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softless import backends, validation
from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.state import State, check_continues
from softless.mechanisms import Call, Mechanism
from softless.mechanisms.base import check_mark, maker

MOST = 4096  # routes that are kept; the oldest gives way


class Route(NamedTuple):
    """How a kind of call runs."""

    mechanism: Mechanism
    call: Call  # without tensors
    spec: KernelSpec | None  # what the kernels run; None for torch
    picture: tuple[int, int, int] = (0, 0, 0)  # prefix, height and width, for the local residual


ROUTES: dict[Any, Route] = {}
LOCK = Lock()


def find(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    grid: tuple[int, int] | None = None,
    taps: Tensor | None = None,
    prefix: int = 0,
    state: State | None = None,
    backend: str = "auto",
) -> Route:
    """Return the route of a call, with the call's tensors in it."""
    arguments = q, k, v, mechanism, is_causal, key_mask, bias, scale, inputs, grid, taps, prefix, state, backend
    try:
        key = None if torch.compiler.is_compiling() else tuple([kind(x) for x in arguments])
        route = ROUTES.get(key)
    except TypeError:  # an argument that cannot be right
        key, route = None, None
    if route is None:
        route = decide(*arguments)
        if key is not None:
            keep(key, route)
    if key_mask is None and bias is None and not inputs:
        return route
    return route._replace(call=route.call._replace(key_mask=key_mask, bias=bias, inputs=inputs or {}))


def kind(x: Any) -> Any:
    """Return what a route depends on in an argument; 1 and True are equal, and not of one kind."""
    if isinstance(x, Tensor) and not x.is_nested:
        return type(x), x.shape, x.dtype, x.device, x.layout
    if x is None or isinstance(x, str | bool | Mechanism):
        return x
    if isinstance(x, State):
        return *[kind(part) for part in x], maker(x)
    if isinstance(x, int | float):
        return type(x), x, x == 0 and repr(x)  # 0.0 equals -0.0
    if isinstance(x, tuple | list):
        return type(x), tuple([kind(each) for each in x])
    if isinstance(x, Mapping):
        return tuple([(name, kind(value)) for name, value in x.items()])
    raise TypeError(x)


def decide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    is_causal: bool,
    key_mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    inputs: Mapping[str, Tensor] | None,
    grid: tuple[int, int] | None,
    taps: Tensor | None,
    prefix: int,
    state: State | None,
    backend: str,
) -> Route:
    """Check every argument, and choose a backend."""
    mechanism, call = validation.prepare(
        q, k, v, mechanism, is_causal=is_causal, key_mask=key_mask, bias=bias, scale=scale, inputs=inputs, grid=grid,
        backend=backend, has_taps=taps is not None,
    )  # fmt: skip
    picture = (0, 0, 0) if taps is None else validation.check_taps(taps, grid, prefix, q, k, v)
    if state is not None:
        validation.check_state(state, k)
        check_mark(state, mechanism)
    spec = backends.choose(mechanism, call, q, k, v, backend)
    if spec is not None:
        check_continues(state, backends.state_like(q, k, v, spec))
    return Route(mechanism, call._replace(key_mask=None, bias=None, inputs={}), spec, picture)


def keep(key: Any, route: Route) -> None:
    with LOCK:
        while len(ROUTES) >= MOST:
            del ROUTES[next(iter(ROUTES))]
        ROUTES[key] = route


def forget() -> None:
    """Forget all routes: what they depend on has changed."""
    ROUTES.clear()
