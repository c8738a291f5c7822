"""Healing: it brings a model closer to the original, goes on where it stopped, and is undone to the bit; and recall."""

import pytest
import torch

import softless
from softless.conversion import healing, pipeline, proving, recall
from softless.conversion.pipeline import layers_of
from softless.conversion.recall import Generated
from softless.errors import NonFiniteError
from tests.conversion import test_images
from tests.conversion.test_convert import LOOSE, Killed, data_for, model_of, output

pytestmark = pytest.mark.filterwarnings("ignore:.*do not drop weights")
STEPS = 12
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """A number of steps that does not depend on how fast the machine is, and a state after each third."""
    monkeypatch.setattr(healing, "steps_in", lambda *_: STEPS)
    monkeypatch.setattr(healing, "SAVES", 3)


@pytest.fixture
def kept(monkeypatch):
    """Healing that is always kept: random weights have no perplexity to be better at."""
    monkeypatch.setattr(proving, "_better", lambda *_: True)


def distance(model: torch.nn.Module, right: torch.Tensor, data: torch.Tensor) -> float:
    return float((output(model, data) - right).square().mean())


@pytest.mark.parametrize(("name", "rank"), [("llama", None), ("gpt2", 2), pytest.param("bert", 2, marks=SLOW)])
@pytest.mark.usefixtures("kept")
def test_a_healed_model_is_closer_and_undo_restores_every_weight(name, rank):
    model, data = model_of(name), data_for(name, 32)
    right, weights = output(model, data), {key: x.clone() for key, x in model.state_dict().items()}
    plain = softless.convert(model, data, **LOOSE, layers=3)
    before = distance(model, right, data)
    plain.undo()
    healed = softless.convert(model, data, **LOOSE, layers=3, heal=1, rank=rank)
    assert healed.document["healing"]["steps"] == STEPS
    assert healed.document["healing"]["delivered_before"] == plain.document["delivered"]
    assert distance(model, right, data) < before
    assert not any("parametrizations" in key for key in model.state_dict())
    healed.undo()
    assert torch.equal(output(model, data), right)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())
    assert all(x.requires_grad for x in model.parameters())


@pytest.mark.usefixtures("kept")
def test_a_low_rank_leaves_all_else_as_it_is():
    model, data = model_of("llama"), data_for("llama", 32)
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    softless.convert(model, data, **LOOSE, layers=3, heal=1, rank=2)
    changed = {key: x - weights[key] for key, x in model.state_dict().items() if key in weights}
    changed = {key: x for key, x in changed.items() if x.any()}
    assert changed
    assert all(key.endswith("_proj.weight") for key in changed)
    assert all(torch.linalg.matrix_rank(x, rtol=1e-3) <= 2 for x in changed.values())


def test_a_healed_model_of_images_is_saved_and_undone(tmp_path):
    model = test_images.model_of("our DeiT")
    samples = test_images.samples_for(model, 32)
    before = test_images.output(model, samples)
    conversion = softless.convert(model, samples, **test_images.LOOSE, heal=1)
    conversion.save(tmp_path / "model")
    again = softless.load_converted(tmp_path / "model")
    assert torch.equal(test_images.output(again, samples), test_images.output(model, samples))
    conversion.undo()
    assert torch.equal(test_images.output(model, samples), before)


@pytest.mark.parametrize("stop", [5, *(pytest.param(stop, marks=SLOW) for stop in (0, 2, 8, 11))])
def test_a_killed_healing_goes_on_to_the_same_weights(tmp_path, stop):
    options, data = LOOSE | {"layers": 3, "heal": 1, "rank": 2}, data_for("llama")
    right = softless.convert(model_of("llama"), data, **options)
    model = model_of("llama")
    before, done = output(model, data), iter(range(10**6))

    def kill(label, _amount):
        if label == "healing" and next(done) == stop:
            raise Killed

    with pytest.raises(Killed):
        softless.convert(model, data, **options, work=tmp_path, watch=kill)
    assert torch.equal(output(model, data), before)
    found = softless.convert(model_of("llama"), data, **options, work=tmp_path)
    assert found.document["delivered"] == right.document["delivered"]
    weights = right.model.state_dict()
    assert all(torch.equal(x, weights[key]) for key, x in found.model.state_dict().items())


def test_a_healing_that_does_harm_is_undone(monkeypatch):
    monkeypatch.setattr(proving, "_better", lambda *_: False)
    data = data_for("llama")
    plain = softless.convert(model_of("llama"), data, **LOOSE, layers=3)
    healed = softless.convert(model_of("llama"), data, **LOOSE, layers=3, heal=1)
    assert not healed.document["healing"]["kept"]
    assert healed.document["delivered"] == plain.document["delivered"]
    assert torch.equal(output(healed.model, data), output(plain.model, data))


def test_a_loss_that_is_not_finite_stops_healing_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(healing.Distance, "__call__", lambda *_: torch.tensor(torch.nan, requires_grad=True))
    model, data = model_of("llama"), data_for("llama")
    before = output(model, data)
    with pytest.raises(NonFiniteError, match="not a finite number after 0 steps of healing"):
        softless.convert(model, data, **LOOSE, layers=3, heal=1)
    assert torch.equal(output(model, data), before)


def test_a_conversion_that_fails_after_healing_gives_every_weight_back(monkeypatch):
    def fail(*_args, **_options):
        raise Killed

    monkeypatch.setattr(pipeline, "assemble", fail)
    model, data = model_of("llama"), data_for("llama")
    before = output(model, data)
    with pytest.raises(Killed):
        softless.convert(model, data, **LOOSE, layers=3, heal=1)
    assert torch.equal(output(model, data), before)


def test_recall_asks_for_what_the_prompt_holds():
    samples = {"input_ids": data_for("llama", 8).repeat(1, 3)}
    questions, answers = recall.prompts(samples, 2048, seed=0)
    assert questions.shape == (recall.PROMPTS, 60 + recall.CUE)
    for question, answer in zip(questions.tolist(), answers.tolist(), strict=True):
        cue = question[-recall.CUE :]
        places = [at for at in range(30) if question[at : at + recall.CUE] == cue]
        after = [question[at + recall.CUE : at + recall.CUE + recall.ASKED] for at in places]
        assert answer in after


def test_recall_is_the_share_of_tokens_found_again(monkeypatch):
    """Against a model that copies, and one that never does."""
    model = model_of("llama")
    samples = {"input_ids": data_for("llama", 8).repeat(1, 2)}
    layers = layers_of(model)
    _, answers = recall.prompts(samples, layers.longest, 0)
    parts = iter([*answers.split(recall.BATCH), torch.zeros(3, 1)])
    monkeypatch.setattr(type(layers), "generated", lambda *_: next(parts))
    copies = recall.generate(layers, samples, 0, lambda *_: None)
    assert copies.recall == [1.0] * recall.PROMPTS
    none = Generated([0.0] * recall.PROMPTS, copies.texts)
    told, _ = recall.compared(samples, copies, none)
    assert (told["before"]["mean"], told["after"]["mean"], told["lost"]["mean"]) == (1, 0, 1)
