"""Tables from runs: means and spreads by hand, and sentences that do not claim more than the seeds show."""

from math import sqrt

import numpy as np
import pytest

from softless.errors import FileError
from softless.study import grid as study_grid
from softless.study import tables as study_tables
from softless.study.twins import twins_named
from softless.train.metrics import Answers


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
    found = study_tables.groups(RUNS)
    assert list(found) == ["softmax", "inline", "inline-local", "linear-relu", "linear-identity"]
    spread = study_tables.shared_spread(found)
    assert spread.deviation == pytest.approx(sqrt(2))  # four twins, each 1 point either side of its mean
    assert spread.freedom == 4
    assert spread.margin(2, 2) == pytest.approx(2.776 * sqrt(2), abs=1e-3)
    assert spread.margin(2) == pytest.approx(2.776, abs=1e-3)
    assert spread.margin(2, 0) is None


def test_one_seed_has_no_spread():
    found = study_tables.groups([*runs("softmax", 0.8), *runs("inline", 0.7)])
    spread = study_tables.shared_spread(found)
    assert spread.deviation is None
    assert study_tables.estimate(found["softmax"], spread) == {"mean": 0.8, "low": None, "high": None, "n": 1}
    assert study_tables.compare(found["softmax"], found["inline"], spread) == (
        "softmax is 10.0 points ahead of inline, from one seed each."
    )


def test_an_estimate_is_a_share_with_its_interval():
    found = study_tables.groups(RUNS)
    spread = study_tables.shared_spread(found)
    est = study_tables.estimate(found["softmax"], spread)
    assert est == {
        "mean": pytest.approx(0.81),
        "low": pytest.approx(0.78224, abs=1e-5),
        "high": pytest.approx(0.83776, abs=1e-5),
        "n": 2,
    }
    assert study_tables.estimate(study_tables.Group("x", "x", (), 2), spread)["mean"] is None
    assert study_tables.estimate(study_tables.Group("x", "x", (99.9, 99.9), 2), spread)["high"] == 1.0


def test_a_difference_within_the_spread_is_called_that():
    found = study_tables.groups(RUNS)
    spread = study_tables.shared_spread(found)
    assert study_tables.compare(found["inline"], found["softmax"], spread) == (
        "softmax and inline are 1.0 points apart, within the spread of seeds (3.9)."
    )
    assert study_tables.compare(found["softmax"], found["inline-local"], spread) == (
        "inline + local is 10.0 points ahead of softmax, more than the spread of seeds (3.9)."
    )
    lost = study_tables.groups(runs("linear-identity", None, None))["linear-identity"]
    assert study_tables.compare(found["softmax"], lost, spread) == "linear identity did not finish a training."


def test_a_table_has_the_twins_that_ran_beside_the_papers_numbers():
    made = {table["id"]: table for table in study_tables.tables(RUNS)}
    assert set(made) == {"3", "4", "9"}
    assert made["3"]["columns"] == ["twin", "accuracy", "spread", "seeds", "against softmax", "paper"]
    assert made["3"]["rows"] == [
        ["inline", 80.0, pytest.approx(1.41), 2, -1.0, 80.2],
        ["linear relu", 71.0, pytest.approx(1.41), 2, -10.0, 77.3],
        ["linear identity", 10.0, None, "1 of 2", -71.0, 0.2],
    ]
    assert made["9"]["says"] == "inline + local is 10.0 points ahead of softmax, more than the spread of seeds (3.9)."
    assert made["9"]["paper"].startswith("InLine with its local residual is the best")
    assert {id_: table["setting"].removeprefix("ImageNet-1K, ") for id_, table in made.items()} == {
        "3": "Swin-T", "4": "Swin-T", "9": "DeiT-T",
    }  # fmt: skip


def test_parameters_have_a_column_where_they_differ():
    sizes = {"inline-local": 61_400}
    sized = [{**run, "parameters": sizes.get(run["twin"]["id"], 58_000)} for run in RUNS]
    made = {table["id"]: table for table in study_tables.tables(sized)}
    assert made["3"]["columns"] == list(study_tables.COLUMNS)
    assert made["4"]["columns"][:3] == ["twin", "parameters", "accuracy"]
    assert [row[:2] for row in made["4"]["rows"]] == [["inline", 58_000], ["inline + local", 61_400]]
    assert "inline + local (61.4 k parameters) is 11.0 points ahead of inline (58 k parameters)" in made["4"]["says"]


def test_answers_to_images_widen_what_chance_can_do():
    rng = np.random.default_rng(0)
    answered = [
        {
            **run,
            "answers": vars(Answers.of(rng.random(100) < run["accuracy"])),
            "curve": [{"epoch": 1, "accuracy": 0.5}],
        }
        for run in RUNS
        if run["status"] == "done"
    ]
    found = study_tables.groups(answered)
    assert found["softmax"].answers.shape == (2, 100)
    assert found["softmax"].curves == (((1, 50.0),), ((1, 50.0),))
    spread = study_tables.shared_spread(found)
    says = study_tables.compare(found["inline"], found["softmax"], spread)
    assert "within the spread of seeds and test images (" in says
    assert float(says.split("(")[-1].rstrip(").")) > spread.margin(2, 2)


def test_a_file_that_is_no_record_of_a_run_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(FileError, match="is no record of a run"):
        study_grid.read_record(tmp_path / "a.json")
