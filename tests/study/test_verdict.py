"""The rows of the verdict below the answer: what was measured, in words that say no more than that."""

from softless.study import document as study_document
from softless.study import verdict as study_verdict
from softless.study.tables import Group, Spread

SPREAD = Spread(0.5, 60)  # Student's t is 2.0: a difference of two means over two seeds counts from 1 point on


def group(id_, *accuracies, runs=None, **more):
    return Group(id_, id_.replace("-", " "), accuracies, runs or len(accuracies), **more)


def lap(label, tokens, seconds, speedup, **more):
    one = {"label": label, "tokens": tokens, "head_dim": 64, "seconds": seconds, "fastest": seconds, "repeats": 3}
    return {**one, "speedup": speedup, "peak_bytes": 1000, "skipped": None, **more}


def test_the_verdict_names_the_fastest_and_the_slow():
    part = {"head_dim": 64, "tokens": [8, 16], "threads": 1, "trends": []}
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0), lap("inline", 16, 0.025, 4.0), lap("hydra", 16, 0.01, 10.0)]
    part["laps"] += [lap("threshold", 16, 0.4, 0.25, peak_bytes=2000), lap("hydra", 8, 9.0, 0.1)]
    says = study_verdict._speed(part)
    assert says.startswith("At 16 tokens hydra is fastest, 10x SDPA (10 ms against 100 ms). inline is 4.0x.")
    assert says.endswith("Slower than SDPA there: threshold.")
    assert study_verdict._memory(part) == (
        "at 16 tokens SDPA takes 1 kB, the others from 1 kB (inline) to 2 kB (threshold)."
    )
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0), lap("inline", 16, 0.2, 0.5)]
    assert "nothing is faster than SDPA; inline comes closest" in study_verdict._speed(part)
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0)]
    assert study_verdict._speed(part) == study_verdict._memory(part) == ""


def test_without_a_lap_of_the_reference_the_verdict_says_nothing_of_speed():
    part = {"head_dim": 64, "tokens": [16], "threads": 1, "trends": []}
    for laps in ([lap("SDPA", 16, 0.1, 1.0, head_dim=16), lap("taylor order 2", 16, 0.2, 0.5, head_dim=16)], []):
        assert study_verdict._speed({**part, "laps": laps}) == study_verdict._memory({**part, "laps": laps}) == ""


def test_the_verdict_says_when_numbers_are_rough():
    quiet = {"threads": 2, "laps": [lap("SDPA", 16, 0.1, 1.0)]}
    one_seed = Spread(None, 0)
    assert study_verdict._trust(quiet, 2, [], one_seed) == ""
    assert "timed on 1 thread, because 2 threads waited" in study_verdict._trust(
        {**quiet, "threads": 1}, 2, [], one_seed
    )
    rough = {"threads": 2, "laps": [lap("SDPA", 16, 0.1, 1.0, fastest=0.02)]}
    assert "differ by 5.0x" in study_verdict._trust(rough, 2, [], one_seed)
    assert "differ by 0.5 points from seed to seed" in study_verdict._trust(quiet, 2, [], SPREAD)
    lost = 2 * [group("linear-identity", 10.0, runs=2)]
    assert "Not every run of linear identity finished." in study_verdict._trust(quiet, 2, lost, one_seed)


TWINS = [{"id": "a", "label": "A"}, {"id": "b", "label": "B"}, {"id": "c", "label": "C"}]


def layer(twin, confused, span=3.0, error=0.4):
    return {
        "twin": twin,
        "confusions": {"mean": confused},
        "score_range": {"mean": span},
        "first_order_error": {"mean": error},
    }


def test_confused_queries_are_counted_in_the_worst_layer_by_one_definition():
    layers = [layer("a", 0.0), layer("a", 41.0), layer("b", 0.1), layer("c", 7.5)]
    says = study_verdict._queries(layers, TWINS)
    assert says == (
        "a twin confuses two different queries if their rows of weights differ by less than 0.001 (Euclidean "
        "distance). Confused pairs per image and head, in the worst layer of each twin: A 41, C 7.5, B 0.1."
    )
    assert "apart" not in says
    few = study_verdict._queries([layer("a", 2.0), layer("b", 0.01)], TWINS)
    assert few.endswith("A 2.0; the others have less than 0.05.")
    none = study_verdict._queries([layer("a", 0.0), layer("b", 0.01)], TWINS)
    assert none.endswith("No twin has at least 0.05 confused pairs per image and head in any layer.")
    assert study_verdict._queries([], TWINS) == ""


def test_a_table_compares_hidden_neighbors_with_hidden_random_keys():
    rows = [
        {"twin": twin, "mask": mask, "accuracy": {"mean": mean}}
        for twin, mask, mean in (
            ("a", "none", 0.9), ("a", "local 3", 0.8), ("a", "random 9", 0.89),
            ("b", "none", 0.9), ("b", "local 3", 0.7), ("b", "random 9", 0.9),
        )
    ]  # fmt: skip
    says, table = study_verdict._neighbors(rows, TWINS)
    assert says.startswith("the table shows how many points a twin loses")
    assert table == {
        "columns": ["hidden:", "the 3 x 3 around the query", "9 random keys"],
        "rows": [["B", 20.0, 0.0], ["A", 10.0, 1.0]],
    }
    assert study_verdict._neighbors([], TWINS) == ("", None)


def test_the_range_of_the_softmax_twin_stands_beside_the_safe_one():
    layers = [layer("softmax", 0, 2.0, 0.2), layer("softmax", 0, 6.0, 0.6), layer("inline", 0, 90.0, 9.0)]
    says = study_verdict._range(layers, [{"label": "inline", "safe_range": 2.2}])
    assert says.startswith("in the softmax twin, the scores of one query span 2 to 6 on average, depending on the ")
    assert "as inline has them, differ from softmax's by 40%." in says
    assert says.endswith("by less than 10 % while scores span less than 2.2.")
    assert study_verdict._range([], []) == ""


def test_only_softmax_layers_have_a_verdict_on_a_linear_kernel():
    found = {
        twin: {"layers": [{"name": "blocks.0.attn", "mechanism": mechanism, "verdict": "A linear kernel would cost"}]}
        for twin, mechanism in (("softmax", "softmax"), ("inline", "inline"), ("linear-relu", "linear"))
    }
    assert [each["verdict"] for each in study_document.layer_results(found)] == [
        "A linear kernel would cost",
        None,
        None,
    ]


def own(twin, label, inference, training, together=1):
    return {
        "twin": twin, "label": label, "training_seconds": 1.0, "inference_seconds": 1.0,
        "inference_ratio": inference, "training_ratio": training, "together": together,
    }  # fmt: skip


def test_speed_begins_at_the_tokens_of_the_twins():
    part = {"head_dim": 64, "tokens": [256, 4096], "threads": 1}
    part["laps"] = [lap("SDPA", 4096, 0.1, 1.0), lap("inline", 4096, 0.025, 4.0)]
    part["trends"] = [{"label": "inline", "crossover": 310, "faster_everywhere": False}]
    rows = [own("softmax", "softmax", 1.0, 1.0), own("inline", "inline", 0.8, 0.62), own("taylor", "taylor", 3.0, 3.0)]
    part["own"] = {"tokens": 65, "rows": rows}
    assert study_verdict._speed(part) == (
        "at the 65 tokens of these twins, inline answers at 0.80x the speed of softmax and trains at 0.62x. "
        "Timed alone, inline is faster than SDPA from about 310 tokens on. "
        "At 4,096 tokens inline is fastest, 4.0x SDPA (25 ms against 100 ms)."
    )
    rows[1] |= {"training_ratio": None, "together": 2}
    assert "the speed of softmax (2 runs shared the device while training). " in study_verdict._speed(part)
    part["trends"][0] |= {"crossover": None}
    assert "inline is not faster than SDPA up to 4,096 tokens." in study_verdict._speed(part)
    part["trends"][0] |= {"crossover": 256, "faster_everywhere": True}
    assert "from 256 tokens on, the shortest length timed." in study_verdict._speed(part)


def test_twins_that_were_still_learning_are_named():
    flat, rising = (tuple((float(n), y) for n, y in enumerate(ys, 1)) for ys in ((90,) * 10, range(10, 110, 10)))
    found = [group("a", 90, 90, curves=(flat, flat)), group("b", 90, 90, curves=(rising, flat))]
    assert study_verdict._training(found, 1.0) == (
        "b still gained more than 1 point in the last tenth of training: longer training may change the order."
    )
    assert study_verdict._training(found, 5.0) == study_verdict._training([group("c", 90)], 1.0) == ""


def test_the_residual_is_compared_with_the_twin_without_it():
    found = {each: group(each, *a) for each, a in (("inline", (80, 81)), ("inline-local", (90, 91)))}
    assert study_verdict._residual(found, SPREAD) == (
        "inline local is 10.0 points ahead of inline, more than the spread of seeds (1.0)."
    )
    assert study_verdict._dividing(found, SPREAD) == ""


def test_parameters_stand_beside_a_comparison_that_differs_in_them():
    found = {
        "inline": group("inline", 80, 81, parameters=58_000),
        "inline-local": group("inline-local", 90, 91, parameters=61_400),
    }
    assert study_verdict._residual(found, SPREAD) == (
        "inline local (61.4 k parameters) is 10.0 points ahead of inline (58 k parameters), more than the spread of "
        "seeds (1.0)."
    )
