"""Capture sees every attention call of a model as it happened, and leaves the model as it was."""

from contextlib import ExitStack
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import softless
from softless.errors import SoftlessError, UnsupportedError
from softless.nn.mixing import Mixing
from softless.probes.capture import capture
from tests.models.cases import SMALL, loud, small
from tests.probes.foreign import CASES, Case, bert, images, vit

FOREIGN = pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])
EVERY = pytest.mark.parametrize("name", CASES)
OURS = [*SMALL, "inline_swin_tiny in windows", "inline_pvt_tiny relu", "inline_deit_tiny hydra"]


@cache
def foreign(name: str, fused: bool) -> tuple[Case, Tensor]:
    """A model that many tests look at, and what it says."""
    case = CASES[name](fused)
    return case, run(case)


@cache
def our_own(name: str) -> tuple[Case, Tensor]:
    case = ours(name)
    return case, run(case)


def ours(name: str) -> Case:
    options = {"in windows": {"window": 5}, "relu": {"mechanism": softless.mechanism("linear", phi="relu")}}
    options["hydra"] = {"mechanism": "hydra"}
    model, _, rest = name.partition(" ")
    made = loud(small(model, **options.get(rest, {}))).double()
    return Case(made, {"x": torch.randn(2, 3, 36, 52, dtype=torch.float64)})


def first(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@torch.no_grad()
def run(case: Case) -> Tensor:
    return first(case.model(**case.inputs))


def side_by_side(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)  # [B, H, N, e] -> [B, N, H e]


def hooks(model: nn.Module) -> int:
    """Everything that was put on a model, in places where capture could."""
    on = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, place)) for module in model.modules() for place in on) + sum(
        "mix" in vars(module) for module in model.modules()
    )


def tolerance(expected: Tensor) -> float:
    return (1e-11 if expected.dtype == torch.float64 else 1e-5) * (1 + expected.abs().max().item())


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= tolerance(expected)


@FOREIGN
@EVERY
def test_capture_leaves_the_outputs_of_other_models_unchanged_to_the_bit(name, fused):
    case, expected = foreign(name, fused)
    with capture(case.model):
        found = run(case)
    assert torch.equal(found, expected)
    assert hooks(case.model) == 0
    assert torch.equal(run(case), expected)


@pytest.mark.parametrize("name", OURS)
def test_capture_leaves_the_outputs_of_our_models_unchanged_to_the_bit(name):
    case, expected = our_own(name)
    with capture(case.model):
        found = run(case)
    assert torch.equal(found, expected)
    assert hooks(case.model) == 0


@FOREIGN
@EVERY
def test_a_captured_output_is_the_input_of_the_next_projection(name, fused):
    (case, _), fed = foreign(name, fused), []
    with ExitStack() as stack:
        for module in (module for module in case.model.modules() if isinstance(module, nn.Linear)):
            stack.callback(module.register_forward_pre_hook(lambda _, args: fed.append(args[0])).remove)
        captured = stack.enter_context(capture(case.model))
        run(case)
    assert len(captured.layers) == (4 if "Swin" in name else 2)
    for layer in captured.layers:
        assert layer.mechanism == softless.mechanism("softmax")
        out = side_by_side(layer.output())
        rows = slice(None) if case.rows is None else case.rows
        errors = [(x[rows] - out[rows]).abs().max() for x in fed if x.shape == out.shape]
        assert min(errors) <= tolerance(out)


@pytest.mark.parametrize("name", OURS)
def test_a_captured_output_plus_its_residual_is_the_output_of_our_layer(name, monkeypatch):
    (case, _), mixed = our_own(name), []
    original = Mixing._mix
    monkeypatch.setattr(Mixing, "_mix", lambda *args: mixed.append(original(*args)) or mixed[-1])
    with capture(case.model) as captured:
        run(case)
    assert len(captured.layers) == len(mixed)
    for layer, expected in zip(captured.layers, mixed, strict=True):
        out = layer.output() if layer.local is None else layer.output() + layer.local
        assert_close(side_by_side(out), expected)
    linear = [layer for layer in captured.layers if layer.mechanism.name != "softmax"]
    assert all(layer.local is not None for layer in linear)
    assert bool(linear) == name.startswith("inline")


@FOREIGN
@EVERY
def test_an_edit_that_changes_nothing_leaves_the_output_of_other_models(name, fused):
    (case, expected), seen = foreign(name, fused), []
    with capture(case.model, edit=lambda layer, weights: seen.append(layer.name) or weights) as captured:
        found = run(case)
    assert seen == [layer.name for layer in captured.layers]
    rows = slice(None) if case.rows is None else case.rows
    assert_close(found[rows], expected[rows])


@pytest.mark.parametrize("name", OURS)
def test_an_edit_that_changes_nothing_leaves_the_output_of_our_models(name):
    case, expected = our_own(name)
    with capture(case.model, edit=lambda _, weights: weights):
        assert_close(run(case), expected)


@pytest.mark.parametrize("make", [lambda: vit(True), lambda: vit(False), lambda: ours("inline_deit_tiny")])
def test_edited_weights_are_used(make):
    case = make()
    plain = run(case)
    with capture(case.model, edit=lambda _, weights: torch.full_like(weights, 1 / weights.shape[-1])) as captured:
        edited = run(case)
    assert (edited - plain).abs().max() > 1e-3
    layer = captured.layers[-1]
    with capture(case.model, edit=lambda _, weights: weights.mean(-2, keepdim=True).expand_as(weights)):
        assert run(case).isfinite().all()
    assert layer.weights().shape[-1] == layer.k.shape[2]


def test_captured_layers_know_the_grid_and_prefix_of_their_tokens():
    def seen(case: Case) -> set[tuple[object, int]]:
        with capture(case.model) as captured:
            run(case)
        return {(layer.grid, layer.prefix) for layer in captured.layers}

    assert seen(foreign("timm ViT", True)[0]) == {((4, 4), 1)}
    assert seen(foreign("timm DeiT, distilled", False)[0]) == {((4, 4), 2)}
    assert seen(foreign("Hugging Face ViT", True)[0]) == {((4, 4), 1)}
    assert seen(foreign("timm Swin", True)[0]) == {((5, 5), 0)}
    assert seen(foreign("Hugging Face Swin", False)[0]) == {((4, 4), 0)}
    assert seen(foreign("BERT", True)[0]) == {(None, 0)}
    assert seen(our_own("inline_deit_tiny")[0]) == {((3, 4), 1)}
    assert ((5, 5), 0) in seen(our_own("inline_swin_tiny in windows")[0])


@FOREIGN
def test_masks_are_captured_in_their_simplest_form(fused):
    def seen(case: Case) -> tuple[bool, Tensor | None, Tensor | None]:
        with capture(case.model) as captured:
            run(case)
        layer = captured.layers[0]
        return layer.is_causal, layer.key_mask, layer.bias

    causal, hidden, bias = seen(foreign("Llama", fused)[0])
    assert causal
    assert hidden is None
    assert bias is None
    for name, ordered in (("BERT", False), ("Llama, padded left", True), ("Llama, padded right", True)):
        case, _ = foreign(name, fused)
        causal, hidden, bias = seen(case)
        assert causal == ordered
        assert torch.equal(hidden, case.rows)
        assert bias is None
    causal, hidden, bias = seen(foreign("timm Swin", fused)[0])
    assert not causal
    assert hidden is None
    assert bias.isfinite().all()
    assert bias.std() > 0.1


def test_only_the_layers_of_the_latest_forward_are_captured():
    case = vit(True)
    with capture(case.model) as captured:
        assert captured.layers == ()
        run(case)
        before = captured.layers
        case.inputs["x"] = images()[:1]
        run(case)
    assert [layer.q.shape[0] for layer in before] == [2, 2]
    assert [layer.q.shape[0] for layer in captured.layers] == [1, 1]
    assert [layer.name for layer in captured.layers] == ["blocks.0.attn", "blocks.1.attn"]


@pytest.mark.parametrize("make", [lambda: vit(True), lambda: ours("inline_deit_tiny"), lambda: bert(False)])
def test_an_exception_in_the_model_leaves_no_hook(make):
    case = make()
    expected, last = run(case), list(case.model.children())[-1]

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"), capture(case.model) as captured:
        run(case)
    handle.remove()
    assert captured.layers
    assert hooks(case.model) == 0
    assert torch.equal(run(case), expected)


def test_a_forward_after_a_failed_one_is_captured_completely():
    case = vit(True)
    with capture(case.model) as captured:
        with pytest.raises(AssertionError):
            case.model(torch.randn(1, 3, 7, 7, dtype=torch.float64))
        run(case)
    assert len(captured.layers) == 2


def test_a_failing_edit_leaves_no_hook():
    case = ours("inline_deit_tiny")
    with pytest.raises(ZeroDivisionError), capture(case.model, edit=lambda _, weights: weights * (1 // 0)):
        run(case)
    assert hooks(case.model) == 0


def test_capture_restores_a_mix_function_that_was_set_before():
    case = ours("inline_deit_tiny")
    layer = case.model.blocks[0].attn
    layer.mix = lambda qkv, grid=None, **options: Mixing.mix(layer, qkv, grid, **options) * 2
    own, expected = layer.mix, run(case)
    with capture(case.model):
        assert torch.equal(run(case), expected)
    assert layer.mix is own


def test_attention_outside_the_model_is_not_captured():
    case = vit(True)
    q = torch.randn(1, 2, 5, 8)
    with capture(case.model) as captured:
        run(case)
        nn.functional.scaled_dot_product_attention(q, q, q)
        (q @ q.mT).softmax(-1) @ q
    assert len(captured.layers) == 2


class Strange(nn.Module):
    """Heads that talk to each other before the softmax: no attention that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.talk((x @ x.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return scores.softmax(-1) @ x


class StrangeAttention(Strange):
    pass


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()), "Sequential has no attention: it is made of Conv2d, ReLU"),
        (nn.Sequential(StrangeAttention()), r"attention of Sequential cannot be captured: 0 \(StrangeAttention\)"),
        (nn.Sequential(Strange()), r"attention of Sequential cannot be captured: 0 \(Strange\)"),
        (nn.Sequential(nn.Linear(5, 5), nn.Softmax(-1)), "Sequential has no attention: it is made of Linear, Softmax"),
    ],
)
def test_a_model_without_known_attention_is_refused(model, says):
    with pytest.raises(UnsupportedError, match=says), capture(model):
        model(torch.randn(1, 2, 5, 5))
    assert hooks(model) == 0


def test_missed_attention_is_named_beside_captured_attention():
    model = nn.Sequential(softless.nn.Attention(4, 2), nn.Unflatten(1, (2, 5)), StrangeAttention())
    with torch.no_grad(), capture(model) as captured:
        model(torch.randn(1, 10, 4))
    assert [layer.name for layer in captured.layers] == ["0"]
    assert list(captured.missed) == ["2"]


@FOREIGN
@EVERY
def test_nothing_is_missed_in_the_models_of_timm_and_hugging_face(name, fused):
    case, _ = foreign(name, fused)
    with capture(case.model) as captured:
        run(case)
    assert captured.missed == {}


def test_refusing_a_model_raises_a_softless_error():
    assert issubclass(UnsupportedError, SoftlessError)


@pytest.mark.compile
@pytest.mark.parametrize("own", [True, False], ids=["model.compile()", "torch.compile(model)"])
def test_a_compiled_model_is_captured_as_it_runs_uncompiled(own):
    case = vit(True)
    expected, model = run(case), case.model
    if own:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with torch.no_grad(), capture(model) as captured:
        assert torch.equal(model(**case.inputs), expected)
    assert [layer.name.removeprefix("_orig_mod.") for layer in captured.layers] == ["blocks.0.attn", "blocks.1.attn"]


def test_gradients_flow_through_a_captured_model():
    case = vit(False)
    with capture(case.model, edit=lambda _, weights: weights) as captured:
        first(case.model(**case.inputs)).sum().backward()
    assert captured.layers[0].q.requires_grad
    assert case.model.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
