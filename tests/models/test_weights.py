"""The authors' checkpoints load by name: what they keep beside the weights is left in the file."""

from pathlib import Path

import pytest
import torch

import softless
from softless.errors import FileError


def test_a_file_as_the_authors_save_swin_gives_the_same_outputs(tmp_path: Path) -> None:
    trained, fresh = (softless.create_model("inline_swin_tiny", num_classes=3).eval() for _ in range(2))
    last = "layers.3.blocks.1.attn.relative_position_index"
    state = trained.state_dict() | {last: torch.zeros(49, 49, dtype=torch.int64)}
    torch.save({"model": state, "optimizer": {"step": 1}, "epoch": 299}, tmp_path / "swin.pth")
    report = softless.load_weights(fresh, tmp_path / "swin.pth")
    assert (report.key, report.derived) == ("model", (last,))
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(fresh(images), trained(images))


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
