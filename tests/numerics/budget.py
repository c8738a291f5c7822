"""How far from the truth a low-precision result may be: R3.

    ulp      eps(dtype) * max |exact|, and never less than the step between the smallest numbers of the dtype
    budget   min(ratio * error of the plain formula, ulps * ulp) + ulp

The ratio holds us to what anyone gets by typing the formula; the ulps hold us to what the dtype allows
where typing the formula goes wrong.
"""

import torch
from torch import Tensor

FORWARD = {"ratio": 2.0, "ulps": 4.0}
GRADIENT = {"ratio": 3.0, "ulps": 8.0}


def worst(actual: Tensor, exact: Tensor) -> float:
    """Largest distance, infinite if anything in `actual` is not a number."""
    error = (actual.double() - exact).abs()
    return torch.where(error.isfinite(), error, torch.inf).max().item() if error.numel() else 0.0


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor, *, ratio: float, ulps: float, name: str) -> None:
    """`exact` is float64; `eager` is the plain formula computed step by step in the dtype of `actual`."""
    assert exact.dtype == torch.float64
    assert exact.isfinite().all(), f"{name}: there is no finite truth to compare with"
    assert actual.isfinite().all(), f"{name}: not finite"
    kind, size = torch.finfo(actual.dtype), exact.abs().max().item() if exact.numel() else 0.0
    ulp = kind.eps * max(size, kind.smallest_normal)
    error, theirs = worst(actual, exact), worst(eager, exact)
    allowed = min(ratio * theirs, ulps * ulp) + ulp
    ours, plain, most = (x / ulp for x in (error, theirs, allowed))
    assert error <= allowed, f"{name}: off by {ours:.2f} ulp, the plain formula by {plain:.2f}, allowed {most:.2f}"
