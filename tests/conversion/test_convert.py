"""A conversion: what it does to the model, what it promises, and that it goes on where it stopped."""

import json
from math import exp

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    PreTrainedModel,
)

import softless
from softless.conversion import choosing
from softless.conversion.pipeline import layers_of
from softless.conversion.shortcut import Shortcut
from softless.errors import ArgumentError, NonFiniteError, SoftlessError, UnsupportedError
from softless.probes.running import Estimate
from softless.transformers import mechanisms_of, set_mechanism
from tests.language.models import CAUSAL, ENCODERS, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*do not drop weights")
LOOSE = {"budget": 1.0, "candidates": ["linear"], "steps": 2}


class Killed(BaseException):
    """As a signal would end the process."""


def model_of(name: str, auto=None) -> PreTrainedModel:
    torch.manual_seed(0)
    auto = auto or (AutoModelForCausalLM if name in CAUSAL else AutoModel)
    return auto.from_config((CAUSAL.get(name) or ENCODERS[name])()).eval()


def data_for(name: str, samples: int = 24, seed: int = 0) -> torch.Tensor:
    if name in ("vit", "deit"):
        return torch.randn(samples, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return tokens(samples, 20, seed)


def output(model: PreTrainedModel, data: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(data)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "roberta", "vit", "deit"])
def test_layers_become_linear_and_undo_restores_the_model_to_the_bit(name):
    """R22."""
    model, data = model_of(name), data_for(name)
    before, config = output(model, data), model.config.to_dict()
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    conversion = softless.convert(model, data, **LOOSE)
    assert any(layer.converted for layer in conversion.layers)
    names = ["linear" if layer.converted else "softmax" for layer in conversion.layers]
    assert [made.name for made in mechanisms_of(model)] == names
    assert not torch.equal(output(model, data), before)
    conversion.undo()
    assert torch.equal(output(model, data), before)
    assert model.config.to_dict() == config
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())


def test_undo_keeps_the_layers_that_were_linear_before():
    model, data = model_of("llama"), data_for("llama")
    set_mechanism(model, "delta", layers=[1])
    before, config = output(model, data), model.config.to_dict()
    conversion = softless.convert(model, data, **LOOSE)
    assert [layer.name for layer in conversion.layers] == [f"model.layers.{at}.self_attn" for at in (0, 2)]
    assert mechanisms_of(model)[1].name == "delta"
    conversion.undo()
    assert torch.equal(output(model, data), before)
    assert model.config.to_dict() == config


def test_a_saved_conversion_loads_with_from_pretrained(tmp_path):
    model, data = model_of("llama"), data_for("llama")
    conversion = softless.convert(model, data, budget=1.0, candidates=["linear", "delta"], steps=2)
    conversion.save(tmp_path / "converted")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert mechanisms_of(again) == mechanisms_of(model)
    assert torch.equal(output(again, data), output(model, data))
    assert json.loads((tmp_path / "converted/conversion.json").read_text()) == conversion.document
    assert [path.name for path in tmp_path.iterdir()] == ["converted"]


def test_a_folder_that_is_no_conversion_is_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    conversion = softless.convert(model_of("llama"), data_for("llama"), **LOOSE)
    with pytest.raises(SoftlessError, match="is no conversion"):
        conversion.save(tmp_path / "mine")
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"


def test_the_harm_of_a_layer_is_the_growth_of_the_perplexity():
    """Delivered on the part that proves, found again by hand with the converted model and the original."""
    model, data = model_of("llama"), data_for("llama", 40)
    conversion = softless.convert(model, data, **LOOSE)
    prove = data[torch.randperm(40, generator=torch.Generator().manual_seed(0))[30:]]
    with torch.no_grad():
        after = float(model(prove, labels=prove).loss)
        conversion.undo()
        before = float(model(prove, labels=prove).loss)
    document = conversion.document
    assert document["before"] == pytest.approx(exp(before), rel=1e-4)
    assert document["after"] == pytest.approx(exp(after), rel=1e-4)
    assert document["delivered"]["mean"] == pytest.approx(exp(after - before) - 1, abs=1e-4)
    assert document["delivered"]["n"] == 10


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_layer_alone_does_not_run_the_blocks_before_it(name, monkeypatch):
    def measured() -> list[object]:
        conversion = softless.convert(model, data_for(name), **LOOSE)
        conversion.undo()
        return [layer["damage"] for layer in conversion.document["layers"]]

    model = model_of(name)
    quick = measured()
    runs = []
    for path in layers_of(model).names:
        model.get_submodule(path).register_forward_hook(lambda *_: runs.append(None))
    measured()
    few = len(runs)
    monkeypatch.setattr(Shortcut, "blocks", lambda _layers: [])
    assert measured() == quick
    assert few < len(runs) - few


def test_layers_are_added_least_damage_first_up_to_the_budget():
    model, data = model_of("llama"), data_for("llama", 64)
    highs = []
    for layers in (1, 2):
        conversion = softless.convert(model, data, **LOOSE, layers=layers)
        conversion.undo()
        highs.append(conversion.document["predicted"]["high"])
    budget = sum(highs) / 2
    assert highs[0] < budget < highs[1], "otherwise the test needs another model"
    some = softless.convert(model, data, **LOOSE | {"budget": budget})
    assert [layer.name for layer in some.layers if layer.converted] == [
        layer.name for layer in some.layers if layer.rank == 0
    ]
    damages = [layer.damage.mean for layer in sorted(some.layers, key=lambda layer: layer.rank)]
    assert damages == sorted(damages)


def test_the_largest_count_inside_the_budget_is_found_in_few_tries():
    class Steady:
        def harm(self, chosen: list[int], _label: str) -> Estimate:
            return Estimate(*[float(len(chosen)) ** power] * 3, 9)

    for power, total in ((power, total) for power in (1.0, 1.5, 0.5) for total in range(1, 34)):
        for most in range(total + 1):
            tried = choosing.add(Steady(), list(range(total)), most**power)
            assert max((number for number in tried if number <= most), default=0) == most
            assert len(tried) <= 2 * total.bit_length()


def test_fitting_brings_a_learned_map_closer_to_the_softmax():
    model, data = model_of("llama"), data_for("llama", 64)
    errors = []
    for steps in (1, 40):
        conversion = softless.convert(model, data, **LOOSE | {"steps": steps})
        conversion.undo()
        errors.append([next(iter(layer.errors.values())) for layer in conversion.layers])
    assert all(fitted < begun for begun, fitted in zip(*errors, strict=True)), errors


def test_a_causal_model_gets_nearfar_with_a_window_that_leaves_tokens_far():
    conversion = softless.convert(model_of("llama"), data_for("llama"), budget=1.0, steps=2)
    assert conversion.document["candidates"] == ["nearfar window=2"]  # of 20 tokens
    assert {made.name for made in mechanisms_of(conversion.model)} >= {"nearfar"}
    short = torch.cat([data_for("llama")[:1]] * 2, 1)
    generated = conversion.model.generate(short, max_new_tokens=4, do_sample=False, eos_token_id=-1)
    whole = output(conversion.model, generated)
    assert torch.equal(generated[0, 40:], whole[0, 39:-1].argmax(-1))


# After each kind of step: fitting, comparing candidates, the original, alone, adding layers, proving.
@pytest.mark.parametrize(
    "stop", [2, 10, 16, *(pytest.param(stop, marks=pytest.mark.slow) for stop in range(18) if stop not in (2, 10, 16))]
)
def test_a_killed_conversion_goes_on_to_the_same_layers(tmp_path, stop, monkeypatch):
    monkeypatch.setattr("softless.conversion.fitting.SAVE_EVERY", 3)
    options = LOOSE | {"steps": 8, "candidates": ["linear", "delta"]}
    right = softless.convert(model_of("llama"), data_for("llama"), **options)

    def kill(_label, _amount, calls=iter(range(10**6))):  # noqa: B008  one count per call of the test
        if next(calls) == stop:
            raise Killed

    model = model_of("llama")
    before = output(model, data_for("llama"))
    with pytest.raises(Killed):
        softless.convert(model, data_for("llama"), **options, work=tmp_path, watch=kill)
    assert torch.equal(output(model, data_for("llama")), before)
    labels: list[str] = []
    found = softless.convert(
        model_of("llama"), data_for("llama"), **options, work=tmp_path, watch=lambda label, _: labels.append(label)
    )
    assert found.layers == right.layers
    for name in ("frontier", "delivered", "predicted", "verdict"):
        assert found.document[name] == right.document[name]


def test_a_finished_conversion_measures_nothing_again(tmp_path, monkeypatch):
    softless.convert(model_of("llama"), data_for("llama"), **LOOSE, work=tmp_path)
    monkeypatch.setattr(choosing.Layers, "having", None)
    again = softless.convert(model_of("llama"), data_for("llama"), **LOOSE, work=tmp_path)
    assert again.document["delivered"] is not None


def test_a_broken_promise_is_told(monkeypatch):
    """The part that chooses is made to hide the damage."""
    real = choosing.Ruler.compared

    def hide(ruler, chosen, *how):
        rows = real(ruler, chosen, *how)
        return [[0.0] for _ in rows] if ruler.name == "choose" else [[1.0] for _ in rows]

    monkeypatch.setattr(choosing.Ruler, "compared", hide)
    conversion = softless.convert(model_of("llama"), data_for("llama"), **LOOSE | {"budget": 0.01})
    assert not conversion.kept_promise
    assert "breaks the budget of 1 %" in conversion.document["verdict"]


def test_masked_words_and_classes_are_measured_by_their_labels():
    words = data_for("bert")
    labels = words.masked_fill(torch.arange(20) % 5 != 2, -100)
    masked = softless.convert(model_of("bert", AutoModelForMaskedLM), {"input_ids": words, "labels": labels}, **LOOSE)
    assert masked.document["metric"] == "masked"
    pictures, classes = data_for("vit"), torch.arange(24) % 2
    labeled = {"pixel_values": pictures, "labels": classes}
    sorted_ = softless.convert(model_of("vit", AutoModelForImageClassification), labeled, **LOOSE)
    assert sorted_.document["metric"] == "accuracy"
    assert 0 <= sorted_.document["before"] <= 1


def test_an_encoder_tries_nearfar_beside_the_others():
    conversion = softless.convert(model_of("bert"), data_for("bert"), budget=1.0, steps=1)
    names = [name.split()[0] for name in conversion.document["candidates"]]
    assert names == ["nearfar", "inline", "linear", "regress"]


def test_padding_changes_no_result():
    words = data_for("bert")
    mask = torch.ones_like(words)
    longer = torch.nn.functional.pad(words, (0, 6))
    padded = {"input_ids": longer, "attention_mask": torch.nn.functional.pad(mask, (0, 6))}
    results = [
        softless.convert(model_of("bert"), data, **LOOSE | {"steps": 4}).document["delivered"]["mean"]
        for data in ({"input_ids": words, "attention_mask": mask}, padded)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-2)


def without_softmax() -> PreTrainedModel:
    model = model_of("llama")
    set_mechanism(model, "linear")
    return model


def broken() -> PreTrainedModel:
    model = model_of("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    return model


REFUSED = {
    "budget 0": (model_of, {"budget": 0}, ArgumentError, "budget is 0 and must be above 0 and at most 1"),
    "no layers": (model_of, {"layers": 0}, ArgumentError, "layers is 0 and must be a whole number from 1 on"),
    "too many layers": (model_of, {"layers": 4}, ArgumentError, "layers is 4, and the model has 3 layers"),
    "no minutes": (model_of, {"heal": 0}, ArgumentError, "heal is 0 and must be a number of minutes above 0"),
    "a rank of nothing": (model_of, {"heal": 1, "rank": 0}, ArgumentError, "rank is 0"),
    "a rank without healing": (model_of, {"rank": 2}, ArgumentError, "nothing is healed"),
    "budget above 1": (model_of, {"budget": 1.5}, ArgumentError, "budget is 1.5"),
    "no softmax": (lambda _: without_softmax(), {}, UnsupportedError, "no layer of softmax attention"),
    "not finite": (lambda _: broken(), {}, NonFiniteError, "is not a finite number"),
    "scored candidate": (model_of, {"candidates": ["topk"]}, ArgumentError, "a candidate must be linear"),
    "no candidate": (model_of, {"candidates": []}, ArgumentError, "candidates is empty"),
    "unknown metric": (model_of, {"metric": "beauty"}, ArgumentError, "beauty"),
    "a metric of classes": (
        model_of, {"metric": "accuracy"}, ArgumentError,
        "metric 'accuracy' does not fit LlamaForCausalLM: metric can be perplexity or cosine"
    ),
    "one candidate": (
        model_of, {"candidates": "inline"}, ArgumentError, r"candidates is 'inline' and must be a list .*: \['inline'\]"
    ),
    "no name of a candidate": (model_of, {"candidates": [3]}, ArgumentError, r"candidates is \[3\] and must be a list"),
    "no labels": (
        lambda _: model_of("bert", AutoModelForMaskedLM), {}, ArgumentError, "BertForMaskedLM is measured by its labels"
    ),
    "another model": (lambda _: torch.nn.Linear(2, 2), {}, ArgumentError, "must be a model of softless, timm"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_sentence_and_changes_nothing(case):
    make, options, error, sentence = REFUSED[case]
    model = make("llama")
    before = {key: x.clone() for key, x in model.state_dict().items()}
    with pytest.raises(error, match=sentence):
        softless.convert(model, data_for("llama"), **LOOSE | options)
    assert model.state_dict().keys() == before.keys()


def test_too_few_samples_and_unequal_tensors_are_refused():
    with pytest.raises(ArgumentError, match="data has 15 samples, and at least 16 are needed"):
        softless.convert(model_of("llama"), data_for("llama", 15), **LOOSE)
    uneven = {"input_ids": tokens(20, 8), "attention_mask": torch.ones(19, 8)}
    with pytest.raises(ArgumentError, match="input_ids 20, attention_mask 19"):
        softless.convert(model_of("llama"), uneven, **LOOSE)


def test_layers_with_another_mechanism_belong_to_the_original_and_are_not_converted():
    """The damage of a layer alone is found again by hand, with the mechanisms of the others as they were."""
    torch.manual_seed(0)
    config, data = CAUSAL["llama"](), data_for("llama", 40)
    config.num_hidden_layers = 5
    model = AutoModelForCausalLM.from_config(config).eval()
    set_mechanism(model, "nearfar", layers=[1, 3], window=4, first=1)
    given = mechanisms_of(model)
    choose = data[torch.randperm(40, generator=torch.Generator().manual_seed(0))[20:30]]
    plain = softless.mechanism("linear", phi="relu")  # learns nothing
    conversion = softless.convert(model, data, **LOOSE | {"candidates": [plain]})
    linear = [layer.converted for layer in conversion.layers]
    assert [layer.name for layer in conversion.layers] == [f"model.layers.{at}.self_attn" for at in (0, 2, 4)]
    assert [made.name for made in mechanisms_of(model)][::2] == ["linear" if each else "softmax" for each in linear]
    conversion.undo()
    assert mechanisms_of(model) == given

    def loss() -> float:
        with torch.no_grad():
            return float(model(choose, labels=choose).loss)

    before = loss()
    for at, layer in zip((0, 2, 4), conversion.layers, strict=True):
        set_mechanism(model, plain, layers=[at])
        assert layer.damage.mean == pytest.approx(exp(loss() - before) - 1, abs=1e-4)
        set_mechanism(model, "softmax", layers=[at])


def test_mechanisms_that_the_attention_implementation_ignores_are_refused():
    model = model_of("llama")
    set_mechanism(model, "delta", layers=[1])
    model.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match=r"'sdpa' ignores the mechanisms .*set_attn_implementation\('softless'\)"):
        softless.convert(model, data_for("llama"), **LOOSE)
