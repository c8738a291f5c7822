"""Draw answers onto pictures: a color for every class, and a legend beside the picture."""

import colorsys

import numpy as np
from PIL import Image, ImageDraw

COVER = 0.5  # of a picture, by the colors
LINE, MARGIN = 16, 6  # pixels
GOLDEN = 0.618034  # of the color circle, from one class to the next: neighbors differ


def colors(count: int) -> np.ndarray:
    """Return a color for each class, uint8 [count, 3]: the same for the same class in any set of this size or more."""
    lights = (0.95, 0.7, 0.45)
    found = [colorsys.hsv_to_rgb(index * GOLDEN % 1, 0.75, lights[index % 3]) for index in range(count)]
    return (255 * np.array(found).reshape(-1, 3)).round().astype(np.uint8)


def painted(image: Image.Image, mask: np.ndarray, classes: tuple[str, ...]) -> Image.Image:
    """Return a picture with the colors of its classes over it, and a legend of the classes that occur.

    image     RGB
    mask      uint8 [height, width]: the class of every pixel
    classes   their names
    """
    table = colors(len(classes))
    over = Image.blend(image, Image.fromarray(table[mask]), COVER)
    shown = [label for label in range(len(classes)) if (mask == label).any()]
    draw = ImageDraw.Draw(over)
    width = LINE + 3 * MARGIN + int(max(draw.textlength(classes[label]) for label in shown))
    page = Image.new("RGB", (over.width + width, max(over.height, LINE * len(shown) + 2 * MARGIN)), "white")
    page.paste(over, (0, 0))
    draw = ImageDraw.Draw(page)
    for line, label in enumerate(shown):
        left, top = over.width + MARGIN, MARGIN + LINE * line
        draw.rectangle((left, top + 2, left + LINE - 4, top + LINE - 2), fill=tuple(map(int, table[label])))
        draw.text((left + LINE + MARGIN, top), classes[label], fill="black")
    return page
