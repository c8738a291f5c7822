"""Heads of semantic segmentation on the features of a backbone: UperNet, and Semantic FPN.

    features -> head -> logits at the finest scale -> logits of every pixel, bilinear

The modules are those of transformers and torchvision, with group norms instead of batch norms. A group norm gives the
same result for an image whatever else is in its batch, so a batch may be spread over devices or computed in parts.
"""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from softless.errors import needs_extra
from softless.train.dense_recipe import SegmentModel
from softless.train.tasks.features import Features, build_features

PER_GROUP = 8


class SegmentNetwork(nn.Module):
    """A backbone with a head: images [B, 3, H, W] -> logits [B, classes, H, W].

    In training, a network with an auxiliary head returns its logits too.
    """

    def __init__(self, features: Features, head: nn.Module, auxiliary: nn.Module | None):
        super().__init__()
        self.features, self.head, self.auxiliary = features, head, auxiliary

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.features(images)
        answers = [self.head(features)]
        if self.training and self.auxiliary is not None:
            answers.append(self.auxiliary(features))
        return tuple(resized(answer, images.shape[2:]) for answer in answers)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the backbone does not decay."""
        return {f"features.{name}" for name in self.features.no_weight_decay()}


class SemanticFPN(nn.Module):
    """The head of Semantic FPN (Kirillov et al. 2019).

    A feature pyramid network gives all scales as many channels. Each scale is then brought to the finest one by steps
    of convolution, norm, ReLU and a doubling of the size, and the scales are added.
    """

    def __init__(self, channels: list[int], inner: int, classes: int):
        from torchvision.ops import FeaturePyramidNetwork

        super().__init__()
        self.pyramid = FeaturePyramidNetwork(channels, inner)
        self.scales = nn.ModuleList(
            nn.ModuleList(step(inner, inner // 2) if first else step(inner // 2, inner // 2) for first in firsts)
            for firsts in ([index == 0 for index in range(max(scale, 1))] for scale in range(len(channels)))
        )
        self.classifier = nn.Conv2d(inner // 2, classes, 1)

    def forward(self, features: list[Tensor]) -> Tensor:
        pyramid = [*self.pyramid(OrderedDict((str(at), x) for at, x in enumerate(features))).values()]
        finest, *others = (self.brought(pyramid, scale) for scale in range(len(pyramid)))
        return self.classifier(sum(others, finest))

    def brought(self, pyramid: list[Tensor], scale: int) -> Tensor:
        """Return one scale of the pyramid at the size of the finest."""
        x, steps = pyramid[scale], self.scales[scale]
        assert isinstance(steps, nn.ModuleList)
        for index, convolve in enumerate(steps):
            x = resized(convolve(x), pyramid[max(scale - 1 - index, 0)].shape[2:])
        return x


def step(inputs: int, outputs: int) -> nn.Module:
    """Return a convolution with its norm and ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), group_norm(outputs), nn.ReLU())


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a norm over groups of `PER_GROUP` channels: pooling leaves one pixel, and one number has no deviation."""
    return nn.GroupNorm(channels // PER_GROUP, channels)


def resized(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize features or logits bilinearly."""
    return x if x.shape[2:] == size else F.interpolate(x, size, mode="bilinear", align_corners=False)


def upernet(channels: list[int], inner: int, classes: int) -> nn.Module:
    """Return the head of UperNet (Xiao et al. 2018), as transformers has it."""
    with needs_extra("the head of UperNet comes from transformers", "hf"):
        from transformers import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetHead

    return with_group_norms(UperNetHead(UperNetConfig(hidden_size=inner, num_labels=classes), channels))


def auxiliary_head(channels: list[int], inner: int, classes: int) -> nn.Module:
    """Return the smaller head of UperNet, which reads the next-to-last scale."""
    with needs_extra("the auxiliary head comes from transformers", "hf"):
        from transformers import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead

    config = UperNetConfig(auxiliary_channels=inner, num_labels=classes)
    return with_group_norms(UperNetFCNHead(config, channels, in_index=max(len(channels) - 2, 0)))


def with_group_norms(module: nn.Module) -> nn.Module:
    """Replace the batch norms of a module by group norms."""
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, group_norm(child.num_features))
    return module


def build_network(model: SegmentModel, size: tuple[int, int], classes: int) -> SegmentNetwork:
    """Build the network of a recipe, for images of this size."""
    features = build_features(model, size)
    make = {"upernet": upernet, "fpn": SemanticFPN}[model.head]
    head: nn.Module = make(features.channels, model.channels, classes)
    auxiliary = auxiliary_head(features.channels, model.channels, classes) if model.auxiliary else None
    return SegmentNetwork(features, head, auxiliary)
