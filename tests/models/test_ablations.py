"""Every ablation of the paper is an argument: mechanism, local residual, windows, pattern, confusion."""

import pytest
import torch

import softless
from softless.errors import ArgumentError, UnsupportedError
from softless.models.swin import WindowAttention
from softless.models.table import CONFIGS
from tests.models.cases import FAMILIES, images, loud, mixings, small
from tests.numerics.cases import CASES, FORMS

INLINE = [f"inline_{family}_tiny" for family in FAMILIES]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("local", [False, True])
def test_any_mechanism_runs_and_trains_in_a_model(case, local):
    chosen = {"mechanism": CASES[case], "local": local, "img_size": 32}
    if False not in FORMS[case]:
        with pytest.raises(UnsupportedError, match="goes through tokens in their order"):
            small("inline_swin_tiny", **chosen)
        return
    model = small("inline_swin_tiny", **chosen).train()
    out = model(images(2, 3, 32, 32, dtype=torch.float32))
    out.square().mean().backward()
    assert out.shape == (2, 5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("name", INLINE)
def test_the_convolution_of_q_and_k_is_an_argument_of_every_family(name):
    model = small(name, qk_conv=True, img_size=32).train()
    plain = small(name, img_size=32)
    out = model(images(2, 3, 32, 32, dtype=torch.float32))
    out.square().mean().backward()
    added = {key for key, _ in model.named_parameters()} - {key for key, _ in plain.named_parameters()}
    assert added
    assert all("qk_conv" in key for key in added)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ArgumentError, match="qk_conv is 1 and must be True, False or None"):
        softless.create_model(name, qk_conv=1, device="meta")


@pytest.mark.parametrize("name", INLINE)
def test_the_softmax_twin_has_the_same_shape_but_for_the_residual(name):
    model, twin = (
        softless.create_model(name, device="meta"),
        softless.create_model(name, mechanism="softmax", local=False, device="meta"),
    )
    ours = {key: x.shape for key, x in model.state_dict().items() if ".residual." not in key}
    assert {key: x.shape for key, x in twin.state_dict().items()} == ours
    assert any(".residual." in key for key in model.state_dict())
    assert {module.mechanism.name for module in mixings(twin).values()} == {"softmax"}


@pytest.mark.parametrize("name", INLINE)
def test_each_argument_changes_the_answer_and_nothing_else(name):
    """The same weights, one thing changed."""
    x, base = images(2, 3, 64, 64), loud(small(name).double())
    answers = [base(x)]
    changes = [{"mechanism": "linear"}, {"local": False}, {"mechanism": softless.mechanism("inline", phi="relu")}]
    changes += [] if name == "inline_deit_tiny" else [{"pattern": "SSSS"}]
    changes += [{"window": 2}] if name in ("inline_swin_tiny", "inline_pvt_tiny") else []
    weights = base.state_dict()
    for change in changes:
        other = loud(small(name, **change).double())
        own = other.state_dict()
        same = {key: x for key, x in weights.items() if key in own and own[key].shape == x.shape}
        other.load_state_dict(same, strict=False)
        answers.append(other(x))
    for i, a in enumerate(answers):
        for b in answers[:i]:
            assert (a - b).abs().max() > 1e-4 * b.abs().max()


@pytest.mark.parametrize(
    ("pattern", "mixed"),
    [("IIIS", [2, 2, 6, 0]), ("SSSS", [0, 0, 0, 0]), ("II2S", [2, 2, 2, 0]), (["I", 1, 3, "I"], [2, 1, 3, 2])],
)
def test_a_pattern_says_which_blocks_take_the_mechanism(pattern, mixed):
    model = softless.create_model("inline_swin_tiny", pattern=pattern, mechanism=None, device="meta")
    found = [[not isinstance(block.attn, WindowAttention) for block in layer.blocks] for layer in model.layers]
    assert found == [[i < m for i in range(depth)] for m, depth in zip(mixed, [2, 2, 6, 2], strict=True)]


@pytest.mark.parametrize(
    "mechanism", ["inline", "softmax", "threshold", "reformer", softless.mechanism("soft", landmarks=1)]
)
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_window_does_not_see_other_windows(mechanism, local, shifted):
    """Each has its own means, context and 3x3, as if it were a picture; scored mechanisms roll it to get there."""
    layer, alone = (softless.nn.Attention(12, 3, mechanism, local=local).double() for _ in range(2))
    alone.load_state_dict(layer.state_dict())
    layer.window, layer.shifted = (3, 3), shifted
    x = torch.randn(2, 7 * 8, 12, dtype=torch.float64)
    out = layer(x, (7, 8))
    start = 3 // 2 - 3 if shifted else 0  # that many rows and columns lie before the picture
    for top in range(start, 7, 3):
        for left in range(start, 8, 3):
            rows, columns = (slice(max(at, 0), min(at + 3, most)) for at, most in ((top, 7), (left, 8)))
            piece = x.unflatten(1, (7, 8))[:, rows, columns]
            expected = alone(piece.flatten(1, 2), tuple(piece.shape[1:3]))
            found = out.unflatten(1, (7, 8))[:, rows, columns].flatten(1, 2)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["inline_swin_tiny", "inline_pvt_tiny", "inline_cswin_tiny"])
def test_windows_are_given_for_all_stages_or_each(name):
    one, each = small(name, window=2), small(name, window=[2 if some else None for some in CONFIGS[name].mixed])
    each.load_state_dict(one.state_dict())
    x = images(1, 3, 64, 64, dtype=torch.float32)
    assert torch.equal(one(x), each(x))
    some = small(name, window=(None, 2, None, None))
    sides = [module.window for module in mixings(some).values() if module.residual is not None]
    assert any(side not in (None, (None, None)) for side in sides)
    assert any(side in (None, (None, None)) for side in sides)


@pytest.mark.parametrize("confusion", ["relu", "affine_relu"])
def test_confusion_is_induced_in_front_of_softmax(confusion):
    """Collinear queries see the same under f, and not without it."""
    confused = softless.mechanism("softmax", confusion=confusion)
    q, k = torch.randn(2, 1, 2, 6, 4, dtype=torch.float64)
    inputs = {}
    if confusion == "affine_relu":
        inputs = {"weight": torch.randn(2, 4, 4, dtype=torch.float64), "bias": torch.zeros(2, 4, dtype=torch.float64)}
    same = [softless.attention_weights(scale * q, k, confused, inputs=inputs) for scale in (1, 7)]
    torch.testing.assert_close(*same, rtol=1e-12, atol=1e-12)
    other = [softless.attention_weights(scale * q, k, "softmax") for scale in (1, 7)]
    assert (other[0] - other[1]).abs().max() > 1e-2
    zero = softless.attention_weights(-q.abs(), k, "softmax" if inputs else confused)
    if not inputs:
        torch.testing.assert_close(zero, torch.full_like(zero, 1 / 6))
    model = small("deit_tiny", mechanism=confused)
    assert model(images(1, 3, 64, 64, dtype=torch.float32)).isfinite().all()
    assert any("inputs.weight" in key for key in model.state_dict()) == bool(inputs)


WRONG = [
    ({"name": "vit"}, "model 'vit' is not one of inline_deit_tiny"),
    ({"mechanism": "linnear"}, "mechanism 'linnear' does not exist: did you mean 'linear'?"),
    ({"mechanism": 3}, "mechanism is a int"),
    ({"pattern": "III"}, "pattern 'III' must have an I, an S or a number of blocks for each stage"),
    ({"pattern": "IIXS"}, "pattern 'IIXS' must have"),
    ({"pattern": ["I", "I", 7, "S"]}, r"of \[2, 2, 6, 2\] blocks"),
    ({"window": 0}, "window 0 must be a positive number, or 4 of them"),
    ({"window": [7, 7]}, r"window \[7, 7\] must be"),
    ({"window": [7, 7, 7, 7]}, r"window \[7, 7, 7, 7\] would change no block of stage 4"),
    ({"local": "no"}, "local is 'no' and must be True, False or None"),
    ({"dtype": torch.int8}, "dtype is torch.int8 and must be a floating-point torch.dtype"),
    ({"dims": 96, "depths": 1, "heads": 3, "drop_path_rate": 0.1}, "drop_path_rate 0.1 would change nothing"),
    ({"name": "cswin_tiny", "dims": 96, "depths": 1, "heads": 3, "pattern": "I", "window": 2}, "heads 3 is odd"),
    ({"img_size": -1}, "img_size -1 must be a positive number"),
    ({"global_pool": "max"}, "global_pool 'max' is not one of 'avg', ''"),
    ({"depth": 3}, r"has no option depth: did you mean 'depths'\?"),
    ({"num_clases": 3}, r"has no option num_clases: did you mean 'num_classes'\?"),
    ({"foo": 3}, "has no option foo: it takes mechanism, local, .*num_classes, img_size, .*pretrained, .*weight_std"),
    ({"pretrained": True}, "softless ships no trained weights for model 'inline_swin_tiny', .*; softless.load_weights"),
    ({"pretrained": 1}, "pretrained is 1 and must be True or False"),
    ({"name": "swin_tiny", "mechanism": "inline"}, "mechanism would change no block of model 'swin_tiny'"),
    ({"name": "pvt_tiny", "local": True, "window": 7}, "local and window would change no block"),
    ({"attn_drop_rate": 0.1}, "attn_drop_rate 0.1 needs explicit weights, and 'inline' has none"),
    ({"proj_drop_rate": 1.5}, "proj_drop_rate 1.5 is not a rate between 0 and 1"),
    ({"num_classes": -1}, "num_classes -1 is not a whole number, at least 0"),
    ({"in_chans": 0}, "in_chans 0 is not a whole number, at least 1"),
    ({"position_std": 0.1}, "position_std 0.1 would change nothing: Swin has no positions"),
    ({"name": "inline_pvt_tiny", "position_std": -1}, "position_std -1 is not a deviation above 0, of at most 1"),
    ({"weight_std": 1.5}, "weight_std 1.5 is not a deviation above 0, of at most 1"),
]


def test_position_std_sets_the_initial_positions():
    for std in (None, 0.3):
        model = softless.create_model("inline_deit_tiny", depths=1, position_std=std)
        assert model.pos_embed.std().item() == pytest.approx(std or 0.02, rel=0.05)
        assert model.cls_token.std().item() < 0.05


def test_weight_std_sets_the_initial_weights_and_those_of_a_new_head():
    for std in (None, 0.15):
        model = softless.create_model("inline_deit_tiny", depths=1, weight_std=std)
        model.reset_classifier(500)
        for layer in (model.blocks[0].attn.qkv, model.blocks[0].mlp.fc2, model.head):
            assert layer.weight.std().item() == pytest.approx(std or 0.02, rel=0.05)


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_options_that_make_no_model_are_refused_in_a_sentence(given, words):
    options = {"name": "inline_swin_tiny"} | given
    with pytest.raises((ArgumentError, UnsupportedError), match=words):
        softless.create_model(options.pop("name"), device="meta", **options)


def test_a_class_token_does_not_fit_in_a_window():
    with pytest.raises(UnsupportedError, match="window 7 cuts a picture, and DeiT has a class token"):
        softless.create_model("inline_deit_tiny", window=7)
    layer = softless.nn.Attention(12, 3, window=3)
    with pytest.raises(ArgumentError, match=r"grid is \(3, 3\) and must be .* a picture of all 10 tokens, and has 9"):
        layer(torch.randn(1, 10, 12), (3, 3))
    with pytest.raises(UnsupportedError, match="no causal order"):
        layer(torch.randn(1, 9, 12), (3, 3), is_causal=True)
    with pytest.raises(UnsupportedError, match="no causal order"):
        layer.with_state(torch.randn(1, 9, 12))
