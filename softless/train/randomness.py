"""All that is random in an update follows from (seed, update, rank).

Nothing has to be remembered: an interrupted run draws what the uninterrupted one would have drawn, whatever evaluation,
data workers or another number of ranks drew in between.
"""

import hashlib
import random

import numpy as np
import torch


def key(seed: int, step: int, rank: int) -> int:
    """63 bits that two updates share by accident only."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8]) >> 1


def seed_all(seed: int, step: int, rank: int) -> int:
    """Set every generator that a model, a mixup or a transform may draw from; returns the key."""
    number = key(seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002, timm draws from the global one
    torch.manual_seed(number)
    return number
