"""Scores against their definitions, written out in numpy; and sums of ranks are the whole."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import top_k_accuracy_score

from softless.train.metrics import Answers, ClassCounts

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
def test_scores_match_their_definitions(classes):
    logits, labels = 3 * torch.randn(400, classes), torch.randint(0, classes, (400,))
    logits[torch.arange(400), labels] += 2
    counts = ClassCounts(classes, 400, CPU)
    for parts in zip(*(each.split(64) for each in (logits, labels, torch.arange(400))), strict=True):
        counts.count(*parts)
    scores = counts.scores()
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
    counts = ClassCounts(3, 2, CPU)
    counts.count(torch.eye(3)[:2], torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert counts.scores().by_class == (1.0, 1.0, None)


def test_counts_of_ranks_add_up_to_those_of_one_process():
    logits, labels = torch.randn(101, 7), torch.randint(0, 7, (101,))
    whole, ranks = ClassCounts(7, 101, CPU), [ClassCounts(7, 101, CPU) for _ in range(3)]
    whole.count(logits, labels, torch.arange(101))
    for rank, counts in enumerate(ranks):
        counts.count(logits[rank::3], labels[rank::3], torch.arange(101)[rank::3])
    for tensors in zip(*(counts.tensors() for counts in ranks), strict=True):
        tensors[0].copy_(sum(tensors))
    ours, theirs = ranks[0].scores(), whole.scores()
    assert (ours.images, ours.top1, ours.top5, ours.by_class) == (101, theirs.top1, theirs.top5, theirs.by_class)
    assert ranks[0].answers() == whole.answers()
    assert math.isclose(ours.ece, theirs.ece, rel_tol=1e-12)
    assert math.isclose(ours.loss, theirs.loss, rel_tol=1e-6)


def test_confident_right_answers_are_calibrated_and_wrong_ones_are_not():
    for labels, expected in ((torch.tensor([0, 1]), 0.0), (torch.tensor([1, 0]), 1.0)):
        counts = ClassCounts(2, 2, CPU)
        counts.count(100 * torch.eye(2), labels, torch.tensor([0, 1]))
        assert counts.scores().ece == expected


def test_answers_are_in_the_order_of_the_set_for_any_order_of_batches():
    logits, labels, order = torch.randn(101, 7), torch.randint(0, 7, (101,)), torch.randperm(101)
    counts = ClassCounts(7, 101, CPU)
    for ids in order.split(16):
        counts.count(logits[ids], labels[ids], ids)
    assert counts.answers().bits().tolist() == (logits.argmax(1) == labels).tolist()
    assert counts.answers().bits().mean() == pytest.approx(counts.scores().top1)


def test_images_that_were_skipped_have_no_answer():
    counts = ClassCounts(2, 5, CPU)
    counts.count(torch.eye(2), torch.tensor([0, 0]), torch.tensor([4, 1]))
    assert (counts.answers().images, counts.answers().bits().tolist()) == (2, [False, True])


@pytest.mark.parametrize("images", [0, 1, 7, 8, 9, 360])
def test_packed_answers_unpack_to_the_same_bits(images):
    right = np.random.default_rng(0).random(images) < 0.7
    packed = Answers.of(right)
    assert packed.bits().tolist() == right.tolist()
    assert len(packed.right) <= 4 * -(-images // 24)
