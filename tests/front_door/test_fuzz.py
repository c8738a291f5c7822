"""Whatever is passed, the answer is a result of the right shape and dtype without a NaN, or a SoftlessError."""

from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import softless
from softless.errors import SoftlessError

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PHIS = ["identity", "relu", "leaky_relu", "elu", "exp", "softmax", "affine_relu", torch.square, "nope", None, 3]
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "softmax": {},
    "general": {"sim": [lambda q, k: (q @ k.mT).square(), lambda q, _: q, None]},
    "linear": {"phi": PHIS, "phi_k": PHIS, "t": [1, 0.5, 0, NAN, "a"], "normalize": ["divide", "none", "both"]},
    "inline": {"phi": PHIS, "phi_k": PHIS, "t": [1, 0.5, -1, INF]},
    "blend": {"phi": PHIS, "phi_k": PHIS, "t": [1, 0.5, -1, INF]},
    "regress": {
        "phi": PHIS,
        "phi_k": PHIS,
        "ridge": [0.1, 0, 1, 1e30, "learned", -1, NAN, INF, "a", True],
        "gain": ["dim", "one", "learned", "two", 1.0],
        "center": [True, False, 1],
        "relative": [True, False, None],
        "weighting": [None, "query", "key", 1],
    },
    "efficient": {},
    "taylor": {"order": [1, 2, 3], "normalize": [None, True, False]},
    "hydra": {},
    "angular": {"exact": [False, True]},
    "focused": {"p": [1, 3, 2.5, 16, 0, NAN], "learned_scale": [False, True]},
    "threshold": {"tau": [1, 0.5, 3, INF, -1, "a"], "expansion": ["max", "mean", "minimax"], "tail": ["drop", "mean"]},
    "nearfar": {
        "window": [0, 1, 5, 100, -1, 1.5, "a"],
        "first": [0, 1, 100, -1, NAN],
        "maps": ["shared", "separate", "identity", "none", None],
        "features": [None, 1, 7, 0, "a"],
        "neighborhood": [None, 1, 3, 2, 0, -1],
    },
    "cosformer": {"length": [None, 1, 20, 100, 0, 2.5, "a"]},
    "performer": {"kind": ["positive", "hyperbolic", "trig"], "features": [None, 1, 7, 0, 1.5, True]},
    "delta": {},
    "efla": {},
    "decay": {"slopes": ["lightning", "retention", "none"], "factor": [1, 0, 0.5, -1, NAN, INF, "a"]},
    "transnormer": {"variant": ["t1", "t2", "t3"]},
    "diagonal": {"variant": ["t1", "t2", None], "block": [1, 4, 64, 0, 2.5, "a"]},
    "mlla": {},
    "a2": {},
    "topk": {"k": [1, 3, 100, 0, 2.5, INF, "a"]},
    "sparse": {
        "pattern": ["local", "strided", "local+strided", "fixed", "nope", 3],
        "stride": [1, 4, 64, 0, -1, 2.5],
        "summary": [1, 2, 100, 0],
    },
    "longformer": {"window": [0, 2, 100, -1, 1.5], "global_tokens": [0, 1, 100, -1, NAN]},
    "linformer": {"rank": [1, 4, 0, 2.5], "length": [9, 66, 0], "share": ["none", "heads", "kv", "layers"]},
    "nystrom": {"landmarks": [1, 4, 100, 0, "a"], "steps": [1, 6, 0]},
    "agent": {"agents": [1, 4, 100, 0, 2.5]},
    "soft": {"landmarks": [1, 4, 100, 0, NAN]},
    "nonlocal": {"pairing": ["softmax", "dot", "concatenation", "gaussian"]},
    "asymmetric_nonlocal": {"pyramid": [(1, 3), (1, 100), (), (0,), 4, "1,3"]},
    "emanet": {"bases": [1, 4, 0], "rounds": [1, 3, 0], "detach": [True, False, 1]},
    "reformer": {"buckets": [2, 4, 3, 0], "rounds": [1, 2, 0], "window": [1, 8, 100, 0]},
    "unknown": {},
}

ABSURD = [10**9, 2**63, 10**400, -(10**400), NAN, INF, True, 0.5, None, (), [1], {}, 1j, torch.ones(2)]
every_name = pytest.mark.parametrize("name", OPTIONS)
rarely = st.sampled_from([False] * 9 + [True])


@st.composite
def choices(options, name: str) -> dict[str, Any]:
    pools = {key: ABSURD if options(rarely) else pool for key, pool in OPTIONS[name].items() if options(st.booleans())}
    chosen = {key: options(st.sampled_from(pool)) for key, pool in pools.items()}
    if name == "general" and not options(rarely):
        chosen["sim"] = OPTIONS["general"]["sim"][0]
    return chosen | ({"typo": 1} if options(rarely) else {})


@st.composite
def calls(options) -> dict[str, Any]:
    """Mostly good calls: every part may be wrong, few are."""
    small = st.integers(1, 3)
    batch, group, kv_heads, dim, width = (options(small) for _ in range(5))
    keys = options(st.sampled_from([0, 1, 2, 5, 9, 65]))
    queries = keys if options(st.booleans()) else options(st.sampled_from([0, 1, 3, 9, 66]))
    dtype = options(st.sampled_from(DTYPES))
    torch.manual_seed(options(st.integers(0, 2**31 - 1)))

    def tensor(*shape: int) -> torch.Tensor:
        shape = tuple(options(st.integers(0, 4)) if options(rarely) and options(rarely) else n for n in shape)
        shape = shape[1:] if options(rarely) and options(rarely) else shape
        wrong = options(rarely) and options(rarely)
        return (torch.randn(shape) * options(st.sampled_from([0.0, 1e-3, 1.0, 30.0]))).to(
            torch.int64 if wrong else dtype
        )

    heads = group * kv_heads
    call: dict[str, Any] = {
        "q": tensor(batch, heads, queries, dim),
        "k": tensor(batch, kv_heads, keys, dim),
        "v": tensor(batch, kv_heads, keys, dim if options(st.booleans()) else width),
        "is_causal": options(st.booleans()),
        "inputs": None,
    }
    if options(st.booleans()):
        call["key_mask"] = torch.rand(batch, keys + options(rarely)) < options(st.sampled_from([0.0, 0.5, 1.0]))
    if options(rarely):
        odd = [(0, 0), 5, (True, queries), (-1, -queries), (10**400, 1), torch.ones(batch, keys).bool()]
        call["grid"] = options(st.sampled_from([(1, queries), (queries, 1), (2, 3), *odd]))
    if options(rarely):
        call["bias"] = tensor(heads, queries, keys)
    if options(rarely):
        call["scale"] = options(st.sampled_from([0.5, -1, 0, NAN, True, "1", 10**400, torch.ones(2)]))
    if options(rarely):
        call["backend"] = options(st.sampled_from(["reference", "torch", "triton", "cuda"]))
    return call


def fill_inputs(made: softless.Mechanism, call: dict[str, Any], *, forget: bool) -> None:
    q, k = (call[name] if call[name].ndim == 4 and call[name].shape[3] else torch.ones(1, 1, 1, 1) for name in "qk")
    inputs = {name: torch.rand(shape) for name, shape in made.needed(q, k).items()}
    call["inputs"] = dict(list(inputs.items())[1:]) if forget else inputs


@every_name
@given(st.data(), calls(), rarely)
def test_a_call_is_answered_or_refused(name, data, call, forget):
    options = data.draw(choices(name))
    try:
        made = softless.mechanism(name, **options)
        fill_inputs(made, call, forget=forget)
        out = softless.attention(**call, mechanism=made)
    except SoftlessError:
        event("refused")
        return
    event("answered")
    q, v = call["q"], call["v"]
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    assert not out.isnan().any()


@every_name
@given(st.data(), calls())
def test_a_stream_is_answered_or_refused(name, data, call):
    options = data.draw(choices(name))
    for key in ("is_causal", "bias"):
        call.pop(key, None)
    cut = data.draw(st.integers(0, 10))
    mask = call.pop("key_mask", None)
    try:
        made = softless.mechanism(name, **options)
        fill_inputs(made, call, forget=False)
        state, outs, inputs = None, [], call.pop("inputs")
        q, k, v = (call.pop(each) for each in "qkv")
        for here in (slice(0, cut), slice(cut, None)):
            seen = None if mask is None else mask[:, here]
            own = {name: x[..., here] if name == "beta" else x for name, x in inputs.items()}
            part = (q[..., here, :], k[..., here, :], v[..., here, :])
            out, state = softless.attention_with_state(*part, made, state, key_mask=seen, inputs=own, **call)
            outs.append(out)
    except SoftlessError:
        event("refused")
        return
    event("answered")
    assert torch.cat(outs, 2).shape == (*q.shape[:3], v.shape[3])
    assert all(out.dtype == q.dtype and not out.isnan().any() for out in outs)


@every_name
@given(st.data(), calls())
def test_weights_are_given_or_refused(name, data, call):
    options = data.draw(choices(name))
    call.pop("v")
    try:
        made = softless.mechanism(name, **options)
        fill_inputs(made, call, forget=False)
        weights = softless.attention_weights(**call, mechanism=made)
    except SoftlessError:
        event("refused")
        return
    q, k = call["q"], call["k"]
    channels = q.shape[3] if name == "hydra" else 1
    assert weights.shape == (q.shape[0], q.shape[1] * channels, q.shape[2], k.shape[2])
    assert weights.dtype == q.dtype
    assert not weights.isnan().any()
