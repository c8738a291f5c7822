"""A model as the backbone of a head of segmentation or detection, to be timed as one.

    forward             of a segmentation: the logits of every pixel; of a detection: the boxes that are found, and with
                        mask_rcnn the masks in them
    forward+backward    of a segmentation: through these logits; of a detection: through the losses of `OBJECTS` objects
                        in each image

A head begins with random weights. An untrained detector finds few boxes, so sorting out many is not in its time.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from softless.errors import ArgumentError

TASKS = {"segment": ("upernet", "fpn"), "detect": ("faster_rcnn", "retinanet", "mask_rcnn")}  # the default is the first
CLASSES = {"segment": 150, "detect": 80}  # as ADE20K and COCO have
OBJECTS = 8


def head_of(task: str | None, head: str | None) -> str | None:
    """Return the head of a task; the default one unless it is named."""
    if task is None:
        if head is not None:
            raise ArgumentError(f"--head {head} needs --task {task_of(head)}, or it would not be used")
        return None
    if head is not None and head not in TASKS[task]:
        raise ArgumentError(f"--head {head} is no head of --task {task}, which has {', '.join(TASKS[task])}")
    return head or TASKS[task][0]


def task_of(head: str) -> str:
    """Return the task that a head is for."""
    return next((task for task, heads in TASKS.items() if head in heads), " or ".join(TASKS))


def in_head(
    name: str, options: Mapping[str, Any], head: Any, size: tuple[int, int], dtype: torch.dtype, device: Any
) -> nn.Module:
    """Build a head on a backbone of softless or timm, for images of this size."""
    from softless.train.dense_recipe import DetectModel, SegmentModel
    from softless.train.tasks.detect_heads import build_detector
    from softless.train.tasks.segment_heads import build_network

    task = task_of(head)
    with torch.device(device):
        if task == "segment":
            segment = build_network(SegmentModel(name=name, head=head, **options), size, CLASSES[task])
            return Segmenting(segment).to(dtype).eval()
        detector = build_detector(DetectModel(name=name, head=head, **options), size, CLASSES[task])
    detector.to(dtype).head.float()  # which computes in float32
    return Detecting(detector, size).to(device).eval()


class Segmenting(nn.Module):
    """A `SegmentNetwork` as one tensor: images [B, 3, H, W] -> logits [B, classes, H, W]."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)[0]


class Detecting(nn.Module):
    """A `DetectNetwork` as one tensor: the corners that are found, or in training the sum of the losses.

    The boxes to find lie on a diagonal, and each is an eighth of the image high and wide. Masks fill their boxes.
    """

    def __init__(self, network: nn.Module, size: tuple[int, int]):
        super().__init__()
        self.network, self.size = network, size
        height, width = size
        steps = torch.arange(OBJECTS) / OBJECTS
        near = torch.stack([steps * width, steps * height], 1)
        far = near + torch.tensor([width, height]) / OBJECTS
        inside = [
            (near[:, at, None] <= torch.arange(side)) & (torch.arange(side) < far[:, at, None])
            for at, side in enumerate((width, height))
        ]
        self.register_buffer("boxes", torch.cat([near, far], 1).float(), persistent=False)
        self.register_buffer("masks", inside[1][:, :, None] & inside[0][:, None], persistent=False)
        self.register_buffer("labels", torch.arange(OBJECTS) % CLASSES["detect"], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        shown = torch.tensor([self.size] * len(images))
        if self.training:
            targets = [{"boxes": self.boxes, "labels": self.labels, "masks": self.masks}] * len(images)
            losses, _ = self.network(images, shown, targets)
            return torch.stack([*losses.values()]).sum()
        _, detections = self.network(images, shown)
        return torch.cat([image_detections.corners for image_detections in detections])
