"""`softless explain`: its numbers are the formula's, its words repeat its numbers."""

import json

import pytest
import torch

from softless.bench import cost
from softless.kernels.common import choice
from softless.mechanisms import MECHANISMS
from softless.report import units


def explained(softless, *words):
    result = softless("explain", *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# Of those in blocks and of low rank, at every change diagonal and linformer speak for the others.
LATER = {name for name, each in MECHANISMS.items() if each.form in ("blocks", "low rank")} - {"diagonal", "linformer"}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in LATER)) for name in MECHANISMS]
COST = ["form", "flops", "floor_bytes", "weight_bytes", "state_bytes"]


def assert_schema(document):
    """The JSON schema is frozen."""
    assert list(document) == [
        "schema", "mechanism", "formula", "family", "options", "shape", "causal", "dtype", "device", "backend",
        "backend_reason", "cost", "softmax", "ratio", "crossover_tokens", "notes",
    ]  # fmt: skip
    assert document["schema"] == "softless.explain/1"
    assert list(document["shape"]) == ["batch", "heads", "queries", "head_dim", "keys", "kv_heads"]
    assert list(document["cost"]) == list(document["softmax"]) == COST
    assert list(document["ratio"]) == ["flops"]


def test_flops_are_the_hand_formulas(softless):
    batch, heads, tokens, dim = 2, 4, 1000, 32
    document = explained(softless, "inline", "--shape", f"{batch},{heads},{tokens},{dim}")
    assert document["cost"]["flops"] == 4 * batch * heads * tokens * dim**2
    assert document["softmax"]["flops"] == 4 * batch * heads * tokens**2 * dim
    assert document["ratio"]["flops"] == document["cost"]["flops"] / document["softmax"]["flops"]
    assert document["cost"]["floor_bytes"] == 4 * 4 * batch * heads * tokens * dim


def test_shape_words_reach_the_call(softless):
    document = explained(softless, "linear", "--shape", "1,8,16,4", "--keys", "64", "--kv-heads", "2", "--causal")
    assert document["shape"] == {"batch": 1, "heads": 8, "queries": 16, "head_dim": 4, "keys": 64, "kv_heads": 2}
    assert (document["causal"], document["cost"]["form"]) == (True, "chunked state")


def test_options_reach_the_mechanism(softless):
    document = explained(softless, "taylor", "--option", "order=2", "--option", "normalize=true")
    assert document["options"] == {"order": 2, "normalize": True}


def test_half_precision_halves_the_floor_and_says_how_it_is_computed(softless):
    full, half = explained(softless, "inline"), explained(softless, "inline", "--dtype", "bfloat16")
    assert half["cost"]["floor_bytes"] * 2 == full["cost"]["floor_bytes"]
    assert any("float32" in note for note in half["notes"])


def test_cuda_is_counted_without_one(softless):
    document = explained(softless, "inline", "--device", "cuda")
    assert document["cost"]["flops"] == explained(softless, "inline")["cost"]["flops"]


@pytest.mark.parametrize(
    ("name", "reason", "backend", "notes"),
    [
        ("inline", "no recorded evidence", "torch", ["float32", "auto does not use the kernels"]),
        ("inline", None, "triton", []),
        ("hydra", None, "torch", ["float32"]),  # no kernel computes it, tested or not
        ("softmax", "no recorded evidence", "torch", []),  # a kernel of torch's own does
    ],
)
def test_a_note_says_where_auto_leaves_the_kernels_for_lack_of_evidence(
    softless, monkeypatch, name, reason, backend, notes
):
    monkeypatch.setattr(choice, "untested", lambda *_, **__: reason)
    document = explained(softless, name, "--device", "cuda", "--dtype", "bfloat16")
    assert document["backend"] == backend
    assert [
        word for word in ("float32", "auto does not use the kernels") if word in " ".join(document["notes"])
    ] == notes


@pytest.mark.parametrize("columns", ["80", pytest.param("120", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_what_the_json_of_the_frozen_schema_says(softless, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", columns)
    document = explained(softless, name)
    assert_schema(document)
    monkeypatch.setattr(cost, "explain_call", lambda *_, **__: document)
    text = softless("explain", name).stdout
    assert max(map(len, text.splitlines())) <= int(columns)
    words = " ".join(text.split())
    own, softmax = document["cost"]["flops"], document["softmax"]["flops"]
    assert units.flops(own, beside=softmax) in words
    assert units.flops(softmax, beside=own) in words
    assert document["cost"]["form"] in words
    assert " ".join(document["formula"].split()) in words
    if document["crossover_tokens"]:
        assert f"at about {document['crossover_tokens']:,} tokens" in words


def test_help_names_its_argument_and_defaults_in_plain_words(softless):
    said = softless("explain", "--help").stdout
    assert said.startswith("Usage: softless explain [OPTIONS] NAME\n")
    assert "<str>" not in said
    assert "default: (" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_note_advises_a_backend_that_needs_one(softless):
    notes = explained(softless, "delta", "--device", "cuda")["notes"]
    assert notes
    assert not any("triton" in note for note in notes)


def test_a_verdict_says_how_much_less(softless):
    words = " ".join(softless("explain", "inline").stdout.split())
    assert "inline: 0.537 GFLOP, softmax: 34.4 GFLOP, 64x less." in words
    assert "They cost the same at about 64 tokens; beyond, inline costs less." in words


def test_units_read_as_people_write_them():
    assert units.flops(0) == "0 FLOP"
    assert units.flops(1e6) == "1 MFLOP"
    assert units.flops(541e6, beside=34.4e9) == "0.541 GFLOP"
    assert units.flops(12.6e6, beside=34.4e9) == "12.6 MFLOP"
    assert units.flops(9.99e20) == "999,000 PFLOP"
    assert units.size(999.7) == "1 kB"
    assert units.size(137_224) == "137 kB"
    assert units.seconds(0.00125) == "1.25 ms"
    assert units.seconds(2) == "2 s"
    assert units.macs(4_458_974_208) == "4.46 GMAC"
    assert units.count(29_223_544) == "29.2 M"
    assert units.count(12) == "12"
    assert units.percent(0.0123) == "1.2%"
    assert units.percent(0.345) == "34%"
    assert units.picture((224, 320)) == "224 x 320"
    assert units.compare(1.0, "more", "less") == "the same"
    assert units.compare(0.25, "more", "less") == "4x less"
    assert units.compare(1.5, "more", "less") == "1.5x more"
