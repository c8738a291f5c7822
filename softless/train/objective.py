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
    """The loss of a model on a batch that was mixed."""

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

    def mix(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed pixels and their targets [B, classes], smoothed; as they are without Mixup and CutMix."""
        return (pixels, labels) if self.mixup is None else self.mixup(pixels.clone(), labels)

    def __call__(self, model: nn.Module, pixels: Tensor, targets: Tensor) -> Tensor:
        logits = _whole(model(pixels))
        if targets.is_floating_point():
            loss = F.cross_entropy(logits, targets.to(logits.dtype))
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
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
