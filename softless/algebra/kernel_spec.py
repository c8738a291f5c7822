"""The description of a mechanism that the fused kernels take: names and numbers, no code and no tensors."""

from typing import NamedTuple

RULES = ("delta", "efla")  # readers of a memory that tokens both erase from and add to
NEAR = "near"  # the reader of near and far tokens; its maps are names of learned ones
MOST_FEATURES = 128  # of a learned map


class KernelSpec(NamedTuple):
    """Two feature maps, a reader and its numbers. Feature maps are those of `feature_maps`, and `unit`: x / |x|.

    Numbers that differ between heads are no part of it: see `Mechanism.kernel_factors`.
    """

    phi_q: str
    phi_k: str
    reader: str  # divide | subtract | blend | regress | channel | none, NEAR, or one of RULES
    constant: bool = False  # the features are [1, phi]: Taylor attention
    scale: float = 1.0
    t: float = 1.0  # of exp(t x)
    ridge: float = 0.0  # of regress, relative to the trace
    centered: bool = True  # whether regress reads phi(q) - k_mean, or phi(q)
