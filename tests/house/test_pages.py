"""The pages keep up with the code: every page is linked, every paper and law named, every number in its file."""

import json
import re
from pathlib import Path

from softless.mechanisms import MECHANISMS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAW = re.compile(r"\bR(?:[1-9]|1\d|2[0-8])\b")


def test_the_first_page_lists_all_others():
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text()))


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in DOCS.glob("*.md") if f": {path.name}\n" not in navigation] == []


def test_the_references_name_the_paper_of_every_mechanism():
    rows = [line for line in (DOCS / "references.md").read_text().splitlines() if line.startswith("| `")]
    for name, mechanism in MECHANISMS.items():
        where = re.split(r" (?:19|20)\d\d,? ?", mechanism.paper)[-1] or mechanism.paper.rsplit(",", 1)[0]
        (row,) = (row for row in rows if f"`{name}`" in row.split("|")[1])
        assert where in row, f"{name}: {where}"


def test_every_law_that_a_test_cites_is_listed_with_tests_that_exist():
    rows = [line for line in (DOCS / "reliability.md").read_text().splitlines() if line.startswith("| R")]
    laws = {row.split("|")[1].strip(): row for row in rows}
    assert list(laws) == [f"R{number}" for number in (*range(1, 29), 34)]
    cited = {law for path in (ROOT / "tests").rglob("*.py") for law in LAW.findall(path.read_text())}
    assert cited <= set(laws)
    for law, row in laws.items():
        files = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert files or "none:" in row, law
        assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_bench_page_shows_the_newest_evidence_of_growth():
    newest = max((ROOT / "benchmarks/results").glob("scaling-*.json"))
    page = (DOCS / "bench.md").read_text()
    assert f"benchmarks/results/{newest.name}" in page
    for row in json.loads(newest.read_text())["rows"]:
        growth = [", ".join(f"{ratio:.2f}" for ratio in row[what]) for what in ("time", "memory")]
        bar = f"{row['bar']:.2f}{'' if row['holds'] else ', missed'}"
        assert f"| {row['name']} | {' | '.join(growth)} | {row['milliseconds']} | {bar} |" in page
