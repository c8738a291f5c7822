"""Keys that oppose, repeat or vanish: the mean where the mass is lost, R3's budget elsewhere, at any scale (R32).

    opposed      q = u + noise, k = -u + noise         sums of q.k are large and negative
    collinear    k_j = c_j u                           one direction, both senses
    nearly       k_j = u (1 + 1e-3 noise)              what tells the keys apart is the last digits
    equal        k_j = u                               nothing tells them apart
    zero         k_j = 0

The truth is the explicit weights in float64, on the same rounded inputs.
"""

import pytest
import torch
from torch import Tensor

from softless import attention_weights
from softless.algebra import Log
from softless.mechanisms import Call
from tests.numerics import eager, eager_scored
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget, worst
from tests.numerics.cases import CASES, FORMS, Draw, attend, draw, gradients, grid
from tests.numerics.eager import visible
from tests.numerics.test_precision import fits, resolved

FORMULAS = eager.FORMULAS | eager_scored.FORMULAS
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
KINDS = ("opposed", "collinear", "nearly", "equal", "zero")
SCALES = (None, -1.0, 0.0, 1e4)
# Every reader, and the families that have none.
READERS = {
    "divide": ["linear", "linear-relu", "linear-exp", "taylor-2", "focused", "performer"],
    "subtract": ["inline", "inline-relu", "inline-exp"],
    "contrast": ["inline-sum"],
    "blend": ["blend", "blend-exp"],
    "regress": ["regress", "regress-absolute", "regress-query"],
    "channel": ["efficient"],
    "none": ["linear-none", "hydra"],
    "memory": ["delta", "efla", "decay"],
    "scores": ["softmax", "threshold"],
}
EVERY = [case for cases in READERS.values() for case in cases]
# A mass that changes sign can be lost in rounding: these kinds of keys wait for a bound on it.
SIGNED: dict[str, tuple[str, ...]] = {"taylor": ("nearly", "equal", "zero")}
COUNTS = [1, pytest.param(25, marks=pytest.mark.slow)]  # 5 kinds of keys each: 125 of a case and dtype


def keys(kind: str, u: Tensor, k: Tensor) -> Tensor:
    """Keys of one kind, in the direction u [B, H, 1, d]."""
    spread = k[..., :1]
    return {
        "opposed": -u + 0.03 * k,
        "collinear": spread * u,
        "nearly": u * (1 + 1e-3 * spread),
        "equal": u.expand_as(k),
        "zero": torch.zeros_like(k),
    }[kind]


def drawn(case: str, kind: str, dtype: torch.dtype, offset: float) -> Draw:
    given = draw(case, 17, 4)
    u = torch.randn_like(given.q[:, :, :1])
    q = u + (0.03 if kind == "opposed" else 0.5) * given.q
    return Draw(q, keys(kind, u, given.k), given.v + offset, given.inputs).to(dtype)


def scales(case: str) -> tuple[float | None, ...]:
    return SCALES if CASES[case].default_scale(4) is not None else (None,)


def asked(case: str, count: int) -> list[tuple[str, bool, float | None, float]]:
    """(kind of keys, causal or not, scale, offset of the values); where each is asked once, the offsets take turns."""
    chosen = SIGNED.get(case, KINDS)
    return [
        (kind, form, scale, offset)
        for h, kind in enumerate(chosen * count)
        for i, form in enumerate(FORMS[case])
        for j, scale in enumerate(scales(case))
        for k, offset in enumerate((0.0, 10.0))
        if count > 1 or (h + i + j) % 2 == k
    ]


def plain(case: str, given: Draw, is_causal: bool, scale: float | None) -> Tensor:
    """The formula as one types it, where it has no scale; nothing to be compared with otherwise."""
    q, k, v, inputs = given
    if scale is not None:
        return torch.full_like(q[..., :1].expand(*q.shape[:3], v.shape[3]), torch.inf)
    return FORMULAS[case](q, k, v, visible(q, k, is_causal), inputs)


def terms(case: str, given: Draw, is_causal: bool, scale: float | None) -> float:
    """max row sum |w| max |v|: what the terms of an output may add up to before they cancel."""
    call = {"is_causal": is_causal, "inputs": given.inputs, "grid": grid(case, given.q), "scale": scale}
    sums = attention_weights(given.q, given.k, CASES[case], **call).abs().sum(-1).max().item()
    if (
        case in READERS["subtract"] + READERS["contrast"] + READERS["blend"] + READERS["scores"]
    ):  # scores that their mean or maximum leaves
        made, tokens = CASES[case], given.k.shape[2] if case in READERS["contrast"] else 1
        phi_q, phi_k = (made.features_q(x.abs(), Call()) if made.carries_state else x.abs() for x in given[:2])
        phi_q, phi_k = (x.value.exp() if isinstance(x, Log) else x for x in (phi_q, phi_k))
        gain = made.default_scale(given.q.shape[3]) if scale is None else abs(scale)
        sums += gain * tokens * (phi_q @ phi_k.mT).max().item()
    if case == "regress-absolute":  # products through A^-1, which is at most n / ridge
        apart, gain = given.k - given.k.mean(2, keepdim=True), 0.5 if scale is None else abs(scale)
        sums += gain * given.q.norm(dim=-1).max().item() * apart.norm(dim=-1).max().item() * 17 / CASES[case].ridge
    return sums * given.v.abs().max().item()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", [*EVERY, *SIGNED])
def test_outputs_stay_within_budget_however_the_keys_cancel(case, dtype, count):
    """Half precision where float32 sums can tell the output at all; the others relative to what cancels."""
    for kind, is_causal, scale, offset in asked(case, count):
        given = drawn(case, kind, dtype, offset)
        wide = given.to(torch.float64)
        options = {"is_causal": is_causal, "scale": scale}
        exact = attend(case, wide, **options, backend="reference")
        if not fits(exact, dtype):
            continue
        name = f"{kind} keys, causal {is_causal}, scale {scale}, values around {offset}"
        for backend in ("torch", "reference"):
            actual = attend(case, given, **options, backend=backend)
            if dtype.itemsize == 2:
                single = attend(case, given.to(torch.float32), **options, backend="reference")
                if resolved(single, exact, dtype):
                    eager_out = plain(case, given, is_causal, scale)
                    assert_within_budget(actual, exact, eager_out, **FORWARD, name=f"{name}, {backend}")
                continue
            size = exact.abs().max().item() + terms(case, wide, is_causal, scale)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-12
            error = worst(actual, exact)
            assert error <= tolerance * (1 + size), f"{name}, {backend}: off by {error:.1e} of {size:.1e}"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", [*EVERY, *SIGNED])
def test_gradients_stay_within_budget_however_the_keys_cancel(case, dtype, count):
    """Where float32 sums can tell them at all."""
    for kind, is_causal, scale, offset in asked(case, count):
        if case in READERS["scores"] and scale == 1e4:
            continue  # a softmax that picks one key has no gradient but its rounding
        given = drawn(case, kind, dtype, offset)
        options = {"is_causal": is_causal, "scale": scale}
        found, upstream = [], None
        for kind_of, backend in ((torch.float64, "reference"), (dtype, "torch"), (torch.float32, "reference")):
            leaves = [x.to(kind_of).requires_grad_() for x in given.leaves()]
            out = attend(case, given.rebuilt(*leaves), **options, backend=backend)
            upstream = torch.randn(out.shape).to(dtype) if upstream is None else upstream
            found.append(gradients(out, upstream, leaves) if fits(out, dtype) else None)
        if found[0] is None or found[1] is None or found[2] is None:
            continue
        for name, truth, mine, single in zip(("q", "k", "v", *given.inputs), *found, strict=True):
            if fits(truth, dtype) and resolved(single, truth, dtype):
                blame = f"gradient of {name}, {kind} keys, causal {is_causal}, scale {scale}, values around {offset}"
                assert_within_budget(mine, truth, torch.full_like(mine, torch.inf), **GRADIENT, name=blame)


def running_mean(v: Tensor, is_causal: bool) -> Tensor:
    if not is_causal:
        return v.mean(2, keepdim=True).expand_as(v)
    return v.cumsum(2) / torch.arange(1, v.shape[2] + 1, dtype=v.dtype)[:, None]


# (case, q, kind of keys, scale): features or gains that are zero, and keys that nothing tells apart.
MEANS = [
    *((case, 1.0, "equal", None) for case in ("linear", "linear-exp", "inline", "inline-exp", "inline-sum", "softmax")),
    *((case, 1.0, "zero", None) for case in ("linear", "linear-relu", "inline", "inline-sum", "taylor", "efficient")),
    *((case, 1.0, "collinear", 0.0) for case in ("inline", "inline-exp", "inline-sum", "softmax")),
    *(("blend", 1.0, kind, None) for kind in ("equal", "zero")),
    *(("regress", 1.0, kind, None) for kind in ("equal", "zero")),
    *(("regress-absolute", 1.0, kind, scale) for kind, scale in (("equal", 1e4), ("zero", None), ("collinear", 0.0))),
    ("linear-relu", -1.0, "equal", None),
    ("linear-identity", 1.0, "zero", None),
    ("taylor", 0.0, "collinear", None),
    ("inline", 1.0, "equal", -1e4),
    ("inline", 1.0, "equal", 1e4),
    ("inline-sum", 1.0, "equal", 1e4),
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("case", "size", "kind", "scale"), MEANS)
def test_a_lost_mass_reads_the_mean(case, size, kind, scale, dtype):
    """To an ulp of half precision, which is rounded once, and what sums over 17 keys cost in float32 or float64."""
    for is_causal in FORMS[case]:
        q, k, v, inputs = drawn(case, kind, torch.float64, 0.0)
        q, k = (size * x.abs() for x in (q, k)) if case == "linear-relu" else (size * q, k)
        given = Draw(q, k, v, inputs).to(dtype)
        expected = running_mean(given.v.double(), is_causal)
        ulp = torch.finfo(dtype).eps * given.v.double().abs().max().item() if dtype.itemsize == 2 else 0.0
        sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        allowed = ulp + 17 * sums * terms(case, given.to(torch.float64), is_causal, scale)
        for backend in ("torch", "reference"):
            error = worst(attend(case, given, is_causal=is_causal, scale=scale, backend=backend), expected)
            assert error <= allowed, f"{backend}, causal {is_causal}: off by {error:.1e}, allowed {allowed:.1e}"
