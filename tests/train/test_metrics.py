"""Scores against their definitions, written out in numpy; and sums of ranks are the whole."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import top_k_accuracy_score

from softless.train.metrics import Tally

CPU = torch.device("cpu")


def ece(logits, labels, bins=15):
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    confidence, right = p.max(1), p.argmax(1) == labels
    total = 0.0
    for low in np.arange(bins) / bins:
        inside = (confidence >= low) & (confidence < low + 1 / bins + (low + 1 / bins >= 1))
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


@pytest.mark.parametrize("classes", [2, 3, 5, 10])
def test_scores_are_what_they_are_called(classes):
    logits, labels = 3 * torch.randn(400, classes), torch.randint(0, classes, (400,))
    logits[torch.arange(400), labels] += 2
    tally = Tally(classes, CPU)
    for some, theirs in zip(logits.split(64), labels.split(64), strict=True):
        tally.add(some, theirs)
    scores = tally.scores()
    exact, truth = logits.double().numpy(), labels.numpy()
    assert scores.images == 400
    assert scores.top1 == (exact.argmax(1) == truth).mean()
    if classes > 5:
        assert scores.top5 == top_k_accuracy_score(truth, exact, k=5, labels=np.arange(classes))
    else:
        assert scores.top5 == 1
    assert math.isclose(scores.loss, torch.nn.functional.cross_entropy(logits.double(), labels).item(), rel_tol=1e-6)
    assert math.isclose(scores.ece, ece(exact, truth), rel_tol=1e-4, abs_tol=1e-6)
    for label, share in enumerate(scores.by_class):
        assert share == (exact.argmax(1) == truth)[truth == label].mean()


def test_a_class_without_images_has_no_accuracy():
    tally = Tally(3, CPU)
    tally.add(torch.eye(3)[:2], torch.tensor([0, 1]))
    assert tally.scores().by_class == (1.0, 1.0, None)


def test_the_sums_of_ranks_are_the_whole():
    logits, labels = torch.randn(101, 7), torch.randint(0, 7, (101,))
    whole, ranks = Tally(7, CPU), [Tally(7, CPU) for _ in range(3)]
    whole.add(logits, labels)
    for rank, tally in enumerate(ranks):
        tally.add(logits[rank::3], labels[rank::3])
    for tensors in zip(*(tally.tensors() for tally in ranks), strict=True):
        tensors[0].copy_(sum(tensors))
    ours, theirs = ranks[0].scores(), whole.scores()
    assert (ours.images, ours.top1, ours.top5, ours.by_class) == (101, theirs.top1, theirs.top5, theirs.by_class)
    assert math.isclose(ours.ece, theirs.ece, rel_tol=1e-12)
    assert math.isclose(ours.loss, theirs.loss, rel_tol=1e-6)


def test_sure_and_right_is_calibrated_and_sure_and_wrong_is_not():
    for labels, expected in ((torch.tensor([0, 1]), 0.0), (torch.tensor([1, 0]), 1.0)):
        tally = Tally(2, CPU)
        tally.add(100 * torch.eye(2), labels)
        assert tally.scores().ece == expected
