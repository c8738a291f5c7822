"""Tables from runs: means and spreads by hand, and sentences that do not claim more than the seeds show."""

from math import sqrt

import pytest

from softless.commands import study_tables as results
from softless.errors import FileError
from softless.train.twins import twins_named


def runs(twin, *accuracies, lost="diverged"):
    """Records as a grid leaves them, with what a table reads; None is a run that came to nothing."""
    about = twins_named([twin])[0]
    return [
        {
            "twin": {"id": about.id, "label": about.label},
            "seed": seed,
            "status": lost if accuracy is None else "done",
            "accuracy": accuracy,
        }
        for seed, accuracy in enumerate(accuracies)
    ]


RUNS = [
    *runs("softmax", 0.80, 0.82),
    *runs("inline", 0.79, 0.81),
    *runs("inline-local", 0.90, 0.92),
    *runs("linear-identity", 0.10, None),
    *runs("linear-relu", 0.70, 0.72),
]


def test_the_spread_is_that_of_all_twins_that_learned():
    found = results.groups(RUNS)
    assert list(found) == ["softmax", "inline", "inline-local", "linear-relu", "linear-identity"]
    spread = results.shared_spread(found)
    assert spread.deviation == pytest.approx(sqrt(2))  # four twins, each 1 point either side of its mean
    assert spread.quantile == pytest.approx(2.776, abs=1e-3)
    assert spread.margin(2, 2) == pytest.approx(2.776 * sqrt(2), abs=1e-3)
    assert spread.margin(2) == pytest.approx(2.776, abs=1e-3)
    assert spread.margin(2, 0) is None


def test_one_seed_has_no_spread():
    found = results.groups([*runs("softmax", 0.8), *runs("inline", 0.7)])
    spread = results.shared_spread(found)
    assert spread.deviation is None
    assert results.estimate(found["softmax"], spread) == {"mean": 0.8, "low": None, "high": None, "n": 1}
    assert results.compare(found["softmax"], found["inline"], spread) == (
        "softmax is 10.0 points ahead of inline, from one seed each."
    )


def test_an_estimate_is_a_share_with_its_interval():
    found = results.groups(RUNS)
    spread = results.shared_spread(found)
    est = results.estimate(found["softmax"], spread)
    assert est == {
        "mean": pytest.approx(0.81),
        "low": pytest.approx(0.78224, abs=1e-5),
        "high": pytest.approx(0.83776, abs=1e-5),
        "n": 2,
    }
    assert results.estimate(results.Group("x", "x", (), 2), spread)["mean"] is None
    assert results.estimate(results.Group("x", "x", (99.9, 99.9), 2), spread)["high"] == 1.0


def test_a_difference_within_the_spread_is_called_that():
    found = results.groups(RUNS)
    spread = results.shared_spread(found)
    assert results.compare(found["inline"], found["softmax"], spread) == (
        "softmax and inline are 1.0 points apart, within the spread of seeds (3.9)."
    )
    assert results.compare(found["softmax"], found["inline-local"], spread) == (
        "inline + local is 10.0 points ahead of softmax, more than the spread of seeds (3.9)."
    )
    lost = results.groups(runs("linear-identity", None, None))["linear-identity"]
    assert results.compare(found["softmax"], lost, spread) == "linear identity did not get through a training."


def test_a_table_has_the_twins_that_ran_beside_the_papers_numbers():
    made = {table["id"]: table for table in results.tables(RUNS)}
    assert set(made) == {"3", "4", "9"}
    assert made["3"]["columns"] == ["twin", "accuracy", "spread", "seeds", "against softmax", "paper"]
    assert made["3"]["rows"] == [
        ["inline", 80.0, pytest.approx(1.41), 2, -1.0, 80.2],
        ["linear relu", 71.0, pytest.approx(1.41), 2, -10.0, 77.3],
        ["linear identity", 10.0, None, "1 of 2", -71.0, 0.2],
    ]
    assert made["9"]["says"] == "inline + local is 10.0 points ahead of softmax, more than the spread of seeds (3.9)."
    assert made["9"]["paper"].startswith("InLine with its local residual is ahead")


def test_markdown_says_what_the_tables_hold():
    lost = [*runs("linear-leaky", None, None), *runs("inline-leaky", None, None, lost="failed")]
    text = results.markdown(results.tables([*RUNS, *lost]))
    assert "### Table 3: Divide against subtract" in text
    assert "| linear relu | 71.00 ± 1.41 | 2 | -10.00 | 77.3 |" in text
    assert "| linear leaky relu | not finite | 0 of 2 |  | 1.5 |" in text
    assert "| inline leaky relu | failed | 0 of 2 |  | 79.8 |" in text
    assert "In the paper: Subtracting gains" in text


def test_markdown_leaves_out_a_column_that_says_nothing():
    windows = [run for id_ in ("inline", "inline-cut8") for run in runs(id_, 0.8)]
    text = results.markdown(results.tables(windows))
    assert "| twin | top-1 | seeds | the paper's |\n|---|---|---|---|\n| inline | 80.00 | 1 | 80.2 |" in text


def test_a_folder_without_runs_is_one_sentence(tmp_path):
    with pytest.raises(FileError, match="holds no runs: there is no JSON in"):
        results.read_runs(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/a.json").write_text("[]")
    with pytest.raises(FileError, match="is no record of a run"):
        results.read_runs(tmp_path)
