"""`softless bench-model`: text and page say what the JSON says, and every model that was skipped is listed."""

import copy
import json
import random

import pytest
import torch

from softless import stopwatch
from softless.bench import documents, figures, model_contest
from softless.commands import arguments, bench_model
from softless.errors import ArgumentError
from softless.report.units import count, seconds, short, size

NAME = "inline_deit_tiny"
TINY = (NAME, "--image-size", "16", "--batch", "1", "--repeats", "1", "--device", "cpu")
ROW = ["label", "role", "compiled", "parameters", "images_per_second", "ratio", "ms", "fastest_ms", "repeats"]
ROW += ["timing", "eager_images_per_second", "memory_bytes", "skipped"]


def benched(softless, *more):
    result = softless("bench-model", *TINY, *more, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def document():
    """Two sizes, forward and backward, measured once for all who read it."""
    both = plan(image_sizes=[(16, 16), (32, 16)], batch=2, train=True, repeats=1)
    return documents.measure_model(both, command="softless bench-model", option_texts={})


def plan(name=NAME, options=None, **changes):
    defaults = {
        "image_sizes": None, "windows": None, "batch": None, "train": False, "compiled": False, "dtype": None,
        "device": "cpu", "backend": "auto", "repeats": 3,
    }  # fmt: skip
    return documents.plan_model(name, options or {}, **defaults | changes)


def test_the_json_schema_is_frozen(softless):
    document = benched(softless)
    assert list(document) == [
        "schema", "command", "date", "versions", "machine", "model", "options", "dtype", "device", "backend",
        "threads", "compile", "head", "results",
    ]  # fmt: skip
    assert document["schema"] == "softless.bench-model/1"
    (result,) = document["results"]
    assert list(result) == ["image_size", "window", "batch", "pass", "rows"]
    assert [list(row) for row in result["rows"]] == [ROW] * 4
    assert (document["model"], document["dtype"], document["compile"]) == (NAME, "float32", False)


def test_numbers_follow_from_each_other(document):
    passes = [(tuple(result["image_size"]), result["pass"]) for result in document["results"]]
    assert passes == [(side, way) for side in ((16, 16), (32, 16)) for way in ("forward", "forward+backward")]
    for result in document["results"]:
        rows = {row["role"]: row for row in result["rows"]}
        for row in rows.values():
            assert row["images_per_second"] == pytest.approx(2 / (row["ms"] / 1e3))
            assert row["ratio"] == pytest.approx(rows["softmax"]["ms"] / row["ms"])
            assert (row["timing"], row["eager_images_per_second"], row["skipped"]) == ("clock", None, None)
        assert rows["ours"]["parameters"] == rows["plain"]["parameters"] > rows["softmax"]["parameters"]


@pytest.mark.parametrize("columns", ["80", "120"])
def test_what_is_printed_is_what_the_json_says(softless, monkeypatch, columns, document):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(documents, "measure_model", lambda *_, **__: copy.deepcopy(document))
    result = softless("bench-model", *TINY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert "…" not in result.stdout
    text = " ".join(result.stdout.split())
    for each in document["results"]:
        assert bench_model.setting(each) in text
        for row in each["rows"]:
            speed = f"{short(row['images_per_second'])} {short(row['ratio'])} {seconds(row['ms'] / 1e3)}"
            assert f"{row['label']} {speed} {size(row['memory_bytes'])} {count(row['parameters'])}" in text
    assert bench_model.verdict(document) in text


def test_skipped_models_and_eager_times_are_shown(softless, monkeypatch, document):
    changed = copy.deepcopy(document)
    first = changed["results"][0]["rows"]
    for row in first[:3]:
        row |= {"eager_images_per_second": 1234.0, "timing": "events" if row["role"] == "plain" else "graph"}
    first[3] |= dict.fromkeys(ROW[3:-1]) | {"skipped": "timm has no such model"}
    changed |= {"device": "cuda"}
    monkeypatch.setattr(documents, "measure_model", lambda *_, **__: changed)
    text = softless("bench-model", *TINY).stdout
    assert max(map(len, text.splitlines())) <= 80
    text = " ".join(text.split())
    assert "images/s x twin eager time memory parameters" in text
    assert "1,234" in text
    assert "not timed: timm deit_tiny: timm has no such model" in text
    assert "timed by events, launches included: plain formulas" in text


def row(label, role, images, compiled=False):
    return {"label": label, "role": role, "images_per_second": images, "compiled": compiled}


def test_the_verdict_is_about_the_largest_images_and_compares_like_with_like():
    rows = [row("m", "ours", 10.0), row("m, compiled", "ours", 40.0, True), row("softmax twin", "softmax", 20.0)]
    rows += [row("softmax twin, compiled", "softmax", 10.0, True), row("timm x, compiled", "timm", None, True)]
    large = {"image_size": [64, 32], "window": 7, "batch": 3, "pass": "forward", "rows": rows}
    little = large | {"image_size": [16, 16], "rows": []}
    says = bench_model.verdict({"model": "m", "results": [large, little]})
    assert says == "forward, 3 images of 64 x 32, windows 7 x 7: m, compiled does 40 images/s: 4x softmax twin."
    large["rows"] = rows[:1]
    assert bench_model.verdict({"model": "m", "results": [large]}).endswith("m does 10 images/s.")
    large |= {"rows": [row("m", "ours", None)], "batch": 1, "window": None}
    assert bench_model.verdict({"model": "m", "results": [large]}) == (
        "forward, 1 image of 64 x 32: m could not be timed."
    )


def test_sizes_and_windows_are_swept_together():
    settings = plan("inline_swin_tiny", image_sizes=[(32, 32), (64, 48)], windows=[4, None], batch=5).settings
    swept = [(setting.image_size, setting.window, setting.batch) for setting in settings]
    assert swept == [((32, 32), 4, 5), ((32, 32), None, 5), ((64, 48), 4, 5), ((64, 48), None, 5)]


def test_images_are_the_models_own_and_fill_a_batch_of_as_many_pixels():
    (own,) = plan("inline_deit_small").settings
    assert (own.image_size, own.batch) == ((288, 288), 2)
    sizes = [(112, 112), (224, 224), (448, 448), (896, 896)]
    assert [setting.batch for setting in plan(image_sizes=sizes).settings] == [16, 4, 1, 1]


@pytest.mark.parametrize(("device", "dtype", "batch"), [("cpu", torch.float32, 4), ("cuda", torch.bfloat16, 256)])
def test_dtype_and_batch_are_what_the_device_is_used_with(monkeypatch, device, dtype, batch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: None)
    (setting,) = plan(device="auto").settings
    assert (setting.device, setting.dtype, setting.batch) == (device, dtype, batch)
    assert plan(device="auto", dtype="float16").settings[0].dtype == torch.float16


def test_the_recorded_command_has_every_setting(softless, monkeypatch):
    monkeypatch.setattr(documents, "measure_model", lambda _, command, **__: {"command": command})
    typed = ("--option", "local=false", "--image-size", "32x48", "--window", "4,none", "--batch", "2", "--repeats", "3")
    result = softless("bench-model", "inline_swin_tiny", *typed, "--train", "--compile", "--device", "cpu", "--json")
    assert json.loads(result.stdout)["command"] == (
        "softless bench-model inline_swin_tiny --option local=false --image-size 32x48 --window 4,none --batch 2 "
        "--train --compile --dtype float32 --device cpu --backend auto --repeats 3"
    )


@pytest.mark.slow
def test_the_command_that_is_recorded_repeats_the_bench(softless):
    document = benched(softless, "--option", "local=false")
    again = json.loads(softless(*document["command"].split()[1:], "--json").stdout)
    for name in ("command", "model", "options", "dtype", "backend", "compile"):
        assert again[name] == document[name]
    places = [[result[key] for key in ("image_size", "window", "batch", "pass")] for result in document["results"]]
    assert places == [[result[key] for key in ("image_size", "window", "batch", "pass")] for result in again["results"]]


def test_a_backend_reaches_the_model(softless, monkeypatch):
    backends, real = [], model_contest.by_backend
    monkeypatch.setattr(
        model_contest, "by_backend", lambda model, backend: backends.append(backend) or real(model, backend)
    )
    assert benched(softless, "--backend", "reference")["backend"] == "reference"
    assert backends == ["reference"]


@pytest.mark.slow
def test_progress_adds_up_to_one():
    """The amounts add up for any number of models, passes and sizes."""
    moved = []
    both = plan(image_sizes=[(16, 16)], batch=1, train=True, repeats=1)
    list(documents._model_results(both, lambda _label, amount: moved.append(amount)))
    assert sum(moved) == pytest.approx(1)


def test_a_size_that_does_not_fit_is_refused_before_the_first_is_measured(monkeypatch):
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 10**8)
    with pytest.raises(ArgumentError, match="1 images of 4096 x 4096 need about"):
        plan(image_sizes=[(16, 16), (4096, 4096)])


BAD_INPUT = [
    (["deit"], "model 'deit' does not exist: did you mean 'deit_tiny'?"),
    ([*TINY, "--window", "7"], "DeiT has a class token"),
    (["swin_tiny", "--window", "7"], "window would change no block of model 'swin_tiny'"),
    (["inline_swin_tiny", "--window", "7", "--option", "window=7"], "are the same: give one of them"),
    ([*TINY, "--option", "phi=relu"], "model 'inline_deit_tiny' has no option 'phi' here"),
    ([*TINY, "--image-size", "8"], "images are 8 x 8 pixels and must be at least 16 x 16"),
    ([*TINY, "--image-size", "16384", "--batch", "999999999"], "999999999 images of 16384 x 16384 need about"),
    ([*TINY, "--backend", "triton"], "backend 'triton' was asked for and cannot run"),
    ([*TINY, "--plot", "."], "'.' is a folder and must be a file"),
]


@pytest.mark.parametrize(("more", "says"), BAD_INPUT)
def test_bad_input_exits_3_with_one_line_that_repeats_it(softless, more, says):
    result = softless("bench-model", *more)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


@pytest.mark.parametrize(
    "more", [["--image-size", "a"], ["--image-size", "1x2x3"], ["--window", "-1"], ["--window", ""], ["--batch", "0"]]
)
def test_a_usage_error_exits_2(softless, more):
    result = softless("bench-model", *TINY, *more)
    assert result.exit_code == 2
    assert "Usage: softless bench-model" in result.stderr


def test_arguments_are_read_from_text():
    assert arguments.image_sizes("448,224x320,224x320,64") == ((64, 64), (224, 320), (448, 448))
    assert arguments.windows("14,none,7,7") == (7, 14, None)
    assert arguments.image_size("480X640") == (480, 640)


PIECES = [
    ["--compile", "x"],
    ["--plot", ""],
    ["--image-size", "17x33"],
    ["--image-size", "0"],
    ["--window", "3"],
]
PIECES += [
    ["--batch", "2"],
    ["--batch", "-1"],
    ["--option", "local=false"],
    ["--option", "="],
    ["--option", "window=2"],
]
PIECES += [
    ["--option", "mechanism=hydra"],
    ["--tokens", "3"],
    ["inline"],
    ["--json"],
    ["--quick"],
    ["--backend", "torch"],
]


def test_command_lines_nobody_would_write_give_no_traceback(softless):
    rng = random.Random(4)
    for _ in range(12):
        line = [word for piece in rng.sample(PIECES, rng.randrange(1, 4)) for word in piece]
        result = softless("bench-model", *TINY, *line)
        assert result.exit_code in (0, 2, 3), (line, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), line


def test_the_command_draws_what_it_measured(softless, tmp_path):
    typed = ("deit_tiny", "--image-size", "16,32", "--batch", "1", "--repeats", "1", "--device", "cpu")
    shown = softless("bench-model", *typed, "--plot", "deep/page.html", "--json")
    assert shown.exit_code == 0, shown.output
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]
    text, told = (tmp_path / "deep/page.html").read_text(), json.loads(shown.stdout)
    assert told["command"] in text
    assert "not timed: softmax twin: deit_tiny is softmax attention itself" in text
    measured = [row["images_per_second"] for each in told["results"] for row in each["rows"] if row["role"] == "ours"]
    assert [trace.y for trace in figures.draw_model(told).data if trace.name == "deit_tiny"] == [tuple(measured)]
