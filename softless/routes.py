"""The route of a call: its arguments checked and its backend chosen, once for every kind of call.

What `validation` checks, what `backends` chooses and which kernels then run depends on shapes, strides, dtypes, devices
and options, never on numbers. So the answer for one call is kept for all calls that agree in these, and finding it is
one look-up. A call with anything else is checked anew, and a call that raises keeps nothing.
"""

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from softless import backends, validation
from softless.algebra.direct import Steps
from softless.algebra.kernel_spec import NEAR
from softless.algebra.modes import PLAIN, eager
from softless.algebra.state import AnyState, NearState, State, check_continues
from softless.backends import Route
from softless.mechanisms import Call, Mechanism
from softless.mechanisms.base import check_mark, maker, signature

MOST = 4096  # routes that are kept; the oldest gives way
ROUTES: dict[Any, Route] = {}
LOCK = Lock()


def find(
    q: Tensor,
    k: Any,
    v: Any,
    mechanism: str | Mechanism,
    *,
    packed: bool = False,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    grid: tuple[int, int] | None = None,
    taps: Tensor | None = None,
    prefix: int = 0,
    state: AnyState | None = None,
    backend: str = "auto",
) -> tuple[Route, Call]:
    """Return the route of a call, and the call itself. A packed q is [B, N, 3, H, d], with None for k and v."""
    arguments = q, k, v, packed, mechanism, is_causal, key_mask, bias, scale, inputs, grid, taps, prefix, state, backend
    key: Any = None
    try:
        if not torch.compiler.is_compiling():
            few = key_mask is None and bias is None and scale is None and inputs is None and grid is None
            if few and taps is None and state is None and prefix == 0:
                key = kind(q), kind(k), kind(v), packed, mechanism, type(is_causal), is_causal, backend
            else:
                key = tuple([x if x is None else kind(x) for x in arguments])
        route = ROUTES.get(key)
    except (TypeError, RuntimeError):  # an argument that is wrong, or a tensor that may have no memory
        key, route = None, None
    if route is None:
        route = decide(*arguments)
        if key is not None:
            keep(key, route)
    if key_mask is None and bias is None and not inputs:
        return route, route.call
    return route, route.call._replace(key_mask=key_mask, bias=bias, inputs=inputs or {})


def kind(x: Any) -> Any:
    """Return what a route depends on in an argument; 1 and True are equal, and not of one kind."""
    if type(x) in PLAIN:
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
    if x is None or isinstance(x, (str, bool, Mechanism)):
        return x
    if isinstance(x, State | NearState):
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
    k: Any,
    v: Any,
    packed: bool,
    mechanism: str | Mechanism,
    is_causal: bool,
    key_mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    inputs: Mapping[str, Tensor] | None,
    grid: tuple[int, int] | None,
    taps: Tensor | None,
    prefix: int,
    state: AnyState | None,
    backend: str,
) -> Route:
    """Check every argument, and choose a backend."""
    if packed:
        validation.check_packed(q)
        q, k, v = backends.heads_of(q)
    mechanism, call = validation.prepare(
        q, k, v, mechanism, is_causal=is_causal, key_mask=key_mask, bias=bias, scale=scale, inputs=inputs, grid=grid,
        backend=backend, has_taps=taps is not None,
    )  # fmt: skip
    picture = (0, 0, 0) if taps is None else validation.check_taps(taps, grid, prefix, q, k, v)
    if state is not None:
        validation.check_state(state, k)
        check_mark(state, mechanism)
    spec = backends.choose(mechanism, call, q, k, v, backend)
    if spec is not None and spec.reader != NEAR:
        check_continues(state, backends.state_like(q, k, v, spec))
    user = "" if torch.compiler.is_compiling() else signature(mechanism)  # a compiled call marks no state
    plain = spec is None and taps is None and backend != "reference" and eager()  # a trace fixes no lengths
    steps = mechanism.shortcut(q, k, v, call) if plain else None
    call = call._replace(key_mask=None, bias=None, inputs={})
    return Route(mechanism, call, backend, spec, picture, user, steps=unpacking(steps) if packed and steps else steps)


def unpacking(steps: Steps) -> Callable[[Tensor, Any, Any], Tensor | None]:
    """Return the same steps for a packed q [B, N, 3, H, d]."""
    return lambda qkv, *_: steps(*qkv.permute(2, 0, 3, 1, 4).contiguous().unbind())


def keep(key: Any, route: Route) -> None:
    with LOCK:
        while len(ROUTES) >= MOST:
            del ROUTES[next(iter(ROUTES))]
        ROUTES[key] = route


def forget() -> None:
    """Forget all routes: what they depend on has changed."""
    ROUTES.clear()
