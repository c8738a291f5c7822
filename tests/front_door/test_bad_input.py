"""Every mistake a user can make raises a SoftlessError that says what was given and what was needed.

And what is not a mistake (nothing to attend to, one token, padding full of NaN) has a defined value.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import softless
from softless import State, attention, attention_weights, attention_with_state, mechanism, nn, threshold_report
from softless.errors import SoftlessError
from softless.mechanisms import OPTIONS as KNOWN

ROOT = Path(__file__).parents[2]

NAN, INF = float("nan"), float("inf")
ALL = softless.list_mechanisms()
KERNELIZED = ["linear", "inline", "efficient", "taylor", "hydra", "angular", "focused"]
SCORED = ["softmax", "general", "threshold", "topk", "sparse", "longformer", "nonlocal", "reformer"]
MIXERS = ["linformer", "nystrom", "agent", "soft", "asymmetric_nonlocal", "emanet"]


def made(name: str) -> softless.Mechanism:
    return mechanism("general", sim=lambda q, k: (q @ k.mT).exp()) if name == "general" else mechanism(name)


PICTURES = ["mlla"]  # they read a grid: tests/laws has what they do with one
ANY_FORM = [
    (name, form) for name in ALL if name not in PICTURES for form in (False, True) if made(name).lacks(form) is None
]
every_form = pytest.mark.parametrize(("name", "is_causal"), ANY_FORM)


def inputs(name: str, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Whatever it needs beyond q, k and v."""
    return {each: torch.rand(shape, generator=torch.Generator()) for each, shape in made(name).needed(q, k).items()}


def some(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def refuses(call, *words: object) -> str:
    """The text of the error, which must name each of `words`."""
    with pytest.raises(SoftlessError) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, ValueError), f"{type(caught.value).__name__} is no ValueError"
    assert [word for word in words if str(word) not in text] == [], text
    assert "\n" not in text
    return text


# q, k, v of shape [2, 4, 5, 3] unless the case says otherwise.
TENSORS = {
    "q of rank 3": ({"q": some(4, 5, 3)}, ["q", [4, 5, 3], "[batch, heads, tokens, dim]"]),
    "k of rank 5": ({"k": some(1, 2, 4, 5, 3)}, ["k", [1, 2, 4, 5, 3]]),
    "v of rank 0": ({"v": torch.tensor(1.0)}, ["v", []]),
    "q a list": ({"q": [[1.0]]}, ["q", "list", "tensor"]),
    "k None": ({"k": None}, ["k", "NoneType", "tensor"]),
    "v an array": ({"v": some(2, 4, 5, 3).numpy()}, ["v", "ndarray", "tensor"]),
    "q of integers": ({"q": torch.ones(2, 4, 5, 3, dtype=torch.int64)}, ["q", "int64", "float32"]),
    "v of booleans": ({"v": torch.ones(2, 4, 5, 3, dtype=torch.bool)}, ["v", "bool", "float32"]),
    "k complex": ({"k": some(2, 4, 5, 3, dtype=torch.complex64)}, ["k", "complex64"]),
    "k float64": ({"k": some(2, 4, 5, 3, dtype=torch.float64)}, ["float32", "float64"]),
    "v bfloat16": ({"v": some(2, 4, 5, 3, dtype=torch.bfloat16)}, ["float32", "bfloat16"]),
    "k on meta": ({"k": some(2, 4, 5, 3, device="meta")}, ["cpu", "meta"]),
    "v on meta": ({"v": some(2, 4, 5, 3, device="meta")}, ["cpu", "meta"]),
    "batch of q": ({"q": some(1, 4, 5, 3)}, [[1, 4, 5, 3], [2, 4, 5, 3], "batch"]),
    "batch of v": ({"v": some(3, 4, 5, 3)}, [[3, 4, 5, 3], [2, 4, 5, 3], "batch"]),
    "width of q": ({"q": some(2, 4, 5, 7)}, [[2, 4, 5, 7], [2, 4, 5, 3], "head dimension"]),
    "no width": ({"q": some(2, 4, 5, 0), "k": some(2, 4, 5, 0)}, [[2, 4, 5, 0], "at least 1"]),
    "tokens of v": ({"v": some(2, 4, 6, 3)}, [[2, 4, 6, 3], [2, 4, 5, 3], "tokens"]),
    "heads of v": ({"v": some(2, 2, 5, 3)}, [[2, 2, 5, 3], [2, 4, 5, 3], "heads"]),
    "heads not a multiple": ({"k": some(2, 3, 5, 3), "v": some(2, 3, 5, 3)}, [4, 3, "multiple"]),
    "more key heads": ({"k": some(2, 8, 5, 3), "v": some(2, 8, 5, 3)}, [4, 8, "multiple"]),
    "no heads": ({"q": some(2, 0, 5, 3)}, [[2, 0, 5, 3], 0]),
}


@pytest.mark.parametrize("mistake", TENSORS)
@pytest.mark.parametrize("name", ["inline", "softmax", "threshold"])
def test_tensors_that_do_not_fit_are_named(mistake, name):
    changes, words = TENSORS[mistake]
    given = {each: some(2, 4, 5, 3) for each in "qkv"} | changes
    refuses(lambda: attention(**given, mechanism=name), *words)
    if "v" not in changes:
        refuses(lambda: attention_weights(given["q"], given["k"], name), *[w for w in words if w != "multiple"][:1])
    if name == "inline":
        refuses(lambda: attention_with_state(**given, mechanism=name), *words)


MASKS = {
    "float": (torch.ones(2, 5), ["float32", "bool"]),
    "NaN": (torch.full((2, 5), NAN), ["float32", "bool"]),
    "integer": (torch.ones(2, 5, dtype=torch.int64), ["int64", "bool"]),
    "list": ([[True] * 5] * 2, ["list", "bool"]),
    "per head": (torch.ones(2, 4, 5, dtype=torch.bool), [[2, 4, 5], [2, 5]]),
    "for queries": (torch.ones(2, 3, dtype=torch.bool), [[2, 3], [2, 5]]),
    "without batch": (torch.ones(5, dtype=torch.bool), [[5], [2, 5]]),
    "broadcast": (torch.ones(1, 5, dtype=torch.bool), [[1, 5], [2, 5]]),
    "on meta": (torch.ones(2, 5, dtype=torch.bool, device="meta"), ["meta", "cpu"]),
}


@pytest.mark.parametrize("mistake", MASKS)
@pytest.mark.parametrize("name", ["inline", "softmax"])
def test_a_key_mask_that_does_not_fit_is_named(mistake, name):
    mask, words = MASKS[mistake]
    q, k = some(2, 4, 3, 3), some(2, 4, 5, 3)
    refuses(lambda: attention(q, k, k, name, key_mask=mask), "key_mask", *words)
    refuses(lambda: attention_weights(q, k, name, key_mask=mask), "key_mask", *words)
    if name == "inline":
        refuses(lambda: attention_with_state(q, k, k, name, key_mask=mask), "key_mask", *words)


LAYERS = {
    "local": lambda: nn.Attention(12, 4, local=True),
    "window": lambda: nn.Attention(12, 4, window=2),
    "attn_drop": lambda: nn.Attention(12, 4, "softmax", attn_drop=0.1),
}


@pytest.mark.parametrize("mistake", MASKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_names_a_key_mask_that_does_not_fit(mistake, layer):
    mask, words = MASKS[mistake]
    refuses(lambda: LAYERS[layer]()(some(2, 5, 12), (1, 5), key_mask=mask), "key_mask", *words)


OPTIONS = {
    "unknown mechanism": (lambda: mechanism("magic"), ["magic", *ALL]),
    "misspelled mechanism": (lambda: mechanism("linnear"), ["'linnear' does not exist: did you mean 'linear'?"]),
    "no name": (lambda: mechanism(None), ["None", "softmax"]),
    "a list of names": (lambda: mechanism(["linear"]), ["linear", "softmax"]),
    "unknown option": (lambda: mechanism("linear", temperature=2), ["linear", "temperature", "phi", "normalize"]),
    "option of another": (lambda: mechanism("softmax", tau=1), ["softmax", "tau"]),
    "tau negative": (lambda: mechanism("threshold", tau=-1), ["tau", -1, "positive"]),
    "tau zero": (lambda: mechanism("threshold", tau=0), ["tau", 0, "positive"]),
    "tau NaN": (lambda: mechanism("threshold", tau=NAN), ["tau", "nan"]),
    "tau text": (lambda: mechanism("threshold", tau="a"), ["tau", "a"]),
    "tau None": (lambda: mechanism("threshold", tau=None), ["tau", "None"]),
    "tau tensor": (lambda: mechanism("threshold", tau=torch.tensor(1.0)), ["tau", "tensor"]),
    "expansion": (lambda: mechanism("threshold", expansion="median"), ["median", "max", "mean", "minimax"]),
    "tail": (lambda: mechanism("threshold", tail="keep"), ["keep", "drop", "mean"]),
    "phi unknown": (lambda: mechanism("linear", phi="nope"), ["phi", "nope", "elu", "callable"]),
    "phi a number": (lambda: mechanism("inline", phi=3), ["phi", 3, "identity"]),
    "phi None": (lambda: mechanism("linear", phi=None), ["phi", "None", "elu"]),
    "phi_k unknown": (lambda: mechanism("inline", phi_k="nope"), ["phi_k", "nope", "elu"]),
    "phi_k empty": (lambda: mechanism("inline", phi_k=""), ["phi_k", "elu"]),
    "phi_k zero": (lambda: mechanism("inline", phi_k=0), ["phi_k", 0, "elu"]),
    "t zero": (lambda: mechanism("inline", phi="exp", t=0), ["t", 0, "positive"]),
    "t negative": (lambda: mechanism("linear", phi="exp", t=-0.5), ["t", -0.5, "positive"]),
    "t infinite": (lambda: mechanism("linear", phi="exp", t=INF), ["t", "inf"]),
    "t NaN": (lambda: mechanism("linear", phi="exp", t=NAN), ["t", "nan"]),
    "t text": (lambda: mechanism("linear", phi="exp", t="1"), ["t", "1"]),
    "t without exp": (lambda: mechanism("linear", phi="relu", t=2), ["t", 2, "exp", "relu"]),
    "normalize": (lambda: mechanism("linear", normalize="softmax"), ["softmax", "divide", "none"]),
    "normalize None": (lambda: mechanism("linear", normalize=None), ["None", "divide", "none"]),
    "order 3": (lambda: mechanism("taylor", order=3), ["order", 3, 1, 2]),
    "order text": (lambda: mechanism("taylor", order="2"), ["order", "2"]),
    "order 1 as it is": (lambda: mechanism("taylor", normalize=False), ["normalize", "order 2"]),
    "p NaN": (lambda: mechanism("focused", p=NAN), ["p", "nan", 1, 16]),
    "p zero": (lambda: mechanism("focused", p=0), ["p", 0, 1, 16]),
    "p text": (lambda: mechanism("focused", p="3"), ["p", "3"]),
    "general without sim": (lambda: mechanism("general"), ["sim", "None", "[B, H, N, M]"]),
    "sim no function": (lambda: mechanism("general", sim=3), ["sim", 3, "[B, H, N, M]"]),
    "length zero": (lambda: mechanism("cosformer", length=0), ["length", 0, "at least 1", "None"]),
    "length a fraction": (lambda: mechanism("cosformer", length=2.5), ["length", 2.5, "tokens"]),
    "kind": (lambda: mechanism("performer", kind="trig"), ["trig", "positive", "hyperbolic"]),
    "features zero": (lambda: mechanism("performer", features=0), ["features", 0, "at least 1", "None"]),
    "features a bool": (lambda: mechanism("performer", features=True), ["features", "True"]),
    "slopes": (lambda: mechanism("decay", slopes="alibi"), ["alibi", "lightning", "retention"]),
    "factor negative": (lambda: mechanism("decay", factor=-1), ["factor", -1]),
    "factor NaN": (lambda: mechanism("decay", factor=NAN), ["factor", "nan"]),
    "variant": (lambda: mechanism("transnormer", variant="t3"), ["t3", "t1", "t2"]),
    "variant of diagonal": (lambda: mechanism("diagonal", variant=2), [2, "t1", "t2"]),
    "block zero": (lambda: mechanism("diagonal", block=0), ["block", 0, "at least 1"]),
    "block a fraction": (lambda: mechanism("diagonal", block=2.5), ["block", 2.5, "whole number"]),
    "exact as a word": (lambda: mechanism("angular", exact="no"), ["exact", "no"]),
    "learned_scale as a word": (lambda: mechanism("focused", learned_scale="no"), ["learned_scale", "no"]),
}


JUDGE = """
import json
from softless.errors import SoftlessError
from tests.front_door.test_bad_input import OPTIONS

verdicts = {}
for mistake, (call, _) in OPTIONS.items():
    try:
        verdicts[mistake] = [False, "it was accepted: " + repr(call())]
    except Exception as error:
        verdicts[mistake] = [isinstance(error, SoftlessError) and isinstance(error, ValueError), repr(error)]
print(json.dumps(verdicts))
"""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list]:
    """From a process of its own: the shape checker also checks the options of dataclasses, and cannot be turned off."""
    run = subprocess.run([sys.executable, "-c", JUDGE], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("mistake", OPTIONS)
def test_a_mechanism_that_cannot_be_is_refused_when_it_is_made(mistake, verdicts):
    refused, text = verdicts[mistake]
    assert refused, text
    assert [word for word in OPTIONS[mistake][1] if str(word) not in text] == [], text


def test_attention_names_the_mechanisms_it_knows():
    q = some(1, 1, 2, 3)
    for call in (
        lambda m: attention(q, q, q, m),
        lambda m: attention_weights(q, q, m),
        lambda m: attention_with_state(q, q, q, m),
        lambda m: nn.Attention(4, 2, m),
    ):
        refuses(lambda call=call: call("magic"), "magic", *ALL)
        refuses(lambda call=call: call("linnear"), "linnear", "did you mean 'linear'?")
        refuses(lambda call=call: call(7), "mechanism", "int")
        refuses(lambda call=call: call(softless.Mechanism), "mechanism", "type")


BIASES = {
    "integer": (torch.zeros(5, 5, dtype=torch.int64), ["int64", "float"]),
    "bool": (torch.ones(5, 5, dtype=torch.bool), ["bool", "float"]),
    "number": (1.0, ["float", "tensor"]),
    "rank 5": (some(1, 2, 4, 5, 5), [[1, 2, 4, 5, 5], [2, 4, 5, 5]]),
    "wrong keys": (some(5, 6), [[5, 6], [2, 4, 5, 5]]),
    "wrong heads": (some(3, 5, 5), [[3, 5, 5], [2, 4, 5, 5]]),
    "on meta": (some(5, 5, device="meta"), ["meta", "cpu"]),
}


@pytest.mark.parametrize("mistake", BIASES)
@pytest.mark.parametrize("name", ["softmax", "threshold"])
def test_a_bias_that_does_not_fit_is_named(mistake, name):
    bias, words = BIASES[mistake]
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, name, bias=bias), "bias", *words)


@pytest.mark.parametrize("name", [*KERNELIZED, "general"])
def test_a_bias_has_no_score_to_be_added_to(name):
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, made(name), bias=some(5, 5)), "bias", name, "softmax", "threshold")
    refuses(lambda: attention_weights(q, q, made(name), bias=some(5, 5)), "bias", name)


@pytest.mark.parametrize("name", ["general", "linear", "efficient", "taylor", "angular", "focused"])
def test_a_scale_that_cancels_is_refused(name):
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, made(name), scale=0.5), "scale", 0.5, name)


@pytest.mark.parametrize("scale", [NAN, INF, -INF, True, torch.tensor(0.5), "0.5", 1j], ids=str)
@pytest.mark.parametrize("name", ["softmax", "inline", "hydra", "threshold"])
def test_a_scale_that_is_no_number_is_refused(name, scale):
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, name, scale=scale), "scale", scale, "finite number")


@every_form
def test_a_grid_that_nothing_reads_or_that_does_not_fit_is_refused(name, is_causal):
    q, one = some(2, 4, 6, 3), made(name)
    call = {"is_causal": is_causal, "inputs": inputs(name, q, q)}
    if one.reads_grid:
        refuses(lambda: attention(q, q, q, one, grid=(2, 4), **call), "grid", (2, 4), 6)
    else:
        refuses(lambda: attention(q, q, q, one, grid=(2, 3), **call), "grid", (2, 3), name)


@pytest.mark.parametrize("name", ["inline", "softmax"])
def test_a_backend_that_cannot_run_is_refused(name):
    q = some(2, 4, 5, 3)
    for backend in ("cuda", "", None, 3):
        refuses(lambda b=backend: attention(q, q, q, name, backend=b), repr(backend), "auto", "reference", "torch")
    refuses(lambda: attention(q, q, q, name, backend="triton"), "triton", "auto")
    for backend in ("torch", "triton"):
        refuses(lambda b=backend: attention_weights(q, q, name, backend=b), backend, "weights", "reference")


def test_a_state_cannot_come_from_the_reference():
    q = some(2, 4, 5, 3)
    refuses(lambda: attention_with_state(q, q, q, "linear", backend="reference"), "reference", "torch")


AFFINE = mechanism("linear", phi="affine_relu")
INPUTS = {
    "all missing": (AFFINE, None, ["weight", "bias", "none"]),
    "one missing": (AFFINE, {"weight": some(4, 3, 3)}, ["bias", "weight"]),
    "extra": (mechanism("inline"), {"weight": some(4, 3, 3)}, ["inline", "weight", "none"]),
    "one extra": (AFFINE, {"weight": some(4, 3, 3), "bias": some(4, 3), "beta": some(1)}, ["beta", "weight", "bias"]),
    "mis-shaped": (AFFINE, {"weight": some(4, 3, 2), "bias": some(4, 3)}, ["weight", [4, 3, 2], [4, 3, 3]]),
    "not a tensor": (AFFINE, {"weight": 1.0, "bias": some(4, 3)}, ["weight", "float", [4, 3, 3]]),
    "on meta": (AFFINE, {"weight": some(4, 3, 3, device="meta"), "bias": some(4, 3)}, ["weight", "meta", "cpu"]),
    "complex": (AFFINE, {"weight": some(4, 3, 3, dtype=torch.complex64), "bias": some(4, 3)}, ["weight", "complex64"]),
    "of integers": (AFFINE, {"weight": some(4, 3, 3), "bias": torch.ones(4, 3).long()}, ["bias", "int64", "floating"]),
    "not a mapping": (AFFINE, [some(4, 3, 3), some(4, 3)], ["inputs", "list"]),
    "a tensor": (AFFINE, some(4, 3), ["inputs", "Tensor"]),
    "scale of focused": (mechanism("focused", learned_scale=True), {}, ["focused", "scale"]),
}


@pytest.mark.parametrize("mistake", INPUTS)
def test_inputs_that_do_not_fit_are_named(mistake):
    wants, inputs, words = INPUTS[mistake]
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, wants, inputs=inputs), *words)
    refuses(lambda: attention_weights(q, q, wants, inputs=inputs), *words)
    refuses(lambda: attention_with_state(q, q, q, wants, inputs=inputs), *words)


@pytest.mark.parametrize("name", SCORED)
def test_a_scored_mechanism_has_no_state(name):
    q = some(2, 4, 5, 3)
    refuses(lambda: attention_with_state(q, q, q, made(name), inputs=inputs(name, q, q)), name, "KV cache")


@pytest.mark.parametrize("name", MIXERS)
def test_what_mixes_all_tokens_is_not_causal(name):
    q, one = some(2, 4, 5, 3), made(name)
    refuses(
        lambda: attention(q, q, q, one, inputs=inputs(name, q, q), is_causal=True),
        name,
        "is_causal is True",
        "mixes all tokens",
    )
    refuses(
        lambda: attention_weights(q, q, one, inputs=inputs(name, q, q), is_causal=True),
        name,
        "is_causal is True",
        "mixes all tokens",
    )
    refuses(lambda: attention_with_state(q, q, q, one, inputs=inputs(name, q, q)), name, "mixes all tokens")


def state_of(name: str, *, heads: int = 4, dim: int = 3, dtype: torch.dtype = torch.float32, batch: int = 2) -> State:
    q = some(batch, heads, 5, dim, dtype=dtype)
    return attention_with_state(q, q, q, name)[1]


STATES = {
    "a tuple": (lambda: tuple(state_of("linear")), ["tuple", "State"]),
    "a dict": (lambda: state_of("linear")._asdict(), ["dict", "State"]),
    "the output": (lambda: some(2, 4, 5, 3), ["Tensor", "State"]),
    "other heads": (lambda: state_of("linear", heads=2), [[2, 2, 3, 3], [2, 4, 3, 3]]),
    "other width": (lambda: state_of("linear", dim=5), [[2, 4, 5, 5], [2, 4, 3, 3]]),
    "other batch": (lambda: state_of("linear", batch=3), [[3, 4, 3, 3], [2, 4, 3, 3]]),
    "other dtype": (lambda: state_of("linear", dtype=torch.float64), ["float64", "float32"]),
    "of taylor": (lambda: state_of("taylor"), ["made by 'taylor'", "'linear'"]),
    "of hydra": (lambda: state_of("hydra"), ["made by 'hydra'", "'linear'"]),
    "part mis-shaped": (lambda: state_of("linear")._replace(k_mean=some(2, 4, 7)), ["k_mean", [2, 4, 7], [2, 4, 3]]),
    "part None": (lambda: state_of("linear")._replace(v_mean=None), ["v_mean", "None"]),
    "part on meta": (lambda: state_of("linear")._replace(comoment=some(2, 4, 3, 3, device="meta")), ["meta", "cpu"]),
    "count of another batch": (lambda: state_of("linear")._replace(n=torch.ones(5, 4).long()), ["n", [5, 4]]),
}


@pytest.mark.parametrize("mistake", STATES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_state_that_does_not_fit_is_refused(mistake, tokens):
    make, words = STATES[mistake]
    q, state = some(2, 4, tokens, 3), make()
    refuses(lambda: attention_with_state(q, q, q, "linear", state), "state", *words)


def test_every_query_needs_its_own_key_to_carry_a_state():
    q, k = some(2, 4, 5, 3), some(2, 4, 3, 3)
    refuses(lambda: attention_with_state(q, k, k, "linear"), 5, 3)
    refuses(lambda: attention_with_state(q, k, k, "linear", state_of("linear")), 5, 3)


@pytest.mark.parametrize(
    ("sim", "words"),
    [
        (lambda q, k: q @ k.mT @ k, [[2, 4, 5, 3], [2, 4, 5, 5]]),
        (lambda q, k: (q @ k.mT).sum(), [[], [2, 4, 5, 5]]),
        (lambda *_: 1.0, ["float", [2, 4, 5, 5]]),
        (lambda *_: None, ["NoneType", [2, 4, 5, 5]]),
        (lambda q, k: (q @ k.mT).half(), ["torch.float16", "torch.float32"]),
        (lambda q, k: (q @ k.mT).double(), ["torch.float64", "torch.float32"]),
        (lambda q, k: (q @ k.mT).cfloat(), ["torch.complex64", "torch.float32"]),
    ],
)
def test_a_similarity_of_the_wrong_shape_or_kind_is_refused(sim, words):
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, mechanism("general", sim=sim)), "sim", *words)


@pytest.mark.parametrize(
    ("phi", "words"),
    [
        (lambda x: x.sum(-1), ["phi", [2, 4, 5], [2, 4, 5, 3]]),
        (lambda x: x[:, :, :2], ["phi", [2, 4, 2, 3]]),
        (lambda *_: 1.0, ["phi", "float"]),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_feature_map_of_the_wrong_shape_is_refused(phi, words, is_causal):
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, mechanism("linear", phi=phi), is_causal=is_causal), *words)


def test_two_feature_maps_must_make_equally_many_features():
    q = some(2, 4, 5, 3)
    wide = mechanism("linear", phi="relu", phi_k=lambda x: torch.cat([x, x], -1))
    refuses(lambda: attention(q, q, q, wide), 3, 6)


def test_hydra_needs_values_as_wide_as_queries():
    q, v = some(2, 4, 5, 3), some(2, 4, 5, 7)
    for is_causal in (False, True):
        for backend in ("torch", "reference"):
            refuses(lambda c=is_causal, b=backend: attention(q, q, v, "hydra", is_causal=c, backend=b), "hydra", 7, 3)
    q, k, v = some(1, 2, 5, 3), some(1, 1, 5, 3), some(1, 1, 5, 6)
    for backend in ("torch", "reference"):
        refuses(lambda b=backend: attention(q, k, v, "hydra", backend=b), "hydra", 6, 3)


def test_angular_needs_as_many_queries_as_keys():
    q, k = some(2, 4, 5, 3), some(2, 4, 7, 3)
    for backend in ("torch", "reference"):
        refuses(lambda b=backend: attention(q, k, k, "angular", backend=b), "angular", 5, 7)
    refuses(lambda: attention_weights(q, k, "angular"), "angular", 5, 7)


def test_is_causal_is_yes_or_no():
    q = some(2, 4, 5, 3)
    refuses(lambda: attention(q, q, q, is_causal="no"), "is_causal", "no")


def test_a_threshold_report_needs_keys_and_fitting_tensors():
    q = some(2, 4, 5, 3)
    refuses(lambda: threshold_report(q, q[:, :, :0]), 0, "key")
    refuses(lambda: threshold_report(q[0], q), [4, 5, 3])
    refuses(lambda: threshold_report(q, q, tau=-1), "tau", -1)
    refuses(lambda: threshold_report([1.0], q), "q", "list")


def residual(context: Tensor | None = None, v: Tensor | None = None, grid: tuple = (2, 3), prefix: int = 0) -> Tensor:
    context, v = some(2, 12) if context is None else context, some(2, 4, 6, 3) if v is None else v
    return nn.LocalResidual(12, 4)(context, v, grid, prefix)


MODULES = {
    "dim": (lambda: nn.Attention(190, 3), [190, 3]),
    "heads": (lambda: nn.Attention(12, 0), [12, 0]),
    "kv_heads": (lambda: nn.Attention(12, 4, kv_heads=3), [4, 3]),
    "local with kv_heads": (lambda: nn.Attention(12, 4, local=True, kv_heads=2), [4, 2]),
    "attn_drop of inline": (lambda: nn.Attention(12, 4, attn_drop=0.1), ["attn_drop", 0.1, "inline"]),
    "attn_drop above one": (lambda: nn.Attention(12, 4, "softmax", attn_drop=1.5), ["attn_drop", 1.5]),
    "proj_drop negative": (lambda: nn.Attention(12, 4, proj_drop=-0.1), ["proj_drop", -0.1]),
    "residual": (lambda: nn.LocalResidual(190, 3), [190, 3]),
    "dim of x": (lambda: nn.Attention(12, 4)(some(2, 5, 13)), [13, 12]),
    "rank of x": (lambda: nn.Attention(12, 4)(some(5, 12)), [[5, 12]]),
    "no grid": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12)), ["grid", 6]),
    "large grid": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12), grid=(3, 3)), [6, 3, 9]),
    "grid of one number": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12), grid=6), ["grid", 6]),
    "causal local": (lambda: nn.Attention(12, 4, local=True)(some(2, 6, 12), (2, 3), is_causal=True), ["causal"]),
    "state and local": (lambda: nn.Attention(12, 4, local=True).with_state(some(2, 6, 12)), ["local", "state"]),
    "state of softmax": (lambda: nn.Attention(12, 4, "softmax").with_state(some(2, 6, 12)), ["softmax", "KV cache"]),
    "window zero": (lambda: nn.Attention(12, 4, window=0), ["window", 0, "at least 1"]),
    "window negative": (lambda: nn.Attention(12, 4, window=-1), ["window", -1, "at least 1"]),
    "window a fraction": (lambda: nn.Attention(12, 4, window=2.5), ["window", 2.5, "whole number"]),
    "window a pair": (lambda: nn.Attention(12, 4, window=(2, 2)), ["window", (2, 2), "whole number"]),
    "prefix": (lambda: residual(v=some(2, 4, 7, 3)), [7, 2, 3, 6]),
    "prefix negative": (lambda: residual(v=some(2, 4, 4, 3), prefix=-2), ["prefix", -2, "whole number"]),
    "grid negative": (lambda: residual(grid=(-2, -3)), [(-2, -3), "at least 1 x 1"]),
    "grid of fractions": (lambda: residual(grid=(2.0, 3.0)), [(2.0, 3.0), "(height, width)"]),
    "context too wide": (lambda: residual(context=some(2, 16)), ["context", [2, 16], "[batch, 12]"]),
    "context of tokens": (lambda: residual(context=some(2, 6, 12)), ["context", [2, 6, 12], "[batch, 12]"]),
    "batch of context": (lambda: residual(context=some(1, 12)), [[2, 4, 6, 3], [1, 12]]),
    "heads of v": (lambda: residual(v=some(2, 1, 6, 3)), ["v", [2, 1, 6, 3], "[2, 4, tokens, 3]"]),
    "dim of v": (lambda: residual(v=some(2, 4, 6, 5)), ["v", [2, 4, 6, 5], "[2, 4, tokens, 3]"]),
    "rank of v": (lambda: residual(v=some(4, 6, 3)), ["v", [4, 6, 3], "[batch, heads, tokens, dim]"]),
}


@pytest.mark.parametrize("mistake", MODULES)
def test_a_module_that_cannot_be_is_refused(mistake):
    call, words = MODULES[mistake]
    refuses(call, *words)


# Tensors that are not dense, numbers that no one means: for every mechanism, and for every argument.


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x))


LAYOUTS = {
    "sparse": (Tensor.to_sparse, ["sparse_coo", "dense"]),
    "mkldnn": (Tensor.to_mkldnn, ["mkldnn", "dense"]),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), ["qint8"]),
    "complex": (lambda x: x.cfloat(), ["complex64"]),
    "nested": (nested, ["nested"]),
    "rows": (lambda x: x.flatten(0, -2).to_sparse_csr(), ["sparse_csr", "dense"]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALL)
def test_a_tensor_that_is_not_dense_is_refused_wherever_it_is_given(name, layout):
    change, words = LAYOUTS[layout]
    q, one = some(2, 4, 6, 4), made(name)
    call = {"q": q, "k": q, "v": q, "mechanism": one, "inputs": inputs(name, q, q), "is_causal": bool(one.lacks(False))}
    call |= {"grid": (2, 3)} if one.needs_grid else {}
    attention(**call)
    for each in "qkv":
        named = ["nested"] if layout == "nested" else [each, *words]
        refuses(lambda each=each: attention(**call | {each: change(q)}), *named)
    if one.takes_bias:
        refuses(lambda: attention(**call, bias=change(some(2, 4, 6, 6))), "bias", *words)
    for each, x in call["inputs"].items():
        refuses(lambda each=each, x=x: attention(**call | {"inputs": call["inputs"] | {each: change(x)}}), each, *words)
    if layout in ("sparse", "rows"):
        hidden = torch.ones(2, 6, dtype=torch.bool)
        refuses(lambda: attention(**call, key_mask=change(hidden)), "key_mask", *words)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_refuses_tokens_that_are_not_dense(layout):
    change, words = LAYOUTS[layout]
    x = some(2, 6, 8)
    for module in (
        nn.Attention(8, 2),
        nn.LongformerAttention(8, 2),
        nn.EliminationEncoder(8, 2, 1, 6),
        nn.FunnelEncoder(8, 2, (1, 1)),
        nn.StridedFeedForward(8),
    ):
        refuses(lambda module=module: module(change(x)), "x", *words)
        refuses(lambda module=module: module(x.tolist()), "x", "list")
        refuses(
            lambda module=module: module(x, key_mask=torch.ones(2, 5, dtype=torch.bool)), "key_mask", [2, 5], [2, 6]
        )


@pytest.mark.parametrize("name", ["softmax", "inline", "hydra", "threshold"])
def test_a_scale_of_any_size_is_taken_or_refused(name):
    q = some(2, 4, 5, 3)
    for huge in (10**400, -(10**400), 10**5000, np.float64(INF), np.bool_(True)):
        refuses(lambda huge=huge: attention(q, q, q, name, scale=huge), "scale", "finite number")
    half = attention(q, q, q, name, scale=0.5)
    for scale in (np.float32(0.5), np.float64(0.5)):
        assert torch.equal(attention(q, q, q, name, scale=scale), half)
    assert torch.equal(attention(q, q, q, name, scale=np.int64(2)), attention(q, q, q, name, scale=2))


@pytest.mark.parametrize("name", ["inline", "delta", "performer"])
def test_inputs_are_named_by_strings(name):
    q = some(2, 4, 5, 3)
    for key in (5, None, (1, 2), 10**5000):
        refuses(lambda key=key: attention(q, q, q, name, inputs={key: q}, is_causal=name == "delta"), "inputs", "names")


@pytest.mark.parametrize("name", ["linear", "inline"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_feature_map_makes_at_least_one_feature(name, is_causal):
    q = some(2, 4, 5, 3)
    for option in ("phi", "phi_k"):
        none = mechanism(name, **{option: lambda x: x[..., :0]})
        refuses(lambda none=none: attention(q, q, q, none, is_causal=is_causal), "phi", [2, 4, 5, 0], "at least 1")


ABSURD = [0, -1, 2, True, 10**9, 10**18, 2**63 - 1, 2**63, 10**400, 10**5000, 0.5, 1e308, -1e308, NAN, INF, -INF]
ABSURD += [
    None,
    "a",
    "",
    (),
    (1,),
    (10**9,),
    [1],
    {},
    np.int64(2),
    np.float32(0.5),
    np.ones(2),
    torch.ones(2),
    1j,
    b"a",
]

CAPPED = """
import json, resource, warnings
import torch
from softless import attention, mechanism
from softless.errors import SoftlessError
from softless.mechanisms import OPTIONS
from tests.front_door.test_bad_input import ABSURD, inputs_of, made

warnings.simplefilter("ignore")
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (most, most))
verdicts = {}
for name in OPTIONS:
    for option in OPTIONS[name]:
        wrong = verdicts[f"{name} {option}"] = []
        for number, value in enumerate(ABSURD):
            try:
                one = mechanism(name, **(dict(sim=made(name).sim) if name == "general" else {}) | {option: value})
                for tokens in (5, 9):
                    q = torch.randn(1, 2, tokens, 4)
                    call = dict(is_causal=one.lacks(False) is not None, inputs=inputs_of(one, q, q))
                    out = [attention(q, q, q, one, backend=way, **call) for way in ("torch", "reference")]
                    if out[0].isnan().any() or not torch.allclose(*out, rtol=1e-3, atol=1e-3):
                        wrong.append([number, "the fast way and the reference differ, or are NaN"])
            except SoftlessError as error:
                if option not in str(error) or len(str(error)) > 300 or chr(10) in str(error):
                    wrong.append([number, "refused without its name, or at length: " + str(error)])
            except Exception as error:
                wrong.append([number, repr(error)])
print(json.dumps(verdicts))
"""


def inputs_of(one: softless.Mechanism, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    return {each: torch.rand(shape) for each, shape in one.needed(q, k).items()}


@pytest.fixture(scope="module")
def capped() -> dict[str, list]:
    """From a process that may take 1 GiB more than it has at its start."""
    run = subprocess.run([sys.executable, "-c", CAPPED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is capped by Linux's limits")
@pytest.mark.parametrize(("name", "option"), [(name, option) for name in KNOWN for option in KNOWN[name]])
def test_an_absurd_option_is_answered_or_refused_in_a_sentence_and_in_little_memory(name, option, capped):
    assert capped[f"{name} {option}"] == []


WIDE = {"longformer": "window", "sparse": "stride", "diagonal": "block", "reformer": "window", "topk": "k"}
PATTERNS = [{"pattern": each} for each in ("local", "strided", "local+strided", "fixed")]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("name", "others"), [*((name, {}) for name in WIDE), *(("sparse", each) for each in PATTERNS)])
def test_a_window_wider_than_the_sequence_sees_all_of_it(name, others, is_causal):
    mask = torch.tensor([[True] * 4 + [False], [False] + [True] * 4])
    for queries, key_mask in ((5, None), (5, mask), (2, None), (7, mask)):
        if queries != 5 and not is_causal:
            continue
        q, k, v = (some(2, 4, tokens, 3) for tokens in (queries, 5, 5))
        call = {"is_causal": is_causal, "key_mask": key_mask, "inputs": inputs(name, q, k)}
        widths = [mechanism(name, **others, **{WIDE[name]: width}) for width in (5, 6, 100, 10**9, 2**63 - 1)]
        exact = attention(q, k, v, widths[0], backend="reference", **call)
        for one in widths:
            torch.testing.assert_close(attention(q, k, v, one, **call), exact)
            torch.testing.assert_close(attention(q, k, v, one, backend="reference", **call), exact)


def test_a_number_of_numpy_is_an_option_like_pythons():
    assert mechanism("topk", k=np.int64(3)) == mechanism("topk", k=3)
    assert type(mechanism("topk", k=np.int32(3)).k) is int
    assert mechanism("threshold", tau=np.float32(0.5)) == mechanism("threshold", tau=0.5)
    assert type(mechanism("threshold", tau=np.float64(0.5)).tau) is float


@pytest.mark.parametrize("size", ["dim", "heads", "kv_heads", "window", "attn_drop", "proj_drop", "local", "qkv_bias"])
def test_an_absurd_size_of_a_layer_is_refused_by_its_name(size):
    for value in (-1, 10**400, 10**5000, 0.5, NAN, INF, "a", "no", (), torch.ones(2), 1j):
        if not (size.endswith("drop") and isinstance(value, float) and value == 0.5):
            refuses(lambda value=value: nn.Attention(**{"dim": 8, "heads": 2, size: value}), size)


# What is not a mistake.


@every_form
def test_no_tokens_one_token_and_no_visible_token_are_answered(name, is_causal):
    q, k, v = (some(2, 4, 5, 3) for _ in "qkv")
    one = made(name)

    def run(q: Tensor, k: Tensor, v: Tensor, **call: Tensor) -> Tensor:
        return attention(q, k, v, one, is_causal=is_causal, inputs=inputs(name, q, k), **call)

    assert run(q[:, :, :0], k[:, :, :0], v[:, :, :0]).shape == (2, 4, 0, 3)
    assert (run(q, k[:, :, :0], v[:, :, :0]) == 0).all()
    single = run(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    if one.rows_sum_to_one:
        torch.testing.assert_close(single, v[:, :, :1])
    assert (run(q, k, v, key_mask=torch.zeros(2, 5, dtype=torch.bool)) == 0).all()
    assert run(q[:0], k[:0], v[:0]).shape == (0, 4, 5, 3)


NARROW = [each for each in ANY_FORM if each[0] != "hydra"]  # which needs values as wide as queries


@pytest.mark.parametrize(("name", "is_causal"), NARROW)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_values_without_channels_give_outputs_without_channels(name, is_causal, backend):
    q, v, one = some(2, 4, 5, 3), some(2, 4, 5, 0), made(name)
    own = inputs(name, q, q)
    assert attention(q, q, v, one, is_causal=is_causal, inputs=own, backend=backend).shape == (2, 4, 5, 0)
    if one.carries_state and is_causal:
        assert attention_with_state(q, q, v, one, inputs=own)[0].shape == (2, 4, 5, 0)


@pytest.mark.parametrize("name", [name for name in SCORED if made(name).takes_bias])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_bias_may_have_another_precision(name, backend):
    q, k, v = (some(2, 4, 5, 3) for _ in "qkv")
    bias = some(5, 5, dtype=torch.bfloat16)
    call = {"inputs": inputs(name, q, k), "backend": backend}
    same = attention(q, k, v, made(name), bias=bias.float(), **call)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(attention(q, k, v, made(name), bias=bias.to(dtype), **call), same)


@every_form
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_nothing_in_padding_changes_an_output_or_a_gradient(name, is_causal, backend, poison):
    mask = torch.tensor([[True, False, True, True, False, False], [False, True, True, False, True, True]])
    q, k, v = (some(2, 4, 6, 3) for _ in "qkv")

    def run(fill: float) -> list[Tensor]:
        hidden = mask[:, None, :, None]
        leaves = [x.clone().requires_grad_() for x in (q, torch.where(hidden, k, fill), torch.where(hidden, v, fill))]
        call = {"key_mask": mask, "inputs": inputs(name, q, k), "backend": backend}
        out = attention(*leaves, made(name), is_causal=is_causal, **call)
        found = torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True)  # emanet's reach v alone
        return [out, *found]

    for what, clean, poisoned in zip(("output", "q", "k", "v"), run(0.5), run(poison), strict=True):
        assert poisoned.isfinite().all(), f"{what} is not finite"
        torch.testing.assert_close(poisoned, clean, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("name", KERNELIZED)
def test_nothing_in_padding_enters_a_state(name):
    mask = torch.tensor([[True, False, True, True, False]])
    q, k, v = (some(1, 4, 5, 3) for _ in "qkv")
    hidden = mask[:, None, :, None]
    clean, poisoned = (
        attention_with_state(q, torch.where(hidden, k, fill), torch.where(hidden, v, fill), name, key_mask=mask)
        for fill in (0.5, NAN)
    )
    torch.testing.assert_close(poisoned[0], clean[0])
    torch.testing.assert_close(tuple(poisoned[1]), tuple(clean[1]))


@every_form
def test_a_nan_in_a_real_token_is_not_hidden(name, is_causal):
    q, k, v = (some(1, 1, 5, 3) for _ in "qkv")
    v[0, 0, 2] = NAN
    assert attention(q, k, v, made(name), is_causal=is_causal, inputs=inputs(name, q, k))[0, 0].isnan().any()


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_callers_tensors_stay_as_they_are(name, is_causal, dtype):
    tensors = [some(2, 4, 70, 3, dtype=dtype) for _ in "qkv"]
    mask = torch.rand(2, 70) > 0.3
    copies, kept, own = [x.clone() for x in tensors], mask.clone(), inputs(name, *tensors[:2])
    for backend in ("torch", "reference"):
        attention(*tensors, made(name), is_causal=is_causal, key_mask=mask, inputs=own, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(own.values(), inputs(name, *tensors[:2]).values(), strict=True))
    if name in KERNELIZED:
        state = attention_with_state(*tensors, name)[1]
        before = [x.clone() for x in state]
        attention_with_state(*tensors, name, state, key_mask=mask)
        assert all(map(torch.equal, state, before))
    assert all(map(torch.equal, tensors, copies))
    assert torch.equal(mask, kept)
