"""List every way to compute one call: ours, SDPA, the plain formulas eager and compiled, and other libraries.

    fla chunk         causal, normalized          fla.ops.linear_attn.chunk_linear_attn             [B, T, H, D]
    fla fused_chunk   causal, no normalizer       fla.ops.linear_attn.fused_chunk_linear_attn       [B, T, H, D]
    flash_bla         not causal, normalized      flash_bla.ops.linear_attn.fused.linear_attention  [B, H, T, D]

The other libraries take features instead of q and k. So phi is applied in plain PyTorch first, and counts as part of
their time. `alone` is the kernel without phi. It takes q and k as features: only its time is of use, not its output.
Before the timing, tensors are laid out in memory as each library wants them.

A contestant that cannot compute the call stays on the list with the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from softless.bench.cost import EXPLICIT_COPIES, Terms, picture, weights_shortage
from softless.bench.formulas import SUMS, WEIGHTS, Formula, maps, plain
from softless.bench.scaling import REFERENCE
from softless.errors import UnsupportedError
from softless.functional import attention
from softless.mechanisms import Mechanism
from softless.mechanisms.linear import Linear
from softless.stopwatch import shortage

OURS, SDPA, PLAIN, COMPILED, RIVAL = "ours", "sdpa", "plain", "compiled", "rival"
SUMS_COPIES = 4  # tensors of N x d x e alive at once in the plain causal formula by running sums

Heads = Float[Tensor, "b h n d"]


@dataclass(frozen=True)
class Contestant:
    """A way to compute the call, or the reason why it cannot. `role`: ours | sdpa | plain | compiled | rival.

    `lay` lays a tensor out in memory as the call wants it, before anything is measured.
    """

    label: str
    role: str
    mechanism: str | None = None
    call: Formula | None = None
    absent: str | None = None
    lay: Callable[[Tensor], Tensor] | None = None


def contestants(mechanisms: Mapping[str, Mechanism], terms: Terms, *, compiled: bool = True) -> list[Contestant]:
    """Return all contestants for one shape: ours, SDPA, the plain formulas, the other libraries."""
    if compiled:
        torch.compiler.reset()  # each shape is compiled separately, so a sweep never reaches the recompile limit
    everyone = [ours(label, mechanism, terms) for label, mechanism in mechanisms.items()]
    everyone.append(sdpa(terms))
    for label, mechanism in mechanisms.items():
        everyone += _plain(label, mechanism, terms, compiled)
    return everyone + [_rival(rival, mechanisms, terms) for rival in RIVALS]


def ours(label: str, mechanism: Mechanism, terms: Terms) -> Contestant:
    """Return `softless.attention`, with random tensors for what the mechanism needs beyond q, k and v."""
    if reason := weights_shortage(mechanism, terms):
        return Contestant(label, OURS, label, absent=reason)
    q, k = (torch.empty(size, device="meta") for size in terms.shape.sizes)
    inputs = {
        name: torch.rand(size, device=terms.device, dtype=terms.dtype) for name, size in mechanism.needed(q, k).items()
    }
    attend = partial(attention, mechanism=mechanism, is_causal=terms.is_causal, inputs=inputs, backend=terms.backend)
    return Contestant(label, OURS, label, partial(attend, grid=picture(mechanism, terms.shape.queries)))


def sdpa(terms: Terms) -> Contestant:
    """Return PyTorch's own kernel. If N != M its causal mask is aligned at the bottom right, as ours is."""
    queries, keys = terms.shape.queries, terms.shape.keys
    attend = partial(F.scaled_dot_product_attention, enable_gqa=terms.grouped)
    if not terms.is_causal or queries == keys:
        return Contestant(REFERENCE, SDPA, call=partial(attend, is_causal=terms.is_causal))
    if queries > keys:
        return Contestant(REFERENCE, SDPA, absent=f"answers NaN to the {queries - keys} queries that see no key")
    return Contestant(REFERENCE, SDPA, call=partial(attend, attn_mask=causal_lower_right(queries, keys)))


def _plain(label: str, mechanism: Mechanism, terms: Terms, compiled: bool) -> Iterator[Contestant]:
    eager, fused = Contestant(f"{label} plain", PLAIN, label), Contestant(f"{label} compiled", COMPILED, label)
    try:
        formula = plain(mechanism)
        if terms.is_causal:
            formula = plain(mechanism, causal_by=_causal_by(terms))
    except UnsupportedError as error:
        yield from (replace(contestant, absent=str(error)) for contestant in (eager, fused))
        return
    yield replace(eager, call=formula)
    if compiled:
        yield replace(fused, call=torch.compile(formula, fullgraph=True, dynamic=False))
    else:
        yield replace(fused, absent="compiling takes longer than a quick run")


def _causal_by(terms: Terms) -> str:
    """Return 'weights' if the N x N weights fit in memory, else 'sums' if the running sums fit."""
    shape = terms.shape
    if shape.queries != shape.keys:
        raise UnsupportedError(f"the causal plain formula takes N = M, not {shape.queries} and {shape.keys}")
    numbers = shape.batch * shape.heads * shape.queries * terms.dtype.itemsize
    no_weights = shortage(EXPLICIT_COPIES * numbers * shape.keys, terms.device)
    if no_weights is None:
        return WEIGHTS
    if no_sums := shortage(SUMS_COPIES * numbers * shape.head_dim**2, terms.device):
        raise UnsupportedError(f"forms weights of {no_weights}; forms sums of {no_sums}")
    return SUMS


@dataclass(frozen=True)
class Rival:
    """One kernel of another library; `normalizes` is None if the kernel always does."""

    label: str
    package: str
    install: str
    causal: bool
    module: str
    function: str
    normalizes: bool | None = None
    alone: bool = False

    def lay(self, x: Heads) -> Heads:
        """Lay a tensor out in memory as the kernel wants it."""
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.package == "fla" else x  # memory [B, T, H, D]

    def attend(self, kernel: Callable[..., Any], a: Heads, b: Heads, v: Heads) -> Heads:
        """Call the kernel with features in our order of dimensions."""
        if self.normalizes is None:
            return kernel(a, b, v)
        features = (x.transpose(1, 2) for x in (a, b, v))  # [B, T, H, D]
        out, _ = kernel(*features, scale=1.0, normalize=self.normalizes)
        return out.transpose(1, 2)  # [B, H, T, D]


FLA = Rival("fla chunk", "fla", "pip install fla-core", True, "fla.ops.linear_attn", "chunk_linear_attn", True)
BLA = "from github.com/fla-org/flash-bidirectional-linear-attention"
WITH_PHI = (
    FLA,
    replace(FLA, label="fla fused_chunk", function="fused_chunk_linear_attn", normalizes=False),
    Rival("flash_bla", "flash_bla", BLA, False, "flash_bla.ops.linear_attn.fused", "linear_attention"),
)
RIVALS = (*WITH_PHI, *(replace(rival, label=f"{rival.label} alone", alone=True) for rival in WITH_PHI))


def absence(rival: Rival, terms: Terms) -> str | None:
    """Return the reason why a rival cannot compute this call; None if it can."""
    if rival.causal != terms.is_causal:
        this = "causal" if terms.is_causal else "not"
        return f"is {'causal' if rival.causal else 'not causal'}, and this call is {this}"
    if find_spec(rival.package) is None:
        return f"{rival.package} is not installed ({rival.install})"
    if terms.device != "cuda":
        return "needs a CUDA device"
    if terms.grouped:
        return "takes as many key heads as query heads"
    return None


def load(rival: Rival, mechanism: Linear) -> Formula:
    """Return the rival as a function of q, k and v, with this mechanism's feature maps unless it is `alone`."""
    on_q, on_k = maps(mechanism)
    attend = partial(rival.attend, getattr(import_module(rival.module), rival.function))
    return attend if rival.alone else lambda q, k, v: attend(on_q(q), on_k(k), v)


def _rival(rival: Rival, mechanisms: Mapping[str, Mechanism], terms: Terms) -> Contestant:
    linear = next((mechanism for mechanism in mechanisms.values() if isinstance(mechanism, Linear)), None)
    if linear is None:
        return Contestant(rival.label, RIVAL, absent=f"computes linear, and this is {', '.join(mechanisms)}")
    if reason := absence(rival, terms):
        return Contestant(rival.label, RIVAL, absent=reason)
    try:
        return Contestant(rival.label, RIVAL, linear.name, load(rival, linear), lay=rival.lay)
    except Exception as error:  # noqa: BLE001 - whatever importing another library raises
        return Contestant(rival.label, RIVAL, absent=sentence(error))


def sentence(error: Exception) -> str:
    """Return an error of another library on one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:200]
