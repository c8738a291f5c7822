"""What an update makes smaller: cross-entropy with mixed and smoothed targets, and a teacher's answers.

    loss = (1 - w) CE(student, target) + w T^2 KL(softmax(teacher / T) || softmax(student / T))

w is 0 without a teacher (Hinton et al. 2015). Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) are timm's: one
draw for a whole batch, which is mixed with itself in reverse order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softless.train.recipe import Recipe


class Objective:
    """The loss of a model on a batch."""

    def __init__(self, recipe: Recipe, classes: int, teacher: nn.Module | None = None):
        self.smoothing, self.temperature = recipe.label_smoothing, recipe.temperature
        self.weight = 0.0 if teacher is None else recipe.distill
        self.teacher = None if teacher is None else teacher.eval().requires_grad_(False)
        self.mixup = None
        if recipe.mixup or recipe.cutmix:
            from timm.data import Mixup

            self.mixup = Mixup(
                recipe.mixup, recipe.cutmix, prob=recipe.mix_prob, switch_prob=recipe.mix_switch,
                label_smoothing=recipe.label_smoothing, num_classes=classes,
            )  # fmt: skip

    def __call__(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        targets, smoothing = labels, self.smoothing
        if self.mixup is not None:
            pixels, targets = self.mixup(pixels.clone(), labels)
            smoothing = 0.0  # it is in the targets
        logits = _whole(model(pixels))
        targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if self.teacher is None:
            return loss
        return (1 - self.weight) * loss + self.weight * self._distance(logits, pixels)

    def _distance(self, logits: Tensor, pixels: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            wanted = F.log_softmax(_whole(self.teacher(pixels)) / self.temperature, 1)
        found = F.log_softmax(logits / self.temperature, 1)
        return self.temperature**2 * F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def _whole(logits: Tensor) -> Tensor:
    """In single precision at least."""
    return logits if logits.dtype == torch.float64 else logits.float()
