"""Numbers in prose are printed by a script, and the prose still says what the script prints."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from softless.study.tables import groups

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_threshold_page_shows_the_table_that_its_script_prints() -> None:
    assert script("threshold").table() in (ROOT / "docs" / "threshold.md").read_text()


def test_the_readme_shows_the_newest_gpu_evidence_or_says_that_there_is_none() -> None:
    gpu, readme = script("gpu"), (ROOT / "README.md").read_text()
    assert gpu.fill(readme, gpu.section(gpu.newest())) == readme


def test_the_readme_shows_the_newest_evidence_of_speed() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("cpu-*.json"))
    assert script("cpu").table(json.loads(newest.read_text())["rows"]) in (ROOT / "README.md").read_text()


def test_the_readme_shows_the_twins_as_they_were_kept() -> None:
    readme, columns = (ROOT / "README.md").read_text(), []
    for images in ("cifar10", "imagenette"):
        kept = json.loads((ROOT / "benchmarks" / "results" / f"twins-{images}.json").read_text())
        columns.append(groups(kept["runs"]))
    for twin in ("softmax", "inline", "softmax-local", "inline-local"):
        cells = [f"{column[twin].mean:.2f} ± {column[twin].spread:.2f}" for column in columns]
        assert f"| {columns[0][twin].label} | {' | '.join(cells)} |\n" in readme
