"""The rule of the verdict: a fair pair, an interval over seeds and images, and no answer where there is none (R34)."""

from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from softless.study import decision as study_decision
from softless.study.decision import Rule, decide, decide_pair, gain
from softless.study.tables import (
    Group,
    Spread,
    example_variance,
    groups,
    half_width,
    interval,
    shared_spread,
)
from softless.study.verdict import answer_in_words
from tests.scripts import script

ROOT = Path(__file__).parents[2]
FLAT = tuple((float(epoch), 90.0) for epoch in range(1, 11))
SPREAD = Spread(0.5, 7)

simulated = script("decision")


def group(id_, *accuracies, images=3600, curves=None, seed=0, **more):
    """A twin whose runs answer nearly the same images: those of the seed, so that only its accuracies matter."""
    order = np.random.default_rng(seed).permutation(images)
    right = np.zeros((len(accuracies), images), bool)
    for row, accuracy in zip(right, accuracies, strict=True):
        row[order[: round(images * accuracy / 100)]] = True
    kept = right if accuracies else None
    curves = (FLAT,) * len(accuracies) if curves is None else curves
    more = {"runs": len(accuracies), "parameters": 60_000, **more}
    return Group(id_, id_.replace("-local", " + local"), accuracies, curves=curves, answers=kept, **more)


def decided(softmax, inline, spread=SPREAD, margin=1.0, **more):
    return decide_pair(group("softmax", *softmax, **more), group("inline", *inline, **more), spread, Rule(10.0, margin))


@pytest.mark.parametrize(
    ("softmax", "inline", "margin", "answer"),
    [
        ((90, 91), (92.5, 92.5), 1.0, "no"),
        ((90, 91), (90.5, 90.5), 2.0, "no"),
        ((90, 91), (90.5, 90.5), 0.5, "cannot tell"),
        ((90, 91), (88, 88), 1.0, "yes"),
        ((90, 91), (88, 88), 2.0, "cannot tell"),
        ((90, 91), (89, 89.5), 1.0, "cannot tell"),
    ],
)
def test_the_answer_is_where_the_whole_interval_lies(softmax, inline, margin, answer):
    pair = decided(softmax, inline, margin=margin)
    assert pair["answer"] == answer
    assert pair["difference"] == pytest.approx(np.mean(inline) - np.mean(softmax))
    side = "no" if pair["low"] > -margin else "yes" if pair["high"] < -margin else "cannot tell"
    assert side == answer
    assert (pair["would_tell"] is None) == (answer != "cannot tell")


def test_the_interval_is_the_one_of_the_formula():
    a, b = group("inline", 88, 90, seed=1), group("softmax", 91, 92, seed=2)
    apart = (a.answers.mean(0) - b.answers.mean(0)).tolist()
    rest = 0.0
    for right in (a.answers.astype(float), b.answers.astype(float)):
        residual = right - right.mean(1, keepdims=True) - right.mean(0, keepdims=True) + right.mean()
        rest += (residual**2).sum() / (3600 - 1) / 2
    over_images = 1e4 * (np.var([*apart, 1, -1], ddof=1) - rest) / 3602
    assert example_variance(a, b) == pytest.approx(over_images)
    over_seeds = 0.25 * (1 / 2 + 1 / 2)
    freedom = (over_seeds + over_images) ** 2 / (over_seeds**2 / 7 + over_images**2 / 3599)
    half = stats.t.ppf(0.975, int(freedom)) * sqrt(over_seeds + over_images)
    found = interval(a, b, SPREAD)
    assert (found.low, found.high) == pytest.approx((-2.5 - half, -2.5 + half), abs=1e-3)
    assert half_width(over_seeds, 7, over_images, 3600) == pytest.approx(half, rel=1e-3)


def test_two_twins_that_agree_on_every_image_still_have_an_interval():
    few, many = (interval(*(group(id_, 99, 99, images=n) for id_ in ("a", "b")), Spread(0.0, 1)) for n in (100, 3600))
    assert few.difference == many.difference == 0
    assert few.low < -1 < many.low < 0


def test_more_seeds_and_more_images_make_the_interval_shorter():
    rng, world = np.random.default_rng(0), simulated.World()
    found = {}
    for seeds, images in ((2, 360), (6, 360), (2, 3600)):
        halves = []
        for _ in range(20):
            made = groups(simulated.records(simulated.answers(world, 0, seeds, images, rng)))
            halves.append(interval(made["inline"], made["softmax"], Spread(0.5, 7)).half)
        found[seeds, images] = np.mean(halves)
    assert found[2, 360] > max(found[6, 360], found[2, 3600])


@pytest.mark.parametrize(
    ("change", "because", "tells"),
    [
        (
            {"softmax": (90,), "inline": (95,)},
            "one seed does not show how much accuracy differs between seeds",
            "--seeds",
        ),
        (
            {"softmax": (19, 19), "inline": (95, 95)},
            "softmax (19.0 %) did not learn: it takes 20.0 %, and chance is 10.0 %",
            "longer",
        ),
        ({"runs": 3}, "2 runs of softmax and inline did not finish", "tries failed runs again"),
        ({"curves": (FLAT[:1],) * 2}, "does not show whether accuracy still rises", "several epochs"),
        ({"images": 0}, "did not store the answer to each image", "training them again"),
    ],
)
def test_there_is_no_verdict_where_a_condition_fails(change, because, tells):
    pair = decided(change.pop("softmax", (90, 91)), change.pop("inline", (95, 96)), **change)
    assert pair["answer"] == "cannot tell"
    assert because in pair["because"]
    assert tells in pair["would_tell"]


@pytest.mark.parametrize(("chance", "least"), [(1, 2.0), (10, 20.0), (33, 66.0), (50, 75.0), (90, 95.0)])
def test_two_classes_can_be_learned_too(chance, least):
    for accuracy, learned in ((least - 0.5, False), (least + 0.5, True)):
        both = [group(id_, accuracy, accuracy) for id_ in ("softmax", "inline")]
        assert ("did not learn" not in decide_pair(*both, SPREAD, Rule(chance, 1.0))["because"]) == learned


def test_a_pair_far_behind_another_twin_is_judged_without_a_spread():
    found = {each.id: each for each in (group("softmax", 40, 41), group("inline", 40, 42), group("linear-relu", 97))}
    decision = decide(found, shared_spread(found), chance=0.1)
    assert decision["pairs"][0]["answer"] == "cannot tell"
    assert "one seed does not show" in decision["pairs"][0]["because"]


def test_there_is_no_verdict_where_accuracy_still_rises():
    rising = tuple((float(epoch), 50.0 + 4 * epoch) for epoch in range(1, 11))
    pair = decided((90, 91), (95, 96), curves=(rising, rising))
    assert pair["answer"] == "cannot tell"
    assert "accuracy still rises in the last tenth of training (softmax by 4.0 points and inline" in pair["because"]
    assert pair["would_tell"] == "about 40 epochs instead of 10 (--epochs 40)"


def test_a_pair_without_a_run_has_no_numbers():
    pair = decided((), (95, 96), runs=2)
    assert (pair["answer"], pair["difference"], pair["low"]) == ("cannot tell", None, None)
    assert "2 runs of softmax did not finish" in pair["because"]


@pytest.mark.parametrize(
    ("curve", "points"),
    [
        ([(n, 50 + 2 * n) for n in range(1, 11)], 2.0),  # 2 points per epoch, of which a tenth is one
        ([(n, 50 + 2 * n) for n in range(10, 110, 10)], 20.0),
        ([(n, 50 + 0.1 * n) for n in range(1, 101)], 1.0),
        ([(n, 90 + (n % 2)) for n in range(1, 15)], 0.0),  # noise of one evaluation
        ([(1, 50), (2, 60)], 2.0),
        ([(1, 50)], None),
        ([], None),
    ],
)
def test_the_gain_in_the_last_tenth_is_a_slope_between_windows(curve, points):
    found = gain([tuple(curve)] * 2)
    assert found == (points if points is None else pytest.approx(points, abs=1e-9))


def test_curves_of_seeds_are_averaged():
    up, down = [(n, 50 + n) for n in range(1, 11)], [(n, 50 - n) for n in range(1, 11)]
    assert gain([up, down]) == pytest.approx(0)


def test_the_pair_with_the_higher_accuracy_is_the_headline():
    found = {
        each.id: each
        for each in (
            group("softmax", 90, 91), group("inline", 95, 95), group("softmax-local", 93, 94),
            group("inline-local", 93, 93.5), group("linear-relu", 97, 98),
        )
    }  # fmt: skip
    decision = decide(found, SPREAD, chance=0.1)
    assert [(pair["softmax"], pair["linear"]) for pair in decision["pairs"]] == list(study_decision.FAIR)
    assert (decision["headline"], decision["margin"]) == (1, 1.0)
    says = answer_in_words(decision, found, 3600)
    assert says.startswith(
        "Cannot tell. inline + local reaches 93.2 % and softmax + local 93.5 %: -0.2 points, 95 % interval "
    )
    assert "(2 seeds, 3,600 test images); anything above -1 point counts as no loss. Why: the 95 % interval" in says
    assert "Without the local residual: no. inline reaches 95.0 % and softmax 90.5 %: +4.5 points, 95 % int" in says


def test_twins_that_differ_in_parameters_are_not_a_pair():
    found = {"softmax": group("softmax", 90, 91), "inline-local": group("inline-local", 95, 95, parameters=64_000)}
    decision = decide(found, SPREAD, chance=0.1)
    assert (decision["pairs"], decision["headline"]) == ([], None)
    assert answer_in_words(decision, found, 360) == (
        "Cannot tell: no two of the trained twins (softmax (60 k parameters) and inline + local (64 k parameters)) "
        "differ in attention alone. What would settle it: add inline or softmax-local to --twins."
    )
    assert answer_in_words(decide({}, SPREAD, chance=0.1), {}, 360).endswith("add softmax or inline to --twins.")


def seeds_told(pair):
    return int(pair["would_tell"].split("about ")[1].split()[0])


def test_the_advised_number_of_seeds_makes_the_interval_short_enough():
    softmax, inline = group("softmax", 90, 90), group("inline", 89.5, 89.5)
    pair = decide_pair(softmax, inline, SPREAD, Rule(10.0, 1.0))
    enough = seeds_told(pair)
    for seeds, answer in ((enough - 1, "cannot tell"), (enough, "no")):
        more = [group(each.id, *[each.mean] * seeds) for each in (softmax, inline)]
        spread = Spread(0.5, round(7 * (seeds - 1)))
        assert decide_pair(*more, spread, Rule(10.0, 1.0))["answer"] == answer


def test_more_images_are_advised_where_seeds_cannot_tell():
    a, b = group("softmax", 90, 90, images=360, seed=1), group("inline", 89.7, 89.7, images=360, seed=2)
    pair = decide_pair(a, b, Spread(0.05, 7), Rule(10.0, 1.0))
    assert "test images instead of 360, with 10 seeds per twin" in pair["would_tell"]
    close = decide_pair(a, replace(b, scores=(89.0, 89.0)), Spread(0.05, 7), Rule(10.0, 1.0))
    assert "hardly any number of seeds or test images" in close["would_tell"]


def wrong(rows):
    """The cells where a loss that matters was answered with no."""
    return {(seeds, images, loss): rates["no"] for seeds, images, loss, rates in rows if loss >= 1}


def test_a_loss_that_matters_is_answered_with_no_in_at_most_5_percent():
    rows = simulated.simulate(200)
    assert max(wrong(rows).values()) <= 0.05
    by_cell = {(seeds, images, loss): rates for seeds, images, loss, rates in rows}
    assert by_cell[3, 3600, 0]["no"] > 0.5  # it answers at all
    assert by_cell[3, 3600, 4]["yes"] > 0.9


WORLDS = {
    "usual": simulated.World(),
    "accurate": simulated.World(accuracy=0.975, luck=0.2),
    "hard": simulated.World(accuracy=0.6, luck=0.8),
    "tastes differ": simulated.World(taste=2.0, luck=0.0, chance=0.3),
    "lucky seeds": simulated.World(luck=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_1000_studies_of_each_kind_are_wrong_in_at_most_5_percent(world):
    rows = simulated.simulate(1000, world)
    assert max(wrong(rows).values()) <= 0.05
    if world == simulated.World():
        assert simulated.markdown(rows) in (ROOT / "docs/study.md").read_text()
