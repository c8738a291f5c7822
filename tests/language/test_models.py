"""Mechanisms in models of transformers: which layers have them, what is saved, packs, encoders, gradients, refusals."""

import json
import pickle
import re
from copy import deepcopy

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, DataCollatorWithFlattening, T5Config, T5Model

import softless
from softless.errors import ArgumentError, SoftlessError, UnsupportedError
from softless.transformers import ARCHITECTURES, mechanisms_of, set_mechanism
from tests.language.models import ATTENTIONS, CAUSAL, ENCODERS, causal, encoder, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)
LEARNED = {
    "delta": {},
    "nearfar": {"window": 2, "first": 1, "maps": "separate", "features": 6},
    "linear": {"phi": "affine_relu"},
    "regress": {"ridge": "learned", "relative": False},
}


def names(model):
    return [made.name for made in mechanisms_of(model)]


def test_every_architecture_is_tried_here():
    assert {*CAUSAL, *ENCODERS} == set(ARCHITECTURES)


def test_layers_left_out_keep_softmax_and_can_be_restored():
    model, ids = causal(attention="mixed"), tokens(2, 12)
    assert names(model) == ["linear", "softmax", "linear"]
    set_mechanism(model, "inline", [1])
    assert names(model) == ["linear", "inline", "linear"]
    set_mechanism(model, "softmax")
    assert names(model) == ["softmax"] * 3
    mine = model(ids).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(mine, model(ids).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", CAUSAL)
def test_softmax_layers_give_what_transformers_gives(name):
    """With padding on the left, windows included."""
    model, ids = causal(name, "linear"), tokens(2, 15)
    set_mechanism(model, "softmax")
    seen = torch.ones(2, 15, dtype=torch.long)
    seen[0, :4] = 0
    found = []
    for implementation in ("softless", "sdpa"):
        model.set_attn_implementation(implementation)
        found.append(model(ids, attention_mask=seen).logits[seen.bool()])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LEARNED)
def test_a_saved_model_comes_back_with_its_mechanisms_and_what_they_learned(name, tmp_path):
    model, ids = causal(attention="mixed", dtype=torch.float32), tokens(2, 12)
    set_mechanism(model, name, [1], **LEARNED[name])
    learned = {key: x for key, x in model.state_dict().items() if ".softless." in key}
    assert learned
    with torch.no_grad():
        for x in learned.values():
            x.add_(0.1 * torch.randn_like(x))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert mechanisms_of(again) == mechanisms_of(model)
    assert json.loads((tmp_path / "config.json").read_text())["softless"].keys() == {"0", "1", "2"}
    assert torch.equal(again(ids).logits, model(ids).logits)
    bare = AutoModel.from_pretrained(tmp_path)  # the model without its head
    assert mechanisms_of(bare) == mechanisms_of(model)
    assert torch.equal(bare(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_what_a_checkpoint_does_not_hold_starts_as_the_mechanism_says(tmp_path):
    plain = causal(attention="linear", dtype=torch.float32)
    set_mechanism(plain, "softmax")
    plain.save_pretrained(tmp_path)
    config = plain.config
    config.softless = {"1": {"name": "regress", "options": {"ridge": "learned", "relative": False}}}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    fresh = causal(dtype=torch.float32)
    set_mechanism(fresh, "regress", [1], ridge="learned", relative=False)
    key = "model.layers.1.self_attn.softless.ridge"
    assert torch.equal(model.state_dict()[key], fresh.state_dict()[key])


@every_attention
def test_a_pack_equals_its_parts(attention):
    """Also where a neighbor holds NaN, which must stay there."""
    model = causal(attention=attention)
    parts = [tokens(1, count, count) for count in (9, 1, 14)]
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": part[0].tolist()} for part in parts])
    batch = {name: batch[name] for name in ("input_ids", "position_ids")}
    spoiled = model.get_input_embeddings()(batch["input_ids"])
    spoiled[:, 9:10] = torch.nan
    right = [model(part, use_cache=False).logits for part in parts]
    for given in (
        {"input_ids": batch["input_ids"]}, {"inputs_embeds": spoiled},
    ):  # fmt: skip
        found = model(**given, position_ids=batch["position_ids"], use_cache=False).logits.split([9, 1, 14], 1)
        for at in (0, 2) if "inputs_embeds" in given else (0, 1, 2):
            torch.testing.assert_close(found[at], right[at], atol=1e-5, rtol=1e-5)


@every_attention
def test_offsets_of_sequences_do_what_positions_do(attention):
    model, ids = causal(attention=attention), tokens(2, 12)
    places = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    offsets = torch.tensor([0, 5, 12, 17, 24], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
    by_places = model(ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(model(ids, position_ids=places, use_cache=False, **packed).logits, by_places)


@pytest.mark.parametrize("name", LEARNED)
def test_a_pack_has_the_gradients_of_its_parts(name):
    model = causal(attention="linear")
    set_mechanism(model, name, **LEARNED[name])
    parts = [tokens(1, 6, 1), tokens(1, 9, 2)]
    places = torch.cat([torch.arange(6), torch.arange(9)])[None]
    sums = []
    for run in (
        lambda: model(torch.cat(parts, 1), position_ids=places, use_cache=False).logits.square().sum(),
        lambda: sum(model(part, use_cache=False).logits.square().sum() for part in parts),
    ):
        model.zero_grad()
        run().backward()
        sums.append({key: x.grad.clone() for key, x in model.named_parameters() if ".softless." in key})
    assert sums[0]
    assert all((x != 0).any() for x in sums[0].values())
    torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-4)


def test_a_cache_that_was_filled_with_a_pack_cannot_go_on():
    model, ids = causal(), tokens(1, 12)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    cache = model(ids, position_ids=places, use_cache=True).past_key_values
    with pytest.raises(UnsupportedError, match="the cache cannot go on: it was filled with packed sequences"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(UnsupportedError, match="position_ids begin again inside a row"):
        model(ids, position_ids=places, past_key_values=model(ids, use_cache=True).past_key_values)


@pytest.mark.parametrize("ends", [[0, 4, 11], [1, 4, 12], [0, 9, 4, 12]])
def test_offsets_that_do_not_cover_the_tokens_are_refused(ends):
    said = f"cu_seq_lens_q is {re.escape(str(ends))} and must rise from 0 to the number of tokens, 12"
    with pytest.raises(ArgumentError, match=said):
        causal()(tokens(1, 12), cu_seq_lens_q=torch.tensor(ends))


@pytest.mark.parametrize("mechanism", ["inline", "linear", "efficient", "regress", "threshold", "nearfar"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_padding_changes_nothing_in_an_encoder_of_words(name, mechanism):
    model, ids = encoder(name, mechanism), tokens(2, 10)
    alone = model(ids[:1, :6]).last_hidden_state
    seen = torch.ones(2, 10, dtype=torch.long)
    seen[0, 6:] = 0
    beside = model(ids, attention_mask=seen).last_hidden_state[:1, :6]
    torch.testing.assert_close(beside, alone, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_an_encoder_of_pictures_attends_with_its_mechanism(name, monkeypatch):
    ran = []
    front = softless.transformers.attention.attention
    monkeypatch.setattr(
        "softless.transformers.attention.attention",
        lambda *given, **how: ran.append(given[3].name) or front(*given, **how),
    )
    model = encoder(name, "inline")
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    mine = model(pixels).last_hidden_state
    assert ran == ["inline"] * 3
    set_mechanism(model, "softmax")
    assert (model(pixels).last_hidden_state - mine).abs().max() > 1e-3


def test_checkpointed_layers_have_the_same_gradients():
    model, ids, found = causal(attention="delta").train(), tokens(2, 12), []
    for switch in (model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        switch()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append({key: x.grad.clone() for key, x in model.named_parameters() if ".softless." in key})
    torch.testing.assert_close(*found)


def test_a_copy_of_a_model_is_a_model_of_its_own():
    model, ids = causal(attention="mixed"), tokens(2, 12)
    for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        right = model(ids).logits
        assert torch.equal(copied(ids).logits, right)
        set_mechanism(copied, "inline")
        assert torch.equal(model(ids).logits, right)


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    model = T5Model(T5Config(d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2, vocab_size=20))
    with pytest.raises(
        UnsupportedError, match="softless does not know architecture 't5': it knows gpt2, gpt_neox, llama"
    ):
        set_mechanism(model, "linear")
    with pytest.raises(ArgumentError, match="model is a Linear and must be a model of transformers"):
        set_mechanism(torch.nn.Linear(2, 2), "linear")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nystrom", "mixes all tokens"),
        ("longformer", "has no state to decode from"),
        ("regress", "has a ridge relative to the trace of all keys, so its causal form needs relative=False"),
    ],
)
def test_a_mechanism_that_cannot_decode_is_refused_in_a_causal_model(name, reason):
    said = f"is causal, and mechanism '{name}' {reason}.*; with their defaults, these decode: linear"
    with pytest.raises(UnsupportedError, match=said) as raised:
        set_mechanism(causal(), name)
    assert "regress," not in str(raised.value)


def test_bad_layers_and_options_are_refused_and_change_nothing():
    model = causal(attention="mixed")
    with pytest.raises(ArgumentError, match="layer 3 does not exist: the model has layers 0 to 2"):
        set_mechanism(model, "inline", [1, 3])
    for layers in (1, "all"):
        with pytest.raises(ArgumentError, match=f"layers is {layers!r} and must be a list of numbers"):
            set_mechanism(model, "inline", layers)
    with pytest.raises(ArgumentError, match="options phi were passed beside a mechanism"):
        set_mechanism(model, softless.mechanism("linear"), phi="relu")
    with pytest.raises(UnsupportedError, match="phi of mechanism 'linear' is a function, which no config"):
        set_mechanism(model, softless.mechanism("linear", phi=torch.sin))
    assert names(model) == ["linear", "softmax", "linear"]


def test_dropout_of_weights_is_said_to_be_left_out():
    torch.manual_seed(0)
    config = CAUSAL["llama"](attention_dropout=0.1)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match="attention_dropout is 0.1, and layers with 'linear' do not drop weights"):
        set_mechanism(model, "linear")


@pytest.mark.parametrize("attention", ["linear", "mixed"])
def test_weights_that_nobody_forms_are_refused_and_not_left_out(attention):
    with pytest.raises(UnsupportedError, match="output_attentions is True, and softless returns no attention weights"):
        causal(attention=attention)(tokens(1, 4), output_attentions=True)
    with pytest.raises(UnsupportedError, match="output_attentions is True"):
        encoder("bert")(tokens(1, 4), output_attentions=True)


@pytest.mark.parametrize("loaded", [False, True])
def test_softmax_in_all_layers_brings_back_the_attention_implementation_from_before(loaded, tmp_path):
    model = AutoModelForCausalLM.from_config(CAUSAL["llama"](), attn_implementation="eager").eval()
    right = model(tokens(1, 6), output_attentions=True)
    set_mechanism(model, "linear")
    if loaded:
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    set_mechanism(model, "softmax", [0, 1])
    with pytest.raises(UnsupportedError, match="output_attentions is True"):
        model(tokens(1, 6), output_attentions=True)
    set_mechanism(model, "softmax", [2])
    again = model(tokens(1, 6), output_attentions=True)
    assert torch.equal(again.logits, right.logits)
    assert all(torch.equal(x, y) for x, y in zip(again.attentions, right.attentions, strict=True))
    set_mechanism(model, "linear", [2])
    assert model.config._attn_implementation == "softless"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("linear", "config.softless is 'linear' and must be"),
        ({"0": {"nam": "linear"}}, "config.softless is .* and must be"),
        ({"0": {"name": "nope", "options": {}}}, "mechanism 'nope' is not one of"),
        ({"0": {"name": "nystrom", "options": {}}}, "LlamaModel is causal, and mechanism 'nystrom' mixes all tokens"),
        ({"9": {"name": "linear", "options": {}}}, "layer 9 does not exist: the model has layers 0 to 2"),
    ],
)
def test_damaged_settings_in_a_config_are_refused(settings, said):
    with pytest.raises(SoftlessError, match=said):
        AutoModelForCausalLM.from_config(CAUSAL["llama"](softless=settings))


def test_settings_in_the_config_of_an_unknown_architecture_are_refused():
    config = T5Config(d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2, vocab_size=20)
    config.softless = {"0": {"name": "linear", "options": {}}}
    with pytest.raises(UnsupportedError, match="softless does not know architecture 't5'"):
        T5Model(config)
