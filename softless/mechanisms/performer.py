"""Performer (Choromanski et al. 2021, arXiv 2009.14794): softmax attention in expectation, by random positive features.

    positive     phi(x) = m^-1/2 exp(W x~ - |x~|^2/2)                                   FAVOR+, lemma 1
    hyperbolic   phi(x) = (2m)^-1/2 [exp(W x~ - |x~|^2/2), exp(-W x~ - |x~|^2/2)]       half the variance, or less

    x~ = x d^-1/4        E phi(q).phi(k) = exp(q.k/sqrt(d))
    o_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)

W is the input `projection` [m, d]: blocks of d orthogonal rows, each as long as a Gaussian vector. `draw` makes
one, and a stream must use the same one throughout. The features are kept as logarithms. So there is no need for the
published stabilizer, which lets every query depend on the largest key, nor for its epsilon. The factors that all
features share, m^-1/2 and exp(-|q~|^2/2) of the query, cancel and are left out.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Generator, Tensor

from softless.algebra.state import Log
from softless.errors import ArgumentError, check_choice
from softless.mechanisms.base import Call
from softless.mechanisms.kernelized import Kernelized
from softless.mechanisms.scored import MOST_STAND_INS, check_count


@dataclass(frozen=True)
class Performer(Kernelized):
    name: ClassVar[str] = "performer"
    formula: ClassVar[str] = "linear of phi(x) = exp(W x~ - |x~|^2/2), W random, x~ = x d^-1/4"
    cost: ClassVar[str] = "O(N m d)"
    paper: ClassVar[str] = "Choromanski et al. 2021, arXiv 2009.14794"
    reader: ClassVar[str] = "divide"

    kind: str = "positive"  # positive | hyperbolic
    features: int | None = None  # rows of W; None: d ln d, at least d

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("positive", "hyperbolic"))
        if self.features is not None and (type(self.features) is not int or self.features < 1):
            raise ArgumentError(f"features {self.features!r} is not a number of random features, at least 1, or None")
        check_count("features", self.features or 1, most=MOST_STAND_INS)

    def input_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"projection": (self.features or max(head_dim, int(head_dim * log(head_dim))), head_dim)}

    def draw(self, heads: int, head_dim: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Return a random projection with orthogonal rows.

        >>> import torch, softless
        >>> performer = softless.mechanism("performer", features=6)
        >>> rows = performer.draw(heads=1, head_dim=4, generator=torch.Generator().manual_seed(0))["projection"]
        >>> rows.shape, (rows[:4] @ rows[:4].T).fill_diagonal_(0).abs().max() < 1e-5
        (torch.Size([6, 4]), tensor(True))
        """
        rows, dim = self.input_shapes(heads, head_dim)["projection"]
        blocks = torch.randn(-(-rows // dim), dim, dim, generator=generator)
        lengths = torch.randn(rows, dim, generator=generator).norm(dim=-1, keepdim=True)
        basis, triangle = torch.linalg.qr(blocks)
        basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # else no direction is as likely as another
        return {"projection": basis.mT.flatten(0, 1)[:rows] * lengths}

    def features_q(self, q: Tensor, call: Call) -> Log:
        """W q~."""
        projection = call.inputs["projection"].to(q.dtype).mT
        projection = projection.expand(*q.shape[:2], -1, -1)  # a product for each row: no bit depends on its mates
        logs = (q * q.shape[-1] ** -0.25) @ projection
        return Log(logs if self.kind == "positive" else torch.cat([logs, -logs], -1))

    def features_k(self, k: Tensor, call: Call) -> Log:
        """W k~ - |k~|^2/2."""
        half = k.square().sum(-1, keepdim=True) / (2 * k.shape[-1] ** 0.5)
        return Log(self.features_q(k, call).value - half)
