"""Any image size works: positions are resampled, windows padded, and padding takes part in nothing."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from softless.models.blocks import resample
from softless.models.cswin import Branch
from softless.nn.windows import windows
from tests.models.cases import SMALL, images, loud, plan, small

SIZES = [(64, 64), (96, 64), (50, 77), (16, 16), (33, 200)]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_size_gives_logits(name, size):
    model = small(name)
    out = model(images(2, 3, *size, dtype=torch.float32))
    assert out.shape == (2, 5)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", [name for name in SMALL if "deit" not in name and "pvt" not in name])
def test_without_positions_a_size_is_native_or_not_to_the_bit(name):
    """Nothing depends on the size a model was made for."""
    here, there = small(name, img_size=64), small(name, img_size=(96, 48))
    there.load_state_dict(here.state_dict())
    x = images(1, 3, 96, 48, dtype=torch.float32)
    assert torch.equal(here(x), there(x))


@pytest.mark.parametrize("name", [name for name in SMALL if "deit" in name or "pvt" in name])
def test_positions_are_resampled_once_and_for_all_or_at_each_call(name):
    """A model made for another size, with tables resampled to it, agrees; at their own size they are as they are."""
    here, there = small(name, img_size=64), small(name, img_size=(96, 48))
    state = here.state_dict()
    for key, table in here.state_dict().items():
        if key.startswith("pos_embed"):
            own, other = (positions(model, key) for model in (here, there))
            state[key] = resample(table, own.native, other.native, own.mode, own.prefix)
            assert own(table, list(own.native)) is table
    there.load_state_dict(state)
    x = images(1, 3, 96, 48, dtype=torch.float32)
    assert torch.equal(here(x), there(x))


def positions(model, key):
    stage = key.removeprefix("pos_embed")
    return model.positions[int(stage) - 1] if stage else model.positions


def test_resampling_is_what_timm_does_for_deit_and_the_authors_for_pvt():
    from timm.layers import resample_abs_pos_embed

    table = torch.randn(1, 1 + 14 * 14, 8)
    expected = resample_abs_pos_embed(table, [9, 20], num_prefix_tokens=1)
    assert torch.equal(resample(table, [14, 14], [9, 20], "bicubic", 1), expected)
    flat = table[:, 1:]
    expected = F.interpolate(flat.unflatten(1, (14, 14)).permute(0, 3, 1, 2), (9, 20), mode="bilinear")
    assert torch.equal(resample(flat, [14, 14], [9, 20], "bilinear", 0), expected.flatten(2).mT)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_resampling_keeps_a_wide_table_wide_and_widens_a_narrow_one(mode):
    table = torch.randn(1, 1 + 36, 4, dtype=torch.float64)
    wide, narrow = (resample(table.to(dtype), [6, 6], [9, 4], mode, 1) for dtype in (torch.float64, torch.bfloat16))
    picture = table[:, 1:].unflatten(1, (6, 6)).permute(0, 3, 1, 2)
    expected = F.interpolate(picture, (9, 4), mode=mode, antialias=mode == "bicubic")
    torch.testing.assert_close(wide[:, 1:], expected.flatten(2).mT, rtol=1e-14, atol=1e-14)
    assert torch.equal(narrow, resample(table.bfloat16().float(), [6, 6], [9, 4], mode, 1).bfloat16())


@pytest.mark.parametrize("name", ["inline_swin_tiny", "swin_tiny", "inline_pvt_tiny"])
def test_padding_of_windows_changes_no_output(name, monkeypatch):
    """Filled with anything at all, what pads the windows changes no bit of the answer."""
    window = {"window": 3} if name.startswith("inline") else {}
    model = loud(small(name, **window).double())
    x = images(2, 3, 52, 80)
    clean = model(x)
    real, filled = F.pad, []

    def poisoned(x, pad, *rest, **more):
        out = real(x, pad, *rest, **more)
        if not x.is_floating_point():
            return out
        there = real(torch.ones_like(x), pad)
        filled.append(int((there == 0).sum()))
        return torch.where(there == 0, 1e3, out)

    monkeypatch.setattr("softless.nn.windows.F", SimpleNamespace(pad=poisoned))
    touched = model(x)
    assert sum(filled) > 0
    torch.testing.assert_close(touched, clean, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mechanism", ["inline", None])
def test_a_stripe_is_a_picture_of_its_own(mechanism):
    """Its softmax or InLine, its convolution of values and its 3x3 end where it ends, the last, narrower one too."""
    made = plan({"dim": 12, "heads": 3}, mechanism=mechanism, local=mechanism is not None)
    stripes, alone = (Branch(made, 12, 3, side).double() for side in ((None, 3), (None, None)))
    alone.load_state_dict(stripes.state_dict())
    qkv, source = images(2, 5 * 7, 3, 3, 4), images(2, 5 * 7, 12)
    out = stripes(qkv, (5, 7), source).unflatten(1, (5, 7))
    for left in (0, 3, 6):
        part = [x.unflatten(1, (5, 7))[:, :, left : left + 3] for x in (qkv, source)]
        expected = alone(part[0].flatten(1, 2), (5, part[0].shape[2]), part[1].flatten(1, 2))
        torch.testing.assert_close(out[:, :, left : left + 3].flatten(1, 2), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grid", [(7, 7), (14, 14), (9, 16), (3, 20), (1, 1), (8, 7)])
@pytest.mark.parametrize("size", [(7, 7), (3, 5), (20, 20)])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("rolled", [False, True])
def test_joining_windows_undoes_the_cut(grid, size, shifted, rolled):
    cut = windows(grid, size, shifted=shifted, rolled=rolled)
    x = torch.randn(2, grid[0] * grid[1], 3, 4)
    pieces = cut.cut(x)
    assert torch.equal(cut.join(pieces), x)
    mask = cut.mask(x)
    assert pieces.shape[:2] == (2 * cut.counts[0] * cut.counts[1], cut.size[0] * cut.size[1])
    assert (pieces.shape[0] * pieces.shape[1] if mask is None else mask.sum()) == x.shape[0] * x.shape[1]
    if mask is not None:
        assert (pieces[~mask] == 0).all()


def test_a_table_serves_windows_smaller_than_its_own():
    """In a small picture a window shrinks, and its differences are still those of the table."""
    attn = small("swin_tiny").layers[0].blocks[0].attn
    whole, part = attn.bias((3, 3)).unflatten(1, (3, 3)).unflatten(3, (3, 3)), attn.bias((1, 2))
    assert torch.equal(part.unflatten(1, (1, 2)).unflatten(3, (1, 2)), whole[:, :1, :2, :1, :2])
