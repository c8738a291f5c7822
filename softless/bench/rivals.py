"""Other people's fused linear attention, where it is installed: the same call in their layout.

    fla chunk         causal, normalized          fla.ops.linear_attn.chunk_linear_attn             [B, T, H, D]
    fla fused_chunk   causal, no normalizer       fla.ops.linear_attn.fused_chunk_linear_attn       [B, T, H, D]
    flash_bla         not causal, normalized      flash_bla.ops.linear_attn.fused.linear_attention  [B, H, T, D]

They take features, not q and k: phi is applied in plain PyTorch first and belongs to their time. `alone` is the kernel
by itself, with q and k for features: its numbers mean nothing, its time does. Tensors lie in memory as each wants them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from jaxtyping import Float
from torch import Tensor

from softless.bench.plain import Formula, maps
from softless.mechanisms.linear import Linear

Heads = Float[Tensor, "b h n d"]


@dataclass(frozen=True)
class Rival:
    """One kernel of another library.

    `adapt` makes its function take features in our order of dimensions, `lay` puts a tensor in memory as it wants it.
    """

    label: str
    package: str
    install: str
    causal: bool
    module: str
    function: str
    adapt: Callable[[Callable[..., Any]], Formula]
    lay: Callable[[Heads], Heads]
    alone: bool = False


def _tokens_first(x: Heads) -> Heads:
    return x.transpose(1, 2).contiguous().transpose(1, 2)  # memory [B, T, H, D]


def _fla(normalize: bool) -> Callable[[Callable[..., Any]], Formula]:
    def adapt(function: Callable[..., Any]) -> Formula:
        def attend(a: Heads, b: Heads, v: Heads) -> Heads:
            features = (x.transpose(1, 2) for x in (a, b, v))  # [B, T, H, D]
            out, _ = function(*features, scale=1.0, normalize=normalize)
            return out.transpose(1, 2)  # [B, H, T, D]

        return attend

    return adapt


def _as_it_is(given: Any) -> Any:
    return given


def _causal(label: str, function: str, normalize: bool) -> Rival:
    install, module = "pip install fla-core", "fla.ops.linear_attn"
    return Rival(label, "fla", install, True, module, function, _fla(normalize), _tokens_first)


def _whole() -> Rival:
    install = "from github.com/fla-org/flash-bidirectional-linear-attention"
    module, function = "flash_bla.ops.linear_attn.fused", "linear_attention"
    return Rival("flash_bla", "flash_bla", install, False, module, function, _as_it_is, _as_it_is)


WITH_PHI = (
    _causal("fla chunk", "chunk_linear_attn", normalize=True),
    _causal("fla fused_chunk", "fused_chunk_linear_attn", normalize=False),
    _whole(),
)
RIVALS = (*WITH_PHI, *(replace(each, label=f"{each.label} alone", alone=True) for each in WITH_PHI))


def absence(rival: Rival, *, is_causal: bool, device: str, grouped: bool) -> str | None:
    """Why a rival cannot take this call, in one line; None if it can."""
    if rival.causal != is_causal:
        return f"is {'causal' if rival.causal else 'not causal'}, and this call is {'causal' if is_causal else 'not'}"
    if find_spec(rival.package) is None:
        return f"{rival.package} is not installed ({rival.install})"
    if device != "cuda":
        return "needs a CUDA device"
    if grouped:
        return "takes as many key heads as query heads"
    return None


def load(rival: Rival, made: Linear) -> Formula:
    """The rival as a function of q, k and v, with this mechanism's feature maps unless it is `alone`."""
    on_q, on_k = maps(made)
    attend = rival.adapt(getattr(import_module(rival.module), rival.function))
    return attend if rival.alone else lambda q, k, v: attend(on_q(q), on_k(k), v)
