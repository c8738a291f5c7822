"""`softless explain MODEL`: its numbers are the model's, its words repeat its numbers."""

import json

import pytest

import softless as library
from softless.bench import anatomy
from softless.bench.published import FACTS
from softless.commands import explain
from softless.commands.arguments import model_options
from softless.errors import ArgumentError
from softless.models.table import CONFIGS
from softless.report import units

TINY = ["inline_deit_tiny", "pvt_tiny", "inline_swin_tiny", "cswin_tiny"]
COUNT = ["parameters", "macs"]


def explained(softless, *words):
    result = softless("explain", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def assert_schema(document):
    """The JSON schema is frozen."""
    assert list(document) == [
        "schema", "model", "family", "about", "options", "image_size", "native_size", "stages", "rest", "attention",
        "total", "softmax_twin", "paper", "notes",
    ]  # fmt: skip
    assert document["schema"] == "softless.explain-model/1"
    for stage in document["stages"]:
        assert list(stage) == ["grid", "blocks", "dim", "heads", "kinds", "total", "attention"]
        assert list(stage["total"]) == list(stage["attention"]) == COUNT
        for kind in stage["kinds"]:
            assert list(kind) == ["blocks", "mechanism", "local", "sees"]
    assert list(document["rest"]) == list(document["attention"]) == list(document["total"]) == COUNT
    assert list(document["paper"]) == ["top1", "parameters", "macs"]
    assert (document["softmax_twin"] is None) == (not document["model"].startswith("inline"))


def test_numbers_are_those_of_the_model_and_add_up(softless):
    document = explained(softless, "inline_swin_tiny")
    facts = FACTS["inline_swin_tiny"]
    assert document["total"] == {"parameters": facts.parameters, "macs": facts.macs}
    assert document["image_size"] == document["native_size"] == [224, 224]
    for what in COUNT:
        assert sum(stage["total"][what] for stage in document["stages"]) + document["rest"][what] == getattr(
            facts, what
        )
        assert sum(stage["attention"][what] for stage in document["stages"]) == document["attention"][what]


def test_an_image_size_is_height_then_width(softless, monkeypatch):
    document = explained(softless, "inline_deit_tiny", "--image-size", "32x64")
    assert document["image_size"] == [32, 64]
    assert document["native_size"] == [224, 224]
    assert document["stages"][0]["grid"] == [2, 4]
    monkeypatch.setattr(anatomy, "explain_model", lambda *_, **__: document)
    text = softless("explain", "inline_deit_tiny", "--image-size", "32x64").stdout
    assert "32 x 64; its own are 224 x 224" in text


def test_options_make_another_model_of_which_the_paper_says_nothing(softless):
    words = ("--option", "mechanism=softmax", "--option", "local=false")
    twin = explained(softless, "inline_deit_tiny", "--image-size", "64", *words)
    assert (twin["softmax_twin"], twin["paper"]) == (None, None)
    assert twin["options"] == {"mechanism": "softmax", "local": "false"}
    own = explained(softless, "inline_deit_tiny", "--image-size", "64")
    assert own["softmax_twin"] == twin["total"]
    text = softless("explain", "inline_deit_tiny", "--image-size", "64", *words).stdout
    assert "mechanism=softmax  local=false" in text
    assert "With softmax instead" not in text


@pytest.mark.parametrize("columns", ["80", pytest.param("120", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TINY)
def test_what_is_printed_is_what_the_json_of_the_frozen_schema_says(softless, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", columns)
    document = explained(softless, name, "--image-size", "224x160")
    assert document["model"] == name
    assert_schema(document)
    monkeypatch.setattr(anatomy, "explain_model", lambda *_, **__: document)
    text = softless("explain", name, "--image-size", "224x160").stdout
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "…" not in text
    words = " ".join(text.split())
    assert document["about"] in words
    assert explain.model_verdict(document) in words
    for number, stage in enumerate(document["stages"], 1):
        numbers = " ".join(str(stage[what]) for what in ("blocks", "dim", "heads"))
        count = f"{units.count(stage['total']['parameters'])} {units.macs(stage['total']['macs']).removesuffix('MAC')}"
        shares = "/".join(f"{100 * stage['attention'][what] / stage['total'][what]:.0f}" for what in COUNT)
        assert f"{number} {units.picture(stage['grid'])} {numbers} {count} {shares}%" in words
        for kind in stage["kinds"]:
            assert kind["mechanism"] in words
            assert kind["sees"] in words
    assert f"{document['paper']['top1']:.1f}% top-1" in words


def test_a_verdict_says_how_much_more_softmax_takes():
    count = {"parameters": 6_477_736, "macs": 10**9}
    document = {
        "model": "inline_deit_tiny",
        "image_size": [224, 320],
        "total": count,
        "attention": {"parameters": 647_773, "macs": 5 * 10**7},
        "softmax_twin": {"parameters": 1, "macs": 2 * 10**9},
    }
    assert explain.model_verdict(document) == (
        "inline_deit_tiny: 6.48 M parameters, 1 GMAC at 224 x 320; attention has 10% and 5% of them. "
        "With softmax instead: 2 GMAC, 2x more."
    )


def test_what_a_model_is_says_how_many_blocks_are_mixed():
    about = {name: anatomy.describe(CONFIGS[name]) for name in ("inline_deit_tiny", "inline_swin_base", "swin_tiny")}
    assert about["inline_deit_tiny"].startswith("DeiT, all blocks inline with local residual: a class token")
    assert about["inline_swin_base"].startswith("Swin, 6 of 24 blocks inline with local residual: four stages")
    assert about["swin_tiny"].startswith("Swin: four stages")


BAD_INPUT = [
    (["inline_deit_tiny", "--shape", "1,1,1,1", "--causal"], "--shape and --causal: 'inline_deit_tiny' is a model"),
    (["inline_deit_tiny", "--dtype", "float32"], "--dtype: 'inline_deit_tiny' is a model"),
    (["inline", "--image-size", "224"], "--image-size: 'inline' is no model; a call takes --shape"),
    (
        ["inline_deit_tinny"],
        "nor a model of `softless list --models`: did you mean 'inline_deit_tiny'?",
    ),
    (["vit"], "nor a model of `softless list --models`"),
    (["inline_deit_tiny", "--image-size", "8x64"], "images are 8 x 64 pixels and must be at least 16 x 16"),
    (["inline_deit_tiny", "--option", "heads=3"], "has no option 'heads' here: it takes mechanism, local, window"),
    (["inline_deit_tiny", "--option", "local=perhaps"], "option local is 'perhaps' and must be true or false"),
    (["inline_swin_tiny", "--option", "window=wide"], "option window is 'wide' and must be a number of tokens"),
    (["inline_swin_tiny", "--option", f"window={'9' * 5000}"], "must be a number of tokens"),
    (["inline_swin_tiny", "--option", "window=0"], "window 0 must be a positive number"),
    (["inline_deit_tiny", "--option", "window=7"], "DeiT has a class token"),
    (["inline_swin_tiny", "--option", "pattern=XY"], "pattern 'XY' must have an I, an S"),
    (["inline_swin_tiny", "--option", "mechanism=magic"], "'magic' is not one of softmax"),
    (["swin_tiny", "--option", "window=7"], "window would change no block of model 'swin_tiny'"),
]


@pytest.mark.parametrize(("words", "says"), BAD_INPUT)
def test_bad_input_exits_3_with_one_line_that_repeats_it(softless, words, says):
    result = softless("explain", *words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


@pytest.mark.parametrize("size", ["", "0", "224x", "x224", "224x224x3", "-1", "1e3", "16385", "٣", "9" * 40])
def test_an_image_size_that_is_none_is_a_usage_error(softless, size):
    result = softless("explain", "inline_deit_tiny", "--image-size", size)
    assert result.exit_code == 2
    assert "Usage: softless explain" in result.stderr


def test_options_of_a_model_are_read_by_their_kind():
    words = {"mechanism": "linear", "local": "False", "window": "7,none,14,none", "pattern": "II2S"}
    options = model_options("inline_swin_tiny", words)
    assert options == {"mechanism": "linear", "local": False, "window": [7, None, 14, None], "pattern": "II2S"}
    assert model_options("inline_swin_tiny", {"window": "7"}) == {"window": 7}
    with pytest.raises(ArgumentError, match="has no option 'img_size'"):
        model_options("inline_swin_tiny", {"img_size": "7"})


def test_the_largest_images_are_counted(softless):
    assert explained(softless, "inline_swin_tiny", "--image-size", "16384")["total"]["macs"] > 1e13


def test_no_mechanism_has_the_name_of_a_model():
    assert not set(library.list_mechanisms()) & set(library.list_models())
