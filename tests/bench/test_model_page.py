"""The page of `softless bench-model`: each line in the style of what it is, against what was swept."""

import pytest

pytest.importorskip("plotly")

from softless.bench import figures

ROLES = {
    "m": ("ours", False),
    "m, compiled": ("ours", True),
    "plain formulas": ("plain", False),
    "softmax twin": ("softmax", False),
    "timm m": ("timm", False),
}


def result(side=224, window=None, part="forward", images=None):
    images = images or {label: 1000.0 * (1 + index) / side for index, label in enumerate(ROLES)}
    rows = [
        {
            "label": label,
            "role": ROLES[label][0],
            "compiled": ROLES[label][1],
            "images_per_second": speed,
            "skipped": None if speed else f"no {label}",
        }
        for label, speed in images.items()
    ]
    return {"image_size": [side, 2 * side], "window": window, "batch": 2, "pass": part, "rows": rows}


def document(*results):
    return {
        "command": "softless bench-model m",
        "date": "2030-01-01",
        "versions": {"softless": "1", "torch": "2"},
        "machine": {"processor": "a processor"},
        "model": "m",
        "dtype": "float32",
        "results": list(results),
    }


def lines(figure):
    return {trace.name: trace for trace in figure.data}


def test_resolution_goes_to_the_right_where_it_was_swept():
    figure = figures.draw_model(document(result(224), result(448)))
    assert [note.text for note in figure.layout.annotations] == ["forward, no windows"]
    assert lines(figure)["m"].x == ("224 x 448", "448 x 896")
    assert lines(figure)["m"].y == (1000 / 224, 1000 / 448)
    assert figure.layout.xaxis.title.text == "image size"
    assert figure.layout.yaxis.title.text == "images per second"
    assert figure.layout.yaxis.type == "log"


def test_windows_go_to_the_right_where_they_were_swept():
    figure = figures.draw_model(document(result(window=7), result(window=14), result(window=None)))
    assert [note.text for note in figure.layout.annotations] == ["forward, 224 x 448"]
    assert lines(figure)["softmax twin"].x == ("7", "14", "none")
    assert figure.layout.xaxis.title.text == "window"


def test_there_is_a_panel_for_each_pass_and_for_what_was_not_swept():
    sizes = [result(side, window, part) for side in (32, 64, 96) for window in (7, 14) for part in ("forward", "both")]
    titles = [note.text for note in figures.draw_model(document(*sizes)).layout.annotations]
    assert titles == [f"{part}, {side} x {side} windows" for side in (7, 14) for part in ("forward", "both")]


def test_every_name_is_in_the_legend_once():
    figure = figures.draw_model(document(result(part="forward"), result(part="both")))
    assert sorted(trace.name for trace in figure.data if trace.showlegend) == sorted(ROLES)


def test_the_model_is_the_thickest_and_the_twin_is_black():
    found = lines(figures.draw_model(document(result())))
    widths = {name: trace.line.width for name, trace in found.items()}
    assert {name for name in widths if widths[name] == max(widths.values())} == {"m", "m, compiled"}
    assert found["plain formulas"].line.color == found["m"].line.color != found["softmax twin"].line.color
    assert found["plain formulas"].line.dash == "dot"
    assert found["timm m"].line.color not in (found["m"].line.color, found["softmax twin"].line.color)


def test_filled_marks_are_compiled():
    found = lines(figures.draw_model(document(result())))
    symbols = {name: trace.marker.symbol for name, trace in found.items()}
    assert {name for name, symbol in symbols.items() if symbol == "circle"} == {"m, compiled"}


def test_a_line_has_only_the_points_that_were_measured():
    told = document(result(224), result(448, images=dict.fromkeys(ROLES, 1.0) | {"softmax twin": None}))
    assert lines(figures.draw_model(told))["softmax twin"].x == ("224 x 448",)
    assert "<li>not timed: softmax twin: no softmax twin</li>" in figures.model_page(told)


def test_the_page_says_what_it_shows_and_fetches_nothing():
    text = figures.model_page(document(result(224), result(448)))
    assert "<h1>Throughput against resolution: m</h1>" in text
    assert "a processor, float32, torch 2" in text
    assert 'src="http' not in text
    assert "softless bench-model m" in text
    windows = figures.model_page(document(result(window=7), result(window=14)))
    assert "<h1>Throughput against window: m</h1>" in windows


def test_the_page_escapes_what_it_is_told():
    told = document(result()) | {"model": "<script>alert(1)</script>"}
    assert "<script>alert(1)" not in figures.model_page(told)
