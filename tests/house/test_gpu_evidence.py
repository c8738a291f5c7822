"""The GPU evidence: every bar has cases, one that fails is recorded, and the page of kernels shows the truth."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.scripts import script

ROOT = Path(__file__).parents[2]


gpu, bars, models = script("gpu"), script("gpu_bars"), script("model_bars")
EVERY = (*bars.BARS, *models.BARS)


def row(value, *, sign=">=", limit=1.0, group="a", what="x", **more):
    holds = value is not None and (value >= limit if sign == ">=" else value <= limit)
    return {"bar": 1, "group": group, "what": what, "unit": "x", "sign": sign, "limit": limit, "value": value} | {
        "holds": holds,
        **more,
    }


def test_every_bar_has_cases_and_no_two_share_a_name():
    assert [{case.bar for case in cases()} for cases in EVERY] == [{bar} for bar in range(1, 15)]
    names = [(case.group, case.what) for cases in EVERY for case in cases()]
    assert len(names) == len(set(names)) == 8 + 4 + 88 + 1 + 12 + 2 + 16 + 12 + 5 + 3 + 2 + 2 + 2 + 2


def test_a_bar_has_one_limit_a_group():
    limits = {(case.group, case.sign, case.limit, case.unit) for cases in EVERY for case in cases()}
    assert len(limits) == len({group for group, *_ in limits})


def test_a_case_that_raises_is_recorded_and_does_not_hold():
    def fail():
        raise RuntimeError("CUDA error:\nan illegal memory access")

    found = bars.Case(1, "a", "b", "x", ">=", 1.0, fail).row()
    assert (found["value"], found["holds"]) == (None, False)
    assert found["error"] == "RuntimeError: CUDA error: an illegal memory access"


@pytest.mark.parametrize(
    ("sign", "value", "holds"), [(">=", 1.0, True), (">=", 0.9, False), ("<=", 1.0, True), ("<=", 1.1, False)]
)
def test_a_case_holds_on_the_right_side_of_its_limit(sign, value, holds):
    assert bars.Case(1, "a", "b", "x", sign, 1.0, lambda: (value, {"ms": 3})).row()["holds"] is holds


LOAD = bars.load


@pytest.fixture
def small(monkeypatch):
    """Every measurement on a CPU, in tiny shapes."""
    monkeypatch.setattr(bars, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bars, "BACKEND", "auto")
    monkeypatch.setattr(bars, "REPEATS", 1)
    monkeypatch.setattr(bars, "LARGE", ((1, 2, 32, 8),))
    monkeypatch.setattr(bars, "CAUSAL", ((1, 2, 32, 8),))
    monkeypatch.setattr(bars, "load", lambda *_: lambda q, k, v: q * k * v)  # none is installed here
    monkeypatch.setattr(bars, "rate", lambda: 1e9)
    bars.result.cache_clear()
    yield
    bars.result.cache_clear()


def test_what_is_measured_on_a_gpu_can_be_measured_here(small):
    for cases in (bars.copy_speed, bars.causal, bars.memory):
        for case in cases():
            found = case.row()
            assert "error" not in found, found
            assert found["value"] is not None
    value, facts = bars.against("SDPA", "inline", (1, 2, 32, 8), True)
    assert value == facts["against_ms"] / facts["ms"]


def test_a_rival_that_is_not_installed_has_no_number(small, monkeypatch):
    monkeypatch.setattr(bars, "load", LOAD)
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)
    for case in bars.causal():
        found = case.row()
        assert (found["value"], found["holds"]) == (None, False)
        assert "fla" in found["error"]


def test_a_decode_step_counts_the_state_read_and_written(small):
    _, facts = bars.decode("linear")
    comoment = 64 * 16 * 64 * 64 * 4
    assert 2 * comoment < facts["bytes"] < 2.1 * comoment


def test_the_plain_residual_computes_what_it_is_compared_with(small):
    q, k, v = torch.randn(3, 2, 3, 5 * 5, 4, dtype=torch.float64).unbind()
    taps = torch.randn(2, 3, 9, 4, dtype=torch.float64)
    exact = bars.attention_with_residual(q, k, v, taps, grid=(5, 5))
    assert (bars.plain_residual(q, k, v, taps, 5) - exact).abs().max() <= 1e-12 * (1 + exact.abs().max())
    value, facts = bars.residual(batch=2, heads=3, side=5, dim=4)
    assert value == facts["against_ms"] / facts["ms"]


@pytest.fixture
def small_models(monkeypatch, small):
    """Every bar of whole models on a CPU: the smallest model, on four patches, and not compiled."""
    monkeypatch.setattr(models, "DTYPE", torch.float32)
    monkeypatch.setattr(models, "as_compiled", lambda entrant: replace(entrant, compiled=True))
    for name in ("AGAINST_TIMM", "AGAINST_PLAIN", "TRAINED", "MEMORY"):
        (_, _, _, limit), *_ = getattr(models, name)
        monkeypatch.setattr(models, name, (("inline_deit_tiny", 32, 1, limit),))
    monkeypatch.setattr(models, "REGRESSED", (("small regress", "small", 32, 1, True, 0.5),))
    models.result.cache_clear()
    yield
    models.result.cache_clear()


@pytest.mark.slow
def test_what_is_measured_of_models_can_be_measured_here(small_models):
    for case in (case for cases in models.BARS for case in cases()):
        found = case.row()
        assert "error" not in found, found
        if case.bar == 13:
            assert found["value"] == found["memory_bytes"] / found["against_memory_bytes"]
        else:
            assert found["value"] == found["images_per_second"] / found["against_images_per_second"]
        others = {10: "timm deit_tiny", 13: "softmax twin", 14: "inline_deit_tiny"}
        assert found["against"] == others.get(case.bar, "plain formulas")


def test_a_model_is_measured_once_for_all_its_bars(small_models, monkeypatch):
    ran = []
    contest = models.model_contest
    monkeypatch.setattr(models, "model_contest", lambda *given, **how: ran.append(given) or contest(*given, **how))
    for _ in range(2):
        models.against("plain", "inline_deit_tiny", 32, 1, False)
    models.against("timm", "inline_deit_tiny", 32, 1, False)
    assert [entrant.role for (entrant,), _ in ran] == ["ours", "plain", "timm"]


def test_bars_of_models_run_compiled_kernels_but_for_memory(monkeypatch):
    asked = []

    def record(way, name, side, batch, train, compiled=True):
        asked.append((way, train, compiled))
        rates = {"images_per_second": 1.0, "eager_images_per_second": 1.0, "memory_bytes": 1}
        return {"label": way, "ms": 1.0, "timing": "graph", **rates}

    monkeypatch.setattr(models, "result", record)
    assert all(case.row()["value"] == 1.0 for cases in models.BARS for case in cases())
    assert set(asked) == {
        ("ours", False, True), ("timm", False, True), ("plain", False, True),
        ("ours", True, True), ("plain", True, True), ("ours", True, False), ("twin", True, False),
        ("regress", False, True), ("small", True, True), ("small regress", True, True),
    }  # fmt: skip
    assert bars.BACKEND == "triton"


def test_the_limits_are_those_that_were_promised():
    promised = [(case.bar, case.sign, case.limit) for cases in models.BARS for case in cases()]
    assert promised == [
        (10, ">=", 0.95), (10, ">=", 1.7), (10, ">=", 4.3), (11, ">=", 1.3), (11, ">=", 1.5),
        (12, ">=", 1.5), (12, ">=", 1.5), (13, "<=", 1.05), (13, "<=", 1.05), (14, ">=", 0.95), (14, ">=", 1 / 1.15),
    ]  # fmt: skip


def test_the_table_shows_the_worst_case_of_each_group():
    rows = [row(3.0, what="fast"), row(0.5, what="slow"), row(0.1, sign="<=", group="b", what="lean")]
    rows += [row(0.4, sign="<=", group="b", what="rich"), row(None, group="c", what="broken", error="it broke")]
    assert gpu.table(rows).splitlines()[2:] == [
        "| a | 0.5x (slow) | >= 1x | 1 of 2 |",
        "| b | 0.4x (rich) | <= 1x | 2 of 2 |",
        "| c | failed (broken) | >= 1x | 0 of 1 |",
    ]


EVIDENCE = {
    "schema": "softless.gpu/1",
    "date": "2030-01-02",
    "gpu": "NVIDIA H200",
    "driver": "1.2",
    "versions": {"torch": "2.11", "triton": "3.6"},
    "copy_bytes_per_second": 4.25e12,
    "whole": True,
    "rows": [row(2.0)],
}


def test_evidence_of_another_format_or_half_a_run_is_none(tmp_path):
    assert gpu.newest(tmp_path) is None
    (tmp_path / "gpu-2030-01-01.json").write_text(json.dumps({"date": "2030-01-01", "rows": []}))
    (tmp_path / "gpu-2030-01-03.json").write_text(json.dumps(EVIDENCE | {"whole": False}))
    assert gpu.newest(tmp_path) is None
    (tmp_path / "gpu-2030-01-02.json").write_text(json.dumps(EVIDENCE))
    assert gpu.newest(tmp_path) == EVIDENCE


def test_the_section_is_the_table_or_says_that_there_is_none():
    assert gpu.section(None) == "No GPU evidence of the kernels has been recorded yet: `make gpu` writes it."
    text = gpu.section(EVIDENCE)
    assert text.startswith(gpu.table(EVIDENCE["rows"]))
    about = "NVIDIA H200, driver 1.2, torch 2.11, triton 3.6; bfloat16, 2030-01-02, copies 4.25 TB/s"
    assert text.endswith(f"{about}; written by `make gpu`.")


def test_the_page_is_filled_between_its_marks_and_nowhere_else(monkeypatch, tmp_path):
    start, end = gpu.MARKS
    page = tmp_path / "kernels.md"
    page.write_text(f"# Title\n\n{start}\nold\n{end}\n\nMore.\n")
    monkeypatch.setattr(gpu, "PAGE", page)
    monkeypatch.setattr(gpu, "newest", lambda: EVIDENCE)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--page"])
    for _ in range(2):
        assert gpu.main() == 0
        assert page.read_text() == f"# Title\n\n{start}\n\n{gpu.section(EVIDENCE)}\n\n{end}\n\nMore.\n"
    with pytest.raises(ValueError, match=r"the page has no <!-- gpu evidence"):
        gpu.fill("# Title\n", "x")


def test_a_machine_without_cuda_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 3
    assert capsys.readouterr().err == "this benchmark needs a CUDA device, and torch finds none\n"


@pytest.fixture
def paper_gpu(monkeypatch, tmp_path):
    """A machine that says it has a GPU, and two bars to run on it."""

    def hold():
        yield bars.Case(1, "a", "b", "x", ">=", 1.0, lambda: (2.0, {}))

    def miss():
        yield bars.Case(2, "c", "d", "x", ">=", 1.0, lambda: (0.5, {}))

    for name, its_bars in (("gpu_bars", (hold,)), ("model_bars", (miss,))):
        fake = ModuleType(name)
        fake.BARS, fake.rate = its_bars, lambda: 1e12
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "paper")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu, "driver", lambda: "0")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        return gpu.main()

    return run


def test_a_whole_run_writes_its_evidence_and_fails_on_a_missed_bar(paper_gpu, tmp_path, capsys):
    assert paper_gpu() == 1
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert list(found) == [
        "schema", "date", "command", "gpu", "capability", "driver", "versions", "dtype", "backend",
        "copy_bytes_per_second", "whole", "rows",
    ]  # fmt: skip
    assert list(found["versions"]) == ["python", "cuda", "torch", "triton", "timm", "fla-core", "softless", "ptxas"]
    assert path.name == f"gpu-{found['date']}.json"
    assert found["whole"]
    assert gpu.newest(tmp_path) == found
    said = capsys.readouterr().out
    assert "2  c: d: 0.5x, bar >= 1x   MISSED" in said
    assert said.endswith(gpu.table(found["rows"]) + "\n")


def test_some_bars_alone_are_not_evidence(paper_gpu, tmp_path):
    assert paper_gpu("--only", "1") == 0
    assert list(tmp_path.iterdir()) == []
    assert paper_gpu("--only", "2", "--json", str(tmp_path / "gpu-some.json")) == 1
    assert gpu.newest(tmp_path) is None
