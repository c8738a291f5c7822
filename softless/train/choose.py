"""Choose a recipe by the size and the number of the images, and by the machine.

    the embedded digits                          digits
    no CUDA device                               twins-images      32 x 32 pixels, a small DeiT, minutes
    images below 64 pixels                       cifar10           32 x 32 pixels
    images that fit in memory at 128 pixels      imagenette        128 x 128 pixels
    more                                         inline_deit_tiny  224 x 224 pixels, as on ImageNet
    text                                         text-small, or text-base with a CUDA device

The size of the images is that of the median image of a sample, by shorter side. A batch is never larger than the set.
"""

from contextlib import suppress
from statistics import median_low
from typing import NamedTuple

from softless.data.images import Images
from softless.data.loading import MOST_CACHED
from softless.data.sources import DIGITS
from softless.io.pictures import BadImage
from softless.train import recipe

SAMPLED = 16  # images
SMALL, MEDIUM = 64, 128  # pixels


class TypicalSize(NamedTuple):
    """The size of the median image of a sample, in pixels, and whether all images of the sample have it."""

    height: int
    width: int
    all_same: bool


def typical_size(images: Images) -> TypicalSize | None:
    """Decode a few images from all over the set, and return their typical size; None if none can be decoded."""
    count, sizes = min(SAMPLED, len(images)), []
    for place in range(count):
        with suppress(BadImage):
            image = images[place * len(images) // count].image
            sizes.append((image.height, image.width))
    if not sizes:
        return None
    return TypicalSize(*median_low(sorted(sizes, key=min)), len({*sizes}) == 1)


def fitting(data: str | None, images: Images, size: TypicalSize | None, cuda: bool) -> tuple[str, str, dict[str, str]]:
    """Return the name of the recipe for these images on this machine, why it fits, and which of its keys to change."""
    if data is None or data == DIGITS:
        return recipe.DEFAULT, "for the embedded digits", {}
    side = MEDIUM if size is None else min(size.height, size.width)
    pixels = "the images" if size is None else f"images of {size.height} x {size.width} pixels"
    if not cuda:
        name, because = "twins-images", f"for {pixels} without a CUDA device"
    elif side < SMALL:
        name, because = "cifar10", f"for {pixels}"
    elif len(images) * 3 * MEDIUM**2 <= MOST_CACHED:
        name, because = "imagenette", f"for {pixels}"
    else:
        name, because = "inline_deit_tiny", f"for {pixels}, too many to keep decoded"
    if len(images) >= (batch := recipe.read_recipe(name).batch):
        return name, because, {}
    smaller = 1 << (len(images).bit_length() - 1)  # a power of two: mixing needs pairs
    return name, f"{because}, with batch {smaller} instead of {batch}", {"batch": str(smaller)}


def fitting_text(cuda: bool) -> tuple[str, str]:
    """Return the name of the recipe for a text on this machine, and why it fits."""
    return ("text-base", "for text") if cuda else ("text-small", "for text without a CUDA device")
