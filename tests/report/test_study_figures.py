"""Each figure draws the numbers of the report, in the look of the twin they are of."""

import pytest

from softless.report import study_accuracy, study_locality, study_queries, study_range, study_speed, study_viewer
from softless.report.page import COLORS, INK
from softless.report.study_labels import HEIGHT, LINE, at_ends, beside_marks
from softless.report.study_style import DARK, DASHES, looks, mechanism_color
from tests.report.documents import TAUS


def traces(figure, panel=0, **meta):
    """The traces of a panel whose meta has these values."""
    drawn = figure.panels[panel].plot.data
    return [trace for trace in drawn if all((trace.meta or {}).get(key) == value for key, value in meta.items())]


def of(figure, twin, panel=0, **meta):
    (found,) = traces(figure, panel, twin=twin, **meta)
    return found


def test_the_color_says_the_mechanism_and_the_dash_which_variant(twins):
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


def test_more_variants_than_dashes_still_have_a_look():
    made = looks([{"id": str(i), "label": "x", "mechanism": "inline"} for i in range(20)])
    assert made["0"].dash == made[str(len(DASHES))].dash == "solid"


def test_a_label_has_the_color_of_its_mechanism():
    assert mechanism_color("linear relu") == mechanism_color("linear") == COLORS[1]
    assert mechanism_color("inline, identity, + local") == COLORS[0]
    assert mechanism_color("SDPA") == mechanism_color("softmax") == INK


def test_a_twin_stands_at_its_cost_and_accuracy(report, twins):
    figure = study_accuracy.cost(report["twins"], twins)
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
    figure = study_accuracy.cost(report["twins"], twins)
    assert [pick.value for pick in figure.picks] == ["seconds_per_epoch", "parameters"]
    for twin in report["twins"]:
        twin["accuracy"] = None
    assert study_accuracy.cost(report["twins"], twins) is None


def test_a_twin_without_a_cost_is_left_out_of_that_choice_alone(report, twins):
    report["twins"][0]["macs"] = None
    figure = study_accuracy.cost(report["twins"], twins)
    assert traces(figure, twin="softmax", pick="macs") == []
    assert of(figure, "softmax", pick="parameters").x == (102_000,)


def test_a_learning_curve_is_the_mean_of_the_seeds(report, twins):
    line = of(study_accuracy.learning(report["twins"], twins), "inline")
    (first, second) = report["twins"][2]["seeds"]
    assert line.x == tuple(range(1, 17))
    assert line.y[3] == pytest.approx(50 * (first["curve"][3]["accuracy"] + second["curve"][3]["accuracy"]))
    assert study_accuracy.learning([{"id": "inline", "label": "inline", "seeds": None}], twins) is None


def test_names_beside_marks_do_not_stand_on_each_other():
    marks = [(5.0, 0.9, "one name"), (5.2, 0.9, "another name"), (9.9, 0.5, "at the right edge")]
    places = beside_marks(marks, 10.0, (0.0, 1.0))
    assert places[0].endswith("left")
    assert places[2].endswith("left")
    assert beside_marks([(1.0, 1.0, "alone")], 10.0, (0.0, 2.0)) == ["middle right"]


def test_names_at_the_ends_of_lines_keep_a_line_apart():
    notes = at_ends({"a": (10, 100, "red"), "b": (10, 101, "red"), "c": (10, 10_000, "red")}, [1, 10_000])
    heights = {note["text"]: HEIGHT * note["y"] / 4 + note["yshift"] for note in notes}
    assert heights["b"] - heights["a"] >= LINE - 1e-6
    assert notes[2]["yshift"] == 0


def test_collinear_queries_are_drawn_on_the_keys_with_both_rows_of_each_mechanism(report):
    figure, found = study_queries.collinear(report["collinear"]), report["collinear"]
    (keys,) = figure.panels[0].plot.data
    assert list(zip(keys.x, keys.y, strict=True)) == [tuple(key) for key in found["keys"]]
    arrows = [note for note in figure.panels[0].plot.layout.annotations if note.showarrow]
    assert {(arrow.x, arrow.y) for arrow in arrows} == {tuple(found["p"]), tuple(found["q"])}
    for panel, row in zip(figure.panels[1:], found["rows"], strict=True):
        p, q = panel.plot.data
        assert sorted(p.y) == sorted(row["p"])
        assert sorted(q.y) == sorted(row["q"])
        assert list(p.y) == sorted(p.y, reverse=True)


def test_rows_that_coincide_are_called_the_same(report):
    titles = [panel.title for panel in study_queries.collinear(report["collinear"]).panels]
    assert titles[2] == "linear relu: the same row"
    assert titles[1].startswith("softmax: rows differ by 0.")
    assert titles[3].startswith("inline: rows differ by 0.")


def test_a_histogram_is_of_all_layers_or_of_one(report, twins):
    figure = study_queries.confusions(report, twins)
    linear = figure.panels[1]
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
    figure = study_queries.confusions(report, twins)
    ticks = {panel.plot.layout.xaxis.ticktext for panel in figure.panels}
    assert ticks == {("0", "1", "2", "4", "5", "10", "20", "50", "100")}


def test_of_many_bins_some_are_named(report, twins):
    edges = [0, *(2**power for power in range(11))]
    for layer in report["layers"]:
        layer["confusion_histogram"] = {"edges": edges, "counts": [1] * 11}
    panel = study_queries.confusions(report, twins).panels[0]
    assert panel.plot.layout.xaxis.ticktext == ("0", "2", "8", "32", "128", "512")
    assert panel.plot.data[0].x[-1] == 10.5


def test_bins_stand_between_the_edges_that_name_them(report, twins):
    panel = study_queries.confusions(report, twins).panels[0]
    assert panel.plot.layout.xaxis.ticktext[:5] == ("0", "1", "2", "5", "10")
    assert panel.plot.data[0].x[:3] == (0.5, 1.5, 2.5)
    assert list(panel.plot.data[0].customdata[:4]) == ["0", "1", "2 to 4", "5 to 9"]


def test_local_mass_goes_by_layer_over_its_baseline(report, twins):
    figure = study_locality.local_mass(report["layers"], twins)
    line = of(figure, "softmax")
    assert line.x == (1, 2, 3, 4)
    assert line.y == pytest.approx([34, 32, 30, 28])
    assert figure.panels[0].plot.data[-1].y == pytest.approx([100 * 9 / 64 * 0.77] * 4)


def test_local_mass_needs_no_baseline(report, twins):
    for layer in report["layers"]:
        layer["local_baseline"] = None
    figure = study_locality.local_mass(report["layers"], twins)
    assert of(figure, "softmax").y == pytest.approx([34, 32, 30, 28])
    assert figure.panels[0].plot.layout.annotations == ()


def test_both_kinds_of_masks_start_at_no_mask_and_count_the_same_keys(report, twins):
    figure = study_locality.mask_out(report["mask_out"], twins)
    accuracy = {(row["twin"], row["mask"]): 100 * row["accuracy"]["mean"] for row in report["mask_out"]}
    for panel, masks in enumerate((("local 3", "local 5", "local 7"), ("random 9", "random 25", "random 49"))):
        line = of(figure, "inline", panel)
        assert line.x == (0, 9, 25, 49)
        assert line.y == tuple(accuracy["inline", mask] for mask in ("none", *masks))
    spans = {tuple(panel.plot.layout.yaxis.range) for panel in figure.panels}
    assert len(spans) == 1


def test_a_mask_of_another_name_is_not_drawn(report, twins):
    report["mask_out"].append({"twin": "inline", "mask": "ring 5", "accuracy": {"mean": 0.1}})
    assert of(study_locality.mask_out(report["mask_out"], twins), "inline").x == (0, 9, 25, 49)
    assert study_locality.mask_out([], twins) is None


def test_induced_confusion_keeps_its_order(report, twins):
    mark = of(study_locality.induced(report["induced"], twins), "softmax")
    assert mark.x == ("none", "f1", "f2")
    assert mark.y == pytest.approx([95.6, 92.1, 88.4])


def test_layers_stand_at_their_range_and_error_among_the_curves(report, twins):
    figure = study_range.error(report["range"], twins)
    marks = of(figure, "softmax")
    own = [layer for layer in report["range"]["layers"] if layer["twin"] == "softmax"]
    assert marks.x == tuple(layer["range"]["mean"] for layer in own)
    assert marks.y == tuple(100 * layer["error"]["mean"] for layer in own)
    assert list(marks.customdata) == ["1", "2", "3", "4"]
    curves = [trace.name for trace in figure.panels[0].plot.data if trace.name and not trace.meta]
    assert sorted(curves) == ["inline", "threshold", "uniform"]


def test_a_path_is_the_mean_of_the_layers_and_its_mark_starts_on_it(report, twins):
    figure = study_range.threshold(report["range"]["threshold"], twins)
    path, mark = of(figure, "inline", path=True), of(figure, "inline", follows=True)
    own = [layer for layer in report["range"]["threshold"] if layer["twin"] == "inline"]
    assert list(path.customdata) == TAUS
    assert path.x[3] == pytest.approx(25 * sum(layer["kept"][3] for layer in own), abs=1e-3)
    assert path.y[3] == pytest.approx(25 * sum(layer["discarded"][3] for layer in own), abs=1e-3)
    assert (mark.x[0], mark.y[0]) == (path.x[0], path.y[0])


def test_three_distributions_have_their_mechanisms_colors(report):
    found = study_range.distributions(report["range"]["distributions"]).panels[0].plot.data
    assert [trace.name for trace in found] == ["softmax", "first order", "uniform"]
    assert [trace.line.color for trace in found][:2] == [INK, COLORS[0]]
    assert found[1].y == tuple(report["range"]["distributions"][1]["weights"])


def test_speed_is_in_milliseconds_and_megabytes(report, twins):
    figure = study_speed.curves(report["speed"], twins)
    lines = {(trace.name, trace.meta["pick"]): trace for trace in figure.panels[0].plot.data if trace.name}
    laps = {(lap["label"], lap["tokens"]): lap for lap in report["speed"]["laps"]}
    assert lines["inline", "seconds"].y == tuple(1e3 * laps["inline", n]["seconds"] for n in (64, 256, 1024, 4096))
    assert lines["inline", "peak_bytes"].y[0] == pytest.approx(laps["inline", 64]["peak_bytes"] / 1e6)
    assert [pick.label for pick in figure.picks] == ["time", "memory"]


def test_mechanisms_of_no_twin_are_thin_and_nameless(report, twins):
    figure = study_speed.curves(report["speed"], twins)
    lines = {trace.name: trace for trace in figure.panels[0].plot.data if trace.name}
    assert lines["hydra"].line.width < lines["inline"].line.width
    named = {note.text for note in figure.panels[0].plot.layout.annotations}
    assert named == {"SDPA", "softmax", "inline", "linear relu"}


def test_a_ring_stands_on_the_line_at_the_crossover(report, twins):
    drawn = study_speed.curves(report["speed"], twins).panels[0].plot.data
    rings = {trace.text[0]: trace for trace in drawn if trace.text}
    assert set(rings) == {"N = 325", "N = 377"}
    inline = next(trace for trace in drawn if trace.name == "inline")
    assert rings["N = 325"].x == (325,)
    assert inline.y[1] < rings["N = 325"].y[0] < inline.y[2]


def test_a_mechanism_that_is_faster_everywhere_crosses_before_the_shortest(report, twins):
    report["speed"]["trends"][2] |= {"crossover": 64, "faster_everywhere": True}
    drawn = study_speed.curves(report["speed"], twins).panels[0].plot.data
    (ring,) = [trace for trace in drawn if trace.text == ("N at most 64",)]
    assert ring.y == next(trace.y[:1] for trace in drawn if trace.name == "inline")


def test_laps_that_were_skipped_are_no_points(report, twins):
    for lap in report["speed"]["laps"]:
        if lap["label"] == "inline" and lap["tokens"] > 256:
            lap["seconds"] = None
    drawn = study_speed.curves(report["speed"], twins).panels[0].plot.data
    assert next(trace for trace in drawn if trace.name == "inline").x == (64, 256)


def test_layers_of_the_viewer_are_numbered_as_they_come(report):
    assert study_viewer.layers(report) == {f"blocks.{i}.attn": str(i + 1) for i in range(4)}
    assert study_viewer.layers({"viewer": None}) == {}


@pytest.mark.parametrize(
    ("subject", "parts"),
    [
        (study_viewer, ["viewer"]),
        (study_queries, ["collinear", "layers"]),
        (study_locality, ["layers", "mask_out", "induced"]),
        (study_range, ["range"]),
        (study_speed, ["speed"]),
    ],
)
def test_a_section_without_data_says_so_and_draws_nothing(report, twins, subject, parts):
    assert subject.section(report, twins).missing == ""
    for part in parts:
        report[part] = None
    section = subject.section(report, twins)
    assert section.figures == ()
    assert section.missing.startswith("No ")


def test_every_figure_says_how_to_read_it_and_what_its_panels_show(report, twins):
    subjects = (study_accuracy, study_viewer, study_queries, study_locality, study_range, study_speed)
    figures = [figure for subject in subjects for figure in subject.section(report, twins).figures]
    assert len(figures) == 12
    for figure in figures:
        assert figure.reading.endswith(".")
        assert figure.reading.count(". ") == 0, "one sentence"
        assert figure.part
        assert all(panel.about for panel in figure.panels)
