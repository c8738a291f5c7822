"""The page says what the report says, links to its data, and carries everything it needs."""

import json
import re

import pytest

from softless.errors import FileError, MissingExtraError
from softless.report import page as shared
from softless.report import study_page, study_words
from tests.report.documents import write


@pytest.fixture(scope="module")
def text(whole):
    return study_page.page(whole, {"twins.csv", "report.json"})


def markup(text):
    """The page without plotly, scripts and data."""
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_the_verdict_comes_first(text, report):
    body = markup(text)
    order = ("<h1>Do you need the softmax?</h1>", report["verdict"][0]["says"], "<h2")
    places = [body.index(each) for each in order]
    assert places == sorted(places)
    for verdict in report["verdict"][1:]:
        assert f"<dt>{verdict['about']}</dt>" in body


def test_nothing_is_fetched(text):
    body = markup(text)
    assert "http://" not in body
    assert "https://" not in body
    assert re.search(r"default-src 'none'", body)
    assert {address.split(":")[0] for address in re.findall(r'src="([^"]*)"', body)} == {"data"}


def test_figures_are_numbered_in_order_and_each_links_to_its_data(text):
    body = markup(text)
    assert [int(n) for n in re.findall(r"<b>Figure (\d+)</b>", body)] == list(range(1, 13))
    assert body.count('<p class="data">Data: <a') == 12 + 2, "the figures, the tables and the whole"


def test_a_file_beside_the_page_is_linked_and_a_part_of_the_report_elsewhere(text):
    figures = dict(re.findall(r'<figure id="([^"]+)".*?<p class="data">(.*?)</p>', markup(text), flags=re.DOTALL))
    assert figures["cost"] == 'Data: <a href="twins.csv" download>twins.csv</a>'
    assert 'data-part="layers" download="layers.json"' in figures["local-mass"]
    assert 'data-part="range.threshold"' in figures["threshold"]
    assert '<a href="report.json" download>report.json</a>' in text


def test_a_file_that_is_not_beside_the_page_is_never_linked(report):
    strangers = ("../secret.csv", "https://example.org/x.csv", "javascript:alert(1)", 7, None, "no.csv")
    report["files"] = dict(
        zip(("twins", "layers", "mask_out", "speed", "induced", "collinear"), strangers, strict=True)
    )
    body = markup(study_page.page(report, {"twins.csv"}))
    assert not any(f'href="{name}"' in body for name in strangers)
    assert all(f'data-part="{part}"' in body for part in report["files"])


def test_every_part_that_is_linked_is_in_the_report(text, report):
    for part in re.findall(r'data-part="([^"]*)"', markup(text)):
        found = report
        for key in part.split("."):
            found = found[key]
        assert found


def test_the_report_travels_with_the_page(text, report):
    carried = re.search(r'id="report-data">(.*?)</script>', text, flags=re.DOTALL)[1]
    assert json.loads(carried) == report


def test_texts_of_the_report_are_text_and_nothing_more(report):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    report["verdict"][0]["says"] = report["twins"][0]["label"] = report["command"] = evil
    report["tables"][0]["rows"][0][0] = report["viewer"]["images"][0]["name"] = evil
    text = study_page.page(report, set())
    assert "<script>alert(1)" not in text
    assert "<img src=x" not in text


def test_tables_show_every_row_and_what_the_paper_found(text):
    body = markup(text)
    assert "<b>Table 3</b> Feature maps" in body
    assert '<th scope="row">identity</th><td>\u2013</td><td>94.1%</td>' in body
    assert '<th scope="row">inline</th><td>0.941</td><td>0.978</td><td>0.037</td>' in body
    assert "Linear attention fails to train with identity" in body


def test_every_layer_is_said_in_words(text, report):
    body = markup(text)
    assert body.count('<td class="words">') == len(report["layers"])
    assert "A linear kernel would cost 7% here" in body


@pytest.mark.parametrize("nothing", [None, "absent", "empty"])
def test_sections_without_data_are_one_line_each(report, nothing):
    empty = {"collinear": None, "range": {}, "viewer": None, "speed": {}}
    for part in ("tables", "layers", "mask_out", "induced", "collinear", "range", "viewer", "speed", "files"):
        if nothing == "absent":
            del report[part]
        else:
            report[part] = None if nothing is None else empty.get(part, [])
    report["speed"] = None
    body = markup(study_page.page(report, set()))
    assert body.count('<p class="missing">') == 1 + 6, "the noscript line and six sections"
    assert re.findall(r'<figure id="([^"]+)"', body) == ["cost", "learning"]
    for what in ("queries were compared", "locality", "score ranges", "attention maps", "timings", "tables"):
        assert f"No {what}" in body


def test_a_study_without_twins_still_has_a_page(report):
    for part in ("tables", "layers", "mask_out", "induced", "collinear", "range", "viewer"):
        report[part] = None
    report["twins"] = []
    assert "No accuracies: this study trained no twins." in study_page.page(report, set())


def test_writing_leaves_one_page_and_no_trace(report, tmp_path):
    folder = write(tmp_path / "out", report)
    before = {path.name for path in folder.iterdir()}
    path = study_page.write_page(folder)
    assert path == folder / "index.html"
    assert {each.name for each in folder.iterdir()} == before | {"index.html"}
    first = path.read_bytes()
    study_page.write_page(folder)
    assert path.read_bytes() == first


def test_a_page_that_cannot_be_written_is_said_so(report, tmp_path):
    folder = write(tmp_path, report)
    (folder / "index.html").mkdir()
    (folder / "index.html" / "in the way").touch()
    with pytest.raises(FileError, match=r"cannot write '.*index\.html'"):
        study_page.write_page(folder)
    assert not list(folder.glob(".index.html*"))


def test_a_missing_package_is_named_with_its_pip_command(report, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jinja2" else object())
    with pytest.raises(MissingExtraError, match=r"of a study needs jinja2, .*pip install 'softless\[report\]'"):
        study_page.write_page(write(tmp_path, report))
    with pytest.raises(MissingExtraError, match="a needs jinja2"):
        shared.require("plotly", "jinja2", by="a")


def test_a_sentence_begins_with_a_capital_unless_it_begins_with_a_name():
    assert study_words.sentence("at 64 tokens") == "At 64 tokens"
    assert study_words.sentence("inline is faster") == "inline is faster"
    assert study_words.sentence("") == ""


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "\u2013"), (0.12345, "0.123"), (12345, "12,345"), ("94.1%", "94.1%"), (True, "True")]
)
def test_a_cell_is_short(value, shown):
    assert study_words.cell(value) == shown


def test_facts_are_counted(report):
    said = study_words.facts(report)
    assert said == ("1,437 images to train on and 360 to test on, 10 classes, 8 x 8 patches, 6 twins, 2 seeds each.")
    report["data"]["train"] = None
    assert study_words.facts(report).startswith("an unknown number of images to train on")
