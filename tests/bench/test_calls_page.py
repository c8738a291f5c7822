"""The page of `softless bench`: each line in the style of what it is, each panel one kind of call."""

import pytest

pytest.importorskip("plotly")

from softless.bench import figures

ROLES = {
    "linear": ("ours", "linear"),
    "inline": ("ours", "inline"),
    "SDPA": ("sdpa", None),
    "linear plain": ("plain", "linear"),
    "inline compiled": ("compiled", "inline"),
    "fla chunk": ("rival", "linear"),
    "flash_bla": ("rival", "linear"),
}


def row(label, ms):
    role, mechanism = ROLES[label]
    return {"label": label, "role": role, "mechanism": mechanism, "ms": ms, "skipped": None if ms else f"no {label}"}


def result(tokens, part="forward", heads=2, times=None):
    shape = {"batch": 1, "heads": heads, "queries": tokens, "head_dim": 8, "keys": tokens, "kv_heads": heads}
    times = times or dict.fromkeys(ROLES, float(tokens))
    rows = [row(label, ms) for label, ms in times.items()]
    return {"shape": shape, "pass": part, "floor_bytes": tokens, "floor_ms": tokens / 100, "rows": rows}


def document(*results):
    return {
        "command": "softless bench",
        "date": "2030-01-01",
        "versions": {"softless": "1", "torch": "2"},
        "machine": {"processor": "a processor"},
        "mechanisms": [{"name": "linear"}, {"name": "inline"}],
        "causal": False,
        "dtype": "float32",
        "copy_bytes_per_second": 4.25e12,
        "results": list(results),
    }


def lines(figure):
    return {trace.name: trace for trace in figure.data}


def test_there_is_a_panel_for_each_pass_and_size_in_the_order_they_ran():
    both = [result(n, part, heads) for heads in (4, 2) for n in (8, 16) for part in ("forward", "forward+backward")]
    titles = [note.text for note in figures.draw_calls(document(*both)).layout.annotations]
    assert titles == [
        "forward, [1, 4, N, 8]", "forward+backward, [1, 4, N, 8]",
        "forward, [1, 2, N, 8]", "forward+backward, [1, 2, N, 8]",
    ]  # fmt: skip


def test_a_line_goes_from_short_to_long_whatever_ran_first():
    found = lines(figures.draw_calls(document(result(16), result(4), result(8))))
    assert found["linear"].x == (4, 8, 16)
    assert found["floor: one copy"].y == (0.04, 0.08, 0.16)


def test_the_axis_names_the_lengths_that_ran():
    figure = figures.draw_calls(document(result(1024), result(65536)))
    assert figure.layout.xaxis.tickvals == (1024, 65536)
    assert figure.layout.xaxis.ticktext == ("1,024", "65,536")


def test_a_mechanism_and_its_plain_formula_share_a_color_and_no_one_else_has_it():
    color = {
        name: trace.line.color for name, trace in lines(figures.draw_calls(document(result(8), result(16)))).items()
    }
    assert color["linear"] == color["linear plain"]
    assert color["inline"] == color["inline compiled"]
    distinct = [color[name] for name in ("linear", "inline", "SDPA", "fla chunk", "flash_bla")]
    assert len(set(distinct)) == len(distinct)


def test_ours_are_the_thickest_and_only_the_floor_is_dashed():
    found = lines(figures.draw_calls(document(result(8), result(16))))
    widths = {name: trace.line.width for name, trace in found.items()}
    assert {name for name in widths if widths[name] == max(widths.values())} == {"linear", "inline"}
    assert [name for name, trace in found.items() if trace.line.dash == "dash"] == ["floor: one copy"]


def test_every_name_is_in_the_legend_once():
    figure = figures.draw_calls(document(result(8), result(8, "forward+backward")))
    shown = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(shown) == sorted({*ROLES, "floor: one copy"})


def test_one_length_is_points_that_can_be_seen():
    found = lines(figures.draw_calls(document(result(8))))
    assert all("markers" in trace.mode for trace in found.values())


def test_a_line_has_only_the_points_that_were_measured():
    short, long = result(8), result(16, times=dict.fromkeys(ROLES, 1.0) | {"SDPA": None})
    told = document(short, long)
    assert lines(figures.draw_calls(told))["SDPA"].x == (8,)
    assert "<li>not timed: SDPA: no SDPA</li>" in figures.calls_page(told)


def test_a_reason_is_listed_once_however_often_it_was_met():
    times = dict.fromkeys(ROLES, 1.0) | {"flash_bla": None}
    assert figures.calls_page(document(result(8, times=times), result(16, times=times))).count("not timed") == 1


def test_nothing_missing_is_no_list():
    assert "<ul>" not in figures.calls_page(document(result(8))).split("</script>")[-1]


def test_the_page_says_where_it_was_measured_and_how_fast_a_copy_is():
    text = figures.calls_page(document(result(8)))
    assert "<h1>Time against tokens: linear, inline</h1>" in text
    assert "a processor, float32, torch 2" in text
    assert "(4,250 GB/s)" in text
    causal = document(result(8)) | {"causal": True}
    assert "a processor, causal, float32" in figures.calls_page(causal)
