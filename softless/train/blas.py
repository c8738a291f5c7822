"""Products of small matrices on an Arm processor, by BLAS.

There PyTorch hands every float32 product A B^T, matrix by matrix, to oneDNN and so to the Arm Compute Library, which
calls up a team of threads for each, whatever `torch.set_num_threads` says: 0.1 to 0.6 ms, where BLAS takes 0.003 ms for
a head of 65 tokens. The backward pass of linear attention has two such products a head, a linear layer one. Without
oneDNN an update of the digits' InLine twin takes a sixth of the time, and one of DeiT-T six sevenths.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from softless.train.recipe import Precision


@contextmanager
def by_blas(precision: Precision = "fp32") -> Iterator[None]:
    """Inside, and where oneDNN means the Arm Compute Library, float32 does without it; half precision has no other."""
    mkldnn, before = torch.backends.mkldnn, torch.backends.mkldnn.enabled
    if precision == "fp32" and mkldnn.is_acl_available():
        mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        mkldnn.enabled = before
