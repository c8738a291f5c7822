"""`softless train`, `evaluate` and `data check` on text: what they say, and bad input in one line with exit 3."""

import json
import math

import pyarrow as pa
import pytest
from pyarrow import parquet

from softless.train.choose import fitting_text

TINY = """
task = "language"
command = "softless train --recipe tiny.toml --data book.txt"
length = 16
batch = 8
epochs = 2
lr = 1e-2
log_every = 2
[model]
dim = 16
depth = 1
heads = 2
"""
TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 12
NUMBERS = ["loss_per_byte", "bits_per_byte", "perplexity", "test_loss"]
BPE = ["--set", "tokens=bpe", "--set", "vocabulary=270", "--set", "batch=4"]


@pytest.fixture
def book(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "book.txt").write_text(TEXT)


def words(*more):
    return ["train", "--recipe", "tiny.toml", "--data", "book.txt", "--device", "cpu", *more]


def test_a_language_model_trains_and_says_what_it_reached(softless, book, tmp_path):
    result = softless(*words("--out", "a"))
    assert (result.exit_code, result.stderr) == (0, "")
    recipe, text, model, updates, one, two, last = result.stdout.splitlines()
    assert recipe == "recipe   tiny.toml"
    assert text == "text     562 bytes to train on, 62 bytes to test on; sequences of 16, bytes"
    assert model == "model    llama with softmax, 7.23 k parameters, cpu"
    assert updates == "updates  8: 2 epochs of 4, batch 8"
    assert one.startswith("epoch   1/2   loss ")
    assert "bits per byte " in two
    assert "perplexity " in two
    assert last.startswith("best ")
    assert "bits per byte, after epoch 2" in last
    assert last.endswith("softless evaluate a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "run.json", "log.jsonl", "last", "best", "tensorboard", "result.json",
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [[], BPE], ids=["bytes", "bpe"])
def test_evaluate_gives_the_numbers_of_the_run_and_the_schemas_are_frozen(softless, book, tokens):
    document = json.loads(softless(*words("--out", "a", "--json", *tokens)).stdout)
    assert list(document) == [
        "schema", "out", "recipe", "model", "parameters", "steps", "best_step", "best_loss_per_byte", "last", "seconds",
        "skipped",
    ]  # fmt: skip
    assert (document["schema"], document["model"], list(document["last"])) == ("softless.train/1", "llama", NUMBERS)
    result = softless("evaluate", "a", "--json", "--device", "cpu", "--batch", "3")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == [
        "schema", "target", "step", "data", "device", "tokens", "bytes", "loss", "loss_per_byte", "bits_per_byte",
        "perplexity", "tokens_per_second",
    ]  # fmt: skip
    assert found["schema"] == "softless.evaluate-text/1"
    assert math.isclose(found["loss_per_byte"], document["best_loss_per_byte"], rel_tol=1e-6)
    assert found["tokens"] == 61 if not tokens else found["tokens"] < 61
    shown = softless("evaluate", "a", "--device", "cpu").stdout.splitlines()
    assert shown[0].endswith("of book.txt, cpu")
    assert [line.split()[0] for line in shown[1:]] == ["bits", "perplexity", "speed"]


def test_evaluate_reads_the_whole_of_another_text(softless, book, tmp_path):
    assert softless(*words("--out", "a")).exit_code == 0
    (tmp_path / "other.txt").write_text("the dog sat on the cat.\n" * 4)
    found = json.loads(softless("evaluate", "a", "--data", "other.txt", "--json").stdout)
    assert (found["data"], found["bytes"]) == ("other.txt", 95)


def test_a_run_on_text_resumes_from_its_folder_alone(softless, book, tmp_path):
    for name in ("whole", "cut"):
        assert softless(*words("--out", name, *BPE)).exit_code == 0
    steps = sorted((tmp_path / "cut/last").iterdir())
    for path in steps[-1].iterdir():
        path.unlink()
    result = softless("train", "--out", "cut", "--resume", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "recipe   of the run, as cut was begun" in result.stdout
    for name in ("log.jsonl", "tokenizer.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_without_a_recipe_one_is_chosen_for_text(softless, book):
    small = [word for key in ("length=16", "model.dim=16", "model.depth=1", "epochs=1") for word in ("--set", key)]
    result = softless("train", "--data", "book.txt", "--out", "a", "--device", "cpu", *small)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "recipe   text-small, chosen for text without a CUDA device; --recipe NAME takes ano"
    )
    assert fitting_text(cuda=True)[0] == "text-base"


WRONG = [
    (["--data", "none.txt"], "none.txt: there is no such text file, folder of text files or parquet file"),
    (["--data", "latin.txt"], "latin.txt: it is not UTF-8 text: its byte 1 is 0xe9"),
    (["--data", "short.txt"], "short.txt: its text to train on has 8 tokens (8 bytes), and one sequence needs 17"),
    (["--data", "words.parquet"], "words.parquet: it has columns words, and text is needed"),
    (["--set", "batch=64"], "a batch of 64 needs 64 sequences, and an epoch has 35"),
    (["--set", "image_size=8"], "'image_size' is not a key of a language recipe: only recipes of task 'classify'"),
    (["--set", "tokens=words"], "tokens is 'words' and must be one of bytes, bpe"),
    (["--set", "tokens=bpe"], "tokens, and vocabulary is 4096: set it to at most"),
    (["--set", "task=poetry"], "task is 'poetry' and must be one of classify, language"),
    (["--set", "model.dim=6"], "model.dim 6 is not a multiple of twice model.heads 2"),
    (["deit_tiny"], "'name' is not a key of [model]: only recipes of task 'classify' have it"),
    (["--teacher", "b"], "--teacher: a language model begins on its own"),
    (["--init", "b"], "--init: a language model begins on its own"),
    (["--workers", "2"], "--workers: a language model reads no images"),
    (["--on-bad-image", "skip"], "--on-bad-image: a language model reads no images"),
    (["--out", "nothing", "--resume"], "nothing holds no run"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_exit_3(softless, book, tmp_path, given, says):
    (tmp_path / "latin.txt").write_bytes("hé".encode("latin-1") * 99)
    (tmp_path / "short.txt").write_text("too short")
    parquet.write_table(pa.table({"words": ["a"]}), tmp_path / "words.parquet")
    given = given if "--out" in given else [*given, "--out", "a"]
    result = softless(*words(*given))
    assert result.exit_code == 3, result.output
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert not (tmp_path / "a").exists()


def test_text_needs_a_text_and_images_need_a_recipe_for_images(softless, book):
    result = softless("train", "--recipe", "tiny.toml", "--out", "a")
    assert result.exit_code == 3
    assert "recipe 'tiny.toml' trains a language model, and needs a text: give it with --data" in result.stderr
    result = softless("study", "--recipe", "tiny.toml", "--out", "s")
    assert result.exit_code == 3, result.output
    assert (
        "recipe 'tiny.toml' trains a model of task 'language', and a recipe for images with labels is needed"
        in result.stderr
    )


def test_evaluate_refuses_options_of_images(softless, book):
    assert softless(*words("--out", "a")).exit_code == 0
    for option in (["--weights", "w"], ["--workers", "1"], ["--on-bad-image", "skip"]):
        result = softless("evaluate", "a", *option)
        assert result.exit_code == 3
        assert f"{option[0]}: a is the run of a language model" in result.stderr


def test_data_check_counts_a_text(softless, book):
    result = softless("data", "check", "book.txt")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["train", "562", "562", "10", "2"] in lines
    assert ["test", "62", "62", "2", "0"] in lines
    document = json.loads(softless("data", "check", "book.txt", "--json").stdout)
    assert (document["schema"], document["length"]) == ("softless.data-check-text/1", 256)
    train = {"part": "train", "bytes": 562, "characters": 562, "lines": 10, "sequences": 2}
    assert document["parts"][0] == train


def test_data_check_refuses_a_text_that_is_not_utf_8(softless, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"a\xffb")
    result = softless("data", "check", "bad.txt")
    assert result.exit_code == 3
    assert "bad.txt: it is not UTF-8 text: its byte 1 is 0xff" in result.stderr
