"""The verdict: a plain answer first, and no more certainty than seeds and repeats allow."""

import pytest

from softless.commands import study_verdict
from softless.commands.study_tables import Group, Spread

DATA = {"test": 360, "classes": list("0123456789")}
SPREAD = Spread(0.5, 2.0)  # a difference of two means over two seeds counts from 1 point on


def group(id_, *accuracies, runs=None):
    return Group(id_, id_.replace("-", " "), accuracies, runs or len(accuracies))


def answer(softmax, other, spread=SPREAD):
    found = {"softmax": group("softmax", *softmax), "inline-local": group("inline-local", *other)}
    return study_verdict.needed(found, spread, DATA)


@pytest.mark.parametrize(
    ("softmax", "other", "spread", "says"),
    [
        (
            (90, 91),
            (95, 96),
            SPREAD,
            "no: inline local reaches 95.5 %, softmax 90.5 % of 360 test images, ahead by",
        ),
        ((90, 91), (90, 90), SPREAD, "no: inline local reaches 90.0 %, softmax 90.5 % of 360 test images, and the "),
        ((95, 96), (90, 91), SPREAD, "yes, for accuracy: inline local reaches 90.5 %, softmax 95.5 % of 360"),
        ((90,), (95,), Spread(None, 0.0), "it seems not: inline local reaches 95.0 %, softmax 90.0 %"),
        ((95,), (90,), Spread(None, 0.0), "it seems so: inline local reaches 90.0 %"),
        ((11, 12), (13, 14), SPREAD, "no answer: no twin learned much more than chance (10 %)"),
        ((), (90, 91), SPREAD, "no answer yet: a twin with softmax and one without must be trained."),
    ],
)
def test_the_first_sentence_answers_the_question(softmax, other, spread, says):
    assert answer(softmax, other, spread).startswith(says)


def test_the_difference_within_the_spread_is_said_to_be_so():
    assert answer((90, 91), (90, 90)).endswith("and the difference is within the spread of seeds.")
    assert answer((95,), (90,), Spread(None, 0.0)).endswith("from one seed each, so that chance is not ruled out.")


def lap(label, tokens, seconds, speedup, **more):
    one = {"label": label, "tokens": tokens, "head_dim": 64, "seconds": seconds, "fastest": seconds, "repeats": 3}
    return {**one, "speedup": speedup, "peak_bytes": 1000, "skipped": None, **more}


def test_the_verdict_names_the_fastest_and_the_slow():
    part = {"head_dim": 64, "tokens": [8, 16], "threads": 1}
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0), lap("inline", 16, 0.025, 4.0), lap("hydra", 16, 0.01, 10.0)]
    part["laps"] += [lap("threshold", 16, 0.4, 0.25), lap("hydra", 8, 9.0, 0.1)]
    says = study_verdict._speed(part)
    assert says.startswith("at 16 tokens hydra is fastest, 10x SDPA (10 ms against 100 ms). inline is 4.0x.")
    assert says.endswith("Slower than SDPA there: threshold.")
    assert study_verdict._memory(part) == (
        "at 16 tokens SDPA takes 1 kB, the others from 1 kB (inline) to 1 kB (inline)."
    )
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0), lap("inline", 16, 0.2, 0.5)]
    assert "nothing is faster than SDPA; inline comes closest" in study_verdict._speed(part)
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0)]
    assert study_verdict._speed(part) == study_verdict._memory(part) == ""


def test_without_a_lap_of_the_reference_the_verdict_says_nothing_of_speed():
    part = {"head_dim": 64, "tokens": [16], "threads": 1}
    for laps in ([lap("SDPA", 16, 0.1, 1.0, head_dim=16), lap("taylor order 2", 16, 0.2, 0.5, head_dim=16)], []):
        assert study_verdict._speed({**part, "laps": laps}) == study_verdict._memory({**part, "laps": laps}) == ""


def test_the_verdict_says_when_numbers_are_rough():
    quiet = {"threads": 2, "laps": [lap("SDPA", 16, 0.1, 1.0)]}
    one_seed = Spread(None, 0.0)
    assert study_verdict._trust(quiet, 2, [], one_seed) == ""
    assert "timed on 1 thread" in study_verdict._trust({**quiet, "threads": 1}, 2, [], one_seed)
    rough = {"threads": 2, "laps": [lap("SDPA", 16, 0.1, 1.0, fastest=0.02)]}
    assert "differ by 5.0x" in study_verdict._trust(rough, 2, [], one_seed)
    assert "differ by 0.5 points from seed to seed" in study_verdict._trust(quiet, 2, [], SPREAD)
    lost = 2 * [group("linear-identity", 10.0, runs=2)]
    assert "Not every run of linear identity came to an end." in study_verdict._trust(quiet, 2, lost, one_seed)


TWINS = [{"id": "a", "label": "A"}, {"id": "b", "label": "B"}, {"id": "c", "label": "C"}]


def layer(twin, confused, span=3.0, error=0.4):
    return {
        "twin": twin,
        "confusions": {"mean": confused},
        "score_range": {"mean": span},
        "first_order_error": {"mean": error},
    }


def test_confused_queries_are_counted_in_the_worst_layer():
    layers = [layer("a", 0.0), layer("a", 41.0), layer("b", 0.1), layer("c", 7.5)]
    assert study_verdict._queries(layers, TWINS) == (
        "pairs of queries with the same weights, an image and head in the worst layer: A 41, C 7.5. B tells queries "
        "apart."
    )
    assert study_verdict._queries([layer("a", 0.0), layer("b", 0.0)], TWINS) == "A and B tell queries apart."
    assert study_verdict._queries([], TWINS) == ""


def test_hidden_neighbors_are_compared_with_hidden_strangers():
    rows = [
        {"twin": twin, "mask": mask, "accuracy": {"mean": mean}}
        for twin, mask, mean in (
            ("a", "none", 0.9), ("a", "local 3", 0.8), ("a", "random 9", 0.89),
            ("b", "none", 0.9), ("b", "local 3", 0.7), ("b", "random 9", 0.9),
        )
    ]  # fmt: skip
    assert study_verdict._neighbors(rows, TWINS) == (
        "hiding a query's 3 x 3 costs B 20.0 points (nine others: 0.0), A 10.0 points (nine others: 1.0)."
    )
    assert study_verdict._neighbors([], TWINS) == ""


def test_the_range_of_the_softmax_twin_stands_beside_the_safe_one():
    layers = [layer("softmax", 0, 2.0, 0.2), layer("softmax", 0, 6.0, 0.6), layer("inline", 0, 90.0, 9.0)]
    says = study_verdict._range(layers, [{"label": "inline", "safe_range": 2.2}])
    assert says.startswith("the scores of the softmax twin span 2 to 6 a query, and first order is 40% away")
    assert says.endswith("within 10 % while they span less than 2.2.")
    assert study_verdict._range([], []) == ""


def curve(*accuracies):
    return {"curve": [{"epoch": n, "accuracy": a, "loss": 1.0} for n, a in enumerate(accuracies, 1)]}


def test_twins_that_were_still_learning_are_named():
    flat, rising = curve(0.5, 0.9, 0.9, 0.9, 0.9), curve(0.1, 0.2, 0.3, 0.4, 0.5)
    twins = [{"label": "A", "seeds": [flat, flat]}, {"label": "B", "seeds": [rising, flat]}]
    assert study_verdict._training(twins) == "B still gained at the end: longer training may change the order."
    assert study_verdict._training([{"label": "A", "seeds": [flat, curve(0.1, 0.9), curve()]}]) == ""


def test_the_residual_is_compared_with_the_twin_without_it():
    found = {each: group(each, *a) for each, a in (("inline", (80, 81)), ("inline-local", (90, 91)))}
    assert study_verdict._residual(found, SPREAD) == (
        "inline local is 10.0 points ahead of inline, more than the spread of seeds (1.0)."
    )
    assert study_verdict._dividing(found, SPREAD) == ""
