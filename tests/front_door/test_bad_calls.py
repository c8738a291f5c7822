"""A mistake in an attention call raises a SoftlessError that says what was passed and what was needed."""

import numpy as np
import pytest
import torch

import softless
from softless import State, attention, attention_weights, attention_with_state, mechanism, nn, threshold_report
from tests.front_door.refusals import (
    ALL,
    INF,
    KERNELIZED,
    LAYOUTS,
    MASKS,
    MIXERS,
    NAN,
    SCORED,
    every_form,
    inputs,
    made,
    refuses,
    some,
)

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


@pytest.mark.parametrize("mistake", MASKS)
@pytest.mark.parametrize("name", ["inline", "softmax"])
def test_a_key_mask_that_does_not_fit_is_named(mistake, name):
    mask, words = MASKS[mistake]
    q, k = some(2, 4, 3, 3), some(2, 4, 5, 3)
    refuses(lambda: attention(q, k, k, name, key_mask=mask), "key_mask", *words)
    refuses(lambda: attention_weights(q, k, name, key_mask=mask), "key_mask", *words)
    if name == "inline":
        refuses(lambda: attention_with_state(q, k, k, name, key_mask=mask), "key_mask", *words)


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


# Tensors that are not dense, and numbers of any size: for every mechanism, and for every argument.


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
        if layout == "rows" and x.ndim == 1:
            continue  # one number per head has no rows
        refuses(lambda each=each, x=x: attention(**call | {"inputs": call["inputs"] | {each: change(x)}}), each, *words)
    if layout in ("sparse", "rows"):
        hidden = torch.ones(2, 6, dtype=torch.bool)
        refuses(lambda: attention(**call, key_mask=change(hidden)), "key_mask", *words)


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
