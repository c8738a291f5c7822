"""`softless study`: one document, written whole, repeated exactly, and spoken truly."""

import copy
import json
from dataclasses import asdict, replace

import pytest

from softless.commands import study_measure, study_plan, study_show
from softless.errors import ArgumentError
from softless.probes.cases import CASES, study_cases

LAP = {"label": "str", "tokens": "int", "head_dim": "int", "seconds": "float", "fastest": "float", "repeats": "int"}
LAP |= {"speedup": "float", "peak_bytes": "int", "skipped": "NoneType"}
POINT = dict.fromkeys(["deviation", "range", "error", "worst", "bound", "within_bound"], "float")
PAIRS = {"label": "str", "pairs": "int", "collisions": "int", "smallest": "float", "median": "float"}
PAIRS |= {"factor": "float", "tolerance": "float", "key_rank": "int"}
SCHEMA = {
    "schema": "str",
    "command": "str",
    "date": "str",
    "versions": {"softless": "str", "torch": "str", "python": "str"},
    "machine": {"system": "str", "processor": "str", "cores": "int", "threads": "int", "device": "str"}
    | {"load_average": "float"},
    "seed": "int",
    "quick": "bool",
    "verdict": [{"about": "str", "says": "str"}],
    "speed": {
        "dtype": "str",
        "threads": "int",
        "heads": "int",
        "head_dim": "int",
        "tokens": ["int"],
        "laps": [LAP],
        "trends": [
            {"label": "str", "head_dim": "int", "seconds_growth": "float", "bytes_growth": "float"}
            | {"crossover": "int", "faster_everywhere": "bool"}
        ],
    },
    "approximation": {
        "tokens": "int",
        "heads": "int",
        "head_dim": "int",
        "deviations": ["float"],
        "tolerance": "float",
        "curves": [{"label": "str", "approximates_softmax": "bool", "safe_range": "float", "points": [POINT]}],
    },
    "injectivity": {"head_dim": "int", "keys": "int", "pairs": [PAIRS]},
}
NULLABLE = {"crossover", "safe_range", "seconds_growth", "bytes_growth", "load_average"}


def outline(value, name=""):
    """The shape of a document: names, order and types, with one element for a list of like ones."""
    if isinstance(value, dict):
        return {key: outline(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        kinds = [outline(inner) for inner in value]
        assert all(kind == kinds[0] for kind in kinds)
        return kinds[:1]
    return "nullable" if name in NULLABLE else type(value).__name__


def frozen(schema, name=""):
    if isinstance(schema, dict):
        return {key: frozen(inner, key) for key, inner in schema.items()}
    if isinstance(schema, list):
        return [frozen(inner) for inner in schema]
    return "nullable" if name in NULLABLE else schema


def studied(softless, *words):
    result = softless("study", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def without_time(document):
    """What must repeat exactly."""
    document = copy.deepcopy(document)
    for key in ("date", "verdict", "machine"):
        del document[key]
    for lap in document["speed"]["laps"]:
        for key in ("seconds", "fastest", "speedup", "repeats"):
            del lap[key]
    document["speed"]["trends"] = [(trend["label"], trend["bytes_growth"]) for trend in document["speed"]["trends"]]
    return document


@pytest.fixture
def named_cases(monkeypatch):
    """The named cases alone, where it does not matter which mechanisms a study compares."""
    monkeypatch.setattr(study_measure, "study_cases", lambda: CASES)


few = pytest.mark.usefixtures("named_cases")


def test_the_json_schema_is_frozen(softless):
    document = studied(softless)
    assert outline(document) == frozen(SCHEMA)
    assert list(document) == list(SCHEMA)
    assert document["schema"] == "softless.study/1"


@few
def test_the_file_holds_what_json_prints(softless, tmp_path):
    document = studied(softless, "--quick", "--out", "deep/er")
    assert json.loads((tmp_path / "deep/er/study.json").read_text()) == document
    assert [path.name for path in (tmp_path / "deep/er").iterdir()] == ["study.json"]


@pytest.mark.parametrize("columns", ["80", "120"])
def test_what_is_printed_is_what_is_written(softless, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    result = softless("study", "--quick")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout
    document, words = json.loads((tmp_path / "report/study.json").read_text()), " ".join(result.stdout.split())
    for sentence in document["verdict"]:
        assert f"{sentence['about']} {sentence['says']}" in words
    for row in document["injectivity"]["pairs"]:
        assert f"{row['label']} {row['collisions']:,} of {row['pairs']:,} {row['smallest']:.2g}" in words
    for curve in document["approximation"]["curves"]:
        errors = " ".join(study_show._percent(point["error"]) for point in curve["points"])
        assert f"{curve['label']} {errors}" in words
    longest = max(document["speed"]["tokens"])
    for lap in document["speed"]["laps"]:
        if lap["tokens"] == longest and lap["label"] != "SDPA":
            assert f"{study_show._times(lap['speedup'])} {study_show.units.seconds(lap['seconds'])}" in words
    assert words.index(document["verdict"][-1]["says"]) < words.index("Speed relative to SDPA")


def test_numbers_repeat_exactly_from_the_seed(softless):
    first, again, other = (without_time(studied(softless, "--seed", seed)) for seed in ("3", "3", "4"))
    assert first == again
    assert first["approximation"] != other["approximation"]
    assert first["injectivity"] != other["injectivity"]


def test_every_case_is_in_every_part(softless):
    document, labels = studied(softless), {case.label for case in study_cases()}
    assert {lap["label"] for lap in document["speed"]["laps"]} == labels | {"SDPA"}
    assert {curve["label"] for curve in document["approximation"]["curves"]} == labels | {"uniform"}
    assert {row["label"] for row in document["injectivity"]["pairs"]} == labels


def test_the_paper_s_collisions_are_counted_in_a_study(softless, monkeypatch):
    counts = replace(study_plan.FULL, sets_of_keys=50, keys=20, key_dim=16)
    rows = study_measure._injectivity(counts, 0, study_cases())["pairs"]
    found = {row["label"]: (row["collisions"], row["pairs"]) for row in rows}
    assert found["linear relu"] == (1000, 1000)
    assert found["inline"] == found["softmax"] == (0, 1000)


@few
def test_tokens_are_sorted_and_counted_once(softless):
    assert studied(softless, "--tokens", "16,4,16")["speed"]["tokens"] == [4, 16]


@few
def test_one_length_has_no_growth(softless):
    document = studied(softless, "--tokens", "1")
    assert all(trend["seconds_growth"] is None for trend in document["speed"]["trends"])
    assert softless("study", "--tokens", "1").exit_code == 0


@few
def test_many_lengths_still_fit(softless):
    text = softless("study", "--tokens", "1,2,3,4,5,6,7,8").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@few
def test_the_command_that_is_recorded_repeats_the_study(softless):
    document = studied(softless, "--tokens", "4,8", "--seed", "5")
    assert document["command"] == "softless study --tokens 4,8 --seed 5 --device cpu"
    again = studied(softless, *document["command"].split()[2:])
    assert without_time(again) == without_time(document)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(softless, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(study_measure, "measure", lambda *_args, **_options: pytest.fail("it worked first"))
    result = softless("study", "--out", "file")
    assert result.exit_code == 3
    assert result.stderr == "error: cannot write in the folder 'file': File exists\n"


def test_a_device_that_is_not_there_is_refused(softless, monkeypatch):
    monkeypatch.setattr(study_measure.torch.cuda, "is_available", lambda: False)
    result = softless("study", "--device", "cuda")
    assert (result.exit_code, result.stderr) == (
        3,
        "error: device cuda was asked for and torch finds none: use --device cpu\n",
    )
    assert study_measure.pick_device("auto") == "cpu"


def test_lengths_beyond_memory_are_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(study_measure, "free_bytes", lambda _: 10**9)
    with pytest.raises(ArgumentError, match=r"1048576 tokens need about .* GB and 1.0 GB are free"):
        study_measure._check_memory(replace(study_plan.FULL, tokens=(2**20,)), "cpu")


def test_a_call_that_runs_out_of_memory_is_one_sentence(softless, monkeypatch):
    def fail(*_args, **_options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(study_measure.speed, "race", fail)
    result = softless("study")
    assert (result.exit_code, result.stderr) == (3, "error: 8 tokens do not fit in memory: shorten --tokens\n")


def test_what_was_skipped_is_shown_as_skipped(softless, monkeypatch):
    monkeypatch.setattr(study_measure.speed, "free_bytes", lambda _: 1000)
    result = softless("study")
    assert result.exit_code == 0
    assert "skipped" in result.stdout


def lap(label, tokens, seconds, speedup, **more):
    one = {"label": label, "tokens": tokens, "head_dim": 64, "seconds": seconds, "fastest": seconds, "repeats": 3}
    return {**one, "speedup": speedup, "peak_bytes": 1000, "skipped": None, **more}


def test_the_verdict_names_the_fastest_and_the_slow():
    part = {"head_dim": 64, "tokens": [8, 16], "threads": 1}
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0), lap("inline", 16, 0.025, 4.0), lap("hydra", 16, 0.01, 10.0)]
    part["laps"] += [lap("threshold", 16, 0.4, 0.25), lap("hydra", 8, 9.0, 0.1)]
    says = study_show._speed_verdict(part)
    assert says.startswith("at 16 tokens hydra is fastest, 10x SDPA (10 ms against 100 ms). inline is 4.0x.")
    assert says.endswith("Slower than SDPA there: threshold.")
    part["laps"] = [lap("SDPA", 16, 0.1, 1.0), lap("inline", 16, 0.2, 0.5)]
    assert "nothing is faster than SDPA; inline comes closest" in study_show._speed_verdict(part)


def test_the_verdict_says_when_timings_are_rough():
    quiet = {"threads": 2, "laps": [lap("SDPA", 16, 0.1, 1.0)]}
    assert study_show._trust_verdict(quiet, 2) == ""
    assert "timed on 1 thread" in study_show._trust_verdict({**quiet, "threads": 1}, 2)
    rough = {"threads": 2, "laps": [lap("SDPA", 16, 0.1, 1.0, fastest=0.02)]}
    assert "differ by 5.0x" in study_show._trust_verdict(rough, 2)


def test_the_safe_range_in_the_verdict_is_the_curve_s():
    part = study_measure._approximation(
        replace(study_plan.FULL, score_tokens=64, score_heads=1), 0, study_cases(), print_not
    )
    curves = {curve["label"]: curve for curve in part["curves"]}
    says = study_show._softmax_verdict(part)
    assert f"span less than {curves['inline']['safe_range']:.1f}." in says
    assert "threshold is further off than uniform weights" in says
    assert 1.5 < curves["inline"]["safe_range"] < 3
    errors = [point["error"] for point in curves["inline"]["points"]]
    assert errors == sorted(errors)
    assert all(point["within_bound"] == 1 for point in curves["inline"]["points"])


def print_not(_label, _amount):
    """No progress bar."""


def test_plans_are_the_documented_ones():
    assert asdict(study_plan.FULL)["tokens"] == (256, 512, 1024, 2048, 4096)
    assert (
        study_plan.FULL.sets_of_keys * study_plan.FULL.keys
        == study_plan.QUICK.sets_of_keys * study_plan.QUICK.keys
        == 1000
    )
