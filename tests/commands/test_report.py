"""softless report: the page of a study, drawn again, or one line that says why not."""

import json

import pytest

pytest.importorskip("plotly")
pytest.importorskip("jinja2")
pytest.importorskip("sklearn")

from tests.report import documents


@pytest.fixture(scope="module")
def document():
    return documents.report()


def test_the_page_is_drawn_from_the_numbers_alone(softless, document, tmp_path):
    documents.write(tmp_path / "out", document)
    shown = softless("report", "out")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0] == document["verdict"][0]["says"]
    assert shown.stdout.splitlines()[-1] == "The page is out/index.html"
    first = (tmp_path / "out/index.html").read_text()
    assert document["verdict"][0]["says"] in first
    (tmp_path / "out/index.html").write_text("old")
    assert softless("report", "out").exit_code == 0
    assert (tmp_path / "out/index.html").read_text() == first


def test_json_names_the_path_of_the_page(softless, document, tmp_path):
    documents.write(tmp_path / "out", document)
    told = json.loads(softless("report", "out", "--json").stdout)
    assert told == {
        "schema": "softless.report/1",
        "study": "out/report.json",
        "page": "out/index.html",
        "bytes": (tmp_path / "out/index.html").stat().st_size,
        "verdict": document["verdict"],
    }


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: None, "'out' is not a report: it has no report.json, which softless study writes"),
        (lambda folder: folder.mkdir(), "'out' is not a report: it has no report.json"),
        (lambda folder: folder.write_text("x"), "'out' is not a report: it has no report.json"),
        (lambda folder: (folder / "report.json").mkdir(parents=True), "'out' is not a report: it has no report.json"),
    ],
)
def test_a_folder_without_a_report_is_a_one_line_error_with_status_3(softless, tmp_path, make, sentence):
    make(tmp_path / "out")
    shown = softless("report", "out")
    assert shown.exit_code == 3
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "'out/report.json' is damaged: Expecting property name"),
        ('{"schema": "softless.study/1"}', "'out/report.json' has schema 'softless.study/1', and a page is made of"),
        ('{"schema": "softless.study/4"}', "'out/report.json': command is missing, and a text was needed"),
    ],
)
def test_a_report_of_another_schema_is_a_one_line_error_with_status_3(softless, tmp_path, text, sentence):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.json").write_text(text)
    shown = softless("report", "out", "--json")
    assert shown.exit_code == 3
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"error: {sentence}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]


def test_a_folder_must_be_named(softless):
    assert softless("report").exit_code == 2
