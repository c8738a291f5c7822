"""Heads of object detection on the features of a backbone: Faster R-CNN, Mask R-CNN, and RetinaNet.

    features -> feature pyramid -> head -> boxes with classes, scores and perhaps masks, and in training the losses

The modules are those of torchvision, without its transform of images: the loaders give images of one size. The head
computes in float32 in every precision, because bf16 has 8 bits, and would move a side at 700 pixels by up to 2.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from softless.errors import ArgumentError
from softless.train.dense_recipe import MASK_RCNN, DetectModel
from softless.train.tasks.features import Features, build_features

RATIOS = (0.5, 1.0, 2.0)  # height to width of anchors
THIRDS = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))  # of an octave: the sizes of RetinaNet's anchors on one scale
STRIDES = {"faster_rcnn": 8, MASK_RCNN: 8, "retinanet": 4}  # that the smallest anchor is wide by default
REGION = 7  # height and width of what Faster R-CNN reads from the features of a box
MASK_REGION, CONVOLUTIONS = 14, 4  # the same for a mask, which is answered twice as fine, and the layers that do so
MOST = 100  # boxes that are found in an image, as COCO counts them

Losses = dict[str, Tensor]
Targets = list[dict[str, Tensor]]


class Detections(NamedTuple):
    """The boxes that were found in an image, the highest score first.

    corners   float32 [N, 4]: left, top, right, bottom
    labels    int64 [N]
    scores    float32 [N]: from 0 to 1
    masks     float32 [N, 28, 28]: the probability that the object is in each cell of its box; None if only boxes are
              found
    """

    corners: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor | None = None


class DetectNetwork(nn.Module):
    """A backbone with a feature pyramid and a head: images [B, 3, H, W] -> losses, and what is found in each image.

    losses       by name; none without targets
    detections   `Detections` of each image; none in training
    """

    def __init__(self, features: Features, pyramid: nn.Module, head: nn.Module):
        super().__init__()
        self.features, self.pyramid, self.head = features, pyramid, head

    def forward(self, images: Tensor, shown: Tensor, targets: Targets | None = None) -> tuple[Losses, list[Detections]]:
        """Return losses and what is found; `shown`, int64 [B, 2], is the height and width that show something."""
        scales = self.pyramid(OrderedDict((str(at), x) for at, x in enumerate(self.features(images))))
        with torch.autocast(images.device.type, enabled=False):
            scales = OrderedDict((name, x if x.dtype == torch.float64 else x.float()) for name, x in scales.items())
            sizes: Any = [tuple(size) for size in shown.tolist()]
            return self.head(ImageList(images, sizes), scales, targets)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the backbone does not decay."""
        return {f"features.{name}" for name in self.features.no_weight_decay()}


class FasterHead(nn.Module):
    """The head of Faster R-CNN (Ren et al. 2015): regions that may hold an object, and the class and box of each.

    With `masks`, it is that of Mask R-CNN (He et al. 2017), which also answers for the mask in each box.
    """

    def __init__(self, inner: int, scales: int, anchors: AnchorGenerator, classes: int, *, masks: bool):
        super().__init__()
        names = [str(scale) for scale in range(scales)]
        options: dict[str, Any] = {
            "rpn_anchor_generator": anchors,
            "box_detections_per_img": MOST,
            "box_roi_pool": MultiScaleRoIAlign(names, REGION, 2),
            "box_head": TwoMLPHead(inner * REGION**2, 4 * inner),
            "box_predictor": FastRCNNPredictor(4 * inner, classes + 1),
        }
        if masks:
            options |= {
                "mask_roi_pool": MultiScaleRoIAlign(names, MASK_REGION, 2),
                "mask_head": MaskRCNNHeads(inner, [inner] * CONVOLUTIONS, dilation=1),
                "mask_predictor": MaskRCNNPredictor(inner, inner, classes + 1),
            }
        stock = (MaskRCNN if masks else FasterRCNN)(_stub(inner), **options)
        self.rpn, self.roi_heads = stock.rpn, stock.roi_heads

    def forward(
        self, images: ImageList, scales: dict[str, Tensor], targets: Targets | None
    ) -> tuple[Losses, list[Detections]]:
        if self.training:
            return self.losses(images, scales, targets), []
        regions, _ = self.rpn(images, scales)
        per_image, _ = self.roi_heads(scales, regions, images.image_sizes)
        losses = {} if targets is None else self.losses_in_test(images, scales, targets)
        masks = [each["masks"][:, 0] if "masks" in each else None for each in per_image]
        return losses, [
            Detections(each["boxes"], each["labels"] - 1, each["scores"], own)
            for each, own in zip(per_image, masks, strict=True)
        ]

    def losses(self, images: ImageList, scales: dict[str, Tensor], targets: Targets | None) -> Losses:
        assert targets is not None
        targets = [{**target, "labels": target["labels"] + 1} for target in targets]  # 0 is no object
        regions, losses = self.rpn(images, scales, targets)
        return losses | self.roi_heads(scales, regions, images.image_sizes, targets)[1]

    def losses_in_test(self, images: ImageList, scales: dict[str, Tensor], targets: Targets) -> Losses:
        """Return the losses of a test. They draw anchors and regions at random, and here always the same ones."""
        device = images.tensors.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            self.train()  # the head has no dropout and no batch norm
            losses = self.losses(images, scales, targets)
            self.eval()
        return losses


class RetinaHead(nn.Module):
    """The head of RetinaNet (Lin et al. 2017): class and box of every anchor, with the focal loss."""

    def __init__(self, inner: int, anchors: AnchorGenerator, classes: int):
        super().__init__()
        self.stock = RetinaNet(_stub(inner), classes, anchor_generator=anchors, detections_per_img=MOST)

    def forward(
        self, images: ImageList, scales: dict[str, Tensor], targets: Targets | None
    ) -> tuple[Losses, list[Detections]]:
        stock, features = self.stock, [*scales.values()]
        answers = stock.head(features)  # logits [B, anchors, classes], boxes [B, anchors, 4]
        anchors = stock.anchor_generator(images, features)
        losses = {} if targets is None else stock.compute_loss(targets, answers, anchors)
        if self.training:
            return losses, []
        each = stock.anchor_generator.num_anchors_per_location()
        counts = [x.shape[2] * x.shape[3] * number for x, number in zip(features, each, strict=True)]
        by_scale = {name: [*answer.split(counts, 1)] for name, answer in answers.items()}
        per_image = stock.postprocess_detections(
            by_scale, [[*one.split(counts)] for one in anchors], images.image_sizes
        )
        return losses, [Detections(each["boxes"], each["labels"], each["scores"]) for each in per_image]


def _stub(channels: int) -> nn.Module:
    """Return an empty module in the place of the backbone, which torchvision asks for the channels of its pyramid."""
    stub = nn.Identity()
    stub.out_channels = channels  # type: ignore[assignment]
    return stub


def build_detector(model: DetectModel, size: tuple[int, int], classes: int) -> DetectNetwork:
    """Build the network of a recipe, for images of this size."""
    faster = model.head != "retinanet"
    features = build_features(model, size, coarse=not faster)
    if not features.channels:
        raise ArgumentError(f"recipe: model.name {model.name!r} has features of one scale, and retinanet needs two")
    extra = LastLevelMaxPool() if faster else LastLevelP6P7(model.channels, model.channels)
    pyramid = FeaturePyramidNetwork(features.channels, model.channels, extra)
    scales = len(features.channels)
    smallest = model.anchor or STRIDES[model.head] * features.strides[0]
    octaves = [smallest * 2**octave for octave in range(scales + (1 if faster else 2))]
    sizes = tuple(tuple(octave * third for third in (THIRDS[:1] if faster else THIRDS)) for octave in octaves)
    anchors = AnchorGenerator(sizes, (RATIOS,) * len(sizes))
    head: nn.Module
    if faster:
        head = FasterHead(model.channels, scales, anchors, classes, masks=model.head == MASK_RCNN)
    else:
        head = RetinaHead(model.channels, anchors, classes)
    return DetectNetwork(features, pyramid, head)
