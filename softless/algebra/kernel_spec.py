"""The description of a mechanism that the fused kernels take: names and numbers, no code and no tensors."""

from typing import NamedTuple

RULES = ("delta", "efla")  # readers of a memory that tokens both erase from and add to


class KernelSpec(NamedTuple):
    """Two feature maps, a reader and three numbers. Feature maps are those of `feature_maps`, and `unit`: x / |x|."""

    phi_q: str
    phi_k: str
    reader: str  # divide | subtract | channel | none, or one of RULES
    constant: bool = False  # the features are [1, phi]: Taylor attention
    scale: float = 1.0
    t: float = 1.0  # of exp(t x)
