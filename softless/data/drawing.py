"""Draw masks and boxes onto pictures: a color for every class, and a legend beside the picture."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

COVER = 0.5  # of a picture, by the colors
LINE, MARGIN, FRAME = 16, 6, 2  # pixels
GOLDEN = 0.618034  # of the color circle, from one class to the next: neighbors differ


def colors(count: int) -> np.ndarray:
    """Return a color for each class, uint8 [count, 3]: the same for the same class in any set of this size or more."""
    lights = (0.95, 0.7, 0.45)
    rgb = [colorsys.hsv_to_rgb(index * GOLDEN % 1, 0.75, lights[index % 3]) for index in range(count)]
    return (255 * np.array(rgb).reshape(-1, 3)).round().astype(np.uint8)


def painted(image: Image.Image, mask: np.ndarray, classes: tuple[str, ...]) -> Image.Image:
    """Return a picture with the colors of its classes over it, and a legend of the classes that occur.

    image     RGB
    mask      uint8 [height, width]: the class of every pixel
    classes   their names
    """
    table = colors(len(classes))
    over = Image.blend(image, Image.fromarray(table[mask]), COVER)
    return with_legend(over, [label for label in range(len(classes)) if (mask == label).any()], classes)


def framed(
    image: Image.Image,
    corners: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray,
    classes: tuple[str, ...],
    masks: Sequence[np.ndarray],
) -> Image.Image:
    """Return a picture with boxes in the colors of their classes, their scores, and a legend of the classes that occur.

    image     RGB
    corners   float [N, 4]: left, top, right, bottom, in pixels
    labels    int [N]: the class of each box
    scores    float [N]: from 0 to 1
    classes   their names
    masks     uint8 [height, width] for each box: 1 where its object is; no masks if only boxes were found
    """
    table, over, order = colors(len(classes)), image.copy(), np.argsort(scores, kind="stable")
    for place in order if len(masks) else ():
        whole = Image.new("RGB", image.size, tuple(map(int, table[labels[place]])))
        over.paste(Image.blend(over, whole, COVER), mask=Image.fromarray(255 * masks[place]))
    draw = ImageDraw.Draw(over)
    for place in order:
        box, score = corners[place].tolist(), float(scores[place])
        color = tuple(map(int, table[labels[place]]))
        draw.rectangle(box, outline=color, width=FRAME)
        text = f"{score:.0%}"
        corner = box[0] + FRAME, box[1] + FRAME
        draw.rectangle(draw.textbbox(corner, text), fill=color)
        draw.text(corner, text, fill="black")
    return with_legend(over, sorted({*labels.tolist()}), classes)


def with_legend(picture: Image.Image, shown: list[int], classes: tuple[str, ...]) -> Image.Image:
    """Return a page with a picture, and beside it the colors and names of these classes."""
    table, draw = colors(len(classes)), ImageDraw.Draw(picture)
    width = LINE + 3 * MARGIN + int(max((draw.textlength(classes[label]) for label in shown), default=0))
    page = Image.new("RGB", (picture.width + width, max(picture.height, LINE * len(shown) + 2 * MARGIN)), "white")
    page.paste(picture, (0, 0))
    draw = ImageDraw.Draw(page)
    for line, label in enumerate(shown):
        left, top = picture.width + MARGIN, MARGIN + LINE * line
        draw.rectangle((left, top + 2, left + LINE - 4, top + LINE - 2), fill=tuple(map(int, table[label])))
        draw.text((left + LINE + MARGIN, top), classes[label], fill="black")
    return page
