"""`softless bench`: text and page say what the JSON says, and every contestant that was skipped is listed."""

import copy
import json
import random

import pytest

from softless import stopwatch
from softless.bench import documents, figures
from softless.commands import arguments, bench
from softless.commands.progress import progress
from softless.errors import MissingExtraError
from softless.report import page
from softless.report.units import seconds, short, size

TINY = ("--shape", "1,2,16,4", "--repeats", "1", "--quick", "--device", "cpu")

SHAPE = ["batch", "heads", "queries", "head_dim", "keys", "kv_heads"]
ROW = ["label", "role", "mechanism", "ms", "fastest_ms", "repeats", "timing", "eager_ms", "ratio", "share"]
ROW += ["extra_bytes", "extra_share", "skipped"]


@pytest.fixture(autouse=True)
def a_short_copy(monkeypatch):
    monkeypatch.setitem(stopwatch.COPY_BYTES, "cpu", 1 << 16)


def benched(softless, *more):
    result = softless("bench", *more, *TINY, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_the_json_schema_is_frozen(softless):
    document = benched(softless, "--backward")
    assert list(document) == [
        "schema", "command", "date", "versions", "machine", "mechanisms", "causal", "dtype", "device", "backend",
        "threads", "quick", "copy_bytes_per_second", "results",
    ]  # fmt: skip
    assert document["schema"] == "softless.bench/1"
    assert list(document["versions"]) == ["softless", "torch", "python"]
    assert list(document["machine"]) == ["system", "processor", "cores", "threads", "device", "load_average"]
    assert [list(each) for each in document["mechanisms"]] == [["name", "options", "backend", "backend_reason"]] * 2
    for result in document["results"]:
        assert list(result) == ["shape", "pass", "floor_bytes", "floor_ms", "rows"]
        assert list(result["shape"]) == SHAPE
        assert [list(row) for row in result["rows"]] == [ROW] * 13


def test_the_default_is_linear_and_inline_forward(softless):
    document = benched(softless)
    assert [each["name"] for each in document["mechanisms"]] == ["linear", "inline"]
    assert [result["pass"] for result in document["results"]] == ["forward"]
    assert (document["dtype"], document["backend"], document["causal"]) == ("float32", "auto", False)


def test_numbers_follow_from_each_other(softless):
    document = benched(softless, "inline", "--backward")
    for result, tensors in zip(document["results"], (4, 11), strict=True):
        assert result["floor_bytes"] == tensors * 2 * 16 * 4 * 4
        assert result["floor_ms"] == result["floor_bytes"] / document["copy_bytes_per_second"] * 1e3
        (reference,) = (row["ms"] for row in result["rows"] if row["role"] == "sdpa")
        for row in result["rows"]:
            if row["ms"] is not None:
                assert row["share"] == pytest.approx(result["floor_ms"] / row["ms"])
                assert row["ratio"] == pytest.approx(reference / row["ms"])
                assert (row["timing"], row["eager_ms"], row["skipped"]) == ("clock", None, None)


def test_tokens_sweep_every_shape(softless):
    document = benched(softless, "inline", "--shape", "2,1,1,8", "--tokens", "9,5")
    sizes = [tuple(result["shape"][name] for name in SHAPE[:4]) for result in document["results"]]
    assert sizes == [(2, 1, 5, 8), (2, 1, 9, 8), (1, 2, 5, 4), (1, 2, 9, 4)]


def test_options_reach_the_call(softless):
    call = ("--causal", "--keys", "20", "--kv-heads", "1", "--dtype", "bfloat16", "--backend", "torch")
    document = benched(softless, "linear", "--option", "phi=relu", *call)
    (result,) = document["results"]
    assert result["shape"] == {"batch": 1, "heads": 2, "queries": 16, "head_dim": 4, "keys": 20, "kv_heads": 1}
    assert (document["causal"], document["dtype"], document["backend"]) == (True, "bfloat16", "torch")
    assert document["mechanisms"][0]["options"]["phi"] == "relu"
    assert result["floor_bytes"] == (2 * 2 * 16 + 2 * 20) * 4 * 2


def test_the_command_that_is_recorded_repeats_the_bench(softless):
    typed = ("taylor", "--tokens", "4,8", "--kv-heads", "1", "--causal", "--option", "normalize=true")
    document = benched(softless, *typed)
    again = json.loads(softless(*document["command"].split()[1:], "--json").stdout)
    for name in ("command", "mechanisms", "causal", "dtype", "backend", "quick"):
        assert again[name] == document[name]
    assert [result["shape"] for result in again["results"]] == [result["shape"] for result in document["results"]]


def test_the_backend_of_our_mechanisms_is_shown_with_the_reason(softless):
    for typed, backend, reason in (
        ((), "torch", "the tensors are on the CPU"),
        (("--backend", "reference"), "reference", "asked for"),
    ):
        (made,) = benched(softless, "inline", *typed)["mechanisms"]
        assert (made["backend"], made["backend_reason"]) == (backend, reason)
        assert f"inline ran on {backend}: {reason}" in softless("bench", "inline", *TINY, *typed).stdout


def test_a_name_given_twice_runs_once(softless):
    assert [each["name"] for each in benched(softless, "inline", "inline")["mechanisms"]] == ["inline"]


@pytest.mark.parametrize("columns", ["80", "120"])
def test_what_is_printed_is_what_the_json_says(softless, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    document = benched(softless, "linear", "hydra", "--backward")
    monkeypatch.setattr(documents, "measure_calls", lambda *_, **__: copy.deepcopy(document))
    result = softless("bench", *TINY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert "…" not in result.stdout
    assert "\x1b" not in result.stdout
    text = " ".join(result.stdout.split())
    for row in (row for each in document["results"] for row in each["rows"]):
        if row["skipped"]:
            assert f"not timed: {row['label']}: {row['skipped']}" in text
        else:
            assert f"{row['label']} {seconds(row['ms'] / 1e3)} {short(row['ratio'])}" in text
            assert size(row["extra_bytes"]) in text
    assert bench.verdict(document) in text


def test_an_eager_call_has_a_column_where_it_was_measured(softless, monkeypatch):
    document = benched(softless, "inline")
    for row in document["results"][0]["rows"]:
        if row["ms"] is not None:
            row |= {"eager_ms": 1234.0, "timing": "events" if row["label"] == "SDPA" else "graph"}
    monkeypatch.setattr(documents, "measure_calls", lambda *_, **__: document)
    text = softless("bench", *TINY).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "x SDPA of copy eager extra of output" in " ".join(text.split())
    assert "1.23 s" in text
    assert "timed by events, launches included: SDPA" in text


def row(label, role, ms, ratio, share=0.5):
    return {"label": label, "role": role, "ms": ms, "ratio": ratio, "share": share}


def test_the_verdict_is_about_the_largest_call_and_the_fastest_of_ours():
    shape = {"batch": 1, "heads": 8, "queries": 4096, "head_dim": 64}
    rows = [row("linear", "ours", 2.0, 10.0), row("inline", "ours", 1.0, 20.0), row("SDPA", "sdpa", 20.0, 1.0)]
    large = {"shape": shape, "pass": "forward", "floor_bytes": 2, "rows": rows}
    small = {"shape": shape | {"queries": 8}, "pass": "forward", "floor_bytes": 1, "rows": []}
    says = bench.verdict({"results": [large, small]})
    assert says == "forward [1, 8, 4096, 64]: inline takes 1 ms, 50% of the copy rate; SDPA takes 20 ms, 20x longer."
    large["rows"] = [rows[0], row("SDPA", "sdpa", None, None)]
    assert bench.verdict({"results": [large]}).endswith("linear takes 2 ms, 50% of the copy rate.")
    large["rows"] = [row("linear", "ours", None, None)]
    assert bench.verdict({"results": [large]}).endswith("nothing of ours could be timed.")


def test_a_mechanism_that_does_not_fit_in_memory_is_skipped_and_the_rest_is_timed(softless, monkeypatch):
    monkeypatch.setattr(documents, "check_memory", lambda _: None)
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 1000)
    rows = {row["label"]: row for row in benched(softless, "threshold", "inline")["results"][0]["rows"]}
    assert "are free" in rows["threshold"]["skipped"]
    assert rows["inline"]["ms"] is not None


def test_the_page_draws_every_time_and_fetches_nothing(softless, tmp_path):
    document = benched(softless, "linear", "--backward", "--tokens", "4,8,16", "--plot", "deep/page.html")
    text = (tmp_path / "deep/page.html").read_text()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]
    assert 'src="http' not in text
    assert document["command"] in text
    for label in ("fla chunk", "linear compiled"):
        assert f"not timed: {label}" in text
    figure = figures.draw_calls(document)
    assert [note.text for note in figure.layout.annotations] == [
        "forward, [1, 2, N, 4]",
        "forward+backward, [1, 2, N, 4]",
    ]
    drawn = {(trace.name, tuple(trace.x), tuple(trace.y)) for trace in figure.data}
    for part in ("forward", "forward+backward"):
        results = [result for result in document["results"] if result["pass"] == part]
        for label in ("linear", "SDPA", "linear plain"):
            line = [row["ms"] for result in results for row in result["rows"] if row["label"] == label]
            assert (label, (4, 8, 16), tuple(line)) in drawn
        assert ("floor: one copy", (4, 8, 16), tuple(result["floor_ms"] for result in results)) in drawn
    assert {figure.layout.xaxis.type, figure.layout.yaxis.type} == {"log"}


def test_the_page_escapes_what_it_is_told(softless):
    document = benched(softless, "inline")
    document["machine"]["processor"] = "<script>alert(1)</script>"
    assert "<script>alert(1)" not in figures.calls_page(document)


def test_a_page_without_plotly_is_refused_before_any_work(softless, monkeypatch):
    def missing(package, by):
        raise MissingExtraError(f"{by} needs {package}")

    monkeypatch.setattr(page, "require", missing)
    monkeypatch.setattr(documents, "measure_calls", lambda *_, **__: pytest.fail("it worked first"))
    result = softless("bench", *TINY, "--plot", "page.html")
    assert (result.exit_code, result.stderr) == (3, "error: --plot needs plotly\n")


def test_plotly_is_named_with_its_pip_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'softless\[report\]'"):
        page.require("plotly", by="--plot")


BAD_INPUT = [
    (["nonsense"], "'nonsense' is not one of softmax"),
    (["inline", "efficient", "--option", "phi=relu"], "'efficient' has no option 'phi'"),
    (["inline", "--kv-heads", "3"], "2 query heads are not a multiple of 3 key heads"),
    (["inline", "--shape", "1,8,999999999999,64"], "shape 1,8,999999999999,64"),
    (["inline", "--plot", "."], "'.' is a folder and must be a file"),
    (["inline", "--plot", "/dev/null/page.html"], "cannot write in the folder '/dev/null'"),
]


@pytest.mark.parametrize(("more", "says"), BAD_INPUT)
def test_bad_input_exits_3_with_one_line_that_repeats_it(softless, more, says):
    result = softless("bench", *TINY, *more)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


@pytest.mark.parametrize(
    "more",
    [
        ["--shape", "1,2,3"], ["--shape", "0,1,1,1"], ["--tokens", ""], ["--tokens", "2097152"], ["--option", "phi"],
        ["--backend", "cuda"], ["--repeats", "0"], ["--dtype", "int8"],
    ],
)  # fmt: skip
def test_a_usage_error_exits_2(softless, more):
    result = softless("bench", *more)
    assert result.exit_code == 2
    assert "Usage: softless bench" in result.stderr


def test_help_fits_80_columns_and_names_json(softless):
    result = softless("bench", "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_help_names_mechanisms_and_defaults_in_plain_words(softless):
    said = softless("bench", "--help").stdout
    assert said.startswith("Usage: softless bench [OPTIONS] [MECHANISM]...\n")
    assert "Default: linear and inline." in said
    assert "list[str]" not in said
    assert "(linear" not in said


PIECES = [["inline"], ["softmax"], ["general"], ["x"], ["--causal"], ["--backward"], ["--keys", "7"], ["--keys", "-1"]]
PIECES += [["--kv-heads", "1"], ["--kv-heads", "3"], ["--dtype", "float16"], ["--dtype", "float64"], ["--tokens", "3"]]
PIECES += [["--tokens", "a"], ["--option", "tau=2"], ["--option", "phi=exp"], ["--option", "="], ["--plot", ""]]
PIECES += [["--backend", "reference"], ["--backend", "triton"], ["--json"], ["--shape", "1,1,999999999999999,1"]]


def test_command_lines_nobody_would_write_give_no_traceback(softless):
    rng = random.Random(24)
    for _ in range(30):
        line = [word for piece in rng.sample(PIECES, rng.randrange(1, 5)) for word in piece]
        result = softless("bench", *TINY, *line)
        assert result.exit_code in (0, 2, 3), (line, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), line


def test_progress_is_silent_where_there_is_no_terminal(capsys):
    with progress(10, True) as advance:
        advance("x", 5)
    assert capsys.readouterr() == ("", "")


def test_arguments_are_read_from_text():
    assert arguments.four_numbers("1,2,3,4") == (1, 2, 3, 4)
    assert arguments.key_value("a=b=c") == ("a", "b=c")
    assert arguments.lengths("16,4,16") == (4, 16)


def test_a_quick_bench_is_shorter_than_a_full_one():
    assert bench.QUICK[2] < bench.FULL[2]
    assert bench.QUICK_REPEATS < bench.REPEATS


def test_an_option_goes_to_every_mechanism(softless):
    mechanisms = benched(softless, "linear", "inline", "--option", "phi=relu")["mechanisms"]
    assert [mechanism["options"]["phi"] for mechanism in mechanisms] == ["relu", "relu"]


def test_the_recorded_command_has_every_setting(softless):
    typed = ("--option", "phi=relu", "--causal", "--backward", "--tokens", "8", "--kv-heads", "2", "--keys", "9")
    assert benched(softless, "linear", *typed)["command"] == (
        "softless bench linear --shape 1,2,16,4 --tokens 8 --keys 9 --kv-heads 2 --causal --backward "
        "--option phi=relu --dtype float32 --device cpu --backend auto --repeats 1 --quick"
    )
