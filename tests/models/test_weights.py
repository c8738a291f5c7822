"""The authors' checkpoints and timm's load by name: what they keep beside the weights is left in the file."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models.swin_transformer import get_relative_position_index

import softless
import softless.timm
from softless.errors import FileError
from softless.models.backbone import Backbone
from softless.train.tasks.classify import start_from

LAST_INDEX = "layers.3.blocks.1.attn.relative_position_index"
NARROW = {"dims": (8, 16, 32, 64), "depths": (1, 1, 1, 2), "heads": (1, 2, 4, 8)}


def authors_swin(path: Path, index: torch.Tensor) -> Backbone:
    """A narrow InLine-Swin and its file, which holds the index into the last table of relative positions too."""
    model = softless.create_model("inline_swin_base", **NARROW, num_classes=3).eval()
    state = model.state_dict() | {LAST_INDEX: index}
    torch.save({"model": state, "optimizer": {"step": 1}, "epoch": 299}, path)
    return model


def test_a_file_as_the_authors_save_swin_gives_the_same_outputs(tmp_path: Path) -> None:
    trained = authors_swin(tmp_path / "swin.pth", get_relative_position_index(7, 7))
    fresh = softless.create_model("inline_swin_base", **NARROW, num_classes=3).eval()
    report = softless.load_weights(fresh, tmp_path / "swin.pth")
    assert (report.key, report.derived) == ("model", (LAST_INDEX,))
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(fresh(images), trained(images))


def test_an_index_into_a_table_of_another_order_is_refused(tmp_path: Path) -> None:
    model = authors_swin(tmp_path / "swin.pth", get_relative_position_index(7, 7).T.contiguous())
    with pytest.raises(FileError, match=f"not the model's own index {LAST_INDEX}$"):
        softless.load_weights(model, tmp_path / "swin.pth")


def timms_swin(path: Path, num_classes: int) -> torch.nn.Module:
    """A narrow Swin of timm's, and its file."""
    sizes = {"embed_dim": 8, "depths": NARROW["depths"], "num_heads": NARROW["heads"]}
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes, num_classes=num_classes).eval()
    torch.save(model.state_dict(), path)
    return model


@pytest.mark.parametrize("num_classes", [3, 0])
def test_timms_swin_loads_by_its_names_with_a_head_and_without(tmp_path: Path, num_classes: int) -> None:
    theirs = timms_swin(tmp_path / "timm.pth", num_classes)
    fresh = [softless.create_model("swin_tiny", **NARROW, num_classes=num_classes).eval() for _ in range(2)]
    softless.load_weights(fresh[0], tmp_path / "timm.pth")
    fresh[1].load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        for ours in fresh:
            torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


def test_timm_loads_its_swin_into_ours_for_another_number_of_classes(tmp_path: Path) -> None:
    theirs = timms_swin(tmp_path / "timm.pth", 1000)
    file = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "timm.pth")}}
    ours = timm.create_model("swin_tiny", **NARROW, **file, num_classes=10).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert ours(images).shape == (1, 10)
        torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images), rtol=1e-5, atol=1e-5)


def test_a_file_starts_a_model_of_another_size(tmp_path: Path) -> None:
    """As the authors begin at 384 pixels: tables resampled, the index for the old window left in the file."""
    small = authors_swin(tmp_path / "swin.pth", get_relative_position_index(7, 7))
    large = softless.create_model("inline_swin_base_384", **NARROW, num_classes=3)
    start_from(large, tmp_path / "swin.pth")
    expected = softless.timm.fit_tables(small.state_dict(), large)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in large.state_dict().items())
    assert torch.equal(large.head.weight, small.head.weight)
    with pytest.raises(FileError, match=r"mis-shaped head.weight \(file \[3, 64\], model \[4, 64\]\)"):
        start_from(softless.create_model("inline_swin_base_384", **NARROW, num_classes=4), tmp_path / "swin.pth")


@pytest.mark.parametrize(
    ("name", "key", "shape"),
    [
        ("inline_deit_tiny", "pos_embed", (1, 1 + 8, 192)),
        ("inline_deit_tiny", "pos_embed", (1, 0, 192)),
        ("inline_pvt_tiny", "pos_embed2", (1, 200, 128)),
        ("swin_tiny", "layers.0.blocks.0.attn.relative_position_bias_table", (170, 3)),
    ],
)
def test_a_table_that_is_no_square_is_refused(name: str, key: str, shape: tuple[int, ...]) -> None:
    model = softless.create_model(name, device="meta")
    with pytest.raises(FileError, match=rf"^{key} has -?\d+ places, and only a square of them can be resampled"):
        softless.timm.fit_tables({key: torch.zeros(shape)}, model)


def test_averaged_weights_are_taken_where_a_file_has_them(tmp_path: Path) -> None:
    model = softless.create_model("inline_deit_tiny", num_classes=2)
    raw = model.state_dict()
    averaged = {name: torch.full_like(tensor, 0.5) for name, tensor in raw.items()}
    torch.save({"model": raw, "state_dict_ema": averaged}, tmp_path / "ema.pth")
    assert softless.load_weights(model, tmp_path / "ema.pth").key == "state_dict_ema"
    assert all((parameter == 0.5).all() for parameter in model.parameters())


def test_another_models_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    small, tiny = (softless.create_model(f"inline_deit_{size}", num_classes=2) for size in ("small", "tiny"))
    torch.save(small.state_dict(), tmp_path / "small.pth")
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    with pytest.raises(FileError, match=r"mis-shaped .*cls_token \(file \[1, 1, 320\], model \[1, 1, 192\]\)"):
        softless.load_weights(tiny, tmp_path / "small.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.state_dict().items())
