"""What a study prints: a run that failed is no result, and nobody is told it was one."""

import pytest

from softless.commands.study import twins_table


def twin(mean, low, *statuses):
    accuracy = {"mean": mean, "low": low, "high": low and 1.0, "n": statuses.count("done")}
    seeds = [{"status": status} for status in statuses]
    return {"label": "a", "accuracy": accuracy, "seeds": seeds, "seconds_per_epoch": None, "macs": 1, "parameters": 1}


@pytest.mark.parametrize(
    ("given", "top1", "interval"),
    [
        (twin(0.9, 0.8, "done", "done"), "90.0%", "80.0% to 100.0%"),
        (twin(0.9, None, "done", "failed"), "90.0%", "one seed"),
        (twin(None, None, "failed", "failed"), "failed", "-"),
        (twin(None, None, "failed", "diverged"), "not finite", "-"),
    ],
)
def test_a_twin_without_an_accuracy_shows_the_status_of_its_runs(given, top1, interval):
    cells = [next(iter(column.cells)) for column in twins_table([given]).columns]
    assert cells[1:3] == [top1, interval]
