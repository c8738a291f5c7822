"""Bits per byte and the rule for a text: the intervals are those of the test sequences, and fewer bits are better."""

from math import log, sqrt

import numpy as np
import pytest
from scipy import stats

from softless.probes.running import student
from softless.study.decision import Rule, decide_pair
from softless.study.tables import Group, Spread, example_variance, interval
from softless.study.text.measures import BITS, decide_text, entropy, sequence_scores, spread_of_bits, text_groups
from softless.train.tasks.language import SequenceAnswers

CHANCE, SPREAD = -4.5, Spread(0.01, 8)
FALLING = (-4.0, -3.2, -2.9, -2.75, -2.65, -2.6, -2.56, -2.53, -2.51, -2.5)


def group(id_, *bits, curve=FALLING, runs=None, sequences=400):
    """A twin whose runs take this many bits per byte, on sequences that are hard and easy for all twins alike."""
    hard = np.random.default_rng(0).normal(0, 0.3, sequences)
    hard -= hard.mean()
    answers = np.stack([-value + hard for value in bits]) if bits else None
    curves = (tuple(enumerate(curve, start=1)),) * len(bits)
    return Group(id_, id_, tuple(-value for value in bits), runs or len(bits), "failed", 100, curves, answers)


def decided(softmax, linear, *, margin=0.05, **more):
    pair = group("softmax", *softmax), group("linear", *linear, **more)
    return decide_pair(*pair, SPREAD, Rule(CHANCE, margin, BITS))


@pytest.mark.parametrize(
    ("softmax", "linear", "answer", "because"),
    [
        ((2.50, 2.50), (2.49, 2.49), "no", "lies below 0.05 bits per byte"),
        ((2.50, 2.50), (2.51, 2.51), "no", "lies below 0.05 bits per byte"),
        ((2.50, 2.50), (2.60, 2.60), "yes", "lies above 0.05 bits per byte"),
        ((2.50, 2.50), (2.55, 2.55), "cannot tell", "contains 0.05 bits per byte"),
    ],
)
def test_fewer_bits_are_better_and_the_margin_is_a_loss(softmax, linear, answer, because):
    pair = decided(softmax, linear)
    assert pair["answer"] == answer
    assert pair["because"].endswith(because)
    assert (pair["would_tell"] is None) == (answer != "cannot tell")


def test_a_twin_that_predicts_no_better_than_the_frequencies_of_bytes_did_not_learn():
    pair = decided((2.5, 2.5), (4.6, 4.6))
    assert pair["answer"] == "cannot tell"
    assert (
        "linear (4.60 bits per byte) did not learn: the frequencies of single bytes alone give 4.50" in pair["because"]
    )


def test_training_is_too_short_where_the_distance_of_the_twins_still_changes():
    slower = (-4.0, -3.6, -3.4, -3.2, -3.1, -3.0, -2.9, -2.8, -2.6, -2.5)
    assert decided((2.5, 2.5), (2.5, 2.5))["answer"] == "no"  # both still fall, alike
    pair = decided((2.5, 2.5), (2.5, 2.5), curve=slower)
    assert "still changes in the last tenth of training" in pair["because"]
    assert pair["would_tell"] == "about 26 epochs instead of 10 (--epochs 26)"


def test_one_seed_has_no_interval():
    pair = decided((2.5,), (2.5,))
    assert (pair["answer"], pair["low"], pair["high"]) == ("cannot tell", None, None)
    assert "one seed does not show how much the loss in bits per byte differs between seeds" in pair["because"]


def test_the_interval_pairs_seeds_and_test_sequences():
    rng = np.random.default_rng(1)
    a, b = (Group(name, name, (-2.0, -2.1), 2, answers=rng.normal(-2, 0.4, (2, 300))) for name in "ab")
    apart = a.answers.mean(0) - b.answers.mean(0)
    rest = 0.0
    for answers in (a.answers, b.answers):
        left = answers - answers.mean(1, keepdims=True) - answers.mean(0) + answers.mean()
        rest += (left**2).sum() / 299 / 2
    over_examples = max(apart.var(ddof=1) - rest, 0) / 300
    assert example_variance(a, b) == pytest.approx(over_examples)
    over_seeds = 0.01**2
    freedom = (over_seeds + over_examples) ** 2 / (over_seeds**2 / 8 + over_examples**2 / 299)
    for family in (1, 8):
        t = stats.t.ppf(1 - 0.025 / family, int(freedom))
        assert interval(a, b, SPREAD, family).half == pytest.approx(t * sqrt(over_seeds + over_examples), rel=1e-3)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 31, 100])
@pytest.mark.parametrize("family", [1, 2, 8])
def test_intervals_that_hold_together_are_as_wide_as_bonferroni_asks(degrees, family):
    assert student(degrees, family) == pytest.approx(stats.t.ppf(1 - 0.025 / family, degrees), rel=3e-4)


def test_the_scores_of_the_sequences_average_to_the_bits_per_byte_of_the_text():
    losses, sizes = np.array([80.0, 90.0, 30.0]), np.array([64, 64, 20])
    answers = SequenceAnswers.of(losses, sizes)
    record = {"answers": {key: getattr(answers, key) for key in ("sequences", "losses", "bytes")}}
    assert -sequence_scores(record).mean() == pytest.approx(losses.sum() / sizes.sum() / log(2), rel=1e-6)


def test_the_study_answers_for_the_best_twin_beside_softmax():
    twins = {name: group(name, bits, bits) for name, bits in (("softmax", 2.5), ("linear", 2.7), ("delta", 2.51))}
    found = decide_text(twins, SPREAD, chance=CHANCE, margin=0.05)
    assert [pair["answer"] for pair in found["pairs"]] == ["yes", "no"]
    assert found["pairs"][found["headline"]]["linear"] == "delta"
    assert found["pairs"][0]["difference"] == pytest.approx(0.2)
    assert found["pairs"][0]["low"] < 0.2 < found["pairs"][0]["high"]


def test_without_softmax_there_is_no_pair():
    found = decide_text({"linear": group("linear", 2.5, 2.5)}, SPREAD, chance=CHANCE, margin=0.05)
    assert (found["pairs"], found["headline"]) == ([], None)


def test_chance_is_the_entropy_of_single_bytes():
    assert entropy(b"aabb") == pytest.approx(1.0)
    assert entropy(bytes(range(256))) == pytest.approx(8.0)
    assert entropy(b"aaaa") == 0.0


def test_the_spread_over_seeds_is_pooled_over_the_twins_that_learned():
    twins = {"softmax": group("softmax", 2.5, 2.54), "bad": group("bad", 4.9, 6.0)}
    assert spread_of_bits(twins, CHANCE).deviation == pytest.approx(sqrt(2 * 0.02**2))
    assert spread_of_bits(twins, CHANCE).freedom == 1


def test_a_run_that_diverged_has_no_score():
    record = {
        "twin": {"id": "linear", "label": "linear"}, "seed": 0, "status": "diverged", "curve": [], "parameters": 5,
        "bits_per_byte": None, "answers": None,
    }  # fmt: skip
    (linear,) = text_groups([record]).values()
    assert (linear.scores, linear.runs, linear.instead) == ((), 1, "not finite")
