"""A model of another size: patches, widths, depths and heads are arguments, and what cannot be made is refused."""

import pytest
import torch

import softless
from softless.errors import ArgumentError
from softless.models import customize

SIZES = {
    "inline_deit_tiny": {"patch_size": 1, "dims": 16, "depths": 2, "heads": 2},
    "inline_pvt_tiny": {"patch_size": 2, "dims": [8, 12, 16, 20], "depths": [1, 2, 1, 1], "heads": [1, 2, 2, 2]},
    "inline_swin_tiny": {"patch_size": 2, "dims": [8, 16, 32, 64], "depths": [1, 1, 2, 1], "heads": [1, 2, 4, 8]},
    "inline_cswin_tiny": {"patch_size": 2, "dims": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "heads": [2, 2, 4, 4]},
}


@pytest.mark.parametrize("name", SIZES)
def test_a_small_model_has_the_sizes_it_was_given(name):
    sizes = SIZES[name]
    model = softless.create_model(name, img_size=16, num_classes=3, **sizes)
    images = torch.randn(2, 3, 16, 16)
    assert model(images).shape == (2, 3)
    found = model.forward_intermediates(images, intermediates_only=True)
    dims = [sizes["dims"]] * sizes["depths"] if isinstance(sizes["dims"], int) else sizes["dims"]
    assert [picture.shape[1] for picture in found] == dims
    patch = sizes.get("patch_size", 4)
    assert [info["reduction"] for info in model.feature_info] == [
        patch * (1 if "deit" in name else 2**stage) for stage in range(len(dims))
    ]
    assert found[0].shape[2:] == (16 // patch, 16 // patch)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_the_first_stages_alone_are_the_first_stages(name, stages):
    sizes = SIZES[name]
    few = {key: given[:stages] for key, given in sizes.items() if key != "patch_size"} | {"patch_size": 2}
    model = softless.create_model(name, img_size=16, num_classes=3, pattern="I" * stages, **few).double()
    whole = softless.create_model(name, img_size=16, num_classes=3, pattern="IIII", **sizes).double()
    stays = {name: weight for name, weight in whole.state_dict().items() if not name.startswith(("norm.", "head."))}
    model.load_state_dict(stays, strict=False)
    images = torch.randn(2, 3, 16, 16).double()
    expected = whole.forward_intermediates(images, intermediates_only=True)[:stages]
    found = model.forward_intermediates(images, intermediates_only=True)
    assert len(found) == stages
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert model(images).shape == (2, 3)
    assert model.feature_info[-1]["reduction"] == 2**stages


def test_sizes_that_are_not_given_are_those_of_the_name():
    assert customize("inline_swin_base", patch_size=2).dims == customize("inline_swin_base").dims
    assert customize("inline_deit_tiny").patch == 16
    assert customize("inline_swin_tiny").patch == 4


def test_a_stage_that_was_all_the_mechanisms_still_is():
    config = customize("inline_swin_base", depths=[3, 3, 1, 1])
    assert config.mixed == (3, 3, 1, 0)
    assert customize("inline_swin_base", pattern="SI2S", depths=[1, 4, 3, 1]).mixed == (0, 4, 2, 0)


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("inline_deit_tiny", {"dims": [64, 64]}, r"dims \[64, 64\] must be a positive number, for deit"),
        ("inline_swin_tiny", {"depths": 4}, r"depths \[4\], heads .* must have a number each for every stage"),
        ("inline_swin_tiny", {"depths": []}, r"depths \[\] must be 1 to 4 positive numbers, one per stage, for swin"),
        ("inline_pvt_tiny", {"heads": [1, 2, 2, 0]}, "must be 1 to 4 positive numbers"),
        ("inline_deit_tiny", {"dims": 64.0}, r"dims 64.0 must be a positive number"),
        ("inline_deit_tiny", {"dims": 50, "heads": 4}, r"dims \[50\] are not multiples of heads \[4\]"),
        ("inline_swin_tiny", {"dims": [96, 96, 192, 384]}, "must double from stage to stage in swin"),
        ("inline_deit_tiny", {"patch_size": 0}, "patch_size 0 is not a whole number, at least 1"),
    ],
)
def test_sizes_that_make_no_model_are_refused(name, sizes, says):
    with pytest.raises(ArgumentError, match=says):
        softless.create_model(name, **sizes)
