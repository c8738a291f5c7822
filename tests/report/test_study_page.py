"""The page says what the report says, links to its data, and carries everything it needs."""

import json
import re

import pytest

from softless.errors import FileError, MissingExtraError
from softless.report import page as shared
from softless.study import page as study_page
from softless.study.page import text as page_text
from tests.report.documents import write


@pytest.fixture(scope="module")
def text(whole):
    return study_page.page(whole, {"twins": "id,accuracy\nsoftmax,0.956\n"})


def markup(text):
    """The page without plotly, scripts and data."""
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_the_verdict_comes_first(text, report):
    body = markup(text)
    says = report["verdict"][0]["says"].removeprefix("No. ").partition(". ")[0]
    order = ("<h1>Do you need the softmax?</h1>", "No.", says, "<h2")
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
    assert body.count('<p class="data">Data: <a') == 12 + 5, "figures, twins, speed, decision, tables, the whole"


def test_a_csv_travels_with_the_page_and_a_part_of_the_report_where_there_is_none(text):
    figures = dict(re.findall(r'<figure id="([^"]+)".*?<p class="data">(.*?)</p>', markup(text), flags=re.DOTALL))
    assert figures["cost"] == 'Data: <a href="#twins" data-file="twins" download="twins.csv">twins.csv</a>'
    assert 'data-part="layers" download="layers.json"' in figures["local-mass"]
    assert 'data-part="range.threshold"' in figures["threshold"]
    carried = json.loads(re.search(r'id="figure-data">(.*?)</script>', text, flags=re.DOTALL)[1])
    assert carried["files"] == {"twins": "id,accuracy\nsoftmax,0.956\n"}


def test_nothing_links_to_a_file_beside_the_page(text):
    assert {address[:1] for address in re.findall(r'<a [^>]*href="([^"]*)"', markup(text))} == {"#"}


def test_files_that_are_no_csv_of_this_folder_are_not_carried(report, tmp_path):
    (tmp_path / "secret.csv").write_text("secret")
    folder = write(tmp_path / "out", report)
    (folder / "large.csv").write_text("x" * (study_page.LARGEST + 1))
    strangers = ("../secret.csv", "report.json", "/etc/hostname", 7, None, "no.csv", "large.csv", "twins.csv")
    report["files"] = dict(zip("abcdefgh", strangers, strict=True))
    write(folder, report)
    text = study_page.write_page(folder).read_text()
    carried = json.loads(re.search(r'id="figure-data">(.*?)</script>', text, flags=re.DOTALL)[1])
    assert list(carried["files"]) == ["h"]


def test_every_part_that_is_linked_is_in_the_report(text, report):
    for part in re.findall(r'data-part="([^"]*)"', markup(text)):
        found = report
        for key in filter(None, part.split(".")):
            found = found[key]
        assert found


def test_the_report_travels_with_the_page(text, report):
    carried = re.search(r'id="report-data">(.*?)</script>', text, flags=re.DOTALL)[1]
    assert json.loads(carried) == report


def test_texts_of_the_report_are_text_and_nothing_more(report):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    report["verdict"][0]["says"] = report["twins"][0]["label"] = report["command"] = evil
    report["tables"][0]["rows"][0][0] = report["viewer"]["images"][0]["name"] = evil
    text = study_page.page(report, {})
    assert "<script>alert(1)" not in text
    assert "<img src=x" not in text


def test_the_decision_is_in_the_first_lines(text, report):
    body = markup(text)
    top = body[: body.index("<h2")]
    assert '<p class="answer">No.</p>' in top
    first, other = report["decision"]["pairs"][1], report["decision"]["pairs"][0]
    row = '<th scope="row">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td>'.format
    assert row("inline + local against softmax + local", "no", "+0.6", "-0.4 to +1.6", "111,000 both") in top
    assert row("inline against softmax", "cannot tell", "-1.5", "-2.6 to -0.4", "102,000 both") in top
    assert top.index("+0.6") < top.index("-1.5")
    assert "1 or less does not matter here" in top
    assert all(pair["because"].rstrip(".") in top for pair in (first, other))
    assert other["would_tell"] in top


def test_the_decision_does_not_repeat_a_reason_of_the_verdict(report):
    pair = report["decision"]["pairs"][0]
    report["verdict"][0]["says"] = (
        f"Cannot tell. {pair['because'].capitalize()} What would settle it: {pair['would_tell']}"
    )
    reasons = page_text.decision(report)["reasons"]
    assert [reason.split(":")[0] for reason in reasons] == ["inline + local against softmax + local"]


def test_an_interval_that_ends_at_the_margin_shows_on_which_side(report):
    report["decision"]["pairs"][1]["low"] = -0.97
    assert page_text.decision(report)["table"].rows[0][2:4] == ("+0.60", "-0.97 to +1.60")


def test_the_first_sentence_of_the_verdict_is_large_and_the_rest_is_not(text):
    body = markup(text)
    assert '<p class="verdict">With the local residual, inline reaches' in body
    assert '<p class="further">Without it: cannot tell' in body


def test_sizes_that_differ_stand_beside_their_comparison(report):
    report["decision"]["pairs"][1] |= {"parameters": [28_042, 38_922], "low": None, "high": None}
    found = page_text.decision(report)
    assert found["table"].rows[0][3:] == ("\u2013", "38,922 against 28,042")
    assert "one seed has no interval" in found["table"].notes[1]
    for nothing in (None, {"margin": 1.0, "pairs": [], "headline": None}):
        report["decision"] = nothing
        assert page_text.decision(report) is None


def test_the_page_describes_how_images_were_resized_and_cut(text, report):
    assert page_text.images(report) in markup(text)
    assert page_text.images(report) == (
        "The images have 8 x 8 pixels. The twins see them at 8 x 8 pixels, in 8 x 8 patches of 1 x 1 pixels: 65 tokens "
        "in all. Recipe: twins-digits, 14 epochs."
    )
    sizes = {"smallest": [120, 90], "median": [500, 375], "largest": [4000, 3000]}
    report["data"] |= {"came": sizes, "split": "The test images were cut from the training images."}
    assert page_text.images(report).startswith("The images have 120 x 90 to 4000 x 3000 (median 500 x 375) pixels.")
    assert page_text.images(report).endswith("The test images were cut from the training images.")


def test_a_finding_may_have_a_small_table(text):
    body = markup(text)
    neighbors = body[body.index("<dt>Neighbors</dt>") : body.index("<dt>Injectivity</dt>")]
    assert '<th scope="row">softmax</th><td>14.2</td><td>1.1</td>' in neighbors
    assert '<th scope="row">inline + local</th><td>6.1</td><td>0.0</td>' in neighbors


def test_tables_are_numbered_as_they_come_and_name_the_paper_s_number_and_setting(text):
    body = markup(text)
    assert [int(n) for n in re.findall(r"<b>Table (\d+)</b>", body)] == [1, 2, 3, 4]
    assert "<b>Table 3</b> Feature maps (Table 3 of the paper)" in body
    assert "<b>Table 4</b> The local residual (Table 9 of the paper)" in body
    assert "The paper (ImageNet-1K, Swin-T): Linear attention fails to train with identity" in body
    assert '<th scope="row">identity</th><td>\u2013</td><td>94.1%</td>' in body
    assert "\u2013 under “linear”: not measured." in body


def test_columns_have_the_same_decimals():
    rows = [["a", 95.0, 1, None, "x"], ["b", 96.94, 12345, 0.5, True], ["c", 7.5, 2, 1.25, None]]
    assert page_text.cells(rows) == [
        ["a", "95.00", "1", "\u2013", "x"],
        ["b", "96.94", "12,345", "0.50", "True"],
        ["c", "7.50", "2", "1.25", "\u2013"],
    ]
    assert page_text.cells([["a", 1.0], ["b"]]) == [["a", "1.0"], ["b", "\u2013"]]
    assert page_text.cells([]) == []


def test_a_column_without_numbers_is_left_out_and_a_dash_is_explained():
    columns = ["twin", "accuracy", "spread", "paper", "local 3", "random 9"]
    rows = [["softmax", 95.0, None, 72.2, 91.1, 92.8], ["taylor", 94.2, None, None, 90.0, 93.1]]
    found = page_text.paper_table(
        {"id": "9", "title": "T", "columns": columns, "rows": rows, "setting": "ImageNet-1K, DeiT-T", "paper": "So."}
    )
    assert found.columns == ("twin", "accuracy, %", "paper, % (ImageNet-1K, DeiT-T)", "3 x 3", "9 random")
    assert found.rows[1] == ("taylor", "94.2", "\u2013", "90.0", "93.1")
    assert found.notes[0].endswith("the paper has no number for this twin.")
    assert found.notes[1] == "The paper (ImageNet-1K, DeiT-T): So."


def test_the_table_of_layers_lists_only_softmax_layers(text, report):
    body = markup(text)
    softmax = [layer for layer in report["layers"] if layer["twin"].startswith("softmax")]
    assert body.count('<td class="words">') == len(softmax)
    assert "A linear kernel would cost 13% here" in body


def test_an_image_is_named_without_the_folders_of_the_user(report):
    report["viewer"]["images"][0]["name"] = "/data/someone/cats/7.png"
    report["viewer"]["images"][1]["name"] = "D:\\someone\\8.png"
    body = markup(study_page.page(report, {}))
    assert 'title="2: 7.png"' in body
    assert 'title="3: 8.png"' in body
    assert "someone" not in body


@pytest.mark.parametrize("nothing", [None, "absent", "empty"])
def test_sections_without_data_are_one_line_each(report, nothing):
    empty = {"collinear": None, "range": {}, "viewer": None, "speed": {}}
    for part in ("tables", "layers", "mask_out", "induced", "collinear", "range", "viewer", "speed", "files"):
        if nothing == "absent":
            del report[part]
        else:
            report[part] = None if nothing is None else empty.get(part, [])
    report["speed"] = None
    body = markup(study_page.page(report, {}))
    assert body.count('<p class="missing">') == 1 + 6, "the noscript line and six sections"
    assert re.findall(r'<figure id="([^"]+)"', body) == ["cost", "learning"]
    for what in ("compare queries", "measure locality", "measure score ranges"):
        assert f"This study did not {what}." in body
    for what in ("stored no attention maps", "measured no speed", "trained no twins that the paper's tables compare"):
        assert f"This study {what}." in body


def test_a_study_without_twins_still_has_a_page(report):
    for part in ("tables", "layers", "mask_out", "induced", "collinear", "range", "viewer"):
        report[part] = None
    report["twins"] = []
    assert "This study trained no twins." in study_page.page(report, {})


def test_writing_leaves_one_page_and_no_temporary_file(report, tmp_path):
    folder = write(tmp_path / "out", report)
    before = {path.name for path in folder.iterdir()}
    path = study_page.write_page(folder)
    assert path == folder / "index.html"
    assert {each.name for each in folder.iterdir()} == before | {"index.html"}
    first = path.read_bytes()
    study_page.write_page(folder)
    assert path.read_bytes() == first


def test_a_page_that_cannot_be_written_raises_a_file_error(report, tmp_path):
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
    assert page_text.sentence("at 64 tokens") == "At 64 tokens"
    assert page_text.sentence("inline is faster") == "inline is faster"
    assert page_text.sentence("") == ""


def test_the_page_does_not_repeat_the_answer():
    assert page_text.after("No. With it: 3.", "no") == "With it: 3."
    assert page_text.after("no: with it", "no") == "with it"
    assert page_text.after("Not so.", "no") == "Not so."
    assert page_text.after("No.", "no") == "No."
    assert page_text.after("Yes.", "") == "Yes."


def test_facts_are_counted(report):
    said = page_text.facts(report)
    assert said == ("1,437 images to train on and 360 to test on, 10 classes, 6 twins, 2 seeds each.")
    report["data"]["train"] = None
    assert page_text.facts(report).startswith("an unknown number of images to train on")
