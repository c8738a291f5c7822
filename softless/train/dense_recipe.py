"""The recipes of segmentation and detection: a backbone with a head that answers for every place of an image.

A recipe file has `task = "segment"` or `task = "detect"`, these keys, and the tables `[model]`, `[augment]`, and
`[masks]` or `[boxes]`; see recipes/segment-*.toml and recipes/detect-*.toml.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from softless.data.boxes import BoxValues, MaskedBoxValues
from softless.data.joint import JointAugment
from softless.data.masks import MaskValues
from softless.errors import ArgumentError
from softless.train.architecture import Architecture
from softless.train.settings import Settings, check_type

SegmentHead = Literal["upernet", "fpn"]
DetectHead = Literal["faster_rcnn", "retinanet", "mask_rcnn"]
MASK_RCNN = "mask_rcnn"  # which finds the mask of each object too


@dataclass(frozen=True, kw_only=True)
class DenseModel(Architecture):
    """A backbone, and the head on its features. The keys of `Architecture` without `global_pool`, and:

    name        str: a model of softless or of timm
    channels    int, default 256: channels inside the head
    """

    name: str = "inline_swin_tiny"
    channels: int = 256

    own: ClassVar[tuple[str, ...]] = ("head", "channels")  # keys that are not of the backbone

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in {"name": str, "channels": int}.items():
            check_type(f"model.{name}", getattr(self, name), kind)
        if self.global_pool is not None:
            raise ArgumentError(
                f"recipe: model.global_pool is {self.global_pool!r}, and a head that answers for every place reads "
                "the features before they are pooled"
            )
        if not (16 <= self.channels <= 2**14 and self.channels % 16 == 0):
            raise ArgumentError(f"recipe: model.channels is {self.channels} and must be a multiple of 16, to {2**14}")


@dataclass(frozen=True, kw_only=True)
class SegmentModel(DenseModel):
    """A backbone with a head that gives every pixel a class. The keys of `DenseModel`, and:

    head        "upernet" (default) or "fpn": the head of UperNet, or that of Semantic FPN
    auxiliary   float, default 0.0: weight in the loss of a second, smaller head on the next-to-last stage; 0 is none
    """

    head: SegmentHead = "upernet"
    auxiliary: float = 0.0

    own: ClassVar[tuple[str, ...]] = ("head", "channels", "auxiliary")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("model.head", self.head, SegmentHead)
        check_type("model.auxiliary", self.auxiliary, float)
        if not 0 <= self.auxiliary <= 10:
            raise ArgumentError(f"recipe: model.auxiliary is {self.auxiliary} and must be from 0 to 10")


@dataclass(frozen=True, kw_only=True)
class DetectModel(DenseModel):
    """A backbone with a head that finds objects. The keys of `DenseModel`, and:

    head      "faster_rcnn" (default), "retinanet", or "mask_rcnn", which needs a mask of each object
    anchor    float, default 0.0: width in pixels of the smallest square anchors, which double from scale to scale; 0 is
              8 strides of the finest scale of faster_rcnn and mask_rcnn, and 4 of that of retinanet
    """

    head: DetectHead = "faster_rcnn"
    anchor: float = 0.0

    own: ClassVar[tuple[str, ...]] = ("head", "channels", "anchor")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("model.head", self.head, DetectHead)
        check_type("model.anchor", self.anchor, float)
        if not 0 <= self.anchor <= 2**14:
            raise ArgumentError(f"recipe: model.anchor is {self.anchor} and must be from 0 to {2**14}")


@dataclass(frozen=True, kw_only=True)
class DenseRecipe(Settings):
    """What the recipes of segmentation and detection share. The keys of `Settings`, and:

    augment         JointAugment
    height, width   int, default 512: size in pixels of the crops to train on, and of the resized images to test on
    channels_last   bool, default False: memory layout of images and convolutions
    """

    augment: JointAugment = field(default_factory=JointAugment)
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


@dataclass(frozen=True, kw_only=True)
class SegmentRecipe(DenseRecipe):
    """How a model is trained that gives every pixel a class. The keys of `DenseRecipe`, and:

    task    "segment"
    model   SegmentModel
    masks   MaskValues
    """

    task: Literal["segment"] = "segment"
    model: SegmentModel = field(default_factory=SegmentModel)
    masks: MaskValues = field(default_factory=MaskValues)

    @property
    def values(self) -> MaskValues:
        """Return what the annotations mean."""
        return self.masks


@dataclass(frozen=True, kw_only=True)
class DetectRecipe(DenseRecipe):
    """How a model is trained that finds objects. The keys of `DenseRecipe`, and:

    task    "detect"
    model   DetectModel
    boxes   BoxValues
    """

    task: Literal["detect"] = "detect"
    model: DetectModel = field(default_factory=DetectModel)
    boxes: BoxValues = field(default_factory=BoxValues)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile:
            raise ArgumentError("recipe: compile is true, and a detection makes boxes of any number: it must be false")

    @property
    def values(self) -> BoxValues:
        """Return what the annotations mean."""
        return MaskedBoxValues(**vars(self.boxes)) if self.model.head == MASK_RCNN else self.boxes


AnyDense = SegmentRecipe | DetectRecipe
