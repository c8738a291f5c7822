"""`softless study --text`: twins trained on a text, one document that a rerun goes on with, and bad input in a line."""

import csv
import json
from dataclasses import replace

import pytest

from softless.study.text import pipeline, plan
from softless.study.text.plan import DecodingPlan, RecallPlan
from softless.train.language_recipe import LanguageModel

TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 40
KEYS = {
    "": [
        "schema", "command", "date", "versions", "machine", "seed", "preset", "data", "decision", "verdict", "twins",
        "prompt", "recall", "decoding", "files",
    ],
    "data": ["name", "train", "test", "sequences", "length", "tokens", "recipe", "epochs", "chance", "whole"],
    "twins": [
        "id", "label", "mechanism", "options", "parameters", "seconds", "bits_per_byte", "perplexity", "sample",
        "seeds",
    ],
    "recall": ["twin", "label", "task", "tokens", "inside", "accuracy"],
    "decoding": ["twin", "label", "tokens", "seconds", "bytes"],
}  # fmt: skip


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text, and studies of it that take seconds, in this process."""
    (tmp_path / "book.txt").write_text(TEXT)
    recipe = replace(plan.RECIPE, model=LanguageModel(dim=16, depth=1, heads=2), length=16, batch=8)
    tiny = plan.TextPreset(
        twins=("softmax", "delta"), seeds=2, train_bytes=1500, test_bytes=200,
        recall=RecallPlan(updates=2, batch=4, dim=16, inside=(2,), beyond=(3,), tested=4),
        decoding=DecodingPlan(tokens=(8, 16), steps=1),
    )  # fmt: skip
    monkeypatch.setattr(pipeline, "RECIPE", recipe)
    monkeypatch.setattr(plan, "PRESETS", {"default": tiny, "quick": replace(tiny, seeds=1), "full": tiny})
    return tmp_path


def studied(softless, *words):
    result = softless("study", "--text", "book.txt", "--device", "cpu", "--pack", "1", *words)
    assert result.exit_code == 0, result.output
    return result


def test_a_study_of_text_writes_a_document_tables_and_a_page_and_goes_on(softless, text):
    first = json.loads(studied(softless, "--json").stdout)
    for place, keys in KEYS.items():
        part = first[place] if place else first
        assert list(part[0] if isinstance(part, list) else part) == keys, place
    assert first["schema"] == "softless.text-study/1"
    assert first["data"]["train"] == 1500
    assert first["data"]["test"] == 200
    assert first["data"]["whole"] == len(TEXT)
    assert [twin["id"] for twin in first["twins"]] == ["softmax", "delta"]
    assert [len(twin["seeds"]) for twin in first["twins"]] == [2, 2]
    assert [len(seed["curve"]) > 2 for twin in first["twins"] for seed in twin["seeds"]] == [True] * 4
    assert [pair["linear"] for pair in first["decision"]["pairs"]] == ["delta"]
    assert {(point["task"], point["tokens"], point["inside"]) for point in first["recall"]} == {
        (task, tokens, tokens == 8) for task in ("recall", "induction") for tokens in (8, 12)
    }
    rows = list(csv.DictReader((text / "report/decoding.csv").read_text().splitlines()))
    assert [(row["twin"], row["tokens"]) for row in rows] == [
        ("softmax", "8"), ("softmax", "16"), ("delta", "8"), ("delta", "16"),
    ]  # fmt: skip
    assert "Do you need the softmax?" in (text / "report/index.html").read_text()
    assert first["files"].keys() == {"twins", "curves", "decision", "recall", "decoding"}

    again = studied(softless)
    assert "continuing: 4 of 4 runs trained before" in again.stdout
    assert "continuing: 2 of 2 runs trained before" in again.stdout
    later = json.loads((text / "report/report.json").read_text())
    assert {key: later[key] for key in ("twins", "recall", "decoding", "verdict")} == {
        key: first[key] for key in ("twins", "recall", "decoding", "verdict")
    }
    drawn = softless("report", "report", "--json")
    assert json.loads(drawn.stdout)["verdict"] == first["verdict"]

    other = softless("study", "--text", "book.txt", "--seed", "5")
    assert other.exit_code == 3
    assert "the study in report was begun with seed 0, and it is 5 now" in other.stderr


def test_the_terminal_shows_the_verdict_first_and_every_run(softless, text):
    out = studied(softless, "--quick", "--out", "a").stdout
    assert "of the text's 2,080 bytes, this study reads 1,700; --full reads all" in out
    assert "2 models to train; each is listed here when it is trained" in out
    assert out.index("bits per byte") < out.index("Softmax") < out.index("The report: a/index.html")
    assert "Cannot tell." in out
    assert "one seed does not show" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--text", "none.txt"], "none.txt: there is no such text file, folder of text files or parquet file"),
        (["--text", "latin.txt"], "latin.txt: it is not UTF-8 text: its byte 3 is 0xe9"),
        (["--text", "short.txt"], "short.txt: its text to test on has 4 tokens (4 bytes), and one sequence needs 17"),
        (["--text", "few.txt"], "few.txt: its 360 bytes to train on are 22 sequences of 16 tokens, and an update"),
        (["--text", "book.txt", "--twins", "sofmax"], "twin 'sofmax' does not exist: did you mean 'softmax'?"),
        (["--text", "book.txt", "--data", "digits"], "--data: --text studies language models, which read a text"),
        (["--text", "book.txt", "--mechanisms", "all"], "--mechanisms: --text studies language models"),
        (["--text", "book.txt", "--recipe", "digits"], "recipe 'digits' is a recipe for images"),
        (["--text", "book.txt", "--quick", "--full"], "--full: --quick asks for a smaller study: use one of them"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(softless, text, monkeypatch, words, says):
    (text / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (text / "short.txt").write_text("x" * 40)
    (text / "few.txt").write_text("x" * 400)
    monkeypatch.setattr(pipeline, "RECIPE", replace(pipeline.RECIPE, batch=23))
    result = softless("study", *words)
    assert result.exit_code == 3, result.output
    assert says in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1
    assert not (text / "report").exists()


def test_a_margin_that_is_no_number_is_a_usage_error(softless, text):
    assert softless("study", "--text", "book.txt", "--margin", "0").exit_code == 2
