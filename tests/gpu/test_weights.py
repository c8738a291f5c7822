"""Weights loaded into a model on a CUDA device stay there."""

from pathlib import Path

import pytest
import torch

import softless
from tests.io.files import Net, saved, values, write

pytestmark = pytest.mark.gpu


def test_a_model_on_a_device_takes_the_numbers_and_keeps_its_device(tmp_path: Path) -> None:
    source, model = Net(), Net().cuda().half()
    model.register_buffer("relative_position_index", torch.arange(4).cuda(), persistent=False)
    content = source.state_dict() | {"relative_position_index": torch.arange(4)}
    report = softless.load_weights(model, write(tmp_path, saved({"model": content})))
    assert (report.tensors, report.derived) == (9, ("relative_position_index",))
    for name, tensor in values(model).items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), source.state_dict()[name].to(tensor.dtype)), name
