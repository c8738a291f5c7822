"""No argument is ignored (R29): changed alone, each gives another result or an error that names it.

Signatures are read with `inspect`: a new argument without a change in `arguments.py` fails here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import product
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import softless
import softless.timm
from softless import models, nn
from softless.errors import SoftlessError
from softless.mechanisms import OPTIONS
from tests.front_door.arguments import (
    AGENT,
    BIAS,
    FUNCTIONS,
    GENERAL,
    LOADING,
    METHODS,
    MODELS,
    MODULES,
    OTHER,
    OTHERS,
    TENSORS,
    Case,
    With,
    X,
    mask,
    saved,
    some,
    state,
)

CASES = FUNCTIONS | MODULES | METHODS | MODELS
PARTIAL = {"nn.Attention alone", "create_model in windows"}  # more cases of a callable that has a whole one

# (callable, argument): where it is documented that the argument does not change the result, and in which words.
UNUSED: dict[tuple[str, str], tuple[object, str]] = {
    ("attention_with_residual", "backend"): (softless.attention, 'backend: "auto", "reference"'),
    ("attention_qkv", "backend"): (softless.attention, 'backend: "auto", "reference"'),
    ("probes.examine", "advance"): (FUNCTIONS["probes.examine"].of, "`advance(images)` is called after each batch"),
    ("data.cached", "workers"): (inspect.getmodule(FUNCTIONS["data.cached"].of), "neither the number of workers nor"),
    ("data.cached", "damage"): (FUNCTIONS["data.cached"].of, "None stops at the first"),
    ("convert", "work"): (softless.convert, "Folder where steps are stored. The same call with the same folder"),
    ("convert", "watch"): (softless.convert, "Is called with a label and an amount of work done."),
    ("nn.Attention.forward", "grid"): (nn.Attention.forward, "Elsewhere it is unused, but must fit the tokens"),
}


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal, to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, str) or not isinstance(a, Iterable):
        return bool(type(a) is type(b) and a == b)
    a, b = list(a), list(b)
    return len(a) == len(b) and all(map(same, a, b))


def check(run: Callable[..., Any], base: Mapping[str, Any], name: str, value: Any) -> str:
    """'changed' or 'refused'; anything else fails."""
    if isinstance(value, With):
        base, value = {**base, **value.others}, value.value
    before, text = run(**base), ""
    try:
        assert not same(run(**{**base, name: value}), before), f"{name}={value!r} changed nothing"
    except SoftlessError as error:
        text = str(error)
    if text:
        assert name in text or str(value) in text, f"the error names neither {name} nor {value!r}: {text}"
        assert "\n" not in text
    return "refused" if text else "changed"


def parameters(case: Case) -> set[str]:
    return set(inspect.signature(case.of).parameters) - {"self"}


@pytest.mark.parametrize("where", CASES)
def test_each_argument_has_a_change_or_a_reason(where):
    case, name = CASES[where], where.split(" ")[0]
    if where in PARTIAL:
        assert set(case.changes) <= parameters(case) | set(models.OPTIONS)
        return
    needed = parameters(case)
    if case.of is softless.create_model:
        needed = needed - {"options"} | set(models.OPTIONS) | {"typo"}
    assert set(case.changes) | {argument for of, argument in UNUSED if of == name} == needed


def test_each_public_callable_has_its_arguments_here():
    kept = {name for name in CASES if name not in PARTIAL} | {"create_model", "load_weights"}
    kept |= {"load_converted"}  # its only argument is the folder: tests/conversion/test_images.py
    kept |= {"attention", "attention_weights", "attention_with_state"}
    public = {name for name in softless.__all__ if callable(getattr(softless, name))}
    public |= {f"nn.{name}" for name in nn.__all__}
    results = {name for name in public if holds_results(name)}
    assert public - results - kept == set()
    assert results == {
        *("Conversion", "Mechanism", "NearState", "State", "ThresholdReport", "WeightsReport"),
        *("nn.Funneled", "nn.Survivors", "nn.Tokens"),
    }


def holds_results(name: str) -> bool:
    """Whether it is a record that calls return: its arguments are what it holds."""
    kind = getattr(softless.nn if name.startswith("nn.") else softless, name.removeprefix("nn."))
    return is_dataclass(kind) or hasattr(kind, "_fields")


@pytest.mark.parametrize("where", UNUSED)
def test_an_argument_that_changes_nothing_is_documented(where):
    documented, words = UNUSED[where]
    assert words in inspect.getdoc(documented)


@pytest.mark.parametrize(("where", "name"), [(where, name) for where in CASES for name in CASES[where].changes])
def test_each_argument_changes_the_result_or_is_refused_by_name(where, name):
    case = CASES[where]
    if name in ("options", "typo"):  # what has no name in the signature
        with pytest.raises(SoftlessError, match="typo"):
            case.run(**case.base, typo=1)
        return
    check(case.run, case.base, name, case.changes[name])


@pytest.mark.parametrize("name", ["model", "path", "key", "fit"])
def test_each_argument_of_load_weights_changes_what_is_loaded_or_is_refused(name, tmp_path):
    files = saved(tmp_path)
    changes = {
        "model": torch.nn.Linear(3, 3),
        "path": files["two"],
        "key": "other",
        "fit": lambda weights: {key: 2 * tensor for key, tensor in weights.items()},
    }
    case = LOADING({"path": files["one"]}, changes)
    assert set(changes) == parameters(case)
    if name == "model":  # a model of another size is refused, and the error names its class
        with pytest.raises(SoftlessError, match="Linear"):
            case.run(**case.base, model=changes["model"])
    else:
        check(case.run, case.base, name, changes[name])


# The front door, for every mechanism.

SMALL: dict[str, dict[str, Any]] = {
    "general": GENERAL,
    "agent": {"agents": 4},
    "soft": {"landmarks": 4},
    "asymmetric_nonlocal": {"pyramid": (1, 4)},
    "topk": {"k": 2},
    "sparse": {"stride": 2},
    "longformer": {"window": 1},
    "nearfar": {"window": 2, "first": 1},
    "linformer": {"rank": 3, "length": 8},
    "nystrom": {"landmarks": 3},
    "emanet": {"bases": 3},
    "reformer": {"buckets": 2, "rounds": 2, "window": 2},
    "diagonal": {"block": 3},
    "performer": {"features": 8},
}
every_mechanism = pytest.mark.parametrize("name", softless.list_mechanisms())


def filled(one: softless.Mechanism, q: Tensor, k: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Whatever it needs beyond q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for name, shape in one.needed(q, k).items()}


def front_door(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The baseline of an attention call, and a change of each argument."""
    one = softless.mechanism(name, **SMALL.get(name, {}))
    base = {**TENSORS, "mechanism": one, "inputs": filled(one, TENSORS["q"], TENSORS["k"])}
    base["is_causal"] = one.lacks(False) is not None
    if one.needs_grid:
        base["grid"] = (2, 3)
    changes = {
        **OTHERS,
        "mechanism": softless.mechanism("nonlocal", pairing="dot"),
        "is_causal": not base["is_causal"],
        "key_mask": mask(2),
        "bias": BIAS,
        "scale": 0.37,
        "inputs": filled(one, TENSORS["q"], TENSORS["k"], seed=1) or {"beta": some(2, 4, 6)},
        "grid": (3, 2),
        "backend": "cuda",
    }
    return base, changes


@every_mechanism
@pytest.mark.parametrize("call", [softless.attention, softless.attention_weights])
def test_each_argument_of_a_call_changes_it_or_is_refused_by_name(name, call):
    base, changes = front_door(name)
    known = set(inspect.signature(call).parameters)
    base, changes = ({key: each[key] for key in each if key in known} for each in (base, changes))
    assert set(changes) == known
    for argument in known - {"mechanism"}:
        check(call, base, argument, changes[argument])
    base |= {"inputs": None, "is_causal": False}
    base.pop("grid", None)
    if base["mechanism"].lacks(False) is None and not base["mechanism"].inputs and name != "mlla":
        check(call, base, "mechanism", changes["mechanism"])


@pytest.mark.parametrize("name", ["linear", "inline", "efficient", "taylor", "hydra", "angular", "delta", "decay"])
def test_each_argument_of_a_stream_changes_it_or_is_refused_by_name(name):
    base, changes = front_door(name)
    call = softless.attention_with_state
    known = set(inspect.signature(call).parameters)
    base, changes = ({key: each[key] for key in each if key in known} for each in (base, changes))
    changes["state"] = softless.attention_with_state(**{**base, **OTHERS})[1]
    assert set(changes) == known
    for argument in known - {"mechanism"}:
        check(call, base, argument, changes[argument])
    check(call, {**TENSORS, "mechanism": "linear"}, "mechanism", "inline")
    check(call, {**TENSORS, "mechanism": "linear"}, "state", state(0))


@every_mechanism
def test_each_argument_of_a_layer_changes_it_or_is_refused_by_name(name):
    one = softless.mechanism(name, **SMALL.get(name, {}))
    base = {"x": X, "is_causal": one.lacks(False) is not None} | ({"grid": (2, 3)} if one.needs_grid else {})

    def run(**call: Any) -> Tensor:
        torch.manual_seed(0)
        return nn.Attention(8, 2, one)(**call)

    changes = {
        "x": OTHER,
        "grid": (3, 2) if one.reads_grid else (3, 3),  # unused, but it must fit
        "context": OTHER,
        "key_mask": mask(2),
        "is_causal": not base["is_causal"],
        "bias": BIAS,
        "attn_mask": BIAS,
    }
    assert set(changes) == set(inspect.signature(nn.Attention.forward).parameters) - {"self"}
    for argument, value in changes.items():
        check(run, base, argument, value)


def test_a_mask_in_the_place_of_the_grid_is_refused():
    for options in ({}, {"local": True}, {"window": 2}, {"mechanism": AGENT}):
        with pytest.raises(SoftlessError, match=r"grid is a torch.bool tensor \[2, 6\].*a mask is given as key_mask="):
            nn.Attention(8, 2, **options)(X, mask(2))


@pytest.mark.parametrize("options", [{}, {"local": True}, {"window": 2}, {"mechanism": AGENT}], ids=str)
@pytest.mark.parametrize("grid", [(3, 3), (-2, -3), (0, 6), (2.0, 3.0), (True, 6), (6,), 6, "23", (2, 3, 1)], ids=str)
def test_a_grid_that_does_not_fit_the_tokens_is_refused_whatever_reads_it(options, grid):
    with pytest.raises(SoftlessError, match="grid"):
        nn.Attention(8, 2, **options)(X, grid)


# Options of mechanisms: for each combination of choices, each option counts or is refused by name.

CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "softmax": {"confusion": (None, "relu", "affine_relu")},
    "general": {"sim": (GENERAL["sim"], lambda q, k: (q @ k.mT).square())},
    "linear": {
        "phi": ("elu", "relu", "exp", "affine_relu", "softmax"),
        "phi_k": (None, "leaky_relu"),
        "t": (1, 0.5),
        "normalize": ("divide", "none"),
    },
    "inline": {
        "phi": ("identity", "relu", "exp", "affine_relu"),
        "phi_k": (None, "softmax"),
        "t": (1, 0.5),
        "gain": ("mean", "sum"),
    },
    "blend": {"phi": ("elu", "exp", "affine_relu"), "phi_k": (None, "relu"), "t": (1, 0.5)},
    "regress": {
        "phi": ("identity", "affine_relu"),
        "phi_k": (None, "softmax"),
        "t": (1, 0.5),
        "ridge": (0.1, 1.0, "learned"),
        "gain": ("dim", "one", "learned"),
        "center": (True, False),
        "relative": (True, False),
        "weighting": (None, "query"),
    },
    "taylor": {"order": (1, 2), "normalize": (True, False)},
    "angular": {"exact": (False, True)},
    "focused": {"p": (3, 2.5), "learned_scale": (False, True)},
    "threshold": {"tau": (0.5, 0.25), "expansion": ("max", "mean", "minimax"), "tail": ("drop", "mean")},
    "nearfar": {
        "window": (2, 3),
        "first": (0, 1),
        "maps": ("shared", "separate", "identity"),
        "features": (None, 3),
        "neighborhood": (None, 3),
    },
    "cosformer": {"length": (None, 20)},
    "performer": {"kind": ("positive", "hyperbolic"), "features": (5, 7)},
    "decay": {"slopes": ("lightning", "retention"), "factor": (1, 0.5)},
    "transnormer": {"variant": ("t1", "t2")},
    "diagonal": {"variant": ("t1", "t2"), "block": (2, 3)},
    "topk": {"k": (2, 3)},
    "sparse": {"pattern": ("local", "strided", "local+strided", "fixed"), "stride": (2, 3), "summary": (4, 1)},
    "longformer": {"window": (1, 2), "global_tokens": (0, 1)},
    "linformer": {"rank": (2, 3), "length": (12, 14), "share": ("none", "heads", "kv")},
    "nystrom": {"landmarks": (3, 4), "steps": (2, 3)},
    "agent": {"agents": (3, 4)},
    "soft": {"landmarks": (3, 4)},
    "nonlocal": {"pairing": ("softmax", "dot", "concatenation")},
    "asymmetric_nonlocal": {"pyramid": ((1, 3), (1, 4))},
    "emanet": {"bases": (2, 3), "rounds": (1, 2), "detach": (True, False)},
    "reformer": {"buckets": (2, 4), "rounds": (1, 2), "window": (1, 2)},
}


def test_each_option_of_each_mechanism_has_choices_here():
    assert {name: set(known) for name, known in CHOICES.items()} == {
        name: set(known) for name, known in OPTIONS.items() if known
    }


def attend(name: str, **options: Any) -> Any:
    """Output and gradients of a call by a mechanism with these options."""
    one = softless.mechanism(name, **options)
    leaves = [(2 * some(1, 2, 12, 4, seed=seed)).requires_grad_() for seed in (0, 1, 2)]
    own = filled(one, leaves[0], leaves[1])
    out = softless.attention(*leaves, one, is_causal=one.lacks(False) is not None, inputs=own)
    return out, torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True)


@pytest.mark.parametrize("name", CHOICES)
def test_each_option_counts_or_is_refused_whatever_the_others_are(name):
    known, tried = CHOICES[name], 0
    for values in product(*known.values()):
        base = dict(zip(known, values, strict=True))
        try:
            softless.mechanism(name, **base)
        except SoftlessError:  # test_a_combination_in_which_an_option_would_be_ignored_is_refused
            continue
        for option in known:
            other = known[option][(known[option].index(base[option]) + 1) % len(known[option])]
            check(lambda **options: attend(name, **options), base, option, other)
            tried += 1
    assert tried


def test_a_combination_in_which_an_option_would_be_ignored_is_refused():
    for name, options, word in (
        ("linear", {"phi": "relu", "t": 2}, "t"),
        ("inline", {"t": 2}, "t"),
        ("regress", {"t": 2}, "t"),
        ("sparse", {"summary": 2}, "summary"),
        ("sparse", {"pattern": "local", "summary": 2}, "summary"),
        ("taylor", {"normalize": False}, "normalize"),
        ("nearfar", {"maps": "identity", "features": 3}, "features"),
        ("nearfar", {"window": 3, "neighborhood": 3}, "window"),
    ):
        with pytest.raises(SoftlessError, match=word):
            softless.mechanism(name, **options)


# timm's own door to the models.

TIMM = {
    "mechanism": "linear",
    "local": False,
    "window": 2,
    "pattern": "S",
    "num_classes": 4,
    "img_size": 32,
    "in_chans": 4,
    "global_pool": "",
    "drop_rate": 0.5,
    "features_only": True,
    "out_indices": With((0,), {"features_only": True}),
    "typo": 1,
}


@pytest.mark.parametrize("name", TIMM)
def test_what_timm_hands_on_is_used_or_refused(name):
    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        found = timm.create_model("inline_deit_tiny", patch_size=4, dims=16, depths=2, heads=2, **options)
        torch.manual_seed(1)
        return dict(found.state_dict()), found.train()(some(2, options.get("in_chans", 3), 16, 16))

    check(run, {"img_size": 16, "num_classes": 3}, name, TIMM[name])


def test_results_of_calls_hold_their_arguments():
    record = softless.ThresholdReport(*some(4, 1, 1, 1))
    assert [getattr(record, field.name) is not None for field in fields(record)] == [True] * 4
