"""The models and blocks are the authors': names, shapes, parameter counts, products counted, and outputs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import softless
from softless.models.blocks import Block
from softless.models.cswin import CSwinBlock
from softless.models.pvt import ReducedAttention
from softless.models.swin import WindowAttention
from softless.models.table import CONFIGS
from tests.golden.fill import DERIVED, load, load_model, weights
from tests.models.cases import plan

# Parameters, and billions of multiply-adds at the model's own image size.
SIZES = {
    "inline_deit_tiny": (6_477_736, 1.109),
    "inline_deit_small": (16_734_760, 4.966),
    "inline_deit_base": (23_797_096, 17.169),
    "inline_pvt_tiny": (12_032_232, 1.976),
    "inline_pvt_small": (21_556_136, 3.915),
    "inline_pvt_medium": (37_618_856, 6.862),
    "inline_pvt_large": (51_154_280, 10.130),
    "inline_swin_tiny": (29_223_544, 4.459),
    "inline_swin_small": (49_793_296, 8.719),
    "inline_swin_base": (88_350_120, 15.398),
    "inline_swin_base_384": (88_465_320, 46.200),
    "inline_cswin_tiny": (20_604_520, 4.312),
    "inline_cswin_small": (33_032_872, 6.773),
    "inline_cswin_base": (73_413_640, 14.885),
    "inline_cswin_base_384": (73_413_640, 46.220),
}
NAMES = [
    pytest.param(name, marks=[] if name.endswith("tiny") else pytest.mark.slow)
    for name in SIZES  # the tiny ones on every change
]


def test_all_fifteen_models_and_their_softmax_ancestors_are_listed():
    names = softless.list_models()
    assert names[:15] == list(SIZES)
    assert names[15:] == [name.removeprefix("inline_") for name in SIZES]
    names.clear()
    assert softless.list_models()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_authors(name):
    shapes, images, logits = load_model(name)
    model = softless.create_model(name, device="meta").eval()
    model.load_state_dict(weights("", shapes), strict=True, assign=True)
    with torch.no_grad():
        wide = model.double()(images.double())
        single = model.float()(images)
    assert (wide - logits).abs().max() <= 1e-10 * logits.abs().max()
    assert (single - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize("name", SIZES)
def test_names_shapes_and_counts_are_the_authors(name):
    shapes = load_model(name).shapes
    model = softless.create_model(name, device="meta")
    ours = {key: list(x.shape) for key, x in model.state_dict().items()}
    assert ours == {key: shape for key, shape in shapes.items() if key.rpartition(".")[2] not in DERIVED}
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name][0]
    model.load_state_dict({key: torch.empty(shape, device="meta") for key, shape in shapes.items()}, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_counted(name):
    model = softless.create_model(name, device="meta").eval()
    images = torch.empty(1, 3, *CONFIGS[name].img_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    macs = counter.get_total_flops() / 2e9
    assert macs == pytest.approx(SIZES[name][1], rel=5e-3)


def block(case: str, sizes: dict) -> torch.nn.Module:
    match case:
        case "block_cswin_I":
            return CSwinBlock(plan(sizes, mechanism="inline", local=True))
        case "block_cswin_S_split7":
            return CSwinBlock(plan(sizes, reach=sizes["split"]))
        case "softmax_pvt_sr2":
            return ReducedAttention(plan(sizes, reach=sizes["sr"]))
        case _:
            made = plan(sizes, reach=sizes["win"], odd=sizes["shift"] > 0)
            return Block(made, WindowAttention(made), 1e-5)


@pytest.mark.parametrize(
    "case",
    ["block_cswin_I", "block_cswin_S_split7", "softmax_pvt_sr2", "softmax_swin_noshift", "softmax_swin_shift"],
)
def test_a_block_is_the_authors(case):
    sizes, inputs, filled, output = load(case)
    made = block(case, sizes).double().eval()
    made.load_state_dict({key: x for key, x in filled.items() if key.rpartition(".")[2] not in DERIVED}, strict=True)
    grid = (sizes["h"], sizes["w"]) if "h" in sizes else (sizes["res"], sizes["res"])
    with torch.no_grad():
        wide, single = made(inputs["x"], grid), made.float()(inputs["x"].float(), grid)
    assert (wide - output).abs().max() <= 1e-10 * output.abs().max()
    assert (single - output).abs().max() <= 1e-5 * output.abs().max()
