"""The weights that ship today: small, complete, and listed on the model card."""

import torch
from safetensors.torch import load_file

import softless
from softless.models import shipped
from softless.models.table import CONFIGS
from tests.scripts import script

KEYS = {
    "schema", "model", "classes", "images", "parameters", "top1", "test_images", "data", "recipe", "seed", "step",
    "teacher", "init", "date", "versions",
}  # fmt: skip


tool = script("shipped")


def test_the_model_card_lists_the_weights_that_ship_or_says_that_there_are_none() -> None:
    page = tool.PAGE.read_text()
    assert tool.fill(page, tool.section(), tool.MARKS) == page


def test_all_files_together_are_small_and_nothing_else_is_beside_them() -> None:
    files = [*shipped.FOLDER.glob("*")]
    assert [path.name for path in files if path.suffix != shipped.SUFFIX or path.stem in CONFIGS] == []
    assert sum(path.stat().st_size for path in files) <= tool.MOST_BYTES


def test_every_file_describes_itself_and_loads_into_a_small_model() -> None:
    for name in softless.list_models(pretrained=True):
        known = shipped.ShippedModel(name)
        assert set(known.document) == KEYS
        assert all(tensor.dtype == torch.float16 for tensor in load_file(known.path).values())
        model = softless.create_model(name, pretrained=True)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert parameters == known.document["parameters"] <= tool.MOST_PARAMETERS
        assert model.num_classes == len(known.document["classes"])
        assert 0 < known.document["top1"] <= 1
