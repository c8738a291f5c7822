"""How good the answers are: top-1, top-5, by class, and whether the confidence can be believed.

    ECE = sum_b (n_b / n) |accuracy_b - confidence_b|        15 equal bins of the largest probability (Guo et al. 2017)

Counts are sums, so those of several ranks add up; they stay on the device until the end.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Scores:
    """Of a set of images. by_class has an accuracy a class, None for one without images."""

    images: int
    loss: float
    top1: float
    top5: float
    ece: float
    by_class: tuple[float | None, ...]


class Tally:
    """Sums over batches."""

    def __init__(self, classes: int, device: torch.device):
        self.loss = torch.zeros(3, dtype=torch.float64, device=device)  # loss, in the top 1, in the top 5
        self.classes = torch.zeros(2, classes, dtype=torch.float64, device=device)  # images, right
        self.bins = torch.zeros(3, BINS, dtype=torch.float64, device=device)  # images, right, confidence

    def add(self, logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> None:
        logits = logits.float()
        best = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]  # [B, 5]
        right, confidence = best[:, 0].double(), logits.softmax(1).amax(1).double()
        total = F.cross_entropy(logits, labels, reduction="sum").double()
        self.loss += torch.stack([total, right.sum(), best.any(1).double().sum()])
        ones = torch.ones_like(right)
        place = (confidence * BINS).long().clamp(0, BINS - 1)
        self.classes[0].index_add_(0, labels, ones)
        self.classes[1].index_add_(0, labels, right)
        for row, values in zip(self.bins, (ones, right, confidence), strict=True):
            row.index_add_(0, place, values)

    def tensors(self) -> list[Tensor]:
        """To be added up over ranks, in place."""
        return [self.loss, self.classes, self.bins]

    def scores(self) -> Scores:
        count, right = self.classes.tolist()
        images = int(sum(count))
        loss, top1, top5 = (self.loss / max(images, 1)).tolist()
        _, correct, confidence = self.bins.cpu()
        gap = (correct - confidence).abs().sum().item() / max(images, 1)
        by_class = tuple(r / n if n else None for n, r in zip(count, right, strict=True))
        return Scores(images, loss, top1, top5, gap, by_class)
