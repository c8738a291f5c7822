"""What is not a report is said in one sentence; what is one, but damaged, is never drawn half."""

import json
import random

import pytest

from softless.errors import FileError, SoftlessError
from softless.study import page as study_page
from softless.study.schema import read
from tests.report.documents import write

POISONS = (None, "x", "", -1, 0, 1.5, True, [], {}, [None], [[]], {"mean": "x"}, 10**400)


def places(value, path=()):
    """Every path into a document, through the first few items of each list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(document, path, value):
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def test_a_report_is_read_as_it_was_written(report, tmp_path):
    assert read(write(tmp_path, report)) == report


def test_a_folder_without_a_report_is_named(tmp_path):
    with pytest.raises(FileError, match=r"is not a report: it has no report\.json"):
        read(tmp_path)
    with pytest.raises(FileError, match=r"is not a report: it has no report\.json"):
        read(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000])
def test_a_file_that_is_not_json_is_damaged(text, tmp_path):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(FileError, match=r"report\.json' is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["[]", "1", "{}", '{"schema": "softless.study/1"}', '{"schema": ["a"]}'])
def test_another_schema_is_named_beside_the_one_that_was_needed(text, tmp_path):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(FileError, match=r"has schema .*, and a page is made of 'softless\.study/4'"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("verdict",), None, "verdict is missing, and a list was needed"),
        (("twins", 1, "label"), 3, r"twins\[1\]\.label is 3, and a text was needed"),
        (("twins", 0, "accuracy", "mean"), "0.9", r"twins\[0\]\.accuracy\.mean is '0\.9', and a number was needed"),
        (("twins", 0, "macs"), True, r"twins\[0\]\.macs is True, and a number was needed"),
        (("layers", 2, "local_mass"), 0.3, r"layers\[2\]\.local_mass is 0\.3, and an object was needed"),
        (("layers", 2, "twin"), "ghost", r"layers\[2\] is about the twin 'ghost', which twins does not list"),
        (("range", "threshold", 0, "twin"), "ghost", r"range\.threshold\[0\] is about the twin 'ghost'"),
        (("viewer", "maps", 0, "image"), 1.5, r"maps\[0\]\.image is 1\.5, and a whole number was needed"),
    ],
)
def test_an_error_names_the_place_of_the_wrong_value(report, tmp_path, path, value, sentence):
    put(report, path, value)
    with pytest.raises(FileError, match=sentence):
        read(write(tmp_path, report))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_a_number_that_is_not_finite_is_refused(report, tmp_path, number):
    report["twins"][0]["macs"] = 123454321
    write(tmp_path, report)
    path = tmp_path / "report.json"
    path.write_text(path.read_text().replace("123454321", number))
    with pytest.raises(FileError, match=r"twins\[0\]\.macs is -?(nan|inf), and a number was needed"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda viewer: viewer.update(grid=[8]), r"viewer\.grid is \[8\], and rows and columns were needed"),
        (lambda viewer: viewer.update(grid=[0, 8]), r"viewer\.grid is \[0, 8\]"),
        (lambda viewer: viewer["images"][1].update(png="http://x/y.png"), r"viewer\.images\[1\]\.png is not a PNG"),
        (lambda viewer: viewer["images"][0].update(png="data:image/png;base64,$"), r"images\[0\]\.png is not a PNG"),
        (lambda viewer: viewer["maps"][3].update(weights="AAAA"), r"maps\[3\] has 3 bytes for 64 tokens and 64"),
        (lambda viewer: viewer["maps"][3].update(weights="!"), r"maps\[3\] has no base64 for 64 tokens"),
        (lambda viewer: viewer["maps"][3].update(row_max=[1.0]), r"maps\[3\] has 4096 bytes for 1 tokens"),
        (lambda viewer: viewer["maps"][3].update(image=99), r"maps\[3\] is of image 99, of 4"),
    ],
)
def test_a_map_that_the_viewer_would_stumble_over_is_refused(report, spoil, sentence):
    spoil(report["viewer"])
    with pytest.raises(FileError, match=sentence):
        study_page.page(report, {})


def test_a_histogram_has_a_count_for_each_bin(report):
    report["layers"][0]["confusion_histogram"]["counts"].pop()
    with pytest.raises(FileError, match=r"confusion_histogram of blocks\.0\.attn has 7 counts, 9 edges"):
        study_page.page(report, {})


def spoiled(whole, folder, count, seed):
    """Reports with one value poisoned each: how many were drawn, and what the others were refused with."""
    rng, text, drawn, refused = random.Random(seed), json.dumps(whole), 0, []
    every = [path for path in places(whole) if path]
    for _ in range(count):
        document = json.loads(text)
        put(document, rng.choice(every), rng.choice(POISONS))
        try:
            study_page.write_page(write(folder, document))
            drawn += 1
        except SoftlessError as error:
            refused.append(str(error))
    return drawn, refused


def test_a_poisoned_report_is_drawn_or_refused_in_one_sentence(whole, tmp_path, seed):
    drawn, refused = spoiled(whole, tmp_path, 6, seed)
    assert drawn + len(refused) == 6
    assert [sentence for sentence in refused if "\n" in sentence] == []


@pytest.mark.slow
def test_300_poisoned_reports_are_drawn_or_refused_in_one_sentence(whole, tmp_path, seed):
    drawn, refused = spoiled(whole, tmp_path, 300, seed)
    assert min(drawn, len(refused)) > 0
    assert [sentence for sentence in refused if "\n" in sentence] == []
