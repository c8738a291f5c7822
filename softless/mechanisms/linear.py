"""Linear attention, InLine and their blend: the same feature maps, and how to normalize.

    linear   o_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)      Katharopoulos et al. 2020, eq. 4
    inline   w_ij = (s/n) phi(q_i).(phi(k_j) - mean phi(k)) + 1/n              Han et al. 2024, their code: s = d^-1/2
             w_ij = s phi(q_i).(phi(k_j) - mean phi(k)) + 1/n                  eq. 4 as printed: gain="sum", s = 1
    blend    w_ij = 1/n + (a / (n phi(q_i).mean phi(k)) + s b/n) phi(q_i).(phi(k_j) - mean phi(k))         s = d^-1/2

The factor s/n is in the authors' code and not in their eq. 4. It makes the sum over keys a mean, so that an output does
not grow with the number of tokens. In the causal form n, the means and the sums run over the tokens seen so far.

`blend` learns a and b for each head, the inputs `divide` and `subtract`. It is `linear` at a = 1 and b = 0, and
`inline` at a = 0 and b = 1. At a = b = 1, where it starts, it is magnitude-aware linear attention (MALA, Fan et al.
2025) as its code has it, without the rotary positions. The paper prints 1 where the code has s/n.

`linear` with phi identity or leaky_relu divides by a sum that changes sign. This is not recommended. It is allowed
because these are the failing rows of InLine's Table 3 (0.2 % and 1.5 % top-1).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softless.algebra import Gains, feature_maps
from softless.algebra.feature_maps import FeatureMap
from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.state import Log
from softless.errors import ArgumentError, check_choice
from softless.mechanisms.base import Call, repeat_heads
from softless.mechanisms.kernelized import Kernelized, per_head


@dataclass(frozen=True)
class FeatureMapped(Kernelized):
    """A kernelized mechanism whose feature maps are names or callables."""

    phi: str | FeatureMap = "identity"
    phi_k: str | FeatureMap | None = None  # None: the same as phi
    t: float = 1.0  # exp(t x)

    def __post_init__(self) -> None:
        for option, phi in (("phi", self.phi), ("phi_k", self.phi if self.phi_k is None else self.phi_k)):
            if not callable(phi) and phi not in feature_maps.NAMES:
                raise ArgumentError(f"{option} {phi!r} is not one of {', '.join(feature_maps.NAMES)} or a callable")
        if not self.t > 0 or self.t == float("inf"):
            raise ArgumentError(f"t {self.t} is not a positive number")
        if self.t != 1 and "exp" not in (self.phi, self.phi_k):
            raise ArgumentError(
                f"t {self.t} is only read by phi 'exp', and phi is {self.phi!r} with phi_k {self.phi_k!r}"
            )

    @property
    def maps_to_negative(self) -> bool:
        """Whether a feature may be negative."""
        return any(callable(phi) or phi in feature_maps.SIGNED for phi in (self.phi, self.phi_k))

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        if "affine_relu" not in (self.phi, self.phi_k):
            return {}
        return {"weight": (heads, head_dim, head_dim), "bias": (heads, head_dim)}

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        phi_q, phi_k = self.phi, self.phi if self.phi_k is None else self.phi_k
        if not isinstance(phi_q, str) or not isinstance(phi_k, str) or "affine_relu" in (phi_q, phi_k):
            return None
        return KernelSpec(phi_q, phi_k, self.reader, scale=scale, t=self.t)

    def maps(self) -> tuple[FeatureMap, FeatureMap] | None:
        names = self.phi, self.phi if self.phi_k is None else self.phi_k
        phi_q, phi_k = (feature_maps.ELEMENTWISE.get(phi) if isinstance(phi, str) else None for phi in names)
        return None if phi_q is None or phi_k is None else (phi_q, phi_k)

    def features_q(self, q: Tensor, call: Call) -> Tensor | Log:
        return feature_maps.apply(self.phi, q, t=self.t, inputs=call.inputs)

    def features_k(self, k: Tensor, call: Call) -> Tensor | Log:
        phi = self.phi if self.phi_k is None else self.phi_k
        if phi == "affine_relu":
            k = repeat_heads(k, call.inputs["weight"].shape[0])
        return feature_maps.apply(phi, k, t=self.t, inputs=call.inputs)


@dataclass(frozen=True)
class Linear(FeatureMapped):
    name: ClassVar[str] = "linear"
    formula: ClassVar[str] = "sum_j phi(q).phi(k_j) v_j / sum_j phi(q).phi(k_j)"
    paper: ClassVar[str] = "Katharopoulos et al. 2020, arXiv 2006.16236"

    phi: str | FeatureMap = "elu"
    normalize: str = "divide"  # divide | none

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("normalize", self.normalize, ("divide", "none"))

    @property
    def reader(self) -> str:  # type: ignore[override]
        return self.normalize

    @property
    def signed(self) -> bool:  # type: ignore[override]
        return self.maps_to_negative


@dataclass(frozen=True)
class InLine(FeatureMapped):
    name: ClassVar[str] = "inline"
    formula: ClassVar[str] = "sum_j [(s/n) phi(q).(phi(k_j) - mean phi(k)) + 1/n] v_j"
    paper: ClassVar[str] = "Han et al. 2024, arXiv 2412.06590"

    gain: str = "mean"  # mean: s/n, as the authors' code | sum: s, eq. 4 as printed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("gain", self.gain, ("mean", "sum"))

    @property
    def reader(self) -> str:  # type: ignore[override]
        return "subtract" if self.gain == "mean" else "contrast"

    def kernel_spec(self, scale: float) -> KernelSpec | None:
        """Return the names for the kernels if the gain is "mean": they have no other gain."""
        return super().kernel_spec(scale) if self.gain == "mean" else None

    def default_scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.gain == "mean" else 1.0


@dataclass(frozen=True)
class Blend(FeatureMapped):
    name: ClassVar[str] = "blend"
    formula: ClassVar[str] = "v_mean + (a / (n phi(q).mean phi(k)) + s b/n) phi(q)^T comoment"
    paper: ClassVar[str] = "Fan et al. 2025, arXiv 2507.00698"
    reader: ClassVar[str] = "blend"

    phi: str | FeatureMap = "elu"

    @property
    def signed(self) -> bool:  # type: ignore[override]
        return self.maps_to_negative

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return super().input_shapes(heads, head_dim) | {"divide": (heads,), "subtract": (heads,)}

    def initialize(self, name: str, tensor: Tensor) -> None:
        if name in ("divide", "subtract"):
            tensor.fill_(1.0)
        else:
            super().initialize(name, tensor)

    def kernel_factors(self, call: Call) -> Tensor | None:
        return torch.stack([call.inputs["divide"], call.inputs["subtract"]], -1).float()

    def default_scale(self, head_dim: int) -> float:
        return head_dim**-0.5

    def _gain(self, phi_q: Tensor | Log, call: Call) -> Gains:
        divide, subtract = (per_head(call.inputs[name], phi_q)[..., None, None] for name in ("divide", "subtract"))
        return Gains(divide, call.scale * subtract)
