"""Numbers in prose are printed by a script, and the prose still says what the script prints."""

import json
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from softless.study.tables import groups
from softless.train.language_recipe import LanguageRecipe
from softless.train.tasks.language import SequenceAnswers
from tests.scripts import script

ROOT = Path(__file__).parents[2]


def test_the_threshold_page_shows_the_table_that_its_script_prints() -> None:
    assert script("threshold").table() in (ROOT / "docs" / "threshold.md").read_text()


def test_the_kernels_page_shows_the_newest_gpu_evidence_or_says_that_there_is_none() -> None:
    gpu, page = script("gpu"), (ROOT / "docs" / "kernels.md").read_text()
    assert gpu.fill(page, gpu.section(gpu.newest())) == page


def test_the_bench_page_shows_the_newest_measurements_of_the_cpu() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("cpu-*.json"))
    assert script("cpu").table(json.loads(newest.read_text())["rows"]) in (ROOT / "docs" / "bench.md").read_text()


def test_the_page_on_language_models_shows_the_run_that_was_kept() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "text-small.json").read_text())
    assert script("language").table(kept) in (ROOT / "docs" / "language.md").read_text()
    assert f"{kept['last']['bits_per_byte']:.2f} bits per byte" in (ROOT / "recipes" / "text-small.toml").read_text()


def test_the_results_on_text_are_those_that_were_kept_and_the_others_say_that_they_are_missing() -> None:
    results, page = script("text_results"), (ROOT / "docs" / "results-text.md").read_text()
    assert results.fill(page, results.stored()) == page
    empty = results.fill(page, {})
    assert all(f"| {twin.label} | {results.MISSING} |" in empty for twin in results.TEXT_TWINS)


def test_the_page_of_conversions_shows_the_records_that_were_kept() -> None:
    results, page = script("convert_results"), (ROOT / "docs" / "results-convert.md").read_text()
    assert results.fill(page) == page


def test_a_table_of_the_results_on_text_shows_seeds_failures_and_what_is_missing() -> None:
    def run(id_: str, seed: int, bits: float | None) -> dict[str, Any]:
        answers = None if bits is None else asdict(SequenceAnswers.of(np.full(9, 64 * bits * log(2)), np.full(9, 64)))
        curve = [] if bits is None else [{"epoch": n, "bits_per_byte": bits + 2.0**-n} for n in range(1, 9)]
        return {
            "twin": {"id": id_, "label": id_}, "seed": seed, "status": "diverged" if bits is None else "done",
            "bits_per_byte": bits, "answers": answers, "curve": curve, "parameters": 5, "seconds": 2.0, "together": 6,
        }  # fmt: skip

    runs = [run("softmax", 0, 2.5), run("softmax", 1, 2.51), run("delta", 0, 2.25), run("delta", 1, 2.26)]
    document = {
        "text": {"name": "tinyshakespeare", "train": 4096, "test": 576, "chance": 4.5},
        "recipe": asdict(LanguageRecipe(length=64, batch=8, epochs=3)), "machine": {"processor": "an abacus"},
        "versions": {"torch": "3", "transformers": "6"}, "runs": [*runs, run("linear", 0, None)],
    }  # fmt: skip
    shown = script("text_results").perplexity(document)
    assert "| delta | 5 | 2.250, 2.260 | 2.255 | -0.250 |" in shown
    assert "| no | 6,144 |" in shown  # 3 epochs of 4,096 tokens in 2 seconds
    assert "| linear | not finite |" in shown
    assert "| nearfar | not run yet |" in shown
    assert "Measured on an abacus, torch 3, transformers 6, with up to 6 runs at once" in shown


def test_the_readme_shows_the_speed_that_was_measured(monkeypatch) -> None:
    front, readme = script("front_page"), (ROOT / "README.md").read_text()
    assert front.fill(readme, front.table(), front.MARKS) == readme
    assert front.PICTURE.read_text() == front.picture()


def test_the_first_screen_of_the_readme_has_at_most_forty_lines() -> None:
    first_screen = (ROOT / "README.md").read_text().split("\n## ")[0].splitlines()
    assert len(first_screen) <= 40
    for command in ("make study", "make test"):
        assert any(line.startswith(command) for line in first_screen)


def test_the_readme_shows_the_twins_as_they_were_kept() -> None:
    readme, columns = (ROOT / "README.md").read_text(), []
    for images in ("cifar10", "imagenette"):
        kept = json.loads((ROOT / "benchmarks" / "results" / f"twins-{images}.json").read_text())
        columns.append(groups(kept["runs"]))
    for twin in ("softmax", "inline", "softmax-local", "inline-local"):
        cells = [f"{column[twin].mean:.2f} ± {column[twin].spread:.2f}" for column in columns]
        assert f"| {columns[0][twin].label} | {' | '.join(cells)} |\n" in readme
