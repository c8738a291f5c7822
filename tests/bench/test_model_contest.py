"""The contest of models: everyone on the same images, numbers that follow from each other, no one left out unsaid."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import softless
from softless import stopwatch
from softless.bench import model_contest as contest
from softless.bench.model_contest import Entrant, Setting, linear_layers
from softless.errors import ArgumentError, UnsupportedError

SMALL = Setting(image_size=(32, 48), batch=2)


def everyone(name="inline_deit_tiny", setting=SMALL, *, compiled=False, **options):
    return {each.label: each for each in contest.entrants(name, options, setting, compiled=compiled)}


def logits(entrant, setting=SMALL):
    with torch.no_grad():
        return entrant.model(setting.images)


@pytest.fixture(scope="module")
def deit():
    return everyone()


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_numbers_follow_from_each_other(deit, train):
    found = contest.model_contest(list(deit.values()), SMALL, train=train, repeats=1)
    assert [row["label"] for row in found] == ["inline_deit_tiny", "plain formulas", "softmax twin", "timm deit_tiny"]
    assert [row["role"] for row in found] == ["ours", "plain", "softmax", "timm"]
    reference = found[2]["ms"]
    for row in found:
        weights = sum(weight.numel() for weight in deit[row["label"]].model.parameters())
        assert row["skipped"] is None
        assert row["parameters"] == weights
        assert row["images_per_second"] == pytest.approx(2e3 / row["ms"])
        assert row["ratio"] == pytest.approx(reference / row["ms"])
        least = 8 * weights if train else 4 * weights  # with a gradient for each weight
        assert least < row["memory_bytes"] < least + 50e6


def test_everyone_computes_what_it_is_said_to(deit):
    """The plain formulas are the model; the twin has its shape and other weights; timm's is a model of its own."""
    mine, plain = deit["inline_deit_tiny"].model, deit["plain formulas"].model
    plain.load_state_dict(mine.state_dict())
    expected = logits(deit["inline_deit_tiny"])
    assert (logits(deit["plain formulas"]) - expected).abs().max() <= 1e-5 * expected.abs().max()
    twin = deit["softmax twin"].model
    shapes = {key: weight.shape for key, weight in mine.state_dict().items() if "residual" not in key}
    assert {key: weight.shape for key, weight in twin.state_dict().items()} == shapes
    assert linear_layers(twin) == []
    assert logits(deit["timm deit_tiny"]).shape == expected.shape
    assert type(deit["timm deit_tiny"].model).__module__.startswith("timm.")


def test_a_window_reaches_everyone_who_has_one():
    setting = Setting(image_size=(64, 64), batch=1, window=4, device="meta")
    found = everyone("inline_swin_tiny", setting)
    images = torch.empty(1, 3, 64, 64, device="meta")
    for label in ("inline_swin_tiny", "plain formulas", "softmax twin"):
        assert found[label].model.config.windows == (4,) * 4
        assert found[label].model(images).shape == (1, 1000)
    theirs = found["timm swin_tiny"]
    assert theirs.model.layers[0].blocks[0].window_size == (4, 4)
    assert theirs.model(images).shape == (1, 1000)


def test_options_reach_the_model_and_its_twin():
    found = everyone(setting=replace(SMALL, device="meta"), mechanism="linear", local=False)
    assert found["inline_deit_tiny"].model.config.mechanism.name == "linear"
    assert found["softmax twin"].model.config.mechanism.name == "softmax"


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("deit_tiny", {}, {"plain formulas": "no linear attention", "softmax twin": "is softmax attention itself"}),
        ("swin_tiny", {}, {"plain formulas": "no linear attention", "softmax twin": "is softmax attention itself"}),
        ("inline_deit_tiny", {"mechanism": "hydra", "local": False}, {"plain formulas": "hydra has no plain formula"}),
        ("inline_pvt_tiny", {}, {"timm": "PVT v2, another architecture"}),
        ("inline_cswin_tiny", {}, {"timm": "timm has no CSwin"}),
    ],
)
def test_whoever_is_missing_has_a_reason(name, options, missing):
    found = everyone(name, replace(SMALL, device="meta"), **options)
    absent = {label: each.absent for label, each in found.items() if each.model is None}
    assert list(absent) == list(missing)
    for label, reason in missing.items():
        assert reason in absent[label]


def test_a_size_that_timm_cannot_take_is_its_excuse(monkeypatch):
    def create_model(*_, **__):
        raise AssertionError("Input height (33)\nis wrong")

    monkeypatch.setattr("timm.create_model", create_model)
    (result,) = contest.model_contest([contest.timms("inline_deit_tiny", SMALL)], SMALL, repeats=1)
    assert (result["label"], result["images_per_second"]) == ("timm deit_tiny", None)
    assert result["skipped"] == "AssertionError: Input height (33)"


def test_timm_has_the_names_it_is_asked_for():
    import timm

    assert set(contest.TIMM_NAMES.values()) <= set(timm.list_models())
    ancestors = {name for name in softless.list_models() if not name.startswith("inline_")}
    assert {name for name in ancestors if name.split("_")[0] not in contest.NOT_IN_TIMM} == set(contest.TIMM_NAMES)


def test_images_are_the_same_on_every_run():
    half = replace(SMALL, dtype=torch.bfloat16)
    assert half.images.shape == (2, 3, 32, 48)
    assert half.images.dtype == torch.bfloat16
    assert torch.equal(SMALL.images, SMALL.images)


def linear(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 48, 4, bias=bias))


def test_a_job_gives_the_logits_or_every_gradient_too():
    model = linear()
    (out,) = contest.model_job(model, SMALL.images, False)()
    assert (out.shape, out.requires_grad, model.training) == ((2, 4), False, False)
    out, *gradients = contest.model_job(model, SMALL.images, True)()
    assert out.requires_grad
    assert model.training
    assert [each.shape for each in gradients] == [each.shape for each in model.parameters()]


def test_memory_is_the_weights_and_what_a_call_makes():
    rows = [Entrant(str(bias), "timm", model=linear(bias=bias)) for bias in (False, True)]
    bare, biased = contest.model_contest(rows, SMALL, repeats=1)
    assert bare["memory_bytes"] == 4 * 3 * 32 * 48 * 4 + 2 * 4 * 4
    assert biased["memory_bytes"] == bare["memory_bytes"] + 4 * 4


def test_a_ratio_is_to_the_twin_that_is_compiled_as_the_row_is():
    names = [("a", "ours", False), ("b", "softmax", False), ("a2", "ours", True), ("b2", "softmax", True)]
    rows = [Entrant(label, role, compiled, linear()) for label, role, compiled in names]
    a, b, a2, b2 = contest.model_contest(rows, SMALL, repeats=1)
    assert a["ratio"] == pytest.approx(b["ms"] / a["ms"])
    assert a2["ratio"] == pytest.approx(b2["ms"] / a2["ms"])
    (alone,) = contest.model_contest(rows[:1], SMALL, repeats=1)
    assert alone["ratio"] is None


class Failing(nn.Module):
    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def forward(self, _images):
        raise self.error


def test_running_out_of_memory_is_an_excuse_for_everyone():
    (found,) = contest.model_contest([Entrant("it", "ours", model=Failing(torch.OutOfMemoryError("CUDA")))], SMALL)
    assert found["skipped"] == "ran out of memory at 2 images of 32 x 48"


def test_another_model_that_raises_is_excused_and_ours_is_not():
    (found,) = contest.model_contest([Entrant("it", "timm", model=Failing(TypeError("no\nway")))], SMALL)
    assert found["skipped"] == "TypeError: no"
    with pytest.raises(UnsupportedError):
        contest.model_contest([Entrant("it", "ours", model=Failing(UnsupportedError("cannot")))], SMALL)


def test_tick_is_told_every_label_once_a_turn_and_once_before():
    told = []
    rows = [Entrant("here", "timm", model=linear()), Entrant("gone", "timm", absent="it is not")]
    contest.model_contest(rows, SMALL, repeats=2, tick=told.append)
    assert (told.count("here"), told.count("gone")) == (3, 3)


def test_images_beyond_memory_are_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 10**9)
    large = replace(SMALL, image_size=(4096, 4096), batch=64)
    with pytest.raises(ArgumentError, match=r"64 images of 4096 x 4096 need about .* GB and 1.0 GB are free"):
        contest.check_images("inline_swin_tiny", {}, large, train=False)
    contest.check_images("inline_swin_tiny", {}, SMALL, train=True)


def test_training_needs_more_than_a_forward_pass(monkeypatch):
    """A size between the two estimates runs forward and not backward."""
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: 40 * 10**6)
    contest.check_images("inline_deit_tiny", {}, SMALL, train=False)
    with pytest.raises(ArgumentError, match="are free"):
        contest.check_images("inline_deit_tiny", {}, replace(SMALL, image_size=(224, 224)), train=True)


@pytest.mark.parametrize("name", ["inline_deit_tiny", pytest.param("inline_swin_tiny", marks=pytest.mark.slow)])
def test_the_estimate_is_no_less_than_what_a_forward_pass_takes(name, monkeypatch):
    """At a size where tokens, not weights, are most of the memory."""
    setting = Setting(image_size=(224, 224), batch=1)
    mine = contest.ours(name, {}, setting)
    (found,) = contest.model_contest([mine], setting, repeats=1)
    taken = found["memory_bytes"] - sum(weight.nbytes for weight in mine.model.parameters())
    monkeypatch.setattr(stopwatch, "free_bytes", lambda _: int(taken / stopwatch.FREE_SHARE) - 1)
    with pytest.raises(ArgumentError, match="are free"):
        contest.check_images(name, {}, setting, train=False)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
def test_everyone_is_compiled_too_and_says_the_same():
    found = everyone(compiled=True)
    assert list(found)[:2] == ["inline_deit_tiny", "inline_deit_tiny, compiled"]
    for label, entrant in found.items():
        if entrant.compiled:
            expected = logits(found[label.removesuffix(", compiled")])
            assert (logits(entrant) - expected).abs().max() <= 1e-5 * expected.abs().max()
