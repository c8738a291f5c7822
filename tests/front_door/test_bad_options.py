"""An option that a mechanism cannot take raises a SoftlessError that names it, in little memory."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from softless import attention, mechanism
from softless.mechanisms import OPTIONS as KNOWN
from tests.front_door.refusals import (
    ALL,
    INF,
    NAN,
    ROOT,
    inputs,
    some,
)

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
    "window negative": (lambda: mechanism("nearfar", window=-1), ["window", -1, "at least 0"]),
    "maps": (lambda: mechanism("nearfar", maps="own"), ["maps", "own", "shared", "separate", "identity"]),
    "an even neighborhood": (lambda: mechanism("nearfar", neighborhood=4), ["neighborhood", 4, "even"]),
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
from tests.front_door.test_bad_options import OPTIONS

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
from tests.front_door.refusals import inputs_of, made
from tests.front_door.test_bad_options import ABSURD

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
                    call |= dict(grid=(1, tokens)) if one.needs_grid else {}
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
