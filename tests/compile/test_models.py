"""The models compile whole, export with any batch, and say the same in onnxruntime: R11."""

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from softless.bench.model_contest import by_plain_formulas
from softless.models.blocks import Stage
from tests.models.cases import FAMILIES, SMALL, loud, small

pytestmark = [
    pytest.mark.compile,
    # All are torch's own or its exporter's, raised while it traces, and say nothing about what it traced.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),  # torch 2.11's exporter does that
]

BATCH = torch.export.Dim("batch", min=1, max=64)
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def short(family: str, blocks: int = 2) -> nn.Module:
    """A mixed stage, and in a pyramid one of the family's own attention after it; so many blocks in each."""
    if family == "deit":
        model = small("inline_deit_tiny")
    else:
        model = small(f"inline_{family}_tiny", pattern="ISII")
        model.prune_intermediate_layers([1], prune_norm=True)
    for stage in (module for module in model.modules() if isinstance(module, Stage)):
        del stage[blocks:]
    return loud(model)


def pictures(batch: int = 2, height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(batch, 3, height, width)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    error, bound = (found - expected).abs().max().item(), tolerance * expected.abs().max().item()
    assert error <= bound, f"{error:.1e} > {bound:.1e}"


def gradients(model: nn.Module, run: nn.Module, images: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(images).square().mean(), list(model.parameters())))


# Their exports trace every family whole, at every change; swin speaks for the pyramids here.
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each not in ("deit", "swin"))) for each in FAMILIES]
)
def test_a_model_compiles_to_one_graph_with_the_same_output(family):
    model, images = short(family, blocks=1), pictures(height=52, width=80)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(images), model(images), 8 * EPS)
    for found, expected in zip(gradients(model, compiled, images), gradients(model, model, images), strict=True):
        assert_close(found, expected, 64 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_compiles_a_model(family):
    model, images = short(family, blocks=1), pictures()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(images), model(images), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_another_batch_needs_no_other_graph(name):
    model = loud(small(name))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for images in (pictures(2), pictures(5)):
            assert_close(compiled(images), model(images), 8 * EPS)


@pytest.mark.parametrize("family", ["deit", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])])
def test_the_plain_formulas_compile_too(family):
    model, images = short(family, blocks=1), pictures()
    expected = model(images)
    compiled = torch.compile(by_plain_formulas(model), fullgraph=True, backend="aot_eager")
    assert_close(compiled(images), expected, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_exports_with_any_batch(family):
    check_export(short(family, blocks=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_full_size_model_exports_with_any_batch(name):
    check_export(loud(small(name)))


def check_export(model: nn.Module) -> None:
    program = torch.export.export(model, (pictures(),), dynamic_shapes=({0: BATCH},))
    targets = {str(node.target) for node in program.graph.nodes}
    assert not any(target.startswith("softless") for target in targets), "an export needs no kernel of ours"
    for batch in (1, 2, 5):
        images = pictures(batch)
        assert_close(program.module()(images), model(images), 8 * EPS)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each != "deit")) for each in FAMILIES]
)
def test_onnxruntime_matches_the_model(family):
    check_onnx(short(family, blocks=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_onnxruntime_matches_a_full_size_model(name):
    check_onnx(loud(small(name)))


@torch.no_grad()  # with gradients, torch's exporter trips over the strides of its own SDPA with a bias
def check_onnx(model: nn.Module) -> None:
    program = torch.onnx.export(model, (pictures(),), dynamo=True, dynamic_shapes=({0: BATCH},), verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    for batch in (1, 5):
        images = pictures(batch)
        (found,) = session.run(None, {name: images.numpy()})
        assert_close(torch.from_numpy(found), model(images), 1e-5)
