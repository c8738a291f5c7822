"""Numbers in prose are printed by a script, and the prose still says what the script prints."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_threshold_page_shows_the_table_that_its_script_prints() -> None:
    path = ROOT / "benchmarks" / "threshold.py"
    spec = importlib.util.spec_from_file_location("benchmarks_threshold", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.table() in (ROOT / "docs" / "threshold.md").read_text()
