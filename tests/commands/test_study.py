"""`softless study`: twins trained, examined and timed; one document, repeated exactly, that a rerun goes on with."""

import base64
import copy
import csv
import json
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from softless.commands.progress import Bar
from softless.commands.study import ProgressLines
from softless.errors import ArgumentError, NonFiniteError
from softless.machine import pick_device
from softless.study import document as study_document
from softless.study import examine as study_examine
from softless.study import grid, pipeline, schema
from softless.study import plan as study_plan
from softless.study.decision import FAIR
from softless.study.plan import StudyOptions
from softless.study.twins import side_of
from softless.train.recipe import read_recipe
from tests.commands.conftest import MECHANISMS, RECIPE, TINY, small_studies
from tests.data.pictures import folder

QUIET = ProgressLines(Bar(), 0, 0.0, quiet=True)
EST = {"mean", "low", "high", "n"}
KEYS = {
    "": [
        "schema", "command", "date", "versions", "machine", "seed", "preset", "data", "decision", "verdict", "twins",
        "tables", "examined", "layers", "mask_out", "induced", "collinear", "range", "viewer", "speed", "files",
    ],
    "data": [
        "name", "train", "test", "classes", "image_size", "patch", "grid", "came", "tokens", "recipe", "epochs",
        "chance", "split",
    ],
    "decision": ["margin", "pairs", "headline"],
    "twins": [
        "id", "label", "mechanism", "options", "local", "cut", "tables", "parameters", "macs", "seconds_per_epoch",
        "accuracy", "seeds",
    ],
    "tables": ["id", "title", "says", "columns", "rows", "paper", "setting"],
    "examined": ["images", "masked"],
    "mask_out": ["twin", "mask", "accuracy"],
    "induced": ["twin", "what", "accuracy"],
    "collinear": ["twin", "layer", "keys", "p", "q", "rows"],
    "range": ["curves", "layers", "threshold", "distributions"],
    "viewer": ["grid", "images", "maps"],
    "speed": ["dtype", "threads", "heads", "head_dim", "tokens", "laps", "trends", "own"],
}  # fmt: skip


def studied(softless, *words):
    result = softless("study", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def without_time(document):
    """What must repeat exactly."""
    document = copy.deepcopy(document)
    for key in ("date", "verdict", "machine", "command"):
        del document[key]
    for lap in document["speed"]["laps"]:
        for key in ("seconds", "fastest", "speedup", "repeats"):
            del lap[key]
    for row in document["speed"]["own"]["rows"]:
        for key in ("training_seconds", "inference_seconds", "training_ratio", "inference_ratio"):
            del row[key]
    document["speed"]["trends"] = [(trend["label"], trend["bytes_growth"]) for trend in document["speed"]["trends"]]
    for twin in document["twins"]:
        del twin["seconds_per_epoch"]
        for seed in twin["seeds"]:
            del seed["seconds"]
    return document


@pytest.fixture(scope="module")
def study_once(tmp_path_factory):
    """A small study: its document, and a folder that is left as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("study"))
        small_studies(patch)
        document, page = pipeline.prepare(StudyOptions(out=Path("report"))).run(QUIET)
        return json.loads(json.dumps(document)), page.parent.absolute()


@pytest.fixture
def report(study_once, tmp_path):
    """The same in a folder of one's own."""
    document, folder = study_once
    shutil.copytree(folder, tmp_path / "report")
    return copy.deepcopy(document), tmp_path / "report"


def test_the_json_has_what_its_contract_names(report):
    document, _ = report
    for name, keys in KEYS.items():
        part = document[name] if name else document
        assert list(part[0] if isinstance(part, list) else part) == keys, name
    schema.check(document, schema.StudyDocument)
    assert list(document) == list(schema.StudyDocument.__annotations__)
    assert list(document["twins"][0]["seeds"][0]) == list(schema.SeedResult.__annotations__)
    assert document["schema"] == "softless.study/4"
    assert document["data"] == {
        "name": "digits", "train": 1437, "test": 360, "classes": list("0123456789"), "image_size": 8, "patch": 4,
        "grid": [2, 2], "came": {"smallest": [8, 8], "median": [8, 8], "largest": [8, 8]}, "tokens": 5,
        "recipe": "quick.toml", "epochs": 1, "chance": 37 / 360, "split": study_document.SPLIT,
    }  # fmt: skip
    assert document["examined"] == {"images": 6, "masked": 6}
    assert {row["twin"] for row in document["speed"]["own"]["rows"]} == set(TINY.twins)
    assert document["speed"]["own"]["tokens"] == 5
    assert {each["twin"] for each in document["layers"]} == set(TINY.twins)
    assert document["twins"][0]["accuracy"].keys() == EST
    assert document["layers"][0]["score_range"].keys() == EST
    assert [row["mask"] for row in document["mask_out"] if row["twin"] == "softmax"] == [
        "none", "local 3", "local 5", "local 7", "random 9", "random 25", "random 49",
    ]  # fmt: skip
    assert {row["twin"] for row in document["induced"]} == {"softmax"}
    assert document["collinear"]["twin"] == "linear-relu"
    assert [each["name"] for each in document["range"]["distributions"]] == ["softmax", "first order", "uniform"]
    assert [curve["label"] for curve in document["range"]["curves"]] == ["uniform", *MECHANISMS]
    assert {lap["label"] for lap in document["speed"]["laps"]} == {*MECHANISMS, "SDPA"}
    assert {table["id"] for table in document["tables"]} == {"2", "9"}


def test_the_folder_holds_the_page_the_document_and_its_tables(report):
    document, folder = report
    assert json.loads((folder / "report.json").read_text()) == document
    assert (folder / "index.html").read_text().startswith("<!")
    assert set(document["files"].values()) == {path.name for path in folder.glob("*.csv")}
    with (folder / "twins.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [twin["id"] for twin in document["twins"]]
    assert [float(row["accuracy"]) for row in rows] == [twin["accuracy"]["mean"] for twin in document["twins"]]
    with (folder / "layers.csv").open() as file:
        first = next(csv.DictReader(file))
    assert float(first["score_range_high"]) == document["layers"][0]["score_range"]["high"]


@pytest.mark.parametrize("columns", ["80", "120"])
def test_what_is_printed_is_the_verdict_and_the_page(softless, report, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    result = softless("study")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout
    document, words = json.loads((tmp_path / "report/report.json").read_text()), " ".join(result.stdout.split())
    for sentence in document["verdict"]:
        assert f"{sentence['about']} {sentence['says']}" in words
    for twin in document["twins"]:
        assert f"{twin['label']} {twin['accuracy']['mean']:.1%} one seed" in words
    assert document["verdict"][0]["about"] == "Softmax"
    assert result.stdout.splitlines()[-1] == "The report: report/index.html"


def test_numbers_repeat_exactly_from_the_seed(softless, study_once):
    report = study_once
    again, other = (without_time(studied(softless, "--out", name, "--seed", name)) for name in ("0", "4"))
    assert without_time(report[0]) == again
    assert again["twins"][0]["accuracy"] != other["twins"][0]["accuracy"]
    assert again["range"]["curves"] != other["range"]["curves"]


def test_a_rerun_continues_and_prints_how_many_runs_were_finished(softless, report, monkeypatch):
    monkeypatch.setattr(grid, "execute", lambda *_: pytest.fail("it trained again"))
    monkeypatch.setattr(study_examine, "examine_twin", lambda *_, **__: pytest.fail("it examined again"))
    monkeypatch.setattr(study_examine, "time_mechanisms", lambda *_: pytest.fail("it timed again"))
    monkeypatch.setattr(study_examine, "time_twins", lambda *_: pytest.fail("it timed the twins again"))
    again = studied(softless)
    assert {key: again[key] for key in again if key != "date"} | {"machine": 0} == {
        key: report[0][key] for key in again if key != "date"
    } | {"machine": 0}
    assert "continuing: 3 of 3 runs trained before" in softless("study").stdout


def test_another_twin_is_added_to_a_study(softless, report, monkeypatch):
    more = studied(softless, "--twins", "softmax,inline-local,linear-relu,taylor")
    assert [twin["id"] for twin in more["twins"]] == ["softmax", "inline-local", "linear-relu", "taylor"]
    assert more["twins"][:3] == report[0]["twins"]
    assert more["speed"]["laps"] == report[0]["speed"]["laps"]


def test_another_recipe_needs_another_folder(softless, report, tmp_path):
    (tmp_path / "other.toml").write_text(Path(RECIPE).read_text().replace("epochs = 1", "epochs = 2"))
    result = softless("study", "--recipe", "other.toml")
    assert result.exit_code == 3
    assert "the grid in report/twins was begun with recipe.epochs 1, and it is 2 now" in result.stderr


def test_other_images_in_the_same_folder_are_refused_with_the_difference(softless, report, tmp_path):
    folder(tmp_path / "shades", {"train": {"a": 8, "b": 8}, "val": {"a": 2, "b": 2}})
    result = softless("study", "--data", "shades")
    assert result.exit_code == 3
    assert result.stderr == (
        "error: the grid in report/twins was begun with other images: digits has 1,437 images in 10 classes to train "
        "on, and shades has 16 images in 2 classes to train on; give it those, or another folder with --out\n"
    )


def test_the_command_that_is_recorded_repeats_the_study(softless):
    words = ["--seed", "5", "--tokens", "4,8", "--mechanisms", "inline", "--twins", "softmax,inline", "--seeds", "2"]
    document = studied(softless, *words)
    assert document["command"] == (
        "softless study --twins softmax,inline --mechanisms inline --tokens 4,8 --seeds 2 --seed 5 --out report "
        "--device cpu"
    )
    assert [len(twin["seeds"]) for twin in document["twins"]] == [2, 2]
    (pair,) = document["decision"]["pairs"]
    assert (pair["softmax"], pair["linear"], pair["answer"]) == ("softmax", "inline", "cannot tell")
    assert pair["low"] < pair["difference"] < pair["high"]
    assert pair["parameters"][0] == pair["parameters"][1] == document["twins"][0]["parameters"]
    assert list(pair) == list(schema.FairPair.__annotations__)
    assert list(document["speed"]["own"]["rows"][0]) == list(schema.TwinSpeed.__annotations__)
    softmax, inline = document["speed"]["own"]["rows"]
    assert softmax["inference_ratio"] == softmax["training_ratio"] == 1
    assert inline["inference_ratio"] == softmax["inference_seconds"] / inline["inference_seconds"] > 0
    assert inline["training_ratio"] == softmax["training_seconds"] / inline["training_seconds"] > 0
    assert document["verdict"][0]["answer"] == "cannot tell"
    assert "at the 5 tokens of these twins, inline answers at" in str(document["verdict"])
    assert without_time(studied(softless, *document["command"].split()[2:])) == without_time(document)


def test_the_command_that_is_recorded_can_be_typed(tmp_path):
    options = StudyOptions(
        out=tmp_path / "a report",
        data="my flowers/",
        recipe="it's.toml",
        mechanisms=("linear relu",),
        epochs=7,
        margin=0.5,
    )
    assert shlex.split(options.command("cpu")) == [
        *("softless", "study", "--mechanisms", "linear relu", "--data", "my flowers/", "--recipe", "it's.toml"),
        *("--epochs", "7", "--seed", "0", "--margin", "0.5", "--out", str(tmp_path / "a report"), "--device", "cpu"),
    ]


def test_a_study_that_runs_out_of_minutes_reports_the_runs_left(softless):
    document = studied(softless, "--minutes", "0.000001")
    assert document["twins"] == document["layers"] == []
    said = {sentence["about"]: sentence["says"] for sentence in document["verdict"]}
    assert said["Softmax"].startswith("Cannot tell: no two of the trained twins (no twin) differ in attention alone.")
    assert said["Left"] == "3 of the runs are not trained yet: run the same command again."
    assert len(studied(softless)["twins"]) == 3


def test_the_minutes_are_for_both_grids_and_what_is_left_is_of_both(tmp_path, monkeypatch):
    minutes = {}

    def slow(folder, recipe, twins, **options):
        minutes[folder.name] = options["minutes"]
        time.sleep(0.02)
        about = {"id": twins[-1].id, "label": twins[-1].label}
        lost = {"twin": about, "seed": 0, "status": "failed", "accuracy": None}
        return grid.GridResult((lost,) if folder.name == "twins-windows" else (), 2)

    monkeypatch.setattr(study_plan, "FULL", replace(study_plan.FULL, timing=TINY.timing))
    monkeypatch.setattr(pipeline, "run_grid", slow)
    study = pipeline.prepare(StudyOptions(out=tmp_path, preset="full", minutes=1e-4, device="cpu"))
    document, _ = study.run(QUIET)
    assert 0 < minutes["twins"] <= 1e-4
    assert minutes["twins-windows"] == 0
    said = {sentence["about"]: sentence["says"] for sentence in document["verdict"]}
    assert said["Left"].startswith("4 of the runs are not trained yet")
    assert "Not every run of inline + local in 2 x 2 windows finished." in said["Trust"]
    twins, windows = 23, 6
    trained = pipeline.DECODING + 3 * (twins + windows)
    assert study.work == pytest.approx(trained + pipeline.EXAMINING * twins + pipeline.TIMING)


LOST = {"deleted": shutil.rmtree, "damaged": lambda shelf: next(shelf.rglob("*.safetensors")).write_text("")}


@pytest.mark.parametrize("damage", LOST.values(), ids=LOST)
def test_images_that_were_lost_are_decoded_again(softless, report, damage):
    damage(report[1] / "twins/images")
    again = studied(softless)
    assert without_time(again) == without_time(report[0])
    assert next((report[1] / "twins/images").rglob("*.safetensors")).stat().st_size


def test_a_study_of_one_mechanism_with_a_head_dim_of_its_own(softless, report):
    document = studied(softless, "--mechanisms", "taylor order 2")
    assert {lap["label"] for lap in document["speed"]["laps"]} == {"taylor order 2", "SDPA"}
    assert not {"Speed", "Memory"} & {sentence["about"] for sentence in document["verdict"]}


@pytest.mark.parametrize(
    ("old", "new", "twins", "says"),
    [
        ("", "", "softmax,inline-cut2", "twin 'inline-cut2' needs a picture that 2 x 2 windows "),
        ("inline_deit_tiny", "nope", "softmax,inline", "model 'nope' is not one of inline_deit_tiny, "),
        ('inline_deit_tiny"\npatch_size = 4', 'nope"', "softmax,inline", "model 'nope' is not one of "),
        ("dims = 8", "dims = 9", "softmax,inline", "dims [9] are not multiples of heads [2]"),
    ],
    ids=["windows", "unknown", "unknown without a patch", "sizes"],
)
def test_a_twin_that_cannot_be_built_is_refused_before_any_training(softless, tmp_path, old, new, twins, says):
    (tmp_path / "a.toml").write_text(Path(RECIPE).read_text().replace(old, new))
    result = softless("study", "--recipe", "a.toml", "--twins", twins)
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {says}")
    assert not (tmp_path / "report/twins").exists()


@pytest.mark.parametrize("margin", ["0", "-1", "100", "nan", "much"])
def test_a_margin_that_is_no_number_of_points_is_refused(softless, margin):
    result = softless("study", "--margin", margin)
    assert result.exit_code == 2
    said = f"'{margin}' is not a number of points of accuracy, or bits per byte of text, between 0 and 100"
    assert said in " ".join(result.stderr.split())


def test_the_epochs_and_the_margin_follow_the_options(softless):
    document = studied(softless, "--twins", "softmax", "--epochs", "2", "--margin", "0.25")
    assert (document["data"]["epochs"], document["decision"]["margin"]) == (2, 0.25)
    assert len(document["twins"][0]["seeds"][0]["curve"]) == 2


@pytest.mark.parametrize("option", ["--twins", "--mechanisms"])
def test_a_list_of_nothing_is_refused(softless, option):
    result = softless("study", option, " ,")
    assert result.exit_code == 2
    assert "' ,' names nothing" in result.stderr


def test_a_twin_with_infinities_is_passed_and_named(softless, tmp_path, monkeypatch):
    real = study_examine.examine_twin

    def fails_for_linear(model, *args, **options):
        if model.blocks[0].attn.mechanism.name == "linear":
            raise NonFiniteError("the weights of blocks.0.attn are not finite")
        return real(model, *args, **options)

    monkeypatch.setattr(study_examine, "examine_twin", fails_for_linear)
    result = softless("study", "--twins", "softmax,linear-relu")
    assert result.exit_code == 0
    assert "linear relu cannot be examined: the weights of blocks.0.attn are not finite" in " ".join(
        result.stdout.split()
    )
    document = json.loads((tmp_path / "report/report.json").read_text())
    assert {layer["twin"] for layer in document["layers"]} == {"softmax"}
    assert [twin["id"] for twin in document["twins"]] == ["softmax", "linear-relu"]


def test_maps_are_a_byte_a_weight_and_images_are_real(report):
    viewer = report[0]["viewer"]
    assert viewer["grid"] == [2, 2]
    assert [image["label"] for image in viewer["images"]] == ["0", "1"]
    assert all(image["name"].startswith("digits[") for image in viewer["images"])
    assert len(viewer["maps"]) == 3 * 2
    for each in viewer["maps"]:
        weights = np.frombuffer(base64.b64decode(each["weights"]), np.uint8).reshape(5, 5)
        assert weights.max(1).tolist() == [255] * 5
        assert len(each["row_max"]) == 5


def test_a_folder_of_images_is_studied(softless, tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 700), ("val", 8)):
        for index in range(count):
            place = tmp_path / "pictures" / part / ("dark", "bright")[index % 2]
            place.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 100, (9, 10, 3)) + 100 * (index % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(place / f"{index}.png")
    document = studied(softless, "--data", "pictures", "--twins", "softmax,inline")
    assert (document["data"]["name"], document["data"]["classes"]) == ("pictures", ["bright", "dark"])
    assert (document["data"]["train"], document["data"]["test"]) == (700, 8)
    assert document["data"]["came"]["median"] == [10, 9]
    assert document["data"]["split"] is None
    assert [image["name"] for image in document["viewer"]["images"]] == ["1.png", "0.png"]


def test_recipes_for_digits_and_for_other_images():
    assert pipeline.default_recipe(None, "cuda") == pipeline.default_recipe("digits", "cpu") == "twins-digits"
    assert pipeline.default_recipe("x.parquet", "cuda") == "twins-cifar10"
    assert pipeline.default_recipe("x.parquet", "cpu") == "twins-images"


def test_a_full_study_has_every_table_and_windows_beside_it(tmp_path):
    full = StudyOptions(out=tmp_path, preset="full").resolve()
    assert (full.seeds, full.tables) == (3, ("1", "3", "4", "9", "10"))
    digits = read_recipe("twins-digits")
    assert side_of(digits) is None
    recipe, twins = pipeline.windows_of(digits, "twins-digits", full)
    assert side_of(recipe) == 8
    cuts = "inline-cut4", "inline-cut2", "inline-local-cut4", "inline-local-cut2"
    assert [twin.id for twin in twins] == ["inline", "inline-local", *cuts]
    _, twins = pipeline.windows_of(read_recipe("twins-cifar10"), "twins-cifar10", full)
    assert {twin.cut for twin in twins} == {None, 8, 4, 2}
    assert pipeline.windows_of(digits, "twins-digits", StudyOptions(out=tmp_path).resolve()) is None
    assert pipeline.windows_of(digits, "mine", full) is None


def test_presets_are_the_documented_ones(tmp_path):
    default, quick = (StudyOptions(out=tmp_path, preset=name).resolve() for name in ("default", "quick"))
    assert (len(default.twins), default.seeds) == (7, 2)
    assert (quick.twins, quick.seeds) == (default.twins[:4], 1)
    assert {*default.twins} >= {*quick.twins} == {id_ for pair in FAIR for id_ in pair}
    assert pipeline.recipe_named("twins-digits", quick, 3).epochs == 3
    epochs = {name: read_recipe(f"twins-{name}").epochs for name in ("digits", "images")}
    assert epochs == {"digits": 14, "images": 10}
    for name, most in (("digits", 12), ("images", 10)):
        assert pipeline.recipe_named(f"twins-{name}", quick).epochs == most
        assert pipeline.recipe_named(f"twins-{name}", default) == read_recipe(f"twins-{name}")
    assert default.timing.tokens == (256, 512, 1024, 2048, 4096)
    assert StudyOptions(out=tmp_path, preset="full", twins=("softmax",)).resolve().tables == ()


def test_a_recipe_that_keeps_no_images_is_refused(softless, tmp_path):
    (tmp_path / "a.toml").write_text(Path(RECIPE).read_text().replace("cache = true", "cache = false"))
    result = softless("study", "--recipe", "a.toml")
    assert (result.exit_code, result.stderr) == (
        3,
        "error: a study keeps its images decoded, and the recipe has cache = false\n",
    )


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(softless, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(pipeline, "prepare", lambda *_: pytest.fail("it worked first"))
    result = softless("study", "--out", "file")
    assert result.exit_code == 3
    assert result.stderr == "error: cannot write in the folder 'file': Not a directory\n"


def test_a_device_that_is_not_there_is_refused(softless, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = softless("study", "--device", "cuda")
    assert (result.exit_code, result.stderr) == (
        3,
        "error: device is 'cuda', and torch finds no CUDA device: use 'cpu' or 'auto'\n",
    )
    assert pick_device("auto") == "cpu"


def test_lengths_beyond_memory_are_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(study_examine, "free_bytes", lambda _: 10**9)
    with pytest.raises(ArgumentError, match=r"1048576 tokens need about .* GB and 1.0 GB are free"):
        study_examine.check_memory(replace(study_plan.TimingPlan(), tokens=(2**20,)), "cpu")


def test_a_call_that_runs_out_of_memory_raises_a_one_sentence_error(softless, monkeypatch):
    def fail(*_args, **_options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(study_examine.scaling, "race", fail)
    result = softless("study")
    assert (result.exit_code, result.stderr) == (3, "error: 8 tokens do not fit in memory: shorten --tokens\n")
