"""The recipe of semantic segmentation: a backbone with a head that gives every pixel a class.

A recipe file has `task = "segment"`, these keys, and the tables `[model]`, `[augment]` and `[masks]`; see
recipes/segment-*.toml.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from softless.data.joint import JointAugment
from softless.data.masks import MaskValues
from softless.errors import ArgumentError
from softless.train.architecture import Architecture
from softless.train.settings import Settings, check_type

Head = Literal["upernet", "fpn"]


@dataclass(frozen=True, kw_only=True)
class SegmentModel(Architecture):
    """A backbone, and the head on its features. The keys of `Architecture` without `global_pool`, and:

    name        str: a model of softless or of timm
    head        "upernet" (default) or "fpn": the head of UperNet, or that of Semantic FPN
    channels    int, default 256: channels inside the head
    auxiliary   float, default 0.0: weight in the loss of a second, smaller head on the next-to-last stage; 0 is none
    """

    name: str = "inline_swin_tiny"
    head: Head = "upernet"
    channels: int = 256
    auxiliary: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in {"name": str, "head": Head, "channels": int, "auxiliary": float}.items():
            check_type(f"model.{name}", getattr(self, name), kind)
        if self.global_pool is not None:
            raise ArgumentError(
                f"recipe: model.global_pool is {self.global_pool!r}, and a head that gives every pixel a class reads "
                "the features before they are pooled"
            )
        if not (16 <= self.channels <= 2**14 and self.channels % 16 == 0):
            raise ArgumentError(f"recipe: model.channels is {self.channels} and must be a multiple of 16, to {2**14}")
        if not 0 <= self.auxiliary <= 10:
            raise ArgumentError(f"recipe: model.auxiliary is {self.auxiliary} and must be from 0 to 10")


@dataclass(frozen=True, kw_only=True)
class SegmentRecipe(Settings):
    """How a model is trained that gives every pixel a class. The keys of `Settings`, and:

    task            "segment"
    model           SegmentModel
    augment         JointAugment
    masks           MaskValues
    height, width   int, default 512: size in pixels of the crops to train on, and of the resized images to test on
    channels_last   bool, default False: memory layout of images and convolutions
    """

    task: Literal["segment"] = "segment"
    model: SegmentModel = field(default_factory=SegmentModel)
    augment: JointAugment = field(default_factory=JointAugment)
    masks: MaskValues = field(default_factory=MaskValues)
    height: int = 512
    width: int = 512
    channels_last: bool = False
    batch: int = 16
    epochs: int = 100
    warmup_epochs: int = 5

    least: ClassVar[Mapping[str, float]] = {**Settings.least, "height": 1, "width": 1}
    most: ClassVar[Mapping[str, float]] = {**Settings.most, "height": 2**14, "width": 2**14}

    @property
    def size(self) -> tuple[int, int]:
        """Return the height and width of the images that the model sees."""
        return self.height, self.width
