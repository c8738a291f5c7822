"""One function loads what users have: names, shapes and dtypes are the model's own, or nothing is loaded."""

import copy
import dataclasses
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import softless
from softless.errors import ArgumentError, FileError
from tests.io.files import Net, foreign_class, same, saved, values, write


@pytest.fixture
def source() -> Net:
    return Net()


def author_checkpoint(net: Net, **more: object) -> bytes:
    """Weights, optimizer, schedule, best accuracy and a settings object, as the InLine authors save them."""
    optimizer = torch.optim.AdamW(net.parameters())
    net.norm(net.layer(torch.randn(5, 3))).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    with foreign_class("yacs.config", "CfgNode") as node:
        config = node(MODEL=node(TYPE="inline_swin", DROP_PATH=0.2), EPOCHS=300)
        config.__dict__["__immutable__"] = True
        content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": None, "epoch": 299}
        content |= {"lr_scheduler": schedule.state_dict(), "max_accuracy": np.float64(82.4), "config": config}
        return saved(content | more)


def test_the_authors_file_loads_without_the_package_of_its_settings(source, tmp_path, watch):
    path = write(tmp_path, author_checkpoint(source))
    model = Net()
    assert not same(model, values(source))
    with watch() as deeds:
        report = softless.load_weights(model, path)
    assert deeds == []
    assert same(model, values(source))
    assert "yacs" not in sys.modules
    assert (report.path, report.format, report.key, report.tensors) == (path, "torch", "model", 9)
    assert {"numpy.dtype", "yacs.config.CfgNode"} <= set(report.ignored)
    assert not any(name.startswith(("torch.", "collections.")) for name in report.ignored)


def test_averaged_weights_are_preferred_and_key_selects_the_others(source, tmp_path):
    average = Net()
    path = write(tmp_path, author_checkpoint(source, state_dict_ema=average.state_dict()))
    model = Net()
    assert softless.load_weights(model, path).key == "state_dict_ema"
    assert same(model, values(average))
    assert softless.load_weights(model, path, key="model").key == "model"
    assert same(model, values(source))


@pytest.mark.parametrize(
    ("wrap", "key"),
    [
        (lambda state: state, None),
        (dict, None),
        (lambda state: {"state_dict": state, "epoch": 1, "arch": "vit"}, "state_dict"),
        (lambda state: {"model": state}, "model"),
        (lambda state: {"state_dict_ema": None, "model": state}, "model"),
        (lambda state: {"model": state, "state_dict": {}}, "model"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 3])
def test_weights_are_found_where_people_put_them(source, tmp_path, wrap, key, protocol):
    path = write(tmp_path, saved(wrap(source.state_dict()), pickle_protocol=protocol))
    model = Net()
    report = softless.load_weights(model, path)
    assert (report.key, report.tensors, report.ignored) == (key, 9, ())
    assert same(model, values(source))


def test_a_model_may_have_a_parameter_called_model(tmp_path):
    source, model = (nn.ParameterDict({"model": torch.randn(2)}) for _ in range(2))
    assert softless.load_weights(model, write(tmp_path, saved(source.state_dict()))).key is None
    assert same(model, values(source))


def test_parameters_and_views_load_as_their_numbers(tmp_path):
    big = torch.randn(6, 8)
    content = {"a": nn.Parameter(big[1:4, ::2]), "b": big.t()[2], "c": big, "d": big.t()}
    model = nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in content.items()})
    softless.load_weights(model, write(tmp_path, saved(content)))
    for name, tensor in content.items():
        assert torch.equal(model[name], tensor), name


def test_safetensors_load(source, tmp_path):
    path = tmp_path / "weights.anything"
    save_file(source.state_dict(), path)
    model = Net()
    report = softless.load_weights(model, str(path))
    assert (report.format, report.key, report.tensors) == ("safetensors", None, 9)
    assert same(model, values(source))
    with pytest.raises(FileError, match=r"key='model' was given, and a safetensors file has .* no key"):
        softless.load_weights(model, path, key="model")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_the_prefix_of_a_wrapper_is_removed_from_every_name_or_none(source, tmp_path, prefix):
    wrapped = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    model = Net()
    report = softless.load_weights(model, write(tmp_path, saved(wrapped)))
    assert report.prefix == prefix
    assert same(model, values(source))
    before = values(model)
    wrapped["gain"] = wrapped.pop(f"{prefix}gain")
    with pytest.raises(FileError, match=f"unexpected .*'{prefix}layer.weight'"):
        softless.load_weights(model, write(tmp_path, saved(wrapped)))
    assert same(model, before)


def test_a_wrapped_model_takes_its_own_names(source, tmp_path):
    model = nn.ModuleDict({"module": Net()})
    content = {f"module.{name}": tensor for name, tensor in source.state_dict().items()}
    assert softless.load_weights(model, write(tmp_path, saved(content))).prefix == ""
    assert same(model["module"], values(source))


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_every_difference_is_named_in_one_sentence_and_nothing_is_loaded(source, tmp_path, form):
    content = source.state_dict()
    del content["layer.bias"], content["norm.running_var"]
    content |= {"head.weight": torch.ones(2), "head.bias": torch.ones(2)}
    content |= {
        "layer.weight": torch.ones(4, 5),
        "gain": torch.ones(1),
        "norm.weight": torch.ones(4, dtype=torch.int64),
    }
    path = tmp_path / "w"
    save_file(content, path) if form == "safetensors" else torch.save({"model": content}, path)
    model = Net()
    before = values(model)
    with pytest.raises(FileError) as caught:
        softless.load_weights(model, path)
    text = str(caught.value)
    where = " under 'model'" if form == "torch" else ""
    assert text.startswith(f"{path}: the weights{where} do not fit Net: ")
    kinds = dict(part.split(" ", 1) for part in text.partition("fit Net: ")[2].split("; "))
    assert kinds["missing"] == "layer.bias, norm.running_var"
    assert set(kinds["unexpected"].split(", ")) == {"'head.weight'", "'head.bias'"}
    assert "layer.weight (file [4, 5], model [4, 3])" in kinds["mis-shaped"]
    assert "gain (file [1], model [])" in kinds["mis-shaped"]
    assert kinds["mistyped"] == "norm.weight (file torch.int64, model torch.float32)"
    assert same(model, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_floating_point_is_cast_to_the_models_dtype(source, tmp_path, dtype):
    path = write(tmp_path, saved(source.state_dict()))
    model = Net().to(dtype)
    softless.load_weights(model, path)
    assert same(model, values(copy.deepcopy(source).to(dtype)))
    back = Net()
    softless.load_weights(back, write(tmp_path, saved(model.state_dict())))
    assert same(back, values(copy.deepcopy(model).float()))


def test_integers_are_never_cast(source, tmp_path):
    content = source.state_dict() | {"norm.num_batches_tracked": torch.tensor(2, dtype=torch.int32)}
    with pytest.raises(FileError, match=r"mistyped norm.num_batches_tracked \(file torch.int32, model torch.int64\)"):
        softless.load_weights(Net(), write(tmp_path, saved(content)))


def test_the_parameters_stay_the_same_objects(source, tmp_path):
    model = Net()
    model.gain.requires_grad_(False)
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    softless.load_weights(model, write(tmp_path, saved(source.state_dict())))
    assert {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_the_default_device_does_not_matter(source, tmp_path, form):
    path, model = tmp_path / "w", Net()
    save_file(source.state_dict(), path) if form == "safetensors" else torch.save(source.state_dict(), path)
    with torch.device("meta"):
        softless.load_weights(model, path)
    assert same(model, values(source))


def test_a_model_without_memory_is_refused(source, tmp_path):
    path = write(tmp_path, saved(source.state_dict()))
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ArgumentError, match=r"gain has no memory"):
        softless.load_weights(model, path)
    with pytest.raises(ArgumentError, match="weight has no memory"):
        softless.load_weights(nn.LazyLinear(3), path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_load_with_a_warning_that_names_them(source, tmp_path, bad):
    with torch.no_grad():
        source.layer.weight[1, 2] = bad
    path = write(tmp_path, saved(source.state_dict()))
    model = Net()
    with pytest.warns(RuntimeWarning, match=r"NaN or infinity is loaded in layer\.weight$"):
        report = softless.load_weights(model, path)
    assert report.nonfinite == ("layer.weight",)
    assert same(model, values(source))


def test_a_number_too_large_for_the_models_dtype_is_not_finite(source, tmp_path):
    with torch.no_grad():
        source.gain.fill_(1e6)
    path = write(tmp_path, saved(source.state_dict()))
    assert softless.load_weights(Net(), path).nonfinite == ()
    model = Net().half()
    before = values(model)
    with pytest.raises(RuntimeWarning, match="gain"):  # warnings are errors in these tests: nothing was loaded
        softless.load_weights(model, path)
    assert same(model, before)


class Window(nn.Module):
    """As in Swin: a table, the index into it, and a mask; the last two follow from the sizes."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 2))
        self.register_buffer("relative_position_index", torch.arange(16).view(4, 4) % 9, persistent)
        self.register_buffer("attn_mask", torch.full((2, 4, 4), -100.0), persistent)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("in_model", [True, False])
def test_buffers_that_swin_derives_may_be_absent_on_either_side_and_are_never_loaded(tmp_path, in_file, in_model):
    source, model = (nn.ModuleDict({"attn": Window(p)}) for p in (in_file, in_model))
    source["attn"].attn_mask.zero_()
    report = softless.load_weights(model, write(tmp_path, saved({"model": source.state_dict()})))
    derived = ("attn.relative_position_index", "attn.attn_mask") if in_file else ()
    assert (report.tensors, report.derived) == (1, derived)
    assert torch.equal(model["attn"].table, source["attn"].table)
    assert (model["attn"].attn_mask == -100).all()


def test_an_index_of_another_order_is_refused(tmp_path):
    source, model = (nn.ModuleDict({"attn": Window(p)}) for p in (True, False))
    source["attn"].relative_position_index.copy_(source["attn"].relative_position_index.t().clone())
    before = values(model)
    with pytest.raises(FileError, match=r"not the model's own index attn\.relative_position_index"):
        softless.load_weights(model, write(tmp_path, saved(source.state_dict())))
    assert same(model, before)


def test_an_index_that_the_model_lacks_is_not_loaded(tmp_path):
    model = nn.ModuleDict({"attn": nn.ParameterDict({"table": torch.zeros(9, 2)})})
    content = nn.ModuleDict({"attn": Window(persistent=True)}).state_dict()
    assert len(softless.load_weights(model, write(tmp_path, saved(content))).derived) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"net": {"a": torch.ones(1)}},
            r"under 'state_dict_ema' or 'model' or 'state_dict', nor .* 'net' \(a dictionary\), and key=",
        ),
        ({"epoch": 3}, r"it holds 'epoch' \(a value of type int\)$"),
        ({}, "it holds nothing$"),
        ([torch.ones(1)], "it holds a value of type list, not a dictionary of tensors"),
        (torch.ones(1), "it holds a tensor, not a dictionary of tensors"),
        (nn.Linear(1, 1), "it holds a pickled 'torch.nn.modules.linear.Linear', not a dictionary"),
        ({"model": nn.Linear(1, 1)}, "'model' is a pickled 'torch.nn.modules.linear.Linear', not a dictionary"),
        (
            {"model": {"a": 1.5, 3: torch.ones(1), (4,): None}},
            r"'a' \(.*float\), 3 \(a tensor\), a key that is no string",
        ),
        (
            {"model": {"a": torch.ones(2).to_sparse()}},
            r": 'a' is not a plain tensor",
        ),
        ({"model": OrderedDict(a=np.ones(2))}, r"'a' \(a pickled 'numpy._core.multiarray._reconstruct'\)"),
    ],
)
def test_a_file_without_weights_says_what_it_holds(tmp_path, content, says):
    with pytest.raises(FileError, match=says):
        softless.load_weights(Net(), write(tmp_path, saved(content)))


def test_a_missing_key_is_named(source, tmp_path):
    path = write(tmp_path, saved({"model": source.state_dict()}))
    with pytest.raises(FileError, match=r"no dictionary of tensors under 'ema': it holds 'model' \(a dictionary\)"):
        softless.load_weights(Net(), path, key="ema")


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"model is dict, and a torch\.nn\.Module is needed"):
        softless.load_weights({}, "x")
    with pytest.raises(ArgumentError, match="path is int, and the name of a file is needed"):
        softless.load_weights(Net(), 3)
    with pytest.raises(ArgumentError, match="key is int, and a string or None is needed"):
        softless.load_weights(Net(), "x", key=3)
    for path in (tmp_path, tmp_path / "none", "\0", "x" * 5000):
        with pytest.raises(FileError, match=r"there is no such file|it cannot be read"):
            softless.load_weights(Net(), path)


def test_a_report_is_a_frozen_value(source, tmp_path):
    report = softless.load_weights(Net(), write(tmp_path, saved(source.state_dict())))
    assert isinstance(report, softless.WeightsReport)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.tensors = 3


class Tied(nn.Module):
    """A language model's two ends: one matrix, two names; and a buffer that two parts share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.BatchNorm1d(4)
        self.head.weight = self.embed.weight
        self.other = nn.BatchNorm1d(4)
        self.other.running_mean = self.norm.running_mean


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.parametrize(
    ("first", "second"), [("embed.weight", "head.weight"), ("norm.running_mean", "other.running_mean")]
)
def test_tied_weights_that_differ_in_the_file_are_named_and_nothing_is_loaded(tmp_path, form, first, second):
    """Only the last one would be loaded, whichever that is."""
    model = Tied()
    before, content = copy.deepcopy(model.state_dict()), {k: x.clone() for k, x in Tied().state_dict().items()}
    content[second] = content[first].clone()
    content[second].view(-1)[3] += 1
    path = tmp_path / "weights"
    if form == "safetensors":
        save_file(content, path)
    else:
        path.write_bytes(saved({"model": content}))
    with pytest.raises(FileError, match=f"different numbers for what the model shares, {first} and {second}"):
        softless.load_weights(model, path)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*NaN or infinity is loaded")
@pytest.mark.parametrize("value", [1.5, float("nan")])
def test_tied_weights_that_are_equal_load(tmp_path, value):
    source, model = Tied(), Tied().half()
    source.embed.weight.data[2, 3] = value
    path = write(tmp_path, saved({name: x.clone() for name, x in source.state_dict().items()}))
    softless.load_weights(model, path)
    assert torch.equal(model.embed.weight.nan_to_num(), source.embed.weight.half().nan_to_num())
    assert model.head.weight is model.embed.weight
