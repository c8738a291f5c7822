"""Every way to compute one call: ours, SDPA, the plain formulas eager and compiled, and other libraries.

Whoever cannot take part stays on the list, with the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from softless.bench import rivals
from softless.bench.cost import EXPLICIT, Shape, form, picture
from softless.bench.memory import free_bytes
from softless.bench.plain import SUMS, WEIGHTS, Formula, plain
from softless.bench.speed import EXPLICIT_COPIES, REFERENCE
from softless.errors import UnsupportedError
from softless.functional import attention
from softless.mechanisms import Mechanism
from softless.mechanisms.linear import Linear

OURS, SDPA, PLAIN, COMPILED, RIVAL = "ours", "sdpa", "plain", "compiled", "rival"

FREE_SHARE = 0.8  # of the free memory, which a call may fill
SUMS_COPIES = 4  # tensors of N x d x e alive at once in the plain causal formula by running sums


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is the same for every contestant. `backend` is that of ours."""

    shape: Shape
    is_causal: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str = "auto"

    @property
    def grouped(self) -> bool:
        return self.shape.kv_heads != self.shape.heads


@dataclass(frozen=True)
class Contestant:
    """A way to compute the call, or the reason why it is not one. `role`: ours | sdpa | plain | compiled | rival.

    `lay` puts a tensor in memory as the call wants it, before anything is measured.
    """

    label: str
    role: str
    mechanism: str | None = None
    call: Formula | None = None
    absent: str | None = None
    lay: Callable[[Tensor], Tensor] | None = None


def contestants(mechanisms: Mapping[str, Mechanism], terms: Terms, *, compiled: bool = True) -> list[Contestant]:
    """Everyone for one shape: ours, SDPA, the plain formulas, the rivals."""
    if compiled:
        torch.compiler.reset()  # each shape is compiled for itself, and a sweep never reaches the recompile limit
    everyone = [ours(label, made, terms) for label, made in mechanisms.items()]
    everyone.append(sdpa(terms))
    for label, made in mechanisms.items():
        everyone += _plain(label, made, terms, compiled)
    return everyone + [_rival(rival, mechanisms, terms) for rival in rivals.RIVALS]


def ours(label: str, made: Mechanism, terms: Terms) -> Contestant:
    """`softless.attention`, with random tensors for what the mechanism needs beyond q, k and v."""
    if reason := _weights_do_not_fit(made, terms):
        return Contestant(label, OURS, label, absent=reason)
    shape, like = terms.shape, partial(torch.empty, device="meta")
    q, k = (like(shape.batch, *size, shape.head_dim) for size in ((shape.heads, 1), (shape.kv_heads, shape.keys)))
    inputs = {
        name: torch.rand(size, device=terms.device, dtype=terms.dtype) for name, size in made.needed(q, k).items()
    }
    call = partial(attention, mechanism=made, is_causal=terms.is_causal, inputs=inputs, backend=terms.backend)
    return Contestant(label, OURS, label, partial(call, grid=picture(made, shape.queries)))


def sdpa(terms: Terms) -> Contestant:
    """PyTorch's own kernel. Where N != M our causal mask is aligned at the bottom right, so its is too."""
    queries, keys = terms.shape.queries, terms.shape.keys
    attend = partial(F.scaled_dot_product_attention, enable_gqa=terms.grouped)
    if not terms.is_causal or queries == keys:
        return Contestant(REFERENCE, SDPA, call=partial(attend, is_causal=terms.is_causal))
    if queries > keys:
        return Contestant(REFERENCE, SDPA, absent=f"answers NaN to the {queries - keys} queries that see no key")
    return Contestant(REFERENCE, SDPA, call=partial(attend, attn_mask=causal_lower_right(queries, keys)))


def _plain(label: str, made: Mechanism, terms: Terms, compiled: bool) -> Iterator[Contestant]:
    eager, fused = Contestant(f"{label} plain", PLAIN, label), Contestant(f"{label} compiled", COMPILED, label)
    try:
        formula = plain(made)
        if terms.is_causal:
            formula = plain(made, causal_by=_causal_by(terms))
    except UnsupportedError as error:
        yield from (replace(each, absent=str(error)) for each in (eager, fused))
        return
    yield replace(eager, call=formula)
    if compiled:
        yield replace(fused, call=torch.compile(formula, fullgraph=True, dynamic=False))
    else:
        yield replace(fused, absent="compiling takes longer than a quick run")


def _rival(rival: rivals.Rival, mechanisms: Mapping[str, Mechanism], terms: Terms) -> Contestant:
    made = next((made for made in mechanisms.values() if isinstance(made, Linear)), None)
    if made is None:
        return Contestant(rival.label, RIVAL, absent=f"computes linear, and this is {', '.join(mechanisms)}")
    reason = rivals.absence(rival, is_causal=terms.is_causal, device=terms.device, grouped=terms.grouped)
    if reason:
        return Contestant(rival.label, RIVAL, absent=reason)
    try:
        return Contestant(rival.label, RIVAL, made.name, rivals.load(rival, made), lay=rival.lay)
    except Exception as error:  # noqa: BLE001 - whatever importing another library raises
        return Contestant(rival.label, RIVAL, absent=sentence(error))


def _causal_by(terms: Terms) -> str:
    """N x N weights if they fit, running sums if those do."""
    shape = terms.shape
    if shape.queries != shape.keys:
        raise UnsupportedError(f"the causal plain formula takes N = M, not {shape.queries} and {shape.keys}")
    numbers = shape.batch * shape.heads * shape.queries * terms.dtype.itemsize
    if no_weights := _no_room("weights", EXPLICIT_COPIES * numbers * shape.keys, terms):
        if no_sums := _no_room("sums", SUMS_COPIES * numbers * shape.head_dim**2, terms):
            raise UnsupportedError(f"{no_weights}; {no_sums}")
        return SUMS
    return WEIGHTS


def _weights_do_not_fit(made: Mechanism, terms: Terms) -> str | None:
    """Why explicit weights would not fit, if they would not: the system would kill the process."""
    if terms.backend != "reference" and form(made, terms.is_causal) != EXPLICIT:
        return None
    shape = terms.shape
    matrices = shape.batch * made.matrices(shape.heads, shape.head_dim)
    needed = EXPLICIT_COPIES * matrices * shape.queries * shape.keys * max(4, terms.dtype.itemsize)
    return _no_room("weights", needed, terms)


def _no_room(what: str, needed: int, terms: Terms) -> str | None:
    free = free_bytes(torch.device(terms.device))
    if free is None or needed < FREE_SHARE * free:
        return None
    return f"forms {what} of {needed / 1e9:.0f} GB in all, and {free / 1e9:.0f} GB are free"


def sentence(error: Exception) -> str:
    """What another library's error says, on one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:200]
