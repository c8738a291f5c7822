"""`softless list` says what the table of mechanisms says."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import softless as library
from softless.bench.cost import Shape, Terms, flops
from softless.commands.arguments import make_mechanism, option_text
from softless.errors import SoftlessError, UnsupportedError
from softless.mechanisms import MECHANISMS
from softless.report import units
from softless.train.recipe import shipped

ROOT = Path(__file__).parents[2]


def listed(softless):
    return json.loads(softless("list", "--json").stdout)


def test_the_json_schema_is_frozen(softless):
    document = listed(softless)
    assert list(document) == ["schema", "mechanisms"]
    assert document["schema"] == "softless.list/1"
    for row in document["mechanisms"]:
        assert list(row) == [
            "name", "family", "formula", "cost", "paper", "causal", "state", "bias", "grid", "options",
        ]  # fmt: skip


def test_every_mechanism_is_listed_with_its_options(softless):
    rows = listed(softless)["mechanisms"]
    assert [row["name"] for row in rows] == library.list_mechanisms()
    for row in rows:
        assert row["options"] == {field.name: option_text(field.default) for field in fields(MECHANISMS[row["name"]])}
        assert row["formula"] == MECHANISMS[row["name"]].formula
        assert row["cost"] == MECHANISMS[row["name"]].cost
        where = "" if row["name"] == "threshold" else r", (arXiv \d{4}\.\d{5}|spaces\.ac\.cn/archives/\d+)"
        assert re.fullmatch(rf"[A-Z].* (19|20)\d\d{where}", row["paper"]), "who, when and where"


def test_abilities_are_those_the_mechanisms_show(softless):
    q, k, v = torch.randn(3, 1, 2, 4, 4).unbind()
    for row in listed(softless)["mechanisms"]:
        mechanism = make_mechanism(row["name"], {})

        def can(call, mechanism=mechanism):
            inputs = {name: torch.rand(shape) for name, shape in mechanism.needed(q, k).items()}
            try:
                call(mechanism, inputs)
            except UnsupportedError:
                return False
            return True

        assert row["causal"] == can(
            lambda mechanism, i: library.attention(q, k, v, mechanism, inputs=i, is_causal=True)
        )
        assert row["state"] == can(lambda mechanism, i: library.attention_with_state(q, k, v, mechanism, inputs=i))
        assert row["bias"] == can(
            lambda mechanism, i: library.attention(q, k, v, mechanism, inputs=i, bias=torch.zeros(4, 4))
        )
        assert row["grid"] == can(
            lambda mechanism, i: library.attention(
                q, k, v, mechanism, inputs=i, grid=(2, 2), is_causal=bool(mechanism.lacks(False))
            )
        )


# Options with which the default's stand-ins, windows and lengths are far from the number of tokens.
SMALL = {
    "linformer": {"rank": 16, "length": 8192},
    "longformer": {"window": 16},
    "reformer": {"window": 8},
    "sparse": {"stride": 16},
    "cosformer": {"length": 8192},
    "nystrom": {"landmarks": 8},
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_cost_is_what_is_counted(name):
    """Twice the tokens: four times the products where the cost says N^2, and twice where it says N."""
    mechanism = make_mechanism(name, {}) if name == "general" else library.mechanism(name, **SMALL.get(name, {}))
    tokens = 512 if mechanism.family == "recurrent" else 4096
    causal = mechanism.lacks(False) is not None
    once, twice = (
        flops(mechanism, Terms(shape=Shape(1, 2, n, 8, n, 2), is_causal=causal)) for n in (tokens, 2 * tokens)
    )
    squared = "N^2" in mechanism.cost or "N/l" in mechanism.cost
    assert twice / once == pytest.approx(4 if squared else 2, rel=0.1)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_short_table_has_one_line_for_each_mechanism_under_its_family(softless, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = softless("list").stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    family, seen = "", []
    for line in lines[1 : lines.index("")]:
        if not line.startswith(" "):
            family = line.partition(":")[0]
            continue
        name = line.split()[0]
        row = next(row for row in listed(softless)["mechanisms"] if row["name"] == name)
        seen.append(name)
        assert row["family"] == family
        assert row["cost"] in line
        assert name == "threshold" or line.endswith(re.search(r"\d{4}", row["paper"])[0])
        can = [("-", "yes")[row[ability]] for ability in ("causal", "state", "bias", "grid")]
        assert " ".join(can) in " ".join(line.split())
    assert sorted(seen) == sorted(library.list_mechanisms())


def test_no_paper_is_cut_in_the_short_table(softless):
    said = softless("list").stdout
    assert "..." not in said
    assert "a note of 2024" in said


def test_every_recipe_is_listed(softless):
    document = json.loads(softless("list", "--recipes", "--json").stdout)
    assert document["schema"] == "softless.list-recipes/1"
    assert [row["name"] for row in document["recipes"]] == list(shipped())
    short, wide = (softless("list", "--recipes", *more).stdout for more in ((), ("--wide",)))
    assert max(map(len, short.splitlines())) <= 80
    for row in document["recipes"]:
        assert list(row) == [
            "name", "model", "image_size", "length", "batch", "epochs", "precision", "expected", "cost", "command",
        ]  # fmt: skip
        sides = row["image_size"] if isinstance(row["image_size"], list) else [row["image_size"]] * 2
        size = f"{row['length']} tokens" if row["length"] else " x ".join(map(str, sides))
        assert f"{row['name']} {row['model']} {size} {row['batch']:,}" in " ".join(short.split())
        assert row["expected"] in wide
        assert row["command"] in wide


@pytest.mark.parametrize(
    "words", [["--models", "--recipes"], ["--models", "--wide"], ["--wide", "--json"]], ids=" ".join
)
def test_words_that_contradict_each_other_are_refused(softless, words):
    result = softless("list", *words)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)


@pytest.mark.parametrize("columns", ["80", "100", "120"])
def test_the_wide_table_fits_and_holds_every_name_formula_and_option(softless, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    text = softless("list", "--wide").stdout
    assert max(map(len, text.splitlines())) <= int(columns)
    lines = text.splitlines()
    cuts = [lines[0].index(column) for column in ("family", "formula")]
    left, middle, words = (
        " ".join(" ".join(line[a:b] for line in lines).split()) for a, b in zip((0, *cuts), (*cuts, None), strict=True)
    )
    for row in listed(softless)["mechanisms"]:
        assert f"{row['name']} {row['paper']}" in left
        assert f"{row['family']} {row['cost']}" in middle
        for part in row["formula"].split(", "):
            assert " ".join(part.split()) in words
        for option, default in row["options"].items():
            assert (f"{option}={default}" if row["name"] != "general" else "needs sim, a function") in words


def listed_models(softless):
    return json.loads(softless("list", "--models", "--json").stdout)


def test_the_json_schema_of_models_is_frozen(softless):
    document = listed_models(softless)
    assert list(document) == ["schema", "models"]
    assert document["schema"] == "softless.list-models/1"
    for row in document["models"]:
        assert list(row) == [
            "name", "family", "parameters", "macs", "image_size", "blocks", "softmax_blocks", "paper",
        ]  # fmt: skip
        assert list(row["paper"]) == ["top1", "parameters", "macs"]


def test_every_model_is_listed_with_what_the_code_counts_and_the_paper_prints(softless):
    rows = {row["name"]: row for row in listed_models(softless)["models"]}
    assert list(rows) == library.list_models()
    large = rows["inline_pvt_large"]
    assert (large["parameters"], large["paper"]["parameters"]) == (51_154_280, 50_200_000)
    assert (large["image_size"], large["paper"]["top1"]) == ([224, 224], 83.6)
    assert rows["inline_deit_small"]["image_size"] == [288, 288]
    softmax = {name: (row["softmax_blocks"], row["blocks"]) for name, row in rows.items()}
    assert softmax["inline_swin_tiny"] == (2, 12)
    assert softmax["inline_deit_tiny"] == (0, 12)
    assert all(some == every for name, (some, every) in softmax.items() if not name.startswith("inline_"))


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_table_of_models_fits_and_holds_every_number(softless, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    result = softless("list", "--models")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    words = " ".join(result.stdout.split())
    for row in listed_models(softless)["models"]:
        counts = f"{units.count(row['parameters'])} {units.macs(row['macs'])} {units.picture(row['image_size'])}"
        blocks = f"{row['softmax_blocks']} of {row['blocks']}"
        assert f"{row['name']} {counts} {blocks} {row['paper']['top1']:.1f}" in words


def test_models_are_listed_without_timm():
    code = "import sys; sys.modules['timm'] = None; from softless.__main__ import main; main()"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "list", "--models"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "inline_swin_tiny" in done.stdout


def test_options_are_read_by_their_kind():
    assert make_mechanism("threshold", {"tau": "2", "tail": "mean"}) == library.mechanism(
        "threshold", tau=2, tail="mean"
    )
    assert make_mechanism("angular", {"exact": "True"}) == library.mechanism("angular", exact=True)
    assert make_mechanism("linear", {"phi": "exp", "phi_k": "none", "t": "0.5"}) == library.mechanism(
        "linear", phi="exp", t=0.5
    )
    assert make_mechanism("asymmetric_nonlocal", {"pyramid": "1,4"}) == library.mechanism(
        "asymmetric_nonlocal", pyramid=(1, 4)
    )
    assert option_text((1, 4)) == "1,4"
    assert make_mechanism("linear", {"normalize": "none"}) == library.mechanism("linear", normalize="none")


def test_general_is_softmax_on_the_command_line():
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    expected = library.attention(q, k, v, "softmax")
    torch.testing.assert_close(library.attention(q, k, v, make_mechanism("general", {})), expected)


def test_an_option_without_a_value_of_its_kind_is_refused():
    for name, options in (
        ("focused", {"learned_scale": "2"}),
        ("focused", {"p": "big"}),
        ("asymmetric_nonlocal", {"pyramid": "1,x"}),
        ("general", {"x": "1"}),
    ):
        with pytest.raises(SoftlessError):
            make_mechanism(name, options)
