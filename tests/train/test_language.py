"""Language models: they learn, resume to the same bits, count by bytes, and take their attention from a mechanism."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from softless.data.sequences import TokenizedText
from softless.data.text import Text, open_texts
from softless.data.tokens import ByteTokenizer, learn_pairs
from softless.errors import ArgumentError, FileError
from softless.io import checkpoint
from softless.train.assemble import Runtime, train_language
from softless.train.devices import Devices
from softless.train.language_recipe import LanguageModel, LanguageRecipe
from softless.train.loop import Interrupted
from softless.train.run import Run
from softless.train.tasks import evaluate, language
from softless.train.tasks.language import (
    NextTokenLoss,
    SequenceAnswers,
    TokenCounts,
    build,
    sequence_loader,
    surprises,
    trained,
)
from softless.transformers import mechanisms_of
from tests.train.jobs import Quiet, digest
from tests.train.test_resume import Impatient

SMALL = LanguageModel(dim=16, depth=1, heads=2)
RECIPE = LanguageRecipe(
    model=SMALL, length=16, batch=8, epochs=2, lr=2e-2, warmup_lr=2e-2, min_lr=1e-3, clip=1.0, ema=0.5, accumulate=2,
    checkpoint_every=4, log_every=3,
)  # fmt: skip
BPE = replace(RECIPE, tokens="bpe", vocabulary=270, batch=4, accumulate=1)
TEXT = b"the cat sat on the mat, and the dog sat on the log.\n" * 24
CPU = Runtime(device="cpu")


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_bytes(TEXT)
    return str(tmp_path / "book.txt")


def run(folder, data, recipe=RECIPE, watch=None, **options):
    return train_language(folder, recipe, data, Quiet() if watch is None else watch, runtime=CPU, **options)


def test_a_language_model_learns_and_the_fewest_nats_per_byte_are_the_best(tmp_path, book):
    watch = Quiet()
    outcome = run(tmp_path / "a", book, replace(RECIPE, epochs=6, ema=0.0), watch)
    losses = [numbers["loss"] for _, numbers in watch.lines if "loss" in numbers]
    assert losses[-1] < 0.5 * losses[0]
    assert all("tokens_per_second" in numbers for _, numbers in watch.lines if "loss" in numbers)
    tests = [numbers for _, numbers in watch.lines if "loss_per_byte" in numbers]
    assert outcome.metric == "loss_per_byte"
    assert outcome.best == min(numbers["loss_per_byte"] for numbers in tests)
    for numbers in tests:
        assert math.isclose(numbers["bits_per_byte"], numbers["loss_per_byte"] / math.log(2))
        assert math.isclose(numbers["perplexity"], math.exp(numbers["test_loss"]))
        assert numbers["test_loss"] == numbers["loss_per_byte"]  # a byte is a token
    losses, sizes = SequenceAnswers(**outcome.answers).arrays()
    assert sizes.sum() == len(open_texts(book)[1].data) - 1
    assert math.isclose(losses.sum() / sizes.sum(), outcome.last["loss_per_byte"], rel_tol=1e-6)


@pytest.mark.parametrize("recipe", [RECIPE, BPE, replace(RECIPE, evaluate_updates=3)], ids=["bytes", "bpe", "often"])
@pytest.mark.parametrize("update", [1, 4, 9])
def test_a_language_model_that_is_interrupted_resumes_to_the_same_bits(tmp_path, book, recipe, update):
    run(tmp_path / "whole", book, recipe)
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", book, recipe, Impatient(update))
    run(tmp_path / "cut", book, recipe, resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    names = {path.name for path in (tmp_path / "cut").iterdir()}
    assert ("tokenizer.json" in names) == (recipe is BPE)


def test_evaluations_within_an_epoch_come_every_few_updates_and_at_the_end(tmp_path, book):
    watch = Quiet()
    run(tmp_path / "a", book, replace(RECIPE, evaluate_updates=3), watch)
    tests = [(step, numbers["epoch"]) for step, numbers in watch.lines if "loss_per_byte" in numbers]
    assert tests == [(3, 3 / 8), (6, 6 / 8), (9, 9 / 8), (12, 12 / 8), (15, 15 / 8), (16, 2)]


def test_a_run_goes_on_only_with_the_same_text_recipe_and_tokens(tmp_path, book):
    run(tmp_path / "a", book, BPE)
    with pytest.raises(ArgumentError, match=r"was begun with recipe\.lr 0\.02, and it is 0\.5 now"):
        run(tmp_path / "a", book, replace(BPE, lr=0.5), resume=True)
    with pytest.raises(ArgumentError, match=r"a holds a run already"):
        run(tmp_path / "a", book, BPE)
    (tmp_path / "other.txt").write_bytes(TEXT[:-1])
    with pytest.raises(
        ArgumentError, match=r"was begun with another text to train on \(1,123 bytes then and 1,122 now\)"
    ):
        run(tmp_path / "a", str(tmp_path / "other.txt"), BPE, resume=True)
    (tmp_path / "moved.txt").write_bytes(TEXT)
    run(tmp_path / "a", str(tmp_path / "moved.txt"), BPE, resume=True)
    file = tmp_path / "a/tokenizer.json"
    file.write_text(file.read_text().replace("Ġthe", "Ġhte"))
    with pytest.raises(FileError, match=r"tokenizer\.json: it is damaged: its sha256 is not the one in run\.json"):
        run(tmp_path / "a", book, BPE, resume=True)
    with pytest.raises(FileError, match="it is damaged"):
        trained(tmp_path / "a")


def test_the_best_model_of_a_run_gives_the_scores_of_the_run(tmp_path, book):
    outcome = run(tmp_path / "a", book, BPE)
    model, recipe, tokenizer, about = trained(tmp_path / "a")
    assert (recipe, about["step"], about["data"]) == (BPE, outcome.best_step, book)
    text = TokenizedText(open_texts(book)[1], tokenizer, recipe.length, train=False)
    devices = Devices("cpu")
    batches = sequence_loader(text, 3, devices, seed=0, train=False)
    counts = evaluate(model, batches, lambda: TokenCounts(text.count, tokenizer.sizes, devices.device), devices)
    assert math.isclose(counts.scores().loss_per_byte, outcome.best, rel_tol=1e-6)


def uniform(vocabulary):
    """A model that knows nothing, as a module that transformers could have made."""
    model = nn.Module()
    model.forward = lambda input_ids: SimpleNamespace(logits=torch.zeros(*input_ids.shape, vocabulary))
    return model


def scores(model, text, tokenizer, length=16, batch=4):
    devices, sequences = Devices("cpu"), TokenizedText(text, tokenizer, length, train=False)
    batches = sequence_loader(sequences, batch, devices, seed=0, train=False)
    return evaluate(model, batches, lambda: TokenCounts(sequences.count, tokenizer.sizes, devices.device), devices)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_perplexity_of_a_model_that_knows_nothing_is_the_number_of_tokens(kind):
    text = Text("x", TEXT)
    tokenizer = ByteTokenizer() if kind == "bytes" else learn_pairs(text, 270)
    found = scores(uniform(tokenizer.count), text, tokenizer).scores()
    assert math.isclose(found.perplexity, tokenizer.count, rel_tol=1e-6)
    tokens = tokenizer.encode(TEXT)
    assert (found.tokens, found.bytes) == (len(tokens) - 1, len(TEXT) - tokenizer.sizes[tokens[0].long()])
    assert math.isclose(found.bits_per_byte, math.log2(tokenizer.count) * found.tokens / found.bytes, rel_tol=1e-6)


def test_bits_per_byte_do_not_depend_on_how_the_text_is_cut_into_tokens(monkeypatch):
    """A model that gives every byte the probability 1/256, and a token that of its bytes, needs 8 bits per byte."""
    text = Text("x", TEXT)
    for tokenizer in (ByteTokenizer(), learn_pairs(text, 270)):
        known = torch.cat([math.log(256) * tokenizer.sizes, torch.zeros(1)])

        def losses(model, inputs, targets, known=known):
            return known[targets.clamp(min=-1)]

        monkeypatch.setattr(language, "surprises", losses)
        assert math.isclose(scores(nn.Module(), text, tokenizer).scores().bits_per_byte, 8.0, rel_tol=1e-6)


def test_the_loss_of_parts_is_the_loss_of_the_whole_and_no_output_depends_on_later_tokens():
    torch.manual_seed(0)
    model = build(replace(RECIPE, model=replace(SMALL, depth=2, key_heads=1)))
    text = TokenizedText(Text("x", TEXT), ByteTokenizer(), 16, train=True)
    batch, loss = text.batch(torch.arange(4)), NextTokenLoss()
    whole, *parts = (loss(model, part) for count in (1, 2) for part in loss.parts(batch, count))
    torch.testing.assert_close(sum(parts) / 2, whole)
    changed = batch.inputs.clone()
    changed[:, 9:] = 65
    before, after = (surprises(model, inputs, batch.targets)[:, :9] for inputs in (batch.inputs, changed))
    torch.testing.assert_close(after, before)


def test_a_tied_model_has_one_table_and_its_average_moves_once():
    tied, untied = (build(replace(RECIPE, model=replace(SMALL, tied=tied))) for tied in (True, False))
    assert {*untied.state_dict()} - {*tied.state_dict()} == {"lm_head.weight"}
    tokens = torch.arange(12).reshape(2, 6)
    hidden = tied.model(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(tied(input_ids=tokens).logits, hidden @ tied.model.embed_tokens.weight.T)


@pytest.mark.parametrize(
    "chosen",
    [
        "softmax",
        "inline",
        "delta",
        {"name": "linear", "phi": "relu"},
        {"name": "regress", "relative": False},
        {"name": "nearfar", "window": 4},
    ],
)
def test_every_layer_has_the_mechanism_of_the_recipe_and_learns(chosen):
    model = build(replace(RECIPE, model=replace(SMALL, mechanism=chosen)))
    name = chosen if isinstance(chosen, str) else chosen["name"]
    assert {made.name for made in mechanisms_of(model)} == {name}
    tokens = torch.arange(24).reshape(2, 12)
    surprises(model, tokens[:, :-1], tokens[:, 1:]).mean().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


def test_a_loss_too_large_for_its_perplexity_is_still_a_number():
    counts = TokenCounts(1, torch.ones(256, dtype=torch.int64), torch.device("cpu"))
    counts.losses += 1e6
    counts.counts += 1
    numbers = counts.evaluation().numbers
    assert math.isfinite(numbers["perplexity"])
    json.dumps(numbers, allow_nan=False)


def test_answers_pack_and_unpack():
    answers = SequenceAnswers.of(np.array([1.5, 2.25]), np.array([7, 3]))
    losses, sizes = answers.arrays()
    assert (answers.sequences, losses.tolist(), sizes.tolist()) == (2, [1.5, 2.25], [7, 3])


def test_the_weights_of_the_best_checkpoint_have_the_names_of_transformers(tmp_path, book):
    run(tmp_path / "a", book)
    saved = checkpoint.newest(Run(tmp_path / "a").best)
    assert "model.layers.0.self_attn.q_proj.weight" in saved.parts["model"]
    assert saved.state["about"]["recipe"]["task"] == "language"
    assert saved.state["scores"]["bytes"] == len(open_texts(book)[1].data) - 1
