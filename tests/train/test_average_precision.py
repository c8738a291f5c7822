"""Average precision equals a computation from COCO's definition, written down without pycocotools."""

from dataclasses import replace

import numpy as np
import pytest

from softless.data.boxes import Boxes, stacked
from softless.data.object_masks import decode, encode
from softless.train.tasks.average_precision import box_scores
from tests.data.outlined import ellipse

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RANGES = {"all": (0, 1e10), "small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}


def areas(one, other):
    """Of two boxes, or of two masks: the area that both have, and that of each."""
    if np.ndim(one) == 2:
        return (one & other).sum(), one.sum(), other.sum()
    width, height = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return (max(width, 0) * max(height, 0), *((b[2] - b[0]) * (b[3] - b[1]) for b in (one, other)))


def overlap(one, other, crowd):
    """Intersection over union; with a crowd, the share of the first shape that lies in it."""
    inside, area, others = areas(one, other)
    return inside / (area if crowd else area + others - inside) if inside else 0.0


def judged(known, called, label, threshold, low, high):
    """For one image: (score, whether it is right) of what counts, and how many objects there are to find.

    `known` has shapes, labels, crowds and areas, and `called` has shapes, scores and labels.
    """
    objects = [
        (shape, crowd or not low <= area <= high, crowd)
        for shape, own, crowd, area in zip(*known, strict=True)
        if own == label
    ]
    objects.sort(key=lambda thing: thing[1])  # those that count come first
    mine = sorted((one for one in zip(*called, strict=True) if one[2] == label), key=lambda one: -one[1])[:100]
    taken, answers = set(), []
    for own, score, _ in mine:
        best, at = min(threshold, 1 - 1e-10), None
        for place, (shape, ignored, crowd) in enumerate(objects):
            if place in taken and not crowd:
                continue
            if at is not None and not objects[at][1] and ignored:
                break  # an object that counts is found already
            share = overlap(own, shape, crowd)
            if share >= best:
                best, at = share, place
        if at is not None:
            taken.add(at)
            if not objects[at][1]:
                answers.append((score, True))
        elif low <= areas(own, own)[0] <= high:
            answers.append((score, False))
    return answers, sum(not ignored for _, ignored, _ in objects)


def precision_of(truth, found, label, threshold, low, high):
    """Mean over the 101 recalls of the highest precision at that recall or above; None without a box to find."""
    answers, boxes = [], 0
    for known, called in zip(truth, found, strict=True):
        own, count = judged(known, called, label, threshold, low, high)
        answers, boxes = answers + own, boxes + count
    if not boxes:
        return None
    right = np.cumsum([good for _, good in sorted(answers, key=lambda answer: -answer[0])])  # a stable order
    recall, precision = right / boxes, right / (1 + np.arange(len(right)))
    return float(np.mean([max(precision[recall >= least], default=0.0) for least in np.linspace(0, 1, 101)]))


def by_hand(truth, found, classes, size="all", thresholds=THRESHOLDS):
    values = [
        [precision_of(truth, found, label, threshold, *RANGES[size]) for threshold in thresholds]
        for label in range(classes)
    ]
    return [float(np.mean(each)) if each[0] is not None else None for each in values]


def check(scores, truth, found, classes):
    """Whether these scores are those of the definition."""
    expected, halves = by_hand(truth, found, classes), by_hand(truth, found, classes, thresholds=THRESHOLDS[:1])
    assert list(scores.by_class) == pytest.approx(expected, abs=1e-9)
    assert list(scores.by_class50) == pytest.approx(halves, abs=1e-9)
    assert (scores.ap, scores.ap50) == (pytest.approx(mean(expected)), pytest.approx(mean(halves)))
    assert scores.ap75 == pytest.approx(mean(by_hand(truth, found, classes, thresholds=THRESHOLDS[5:6])))
    for size in ("small", "medium", "large"):
        assert getattr(scores, size) == pytest.approx(mean(by_hand(truth, found, classes, size)))


def mean(values):
    real = [value for value in values if value is not None]
    return float(np.mean(real)) if real else None


def scene(rng, images=6, classes=3, crowds=0.0, quantum=None, most=8):
    """Boxes of all sizes, and answers near them and elsewhere; scores in steps of `quantum` make ties."""
    truth, found = [], []
    for _ in range(images):
        count = int(rng.integers(0, most))
        corner, size = rng.uniform(0, 100, (count, 2)), rng.uniform(4, 150, (count, 2))
        corners, labels = np.concatenate([corner, corner + size], 1), rng.integers(0, classes, count)
        truth.append(stacked(corners, labels, rng.random(count) < crowds, None, "xyxy"))
        near = np.repeat(corners, 2, 0) + rng.normal(0, 3, (2 * count, 4))
        extra = rng.uniform(0, 60, (3, 2))
        boxes = np.concatenate([near, np.concatenate([extra, extra + rng.uniform(10, 50, (3, 2))], 1)])
        scores = rng.random(len(boxes))
        scores = scores if quantum is None else np.ceil(scores / quantum) * quantum
        names = np.concatenate([np.repeat(labels, 2), rng.integers(0, classes, 3)])
        rows = np.concatenate([boxes, scores[:, None], names[:, None]], 1).astype(np.float32)
        found.append(rows[(rows[:, 2:4] > rows[:, :2]).all(1)])
    return truth, found, classes


def empty():
    return stacked(np.zeros((0, 4)), np.zeros(0), np.zeros(0), None, "xyxy")


def nothing_found(rng):
    truth, found, classes = scene(rng)
    return truth, [rows[:0] for rows in found], classes


def images_without_boxes(rng):
    truth, found, classes = scene(rng)
    return [empty() if at % 2 else boxes for at, boxes in enumerate(truth)], found, classes


def only_crowds_of_a_class(rng):
    truth, found, classes = scene(rng)
    return [boxes._replace(crowd=boxes.labels == 1) for boxes in truth], found, classes


def smaller_objects(rng):
    truth, found, classes = scene(rng)
    return [boxes._replace(areas=boxes.areas / 3) for boxes in truth], found, classes


def exact(rng):
    truth, _, classes = scene(rng)
    rows = [np.concatenate([b.corners, rng.random((len(b.labels), 1)), b.labels[:, None]], 1) for b in truth]
    return truth, [each.astype(np.float32) for each in rows], classes


CASES = {
    "random": scene,
    "crowds": lambda rng: scene(rng, crowds=0.4),
    "ties": lambda rng: scene(rng, quantum=0.5),
    "all scores equal": lambda rng: scene(rng, quantum=1.0),
    "no detections": nothing_found,
    "images without boxes": images_without_boxes,
    "nothing to find and nothing found": lambda _rng: ([empty()] * 2, [np.zeros((0, 6), np.float32)] * 2, 2),
    "a class of crowds alone": only_crowds_of_a_class,
    "a class that no image has": lambda rng: (*scene(rng)[:2], 4),
    "all found": exact,
    "objects that are smaller than their boxes": smaller_objects,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_the_definition(case):
    truth, found, classes = CASES[case](np.random.default_rng(7))
    scores = box_scores(truth, found, classes, 1.5)
    assert (scores.images, scores.loss, scores.masks) == (len(truth), 1.5, None)
    assert scores.boxes == sum(int((~boxes.crowd).sum()) for boxes in truth)
    called = [(rows[:, :4].tolist(), rows[:, 4].tolist(), rows[:, 5].tolist()) for rows in found]
    check(scores, [boxes[:4] for boxes in truth], called, classes)
    if case == "all found":
        assert scores.ap == pytest.approx(1)


SIDES = 110, 130  # height and width of the images below


def outlined(rng, images=4, classes=2, crowds=0.0, quantum=None, counts=(1, 5), shift=3.0):
    """Ellipses of all sizes, many of which overlap, and answers that are shifted; scores in steps of `quantum`."""
    truth, found, masks = [], [], []
    for _ in range(images):
        count = int(rng.integers(*counts))
        corner, size = rng.uniform(0, 60, (count, 2)), rng.uniform(8, 120, (count, 2))
        corners, labels = np.concatenate([corner, corner + size], 1), rng.integers(0, classes, count)
        shapes = [ellipse(box, *SIDES) for box in corners]
        own = np.array([encode(shape) for shape in shapes] + [None])[:-1]
        boxes = stacked(corners, labels, rng.random(count) < crowds, np.array([x.sum() for x in shapes]), "xyxy")
        near = np.repeat(corners, 2, 0) + rng.normal(0, shift, (2 * count, 4))
        scores = rng.random(len(near))
        scores = scores if quantum is None else np.ceil(scores / quantum) * quantum
        truth.append(boxes._replace(masks=own))
        found.append(np.concatenate([near, scores[:, None], np.repeat(labels, 2)[:, None]], 1).astype(np.float32))
        masks.append([encode(ellipse(box, *SIDES)) for box in near])
    return truth, found, masks, classes


def no_masks_found(rng):
    truth, found, _, classes = outlined(rng)
    return truth, [rows[:0] for rows in found], [[] for _ in found], classes


def two_that_overlap(_rng):
    """Two objects in one place, which differ by their masks alone, and one answer that has the wrong half."""
    halves = [np.arange(SIDES[1]) < 50, (np.arange(SIDES[1]) >= 50) & (np.arange(SIDES[1]) < 100)]
    codes = [encode(np.tile(half, (SIDES[0], 1))) for half in halves]
    corners = np.array([[0.0, 0, 100, 110]] * 2)
    boxes = stacked(corners, np.zeros(2), np.zeros(2), None, "xyxy")._replace(masks=np.array(codes))
    rows = np.array([[0, 0, 100, 110, 0.9, 0], [0, 0, 100, 110, 0.8, 0]], np.float32)
    return [boxes] * 2, [rows] * 2, [codes, codes[:1] * 2], 1


OUTLINED = {
    "random": outlined,
    "crowds": lambda rng: outlined(rng, crowds=0.5),
    "ties": lambda rng: outlined(rng, quantum=0.5),
    "all scores equal": lambda rng: outlined(rng, quantum=1.0),
    "no detections": no_masks_found,
    "images without objects": lambda rng: outlined(rng, images=8, counts=(0, 2)),
    "no objects at all": lambda rng: outlined(rng, counts=(0, 1)),
    "two objects that overlap": two_that_overlap,
    "all found": lambda rng: outlined(rng, shift=0.0),
}


@pytest.mark.parametrize("case", OUTLINED)
def test_scores_of_masks_equal_the_definition(case):
    truth, found, masks, classes = OUTLINED[case](np.random.default_rng(3))
    scores = box_scores(truth, found, classes, masks=masks)
    alone = box_scores([boxes._replace(masks=None) for boxes in truth], found, classes)
    assert replace(scores, masks=None) == alone
    known = [([decode(code).astype(bool) for code in boxes.masks], *boxes[1:4]) for boxes in truth]
    called = [
        ([decode(code).astype(bool) for code in own], rows[:, 4].tolist(), rows[:, 5].tolist())
        for own, rows in zip(masks, found, strict=True)
    ]
    check(scores.masks, known, called, classes)
    if case == "two objects that overlap":
        assert (scores.ap, scores.masks.ap) == (pytest.approx(1), pytest.approx(0.75, abs=0.01))


def test_a_box_found_twice_counts_once():
    boxes = Boxes(*(np.array(part) for part in ([[0.0, 0, 50, 50]], [0], [False], [2500.0])))
    rows = np.array([[0, 0, 50, 50, 0.9, 0], [0, 0, 50, 50, 0.8, 0], [60, 60, 90, 90, 0.95, 0]], np.float32)
    assert box_scores([boxes], [rows[:2]], 1).ap == pytest.approx(1)
    assert box_scores([boxes], [rows], 1).ap == pytest.approx(0.5)
