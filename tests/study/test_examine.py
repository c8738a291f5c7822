"""What a study puts together: parts that are kept, images spread over the set, Figure 1 on real keys, CSVs."""

import json

import pytest
import torch

from softless.bench.scaling import cases_named, study_cases
from softless.data.augment import PLAIN
from softless.data.reading import Batch
from softless.errors import ArgumentError
from softless.functional import attention_weights
from softless.mechanisms import mechanism
from softless.models import create_model
from softless.study import document as study_document
from softless.study import examine as study_examine
from softless.study.examine import SampleImages, collinear, examine_twin, maps, typical
from softless.study.pipeline import prepare
from softless.study.plan import StudyOptions
from softless.study.tables import tables


def images(count, classes=3):
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 4, 4).contiguous()
    return Batch(pixels, torch.arange(count) * classes // count, torch.arange(count))


def test_a_part_is_measured_once_and_again_when_it_depends_on_something_else(tmp_path):
    study = prepare(StudyOptions(out=tmp_path))
    made = []

    def make():
        made.append(len(made))
        return {"value": len(made), "pair": (1, 2)}

    for asked, value in (({"n": 1}, 1), ({"n": 1}, 1), ({"n": 2}, 2), ({"n": (1, 2)}, 3), ({"n": [1, 2]}, 3)):
        assert study._part("speed", asked, make) == {"value": value, "pair": [1, 2]}
    (tmp_path / "parts/speed.json").write_text("{")
    assert study._part("speed", {"n": [1, 2]}, make)["value"] == 4
    (tmp_path / "parts/speed.json").write_text("[]")
    assert study._part("speed", {"n": [1, 2]}, make)["value"] == 5
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["speed.json"]


def test_a_part_that_fails_leaves_nothing(tmp_path):
    study = prepare(StudyOptions(out=tmp_path))
    with pytest.raises(ZeroDivisionError):
        study._part("speed", {}, lambda: 1 / 0)
    assert not (tmp_path / "parts").exists()


def test_images_are_taken_evenly_from_a_set_that_is_sorted_by_class():
    sample = SampleImages(images(300), PLAIN)
    labels = torch.cat([labels for _, labels in sample.batches(30)])
    assert labels.bincount().tolist() == [10, 10, 10]
    assert sum(len(labels) for _, labels in sample.batches(10_000)) == 300
    assert max(len(labels) for _, labels in sample.batches(300)) == study_examine.BATCH
    assert sample.one_per_class(2).tolist() == [0, 100]
    pixels, _ = next(sample.batches(1))
    assert pixels.shape == (1, 3, 4, 4)


def test_figure_1_on_real_keys():
    q, k = torch.randn(2, 12, 6).unbind()
    found = collinear(q, k)
    assert found["q"] == pytest.approx([2 * x for x in found["p"]])
    assert found["p"][1] == pytest.approx(0, abs=1e-12)
    rows = {row["label"]: (torch.tensor(row["p"]), torch.tensor(row["q"])) for row in found["rows"]}
    torch.testing.assert_close(*rows["linear relu"])
    for label in ("softmax", "inline"):
        p, q_row = rows[label]
        assert (p - q_row).norm() > 1e-3
    p = q[q.relu().norm(dim=1).argmax()].double()
    expected = attention_weights(p[None, None, None], k[None, None].double(), mechanism("softmax"))[0, 0, 0]
    torch.testing.assert_close(torch.tensor(found["rows"][0]["p"], dtype=torch.float64), expected)
    assert len(found["keys"]) == 12
    along = (k.double() @ (p / p.norm())).tolist()
    assert [x for x, _ in found["keys"]] == pytest.approx(along)


def test_the_typical_row_has_the_median_range():
    scores = torch.stack([torch.tensor([0.0, size]) for size in (5, 1, 3, 2, 4)])
    assert typical(scores).tolist() == [0.0, 3.0]


def test_maps_hold_the_local_residual_and_no_negative_weight():
    model = create_model("inline_deit_tiny", patch_size=2, dims=8, depths=1, heads=2, num_classes=3, img_size=6).eval()
    pictures = torch.randn(2, 3, 6, 6)
    found = list(maps(model, pictures))
    assert [(each["layer"], each["image"]) for each in found] == [("blocks.0.attn", 0), ("blocks.0.attn", 1)]
    (layer,) = model.attention_maps(pictures)
    whole = (layer.weights + layer.local).mean(1).clamp(min=0)
    assert found[1]["row_max"] == pytest.approx(whole[1].amax(-1).tolist(), rel=1e-5)


def test_a_threshold_is_measured_at_every_quarter_for_the_slider_of_the_page():
    model = create_model("inline_deit_tiny", patch_size=2, dims=8, depths=1, heads=2, num_classes=3, img_size=4).eval()
    sizes = {"images": 4, "masked": 4, "shown": 2}
    found = examine_twin(model, SampleImages(images(6), PLAIN), **sizes, seed=0, advance=lambda _: None)
    (layer,) = found["layers"]
    assert list(layer["tau"]) == [0.25 * step for step in range(1, 33)]
    assert len(layer["kept"]) == len(layer["discarded"]) == 32
    kept = [each["mean"] for each in layer["kept"]]
    assert kept == sorted(kept)
    assert not any(name.startswith(("kept", "discarded")) for name in layer["by_head"])


def test_estimates_become_columns_and_lists_stay_behind():
    est = {"mean": 0.5, "low": None, "high": 0.6, "n": 3}
    text = study_document.as_csv([{"twin": "a", "accuracy": est, "curve": [1]}, {"twin": "b, c", "more": 2}])
    assert text.splitlines() == [
        "twin,accuracy,accuracy_low,accuracy_high,accuracy_n,more",
        "a,0.5,,0.6,3,",
        '"b, c",,,,,2',
    ]


def test_table_4_comes_from_the_model_that_sees_windows():
    run = {"seed": 0, "status": "done", "accuracy": 0.5}
    records = [{**run, "twin": {"id": id_, "label": id_}} for id_ in ("inline", "inline-cut4", "inline-local")]
    others = [{**run, "twin": {"id": id_, "label": "of another"}} for id_ in ("softmax", "inline", "inline-local")]
    found = tables(others, records)
    assert [table["id"] for table in found] == ["4", "9"]
    assert [row[0] for row in found[0]["rows"]] == ["inline", "inline-local", "inline-cut4"]
    assert [row[0] for row in found[1]["rows"]] == ["of another"] * 2


def test_mechanisms_are_compared_by_label_or_by_name():
    assert [case.label for case in cases_named(["linear relu", "inline", "inline"])] == ["linear relu", "inline"]
    (linear,) = cases_named(["linear"])
    assert (linear.label, linear.options) == ("linear", {})
    assert cases_named(["all"]) == study_cases()
    with pytest.raises(ArgumentError, match="'magic' cannot be compared: there are softmax"):
        cases_named(["inline", "magic"])


def test_a_picture_is_an_address_that_holds_itself():
    assert study_examine.png(torch.zeros(3, 4, 4, dtype=torch.uint8)).startswith("data:image/png;base64,iVBOR")
    assert json.loads(json.dumps(study_document.collinear({}))) is None
