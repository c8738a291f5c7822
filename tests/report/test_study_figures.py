"""Each figure draws the numbers of the report, in the look of the twin they are of."""

from itertools import pairwise

import pytest

from softless.report.page import COLORS, INK
from softless.study.page import SECTIONS, figure_accuracy, figure_attention, figure_queries, figure_range, figure_speed
from softless.study.page.figure import DARK, DASHES, MARKS, POINTS, looks, mechanism_color, span
from tests.report.documents import TAUS


def traces(figure, panel=0, **meta):
    """The traces of a panel whose meta has these values."""
    drawn = figure.panels[panel].plot.data
    return [trace for trace in drawn if all((trace.meta or {}).get(key) == value for key, value in meta.items())]


def of(figure, twin, panel=0, **meta):
    (found,) = traces(figure, panel, twin=twin, **meta)
    return found


def test_the_color_shows_the_mechanism_and_the_dash_shows_the_variant(twins):
    assert {look.color for look in twins.values() if look.mechanism == "softmax"} == {INK}
    assert {look.color for look in twins.values() if look.mechanism == "inline"} == {COLORS[0]}
    assert len({look.color for look in twins.values()}) == 3
    assert len({(look.color, look.dash, look.mark) for look in twins.values()}) == len(twins)


def test_every_mechanism_has_a_color_and_every_color_a_dark_one():
    names = ["softmax", "inline", "linear", "efficient", "hydra", "angular", "focused", "performer"]
    made = looks([{"id": name, "label": name, "mechanism": name} for name in names])
    first = [look.color for look in made.values()][:6]
    assert len(set(first)) == 6
    assert all(look.color in DARK for look in made.values())
    assert len(set(DARK.values())) == len(DARK)


def test_36_twins_of_one_mechanism_look_different_and_more_still_have_a_look():
    made = looks([{"id": str(i), "label": "x", "mechanism": "inline"} for i in range(40)])
    assert len({(look.dash, look.mark) for look in list(made.values())[:18]}) == 18
    assert {look.dash for look in made.values()} <= set(DASHES)
    assert {look.mark for look in made.values()} <= set(MARKS)


def test_the_local_residual_has_the_same_dash_and_mark_whatever_the_order_of_the_twins(report):
    for order in (1, -1):
        made = looks(report["twins"][::order])
        assert {(made[id_].dash, made[id_].mark) for id_ in ("softmax", "inline", "linear")} == {("solid", "circle")}
        assert {(made[f"{id_}-local"].dash, made[f"{id_}-local"].mark) for id_ in ("softmax", "inline", "linear")} == {
            ("dash", "diamond")
        }


def test_a_twin_keeps_its_color_dash_and_mark_in_every_figure(report):
    """Curves that are no twins' but have a twin's label, too: timings and random scores."""
    added = {"id": "taylor", "label": "taylor", "mechanism": "taylor"}, {"id": "elu", "label": "linear elu"}
    report["twins"] += [report["twins"][1] | each for each in added]
    curve = report["range"]["curves"][1]
    report["range"]["curves"].append(curve | {"label": "taylor"})
    laps = [lap for lap in report["speed"]["laps"] if lap["label"] == "linear relu"]
    report["speed"]["laps"] += [lap | {"label": "linear elu"} for lap in laps]
    made = looks(report["twins"])
    by_label = {look.label: look for look in made.values()}
    figures = [figure for section in SECTIONS for figure in section(report, made).figures]
    seen = set()
    for trace in (trace for figure in figures for panel in figure.panels for trace in panel.plot.data):
        look = made.get((trace.meta or {}).get("twin")) or by_label.get(trace.name)
        if look is None or trace.type == "bar" or (trace.name == "softmax" and not trace.marker.symbol):
            continue
        seen.add(look.label)
        if "lines" in trace.mode:
            assert (trace.line.color, trace.line.dash) == (look.color, look.dash)
        if "markers" in trace.mode:
            assert (trace.marker.color, trace.marker.symbol) == (look.color, look.mark)
    assert seen == set(by_label)
    assert by_label["linear elu"].mark != by_label["linear relu"].mark


def test_a_label_has_the_color_of_its_mechanism():
    assert mechanism_color("linear relu") == mechanism_color("linear") == COLORS[1]
    assert mechanism_color("inline, identity, + local") == COLORS[0]
    assert mechanism_color("SDPA") == mechanism_color("softmax") == INK


def test_a_twin_stands_at_its_cost_and_accuracy(report, twins):
    figure = figure_accuracy.cost(report["twins"], twins)
    for twin in report["twins"]:
        for pick in figure.picks:
            mark = of(figure, twin["id"], pick=pick.value)
            assert (mark.x, mark.y) == ((twin[pick.value],), (100 * twin["accuracy"]["mean"],))
            assert mark.error_y.array[0] == pytest.approx(1.2)
            assert mark.marker.color == twins[twin["id"]].color
    assert {mark.meta["pick"] for mark in figure.panels[0].plot.data if mark.visible} == {"seconds_per_epoch"}


def test_a_cost_that_no_twin_has_is_no_choice(report, twins):
    for twin in report["twins"]:
        twin["macs"] = None
    figure = figure_accuracy.cost(report["twins"], twins)
    assert [pick.value for pick in figure.picks] == ["seconds_per_epoch", "parameters"]
    for twin in report["twins"]:
        twin["accuracy"] = None
    assert figure_accuracy.cost(report["twins"], twins) is None


def test_a_twin_without_a_cost_is_left_out_of_that_choice_alone(report, twins):
    report["twins"][0]["macs"] = None
    figure = figure_accuracy.cost(report["twins"], twins)
    assert traces(figure, twin="softmax", pick="macs") == []
    assert of(figure, "softmax", pick="parameters").x == (102_000,)


def test_a_learning_curve_is_the_mean_of_the_seeds(report, twins):
    line = of(figure_accuracy.learning(report["twins"], twins), "inline")
    (first, second) = report["twins"][2]["seeds"]
    assert line.x == tuple(range(1, 17))
    assert line.y[3] == pytest.approx(50 * (first["curve"][3]["accuracy"] + second["curve"][3]["accuracy"]))
    assert figure_accuracy.learning([{"id": "inline", "label": "inline", "seeds": None}], twins) is None


def test_an_accuracy_axis_never_magnifies_less_than_ten_points(report, twins):
    for index, twin in enumerate(report["twins"]):
        twin["accuracy"] = {"mean": 0.95 + 0.001 * index, "low": None, "high": None}
    figure = figure_accuracy.cost(report["twins"], twins)
    low, high = figure.panels[0].plot.layout.yaxis.range
    assert high - low == pytest.approx(POINTS)
    assert f"at least {POINTS:g} points" in figure.reading
    assert "one seed" in figure.reading


@pytest.mark.parametrize("values", [(0.2, 0.9), (0.94, 0.95), (0.99, 1.0), (0.5,), ()])
def test_a_span_holds_every_value_and_does_not_go_far_above_all_right(values):
    low, high = span([100 * value for value in values], least=POINTS, most=101)
    assert high - low >= (POINTS if values else 0) - 1e-9
    assert all(low <= 100 * value <= high <= 101 for value in values)


def test_the_sizes_of_twins_are_listed_if_they_differ(report):
    says = figure_accuracy.shared(report["twins"])
    assert "102,000 parameters: softmax, linear relu and inline" in says
    assert "111,000 parameters: softmax + local, linear relu + local and inline + local" in says
    assert "attention alone" not in says
    for twin in report["twins"]:
        twin["parameters"] = 5
    assert figure_accuracy.shared(report["twins"]).endswith("They differ in attention alone.")


def test_the_twins_in_numbers_have_the_same_decimals_in_a_column(report):
    table = figure_accuracy.numbers(report["twins"], 360)
    assert [row[1] for row in table.rows] == ["95.6", "89.7", "94.1", "97.2", "95.3", "97.8"]
    assert {row[4] for row in table.rows} == {"102,000", "111,000"}
    assert table.notes == ()
    report["twins"][0]["accuracy"] = {"mean": 0.9, "low": None, "high": None}
    alone = figure_accuracy.numbers(report["twins"], 360)
    assert alone.rows[0][:3] == ("softmax", "90.0", "\u2013")
    assert alone.notes == ("\u2013 in the interval: a single seed has none.",)


def test_collinear_queries_are_drawn_on_the_keys_with_both_rows_of_each_mechanism(report, twins):
    figure, found = figure_queries.collinear(report["collinear"], twins), report["collinear"]
    keys, *arrows = figure.panels[0].plot.data
    assert list(zip(keys.x, keys.y, strict=True)) == [tuple(key) for key in found["keys"]]
    assert {(arrow.meta["label"], arrow.x[1], arrow.y[1]) for arrow in arrows} == {
        ("p", *found["p"]),
        ("q", *found["q"]),
    }
    for panel, row in zip(figure.panels[1:], found["rows"], strict=True):
        p, q = panel.plot.data
        assert sorted(p.y) == sorted(row["p"])
        assert sorted(q.y) == sorted(row["q"])
        assert list(p.y) == sorted(p.y, reverse=True)


def test_rows_that_coincide_are_confused_and_others_told_apart(report, twins):
    titles = [panel.title for panel in figure_queries.collinear(report["collinear"], twins).panels]
    assert titles[2] == "linear relu: confused, less than 0.001 apart"
    assert titles[1].startswith("softmax: told apart, 0.")
    assert titles[3].startswith("inline: told apart, 0.")


def test_confused_and_told_apart_are_one_definition_in_the_whole_section(report, twins):
    section = figure_queries.section(report, twins)
    assert "less than 0.001 apart" in section.says
    words = " ".join([section.says, section.remark, *(f.title + f.reading for f in section.figures)])
    assert "the same row" not in words.replace("get the same row", "")
    assert "injective" not in words


def test_twins_that_confuse_no_queries_are_a_sentence_and_no_histogram(report, twins):
    figure = figure_queries.confusions(report, twins)
    assert [panel.twin for panel in figure.panels] == ["linear", "inline", "linear-local", "inline-local"]
    assert figure_queries.told_apart(report, twins) == (
        "softmax and softmax + local tell all queries apart: in 128 test images, every layer and head, no pair of real "
        "queries is confused."
    )


def test_where_no_twin_confuses_queries_there_is_one_sentence_instead_of_equal_bars(report, twins):
    for layer in report["layers"]:
        layer["confusion_histogram"] = {"edges": [0, 1], "counts": [512]}
    section = figure_queries.section(report, twins)
    assert [figure.id for figure in section.figures] == ["collinear"]
    assert section.remark.startswith("All twins tell all queries apart: in 128 test images")
    assert section.missing == ""


def test_a_histogram_is_of_all_layers_or_of_one(report, twins):
    figure = figure_queries.confusions(report, twins)
    linear = figure.panels[0]
    assert linear.twin == "linear"
    assert [pick.value for pick in figure.picks] == ["all", *(f"blocks.{i}.attn" for i in range(4))]
    assert [trace.visible for trace in linear.plot.data] == [True, False, False, False, False]
    for trace in linear.plot.data:
        assert sum(trace.y) == pytest.approx(100)
    counts = [layer["confusion_histogram"]["counts"] for layer in report["layers"] if layer["twin"] == "linear"]
    total = [sum(each) for each in zip(*counts, strict=True)]
    assert linear.plot.data[0].y == pytest.approx([100 * each / sum(total) for each in total])
    assert linear.plot.data[2].y == pytest.approx([100 * each / sum(counts[1]) for each in counts[1]])


def test_histograms_share_their_bins_even_where_twins_have_others(report, twins):
    report["layers"][0]["confusion_histogram"] = {"edges": [0, 1, 2, 4, 8], "counts": [1, 2, 3, 4]}
    figure = figure_queries.confusions(report, twins)
    ticks = {panel.plot.layout.xaxis.ticktext for panel in figure.panels}
    assert ticks == {("0", "1", "2", "4", "5", "10", "20", "50", "100")}


def test_of_many_bins_some_are_named(report, twins):
    edges = [0, *(2**power for power in range(11))]
    for layer in report["layers"]:
        layer["confusion_histogram"] = {"edges": edges, "counts": [1] * 11}
    panel = figure_queries.confusions(report, twins).panels[0]
    assert panel.plot.layout.xaxis.ticktext == ("0", "2", "8", "32", "128", "512")
    assert panel.plot.data[0].x[-1] == 10.5


def test_bins_stand_between_the_edges_that_name_them(report, twins):
    panel = figure_queries.confusions(report, twins).panels[0]
    assert panel.plot.layout.xaxis.ticktext[:5] == ("0", "1", "2", "5", "10")
    assert panel.plot.data[0].x[:3] == (0.5, 1.5, 2.5)
    assert list(panel.plot.data[0].customdata[:4]) == ["0", "1", "2 to 4", "5 to 9"]


def test_local_mass_goes_by_layer_over_its_baseline(report, twins):
    figure = figure_attention.local_mass(report["layers"], twins)
    line = of(figure, "softmax")
    assert line.x == (1, 2, 3, 4)
    assert line.y == pytest.approx([34, 32, 30, 28])
    assert figure.panels[0].plot.data[-1].y == pytest.approx([100 * 9 / 64 * 0.77] * 4)
    assert figure.panels[0].plot.data[-1].meta["label"] == "equal weights"


def test_local_mass_needs_no_baseline(report, twins):
    for layer in report["layers"]:
        layer["local_baseline"] = None
    figure = figure_attention.local_mass(report["layers"], twins)
    assert of(figure, "softmax").y == pytest.approx([34, 32, 30, 28])
    assert figure.panels[0].plot.layout.annotations == ()


def test_both_kinds_of_masks_start_at_no_mask_and_count_the_same_keys(report, twins):
    figure = figure_attention.mask_out(report["mask_out"], twins)
    accuracy = {(row["twin"], row["mask"]): 100 * row["accuracy"]["mean"] for row in report["mask_out"]}
    for panel, masks in enumerate((("local 3", "local 5", "local 7"), ("random 9", "random 25", "random 49"))):
        line = of(figure, "inline", panel)
        assert list(line.customdata) == [0, 9, 25, 49]
        assert line.y == tuple(accuracy["inline", mask] for mask in ("none", *masks))
    spans = {tuple(panel.plot.layout.yaxis.range) for panel in figure.panels}
    assert len(spans) == 1


def test_twins_stand_side_by_side_at_each_number_of_masked_keys(report, twins):
    for panel in figure_attention.mask_out(report["mask_out"], twins).panels:
        places = [trace.x for trace in panel.plot.data]
        for marks, keys in zip(zip(*places, strict=True), (0, 9, 25, 49), strict=True):
            assert sum(marks) / len(marks) == pytest.approx(keys)
            assert all(left < right for left, right in pairwise(marks))


def test_a_mask_of_another_name_is_not_drawn(report, twins):
    report["mask_out"].append({"twin": "inline", "mask": "ring 5", "accuracy": {"mean": 0.1}})
    line = of(figure_attention.mask_out(report["mask_out"], twins), "inline")
    assert list(line.customdata) == [0, 9, 25, 49]
    assert figure_attention.mask_out([], twins) is None


def test_induced_confusion_keeps_its_order_and_stands_beside_the_trained_twins(report, twins):
    report["induced"].append({"twin": "softmax", "what": "rows 25 %", "accuracy": {"mean": 0.6}})
    figure = figure_attention.induced(report["induced"], twins, report["twins"], 360)
    mark = of(figure, "softmax")
    assert mark.y == ("unchanged", "f1(q) = relu(q)", "f2(q) = relu(Aq + b)", "25% of rows shared")
    assert mark.x == pytest.approx([95.6, 92.1, 88.4, 60])
    assert {trace.y[0]: trace.x[0] for trace in figure.panels[1].plot.data} == pytest.approx(
        {twin["label"]: 100 * twin["accuracy"]["mean"] for twin in report["twins"]}
    )
    assert "The twin is not retrained" in figure.reading
    assert "trained with their own attention" in figure.reading


def test_only_layers_that_run_a_softmax_are_asked_what_a_linear_kernel_would_cost(report, twins):
    figure = figure_range.error(report["range"], twins)
    marks = of(figure, "softmax")
    own = [layer for layer in report["range"]["layers"] if layer["twin"] == "softmax"]
    assert marks.x == tuple(layer["range"]["mean"] for layer in own)
    assert marks.y == tuple(100 * layer["error"]["mean"] for layer in own)
    assert list(marks.customdata) == ["1", "2", "3", "4"]
    shown = {(trace.meta or {}).get("twin") for trace in figure.panels[0].plot.data} - {None}
    assert shown == {"softmax", "softmax-local"}
    curves = [trace.name for trace in figure.panels[0].plot.data if trace.name and "twin" not in (trace.meta or {})]
    assert sorted(curves) == ["inline", "threshold", "uniform"]


def test_a_path_is_the_mean_of_the_layers_and_its_mark_starts_on_it(report, twins):
    figure = figure_range.threshold(report["range"]["threshold"], twins)
    path, mark = of(figure, "inline", path=True), of(figure, "inline", follows=True)
    own = [layer for layer in report["range"]["threshold"] if layer["twin"] == "inline"]
    assert list(path.customdata) == TAUS
    assert path.x[3] == pytest.approx(25 * sum(layer["kept"][3] for layer in own), abs=1e-3)
    assert path.y[3] == pytest.approx(25 * sum(layer["discarded"][3] for layer in own), abs=1e-3)
    assert (mark.x[0], mark.y[0]) == (path.x[0], path.y[0])


def test_three_distributions_have_their_mechanisms_colors(report):
    found = figure_range.distributions(report["range"]["distributions"]).panels[0].plot.data
    assert [trace.name for trace in found] == ["softmax", "first order", "uniform"]
    assert [trace.line.color for trace in found][:2] == [INK, COLORS[0]]
    assert found[1].y == tuple(report["range"]["distributions"][1]["weights"])


def test_speed_is_in_milliseconds_and_megabytes(report, twins):
    figure = figure_speed.curves(report["speed"], twins)
    lines = {(trace.name, trace.meta["pick"]): trace for trace in figure.panels[0].plot.data if trace.name}
    laps = {(lap["label"], lap["tokens"]): lap for lap in report["speed"]["laps"]}
    assert lines["inline", "seconds"].y == tuple(1e3 * laps["inline", n]["seconds"] for n in (64, 256, 1024, 4096))
    assert lines["inline", "peak_bytes"].y[0] == pytest.approx(laps["inline", 64]["peak_bytes"] / 1e6)
    assert [pick.label for pick in figure.picks] == ["time", "memory"]


def test_mechanisms_of_no_twin_are_thin_and_nameless(report, twins):
    figure = figure_speed.curves(report["speed"], twins)
    lines = {trace.name: trace for trace in figure.panels[0].plot.data if trace.name}
    assert lines["hydra"].line.width < lines["inline"].line.width
    named = {name for name, line in lines.items() if "label" in line.meta}
    assert named == {"SDPA", "softmax", "inline", "linear relu"}


def rings(report, twins):
    drawn = figure_speed.curves(report["speed"], twins).panels[0].plot.data
    return {trace.meta["label"]: trace for trace in drawn if trace.marker.symbol == "circle-open"}


def test_a_ring_stands_on_the_line_at_the_crossover(report, twins):
    found = rings(report, twins)
    assert set(found) == {"N = 325", "N = 377"}
    drawn = figure_speed.curves(report["speed"], twins).panels[0].plot.data
    inline = next(trace for trace in drawn if trace.name == "inline")
    assert found["N = 325"].x == (325,)
    assert inline.y[1] < found["N = 325"].y[0] < inline.y[2]


def test_a_mechanism_that_is_faster_at_every_length_has_a_sentence_and_no_ring(report, twins):
    report["speed"]["trends"][2] |= {"crossover": 64, "faster_everywhere": True}
    assert set(rings(report, twins)) == {"N = 377"}
    reading = figure_speed.curves(report["speed"], twins).reading
    assert "inline is faster than SDPA at every length timed, from 64 tokens." in reading


def test_the_study_s_own_tokens_are_marked_and_its_own_speed_comes_first(report, twins):
    section = figure_speed.section(report, twins)
    (table,) = section.tables
    assert section.table_first
    assert table.title == "Speed at this study's 65 tokens"
    row = report["speed"]["own"]["rows"][2]
    assert table.rows[2] == (
        "inline", f"{1e3 * row['training_seconds']:.3f}", f"{1e3 * row['inference_seconds']:.3f}", "1.32x", "1.32x",
    )  # fmt: skip
    here = [
        trace for trace in section.figures[0].panels[0].plot.data if "this study" in (trace.meta.get("label") or "")
    ]
    assert [(trace.x, trace.meta["pick"]) for trace in here] == [((65, 65), "seconds"), ((65, 65), "peak_bytes")]
    report["speed"]["own"]["rows"][0]["training_ratio"] = None
    assert "no softmax twin" in figure_speed.section(report, twins).tables[0].notes[1]
    report["speed"]["own"] = None
    assert figure_speed.section(report, twins).tables == ()


def test_laps_that_were_skipped_are_no_points(report, twins):
    for lap in report["speed"]["laps"]:
        if lap["label"] == "inline" and lap["tokens"] > 256:
            lap["seconds"] = None
    drawn = figure_speed.curves(report["speed"], twins).panels[0].plot.data
    assert next(trace for trace in drawn if trace.name == "inline").x == (64, 256)


def test_layers_of_the_viewer_are_numbered_as_they_come(report):
    assert figure_attention.viewer_layers(report) == {f"blocks.{i}.attn": str(i + 1) for i in range(4)}
    assert figure_attention.viewer_layers({"viewer": None}) == {}


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        (figure_attention.viewer_section, ["viewer"]),
        (figure_queries.section, ["collinear", "layers"]),
        (figure_attention.locality_section, ["layers", "mask_out", "induced"]),
        (figure_range.section, ["range"]),
        (figure_speed.section, ["speed"]),
    ],
)
def test_a_section_without_data_says_so_and_draws_nothing(report, twins, section, parts):
    assert section(report, twins).missing == ""
    for part in parts:
        report[part] = None
    empty = section(report, twins)
    assert empty.figures == ()
    assert empty.missing.startswith("This study ")


def test_every_figure_says_how_to_read_it_on_how_many_images_and_what_its_panels_show(report, twins):
    figures = [figure for section in SECTIONS for figure in section(report, twins).figures]
    assert len(figures) == 12
    for figure in figures:
        assert figure.reading.endswith(".")
        assert figure.part
        assert all(panel.about for panel in figure.panels)
        if figure.id != "speed-curves":
            counts = ("Measured on 360 test images", "Measured on 128 test images", "one test image", "4 of 360 test")
            assert any(count in figure.reading for count in counts), figure.id
