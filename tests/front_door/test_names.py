"""The public names are the documented ones, their examples run, and mechanisms are plain values."""

import copy
import dataclasses
import doctest
import inspect
import math
import pickle
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import softless
from softless import algebra
from softless.models import backbone
from tests.numerics.cases import CASES

ROOT = Path(__file__).parents[2]

SIGNATURES = {
    "attention": "q, k, v, mechanism='inline', *, is_causal=False, key_mask=None, bias=None, scale=None, inputs=None, "
    "grid=None, backend='auto'",
    "attention_weights": "q, k, mechanism='inline', *, is_causal=False, key_mask=None, bias=None, scale=None, "
    "inputs=None, grid=None, backend='auto'",
    "attention_with_state": "q, k, v, mechanism='inline', state=None, *, key_mask=None, scale=None, inputs=None, "
    "grid=None, backend='auto'",
    "mechanism": "name, **options",
    "list_mechanisms": "",
    "threshold_report": "q, k, *, tau=1.0, expansion='max', tail='drop', is_causal=False, key_mask=None, bias=None, "
    "scale=None",
    "load_weights": "model, path, *, key=None, fit=None",
    "create_model": "name, *, mechanism=None, local=None, qk_conv=None, window=None, pattern=None, num_classes=None, "
    "img_size=None, patch_size=None, dims=None, depths=None, heads=None, pretrained=False, "
    "device=None, dtype=None, **options",
    "list_models": "pretrained=False",
    "convert": "model, data, *, budget=0.01, candidates=None, metric=None, steps=40, layers=None, heal=None, "
    "rank=None, compare=False, seed=0, work=None, watch=None",
    "load_converted": "folder",
    "Conversion": "model, layers, document, _places, _untouched=None",
    "nn.Attention": "dim, heads=None, mechanism='inline', local=False, *, num_heads=None, kv_heads=None, window=None, "
    "shifted=False, qk_norm=False, rotary=False, qkv_bias=True, qk_conv=False, attn_drop=0.0, proj_drop=0.0",
    "nn.MultiheadAttention": "embed_dim, num_heads, mechanism='inline', *, dropout=0.0, bias=True, batch_first=False, "
    "kv_heads=None, qk_norm=False, rotary=False",
    "nn.LocalResidual": "dim, heads",
    "nn.LongformerAttention": "dim, heads, *, window=256, global_tokens=1, kv_heads=None, qkv_bias=True, proj_drop=0.0",
    "nn.LocalResidual.forward": "self, context, v, grid, prefix=0",
    "nn.Reversible": "pairs",
    "nn.PreNorm": "dim, inner",
    "nn.EliminationEncoder": "dim, heads, depth, length, *, mechanism='softmax', ratio=4",
    "nn.significance": "weights, key_mask=None",
    "nn.FunnelEncoder": "dim, heads, blocks=(4, 4, 4), *, mechanism='softmax', pool='mean', prefix=1, hidden=None",
    "nn.FunnelDecoder": "dim, heads, blocks, layers=2, *, mechanism='softmax', prefix=1, hidden=None",
    "nn.StridedFeedForward": "dim, hidden=None, *, stride=2, width=None, renormalize=False",
    "nn.pool_tokens": "x, key_mask=None, *, stride=2, width=None, mode='mean', prefix=0",
    "nn.repeat_tokens": "x, stride, length, prefix=0",
    "Mechanism": "",
    "NearState": "n, k_mean, v_mean, comoment, keys, values",
    "State": "n, k_mean, v_mean, comoment, shift",
    "ThresholdReport": "kept_fraction, discarded_mass, range, error",
    "WeightsReport": "path, format, key, prefix, tensors, derived, nonfinite, ignored",
    "nn.Funneled": "short, full",
    "nn.Survivors": "x, key_mask, places",
    "nn.Tokens": "x, key_mask",
    "nn.Attention.with_state": "self, x, state=None, *, key_mask=None",
    "nn.Attention.with_weights": "self, x, *, key_mask=None",
    "parallel.attention": "q, k, v, mechanism='inline', *, group=None, is_causal=False, key_mask=None, scale=None, "
    "inputs=None",
    "algebra.Gains": "divide, subtract",
    "algebra.Log": "value",
    "algebra.State": "n, k_mean, v_mean, comoment, shift",
    "algebra.observe": "phi_k, v, mask=None",
    "algebra.merge": "a, b",
    "algebra.read": "phi_q, state, reader, scale=1.0, *, shifted=True, signed=False",
    "algebra.weights": "phi_q, phi_k, reader, scale, visible, *, signed=False",
    "algebra.parallel": "phi_q, phi_k, v, reader, scale=1.0, mask=None, *, signed=False",
    "algebra.recurrent": "phi_q, phi_k, v, reader, scale=1.0, mask=None, state=None, *, signed=False",
    "algebra.chunked": "phi_q, phi_k, v, reader, scale=1.0, mask=None, state=None, chunk=64, *, signed=False",
}


PUBLIC = [
    *(name for name in softless.__all__ if callable(getattr(softless, name))),
    *(f"nn.{name}" for name in softless.nn.__all__),
    *(f"algebra.{name}" for name in algebra.__all__ if callable(getattr(algebra, name))),
    "nn.Attention.with_state",
    "nn.Attention.with_weights",
    "parallel.attention",
]
WITHOUT_TENSORS = {
    "mechanism",
    "list_mechanisms",
    "list_models",
    "Mechanism",
    "WeightsReport",
    "Conversion",
    "load_converted",
}


def find(name: str) -> object:
    thing: object = softless
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_the_documented_one(name):
    signature = inspect.signature(find(name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    found = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert found == f"({SIGNATURES[name]})"


def test_a_module_takes_the_grid_in_second_place():
    parameters = list(inspect.signature(softless.nn.Attention.forward).parameters)
    assert parameters[:3] == ["self", "x", "grid"]


def test_the_mechanisms_are_those_of_this_version():
    names = "softmax general linear inline blend regress efficient taylor hydra angular focused threshold"
    names += " nearfar cosformer performer delta efla decay transnormer diagonal mlla a2"
    names += " topk sparse longformer linformer nystrom agent soft nonlocal asymmetric_nonlocal emanet reformer"
    assert softless.list_mechanisms() == names.split()
    softless.list_mechanisms().clear()
    assert softless.list_mechanisms() == names.split()


def test_dir_lists_the_public_names_and_unknown_ones_raise():
    assert {name.split(".")[0] for name in SIGNATURES} <= {*dir(softless), "algebra"}
    assert set(softless.__all__) <= set(dir(softless))
    with pytest.raises(AttributeError, match="attend"):
        softless.attend  # noqa: B018
    assert not hasattr(softless.nn, "attention_weights")


def test_every_public_name_has_its_signature_here():
    assert set(PUBLIC) - set(SIGNATURES) == set()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_starts_with_a_sentence_and_a_runnable_example(name):
    text = inspect.getdoc(find(name))
    first, rest = text.split("\n", 1)
    assert first.endswith((".", ":"))
    assert rest.lstrip().startswith(">>> import"), "the example comes first"
    examples = doctest.DocTestParser().get_examples(text)
    assert any(example.want for example in examples), "an example shows a result"
    if name not in WITHOUT_TENSORS:
        assert re.search(r"# .*\[(batch|B)\b", text), "the example names its shapes"


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(softless.__path__, "softless.")
    if module.name != "softless.__main__" and ".kernels" not in module.name
)


@pytest.mark.parametrize("name", ["softless", *MODULES])
def test_every_example_in_the_code_runs(name):
    outcome = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


def test_the_code_has_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for name in ["softless", *MODULES] for test in finder.find(import_module(name)) if test.examples]
    assert len(tests) >= 8


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{number}")
    for path in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL), 1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_in_the_pages_runs(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in set(re.findall(r"^import (segmentation_models_pytorch)", block, re.MULTILINE)):
        pytest.importorskip(name)
    monkeypatch.setattr(backbone, "trunc_normal_", torch.nn.init.normal_)  # whose tails take longer to cut than to draw
    if ">>>" in block:
        test = doctest.DocTestParser().get_doctest(block, {}, "page", None, 0)
        assert doctest.DocTestRunner().run(test).failed == 0
    else:
        exec(compile(block, "page", "exec"), {"__name__": "page"})


def test_the_readme_has_an_example():
    assert any(str(block.id).startswith("README.md") for block in BLOCKS)


@pytest.mark.parametrize("case", CASES)
def test_a_mechanism_is_a_frozen_value(case):
    made = CASES[case]
    options = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    again = softless.mechanism(made.name, **options)
    assert made == again
    assert hash(made) == hash(again)
    assert len({made, again}) == 1
    assert copy.deepcopy(made) == made
    assert not any(isinstance(value, torch.Tensor) for value in options.values())
    for name in [*options, "anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, None)
    if not any(callable(value) for value in options.values()):
        assert pickle.loads(pickle.dumps(made)) == made


def test_mechanisms_differ_by_option_and_by_kind():
    assert len(set(CASES.values())) == len(CASES)
    assert softless.mechanism("linear", phi="relu") != softless.mechanism("inline", phi="relu")
    assert softless.mechanism("threshold", tau=1) == softless.mechanism("threshold", tau=1.0)


@pytest.mark.parametrize("case", CASES)
def test_a_mechanism_declares_the_inputs_it_needs(case):
    made = CASES[case]
    expected = {"affine_relu": ("weight", "bias"), "learned": ("scale",), "performer": ("projection",)}
    expected |= {"delta": ("beta",), "efla": ("beta",), "concatenation": ("weight",)}
    expected |= {"linformer": ("e",), "emanet": ("bases",), "reformer": ("rotations",)}
    expected |= dict.fromkeys(("blend", "blend-relu", "blend-exp"), ("divide", "subtract"))
    expected |= {"blend-affine_relu": ("weight", "bias", "divide", "subtract")}
    expected |= {"regress-learned": ("ridge", "gain"), "nearfar": ("gain", "map"), "nearfar-linear": ("gain",)}
    expected |= {"nearfar-separate": ("gain", "map_q", "map_k")}
    assert made.inputs == expected.get(case, expected.get(case.rpartition("-")[2], expected.get(made.name, ())))


@pytest.mark.parametrize("name", ["softmax", "inline"])
def test_a_name_and_its_mechanism_are_the_same(name):
    q, k, v = torch.randn(3, 1, 2, 5, 3).unbind()
    assert torch.equal(softless.attention(q, k, v, name), softless.attention(q, k, v, softless.mechanism(name)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("expansion", ["max", "mean", "minimax"])
@pytest.mark.parametrize("tail", ["drop", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_threshold_report_is_what_counting_by_hand_gives(is_causal, expansion, tail, dtype):
    """Query by query, in plain Python numbers."""
    q, k = (torch.randn(2, 2, 6, 4, dtype=torch.float64).to(dtype) for _ in "qk")
    mask = torch.tensor([[True] * 6, [False, False, True, True, False, True]])
    bias, tau, scale = torch.randn(1, 2, 6, 6, dtype=torch.float64), 0.7, 0.9
    report = softless.threshold_report(
        q,
        k,
        tau=tau,
        expansion=expansion,
        tail=tail,
        is_causal=is_causal,
        key_mask=mask,
        bias=bias.to(dtype),
        scale=scale,
    )
    scores = scale * (q.double() @ k.double().mT) + bias.to(dtype).double()
    for b, h, i in [(b, h, i) for b in range(2) for h in range(2) for i in range(6)]:
        seen = [scores[b, h, i, j].item() for j in range(6) if mask[b, j] and (j <= i or not is_causal)]
        row = by_hand(seen, tau, expansion, tail)
        for name, expected in row.items():
            assert getattr(report, name)[b, h, i].item() == pytest.approx(expected, abs=2e-5), (name, b, h, i)
    summary = report.summary()
    assert summary["error"] == pytest.approx(report.error.mean().item())
    assert list(summary) == ["kept_fraction", "discarded_mass", "range", "error"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_threshold_report_counts_no_key_that_a_bias_hides(dtype):
    q, k = torch.randn(2, 2, 2, 6, 4).unbind()
    mask = torch.tensor([[True] * 6, [False, False, True, True, False, True]])
    hidden = torch.where(mask, 0.0, -torch.inf)[:, None, None].to(dtype)
    by_mask, by_bias = softless.threshold_report(q, k, key_mask=mask), softless.threshold_report(q, k, bias=hidden)
    torch.testing.assert_close(dataclasses.asdict(by_bias), dataclasses.asdict(by_mask))


def by_hand(scores: list[float], tau: float, expansion: str, tail: str) -> dict[str, float]:
    if not scores:
        return {"kept_fraction": 0.0, "discarded_mass": 0.0, "range": 0.0, "error": 0.0}
    top, span = max(scores), max(scores) - min(scores)
    softmax = [math.exp(s - top) for s in scores]
    softmax = [p / sum(softmax) for p in softmax]
    kept = [s > top - tau for s in scores]
    middle = sum(s for s, near in zip(scores, kept, strict=True) if near) / sum(kept)
    rho = min(tau, span)
    slope = (1 - math.exp(-rho)) / rho if rho else 1.0
    height = (1 + slope - slope * math.log(slope)) / 2
    near_weight = {
        "max": lambda s: 1 + s - top,
        "mean": lambda s: 1 + s - middle,
        "minimax": lambda s: height + slope * (s - top),
    }[expansion]
    far = (math.exp(-tau) - math.exp(-span)) / (span - tau) if tail == "mean" and span > tau else 0.0
    weights = [near_weight(s) if near else far for s, near in zip(scores, kept, strict=True)]
    weights = [w / sum(weights) for w in weights]
    return {
        "kept_fraction": sum(kept) / len(kept),
        "discarded_mass": sum(p for p, near in zip(softmax, kept, strict=True) if not near),
        "range": span,
        "error": math.dist(weights, softmax) / math.hypot(*softmax),
    }
