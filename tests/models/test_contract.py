"""timm's model contract on our models: what its own tests ask for, on small ones, and what they do not ask."""

import copy
import subprocess
import sys

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from timm.optim import create_optimizer_v2
from timm.optim._param_groups import group_parameters

import softless
import softless.timm
from softless.errors import ArgumentError
from tests.models.cases import SMALL, images, small
from tests.models.test_originals import TIMM


def picture(height: int = 64, width: int = 64) -> torch.Tensor:
    return images(2, 3, height, width, dtype=torch.float32)


@pytest.mark.parametrize("name", SMALL)
def test_forward_is_forward_features_then_forward_head(name):
    model = small(name)
    x = picture(52, 80)
    features = model.forward_features(x)
    assert features.shape[-1] == model.num_features == model.head_hidden_size
    assert torch.equal(model.forward_head(features), model(x))
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    assert torch.equal(model.get_classifier()(pooled), model(x))


@pytest.mark.parametrize("name", SMALL)
def test_a_reset_classifier_keeps_device_dtype_and_mode(name):
    model, x = small(name).double().train(), picture().double()
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert model(x).shape == (2, model.num_features)
    model.reset_classifier(7, "avg")
    assert model(x).shape == (2, 7)
    assert model.get_classifier().weight.dtype == torch.float64
    assert model.get_classifier().training
    model.reset_classifier(0, "")
    assert torch.equal(model.eval()(x), model.forward_features(x))
    with pytest.raises(ArgumentError, match="global_pool 'max' is not one of"):
        model.reset_classifier(3, "max")
    assert model.num_classes == 0


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_are_the_outputs_of_the_stages(name, norm):
    model = small(name)
    x = picture(48, 80)
    final, every = model.forward_intermediates(x, norm=norm)
    assert torch.equal(final, model.forward_features(x))
    assert [each.shape[1] for each in every] == [info["num_chs"] for info in model.feature_info]
    assert all(each.is_contiguous() for each in every)
    for each, info in zip(every, model.feature_info, strict=True):
        assert each.shape[2:] == tuple(-(-side // info["reduction"]) for side in (48, 80))
    last = model.forward_intermediates(x, indices=1, norm=norm, intermediates_only=True)
    assert torch.equal(last[0], every[-1])
    first = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True, output_fmt="NHWC")
    assert torch.equal(first[0].permute(0, 3, 1, 2), model.forward_intermediates(x, indices=[0])[1][0])
    with pytest.raises(ArgumentError, match="output_fmt 'CHW' is not one of NCHW, NHWC"):
        model.forward_intermediates(x, output_fmt="CHW")


def test_the_class_token_comes_with_the_patches_if_wanted():
    model = small("inline_deit_tiny")
    final, found = model.forward_intermediates(picture(), return_prefix_tokens=True, norm=True, output_fmt="NLC")
    patches, token = found[-1]
    assert torch.equal(torch.cat([token, patches], 1), final)


@pytest.mark.parametrize("name", SMALL)
def test_features_are_where_their_description_says(name):
    model, found = small(name), []
    for info in model.feature_info:
        model.get_submodule(info["module"]).register_forward_hook(lambda _module, _given, out: found.append(out))
    model(picture())
    assert [out.shape[-1] for out in found] == [info["num_chs"] for info in model.feature_info]


@pytest.mark.parametrize("name", SMALL)
def test_every_layer_runs_its_hooks_and_the_answer_stays(name):
    """As adapters and pruning need, where otherwise weights are packed and used without their layers."""
    model, x, ran = small(name).double(), picture().double(), []
    plain = model(x)
    kinds = torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.LayerNorm
    layers = [path for path, module in model.named_modules() if isinstance(module, kinds)]
    for path in layers:
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: ran.append(path))
    torch.testing.assert_close(model(x), plain, rtol=1e-12, atol=1e-12)
    assert sorted(ran) == sorted(layers)


@pytest.mark.parametrize("name", SMALL)
def test_pruning_does_not_change_the_remaining_stages(name):
    whole, x, index = small(name), picture(), 0 if "deit" in name else 1
    pruned = copy.deepcopy(whole)
    assert pruned.prune_intermediate_layers([index]) == [index]
    kept = pruned.forward_intermediates(x, indices=[index], intermediates_only=True)[0]
    assert torch.equal(kept, whole.forward_intermediates(x, indices=[index], intermediates_only=True)[0])
    assert len(list(pruned.parameters())) < len(list(whole.parameters())) - 2


@pytest.mark.parametrize("name", softless.list_models())
def test_every_model_is_registered_with_true_settings(name):
    model = timm.create_model(name, device="meta")
    cfg = model.pretrained_cfg
    assert cfg["input_size"] == (3, *model.config.img_size)
    assert f"{cfg['first_conv']}.weight" in model.state_dict()
    assert f"{cfg['classifier']}.weight" in model.state_dict()
    assert (cfg["crop_mode"] == "squash") == name.startswith("inline_")
    assert resolve_model_data_config(softless.create_model(name, device="meta")) == resolve_model_data_config(model)
    if name in TIMM:
        theirs = timm.get_pretrained_cfg(TIMM[name]).to_dict()
        different = {key for key in ("crop_mode", *resolve_model_data_config(model)) if cfg.get(key) != theirs.get(key)}
        assert different == set()


def test_every_module_that_the_settings_name_exists():
    assert set(softless.timm.__all__) == {"default_cfgs", "fit_tables"}
    exec("from softless.timm import *", {})


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_timm_gives_features_channels_classes_and_ablations(name):
    for way, channels in (
        ("getter", 1),
        ("hook", -1),
    ):  # as timm's Swin: hooks see what the modules give, channels last
        features = timm.create_model(name, features_only=True, feature_cls=way, out_indices=(1, 2), device="meta")
        found = features(torch.empty(1, 3, 96, 64, device="meta"))
        assert [each.shape[channels] for each in found] == features.feature_info.channels()
    model = timm.create_model(name, in_chans=1, num_classes=7, mechanism="softmax", local=False, device="meta")
    assert model(torch.empty(1, 1, 64, 64, device="meta")).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "side"), [("inline_deit_tiny", 64), pytest.param("inline_pvt_tiny", 96, marks=pytest.mark.slow)]
)
def test_weights_are_found_in_a_folder_and_fitted(name, side, tmp_path):
    """timm's local-dir:, its own file format, another image size and number of channels."""
    from timm.models import save_for_hf

    model = softless.create_model(name, img_size=side, num_classes=3)
    save_for_hf(model, tmp_path, safe_serialization=True)
    same = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=side).eval()
    x = picture()
    assert torch.equal(same(x), model.eval()(x))
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=32, in_chans=1, num_classes=3)
    assert other(x[:, :1]).shape == (2, 3)


def test_a_bias_table_is_fitted_to_another_window():
    large, little = (softless.create_model(name, device="meta") for name in ("swin_base_384", "swin_base"))
    key = "layers.0.blocks.0.attn.relative_position_bias_table"
    table = torch.randn(13**2, 4)
    assert softless.timm.fit_tables({key: table}, large)[key].shape == (23**2, 4)
    assert softless.timm.fit_tables({key: table}, little)[key] is table
    wide = softless.timm.fit_tables({key: table.double()}, large)[key]
    square = table.double().mT.unflatten(1, (13, 13))[None]
    assert torch.equal(wide, torch.nn.functional.interpolate(square, (23, 23), mode="bicubic")[0].flatten(1).mT)


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("inline_deit_tiny", {"pos_embed", "cls_token"}),
        ("inline_pvt_tiny", set()),
        ("inline_cswin_tiny", set()),
        ("inline_swin_tiny", {f"layers.3.blocks.{i}.attn.relative_position_bias_table" for i in range(2)}),
    ],
)
def test_weight_decay_is_the_authors(name, spared):
    model = small(name)
    assert model.no_weight_decay() == spared
    create_optimizer_v2(model, "adamw", weight_decay=0.05)


@pytest.mark.parametrize("name", SMALL)
def test_layers_are_grouped_from_stem_to_head(name):
    """As layer-wise learning rates need: the stem first, no layer before the one it reads, the head last."""
    model = small(name)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert set(groups) == {key for key, _ in model.named_parameters()}
    stem = next(key for key in groups if "embed" in key and key.endswith("weight"))
    assert groups[stem] == 0
    assert groups["head.weight"] == max(groups.values())
    ran = []
    for path, module in list(model.named_modules())[1:]:
        own = [f"{path}.{key}" for key, _ in module.named_parameters(recurse=False)]
        module.register_forward_pre_hook(lambda *_, own=own: ran.extend(groups[key] for key in own))
    model(picture())
    assert ran == sorted(ran)
    coarse = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert max(coarse.values()) <= max(groups.values())


@pytest.mark.parametrize("training", [True, False])
def test_checkpointing_keeps_only_what_enters_each_block(training):
    """In eval mode too, as timm's: gradients are asked for there as well."""
    model = small("inline_deit_tiny").train(training)
    model.set_grad_checkpointing()
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    model(picture()).sum().backward()
    assert len(calls) == 2 * len(model.blocks)


@pytest.mark.parametrize("name", SMALL)
def test_a_saved_model_loads_bitwise_equal(name):
    model, x = small(name), picture()
    for other in (small(name), small(name).to("meta").to_empty(device="cpu")):
        other.load_state_dict(model.state_dict())
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("name", SMALL)
def test_initial_weights_are_the_authors(name):
    """Linear layers and tables normal with deviation 0.02, biases zero; convolutions, residuals too, as PyTorch's."""
    model = small(name)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    tables = [x for key, x in model.named_parameters() if "pos_embed" in key or "table" in key]
    drawn = torch.cat([x.flatten() for x in (*(module.weight for module in linear), *tables)])
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05)
    assert not any(module.bias.any() for module in linear if module.bias is not None)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            assert 0.8 * bound < module.weight.abs().max() <= bound


@pytest.mark.parametrize("name", SMALL)
def test_bad_images_are_refused_in_a_sentence(name):
    model = small(name)
    patch = 16 if "deit" in name else 4
    with pytest.raises(ArgumentError, match=r"shape \[2, 1, 64, 64\] and must be \[batch, 3, height, width\]"):
        model(picture()[:, :1])
    with pytest.raises(ArgumentError, match=r"shape \[3, 64, 64\] and must be"):
        model(picture()[0])
    with pytest.raises(ArgumentError, match="images are uint8 and must be floats: divide bytes by 255"):
        model(picture().byte())
    with pytest.raises(
        ArgumentError, match=f"images are 64 x {patch - 1} pixels and must be at least {patch} x {patch}"
    ):
        model(picture()[..., : patch - 1])
    with pytest.raises(ArgumentError, match="images are"):
        model.forward_intermediates(picture()[..., : patch - 1])
    assert model(picture()[..., :patch]).isfinite().all()


def test_without_timm_the_command_that_helps_is_named():
    code = """
import importlib, sys
sys.modules["timm"] = None
import softless
softless.list_models()
for act in (lambda: softless.create_model("inline_deit_tiny"), lambda: importlib.import_module("softless.timm")):
    try:
        act()
    except softless.errors.MissingExtraError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.count("timm is not installed: pip install 'softless[models]'") == 2


@pytest.mark.parametrize("name", SMALL)
def test_a_graph_of_fx_keeps_the_answer(name):
    from timm.models import get_notrace_modules
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    model, x = small(name), picture(52, 80)
    options = {"leaf_modules": list(get_notrace_modules()), "param_shapes_constant": True}
    last = get_graph_node_names(model, tracer_kwargs=options)[1][-1]
    traced = create_feature_extractor(model, [last], tracer_kwargs=options)
    assert torch.equal(traced(x)[last], model(x))
