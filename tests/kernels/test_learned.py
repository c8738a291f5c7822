"""Blend and regress on the kernels are the explicit weights: outputs and gradients, also of their numbers per head.

The truth is `backend="reference"` in float64: never another fast path.
"""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from softless import Mechanism, attention, mechanism
from softless.errors import BackendError
from softless.functional import attention_qkv, attention_with_residual
from tests.kernels.cases import REGIMES, assert_near, assert_same, draw, poisoned, regime
from tests.numerics import eager
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget
from tests.numerics.test_precision import HALF, fits, resolved

pytestmark = [
    pytest.mark.kernels,
    # numpy says it where a GPU says nothing: in branches not taken.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]


class Case(NamedTuple):
    """A mechanism, and its published formula as anyone would type it."""

    mechanism: Mechanism
    plain: eager.Formula | None = None


CASES = {
    "blend": Case(mechanism("blend"), eager.blend("elu")),
    "blend-relu": Case(mechanism("blend", phi="relu"), eager.blend("relu")),
    "blend-exp": Case(mechanism("blend", phi="exp", t=0.5), eager.blend("exp", t=0.5)),
    "blend-softmax": Case(mechanism("blend", phi="softmax"), eager.blend("softmax")),
    "blend-relu-exp": Case(mechanism("blend", phi="relu", phi_k="exp")),
}
BLEND = tuple(name for name in CASES if name.startswith("blend"))
every_case = pytest.mark.parametrize("case", CASES)
every_regime = pytest.mark.parametrize("cut", REGIMES)


def inputs_of(case: str, heads: int) -> dict[str, Tensor]:
    """One number per head, of either sign."""
    return {name: torch.randn(shape) for name, shape in CASES[case].mechanism.input_shapes(heads, 1).items()}


def run(
    case: str, qkv: Any, inputs: dict[str, Tensor], upstream: Tensor, backend: str = "triton", **call: Any
) -> dict[str, Tensor]:
    """Return the output, and the gradients by name."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    learned = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = attention(*leaves, CASES[case].mechanism, inputs=learned, backend=backend, **call)
    gradients = torch.autograd.grad(out, [*leaves, *learned.values()], upstream.to(out.dtype))
    return dict(zip(("output", *"qkv", *learned), (out.detach(), *gradients), strict=True))


def truth(case: str, qkv: Any, inputs: dict[str, Tensor], upstream: Tensor, **call: Any) -> dict[str, Tensor]:
    exact = {name: x.double() for name, x in inputs.items()}
    return run(case, [x.double() for x in qkv], exact, upstream.double(), "reference", **call)


def assert_true(case: str, qkv: Any, **call: Any) -> None:
    """float32 output and gradients of the kernels are the truth to 1e-5."""
    q, _, v = qkv
    inputs, upstream = inputs_of(case, q.shape[1]), torch.randn(*q.shape[:3], v.shape[3])
    ours, exact = run(case, qkv, inputs, upstream, **call), truth(case, qkv, inputs, upstream, **call)
    for name, right in exact.items():
        assert_near(ours[name], right, name)


@every_case
@every_regime
def test_outputs_and_gradients_match_the_explicit_weights(case, cut):
    """Two tiles of keys, shared key heads, values narrower than keys."""
    with regime(cut):
        assert_true(case, draw(35, 43, batch=2, heads=2, groups=1))


@every_case
def test_full_tiles_match_the_explicit_weights(case):
    with regime("spans"):
        assert_true(case, draw(32, 64, dims=(32, 32)))


@pytest.mark.parametrize("dims", [(1, 1), (33, 20), (20, 40), (100, 70)], ids=str)
@pytest.mark.parametrize("case", ["blend"])
def test_every_head_dimension_matches_the_weights(case, dims):
    assert_true(case, draw(19, 17, dims=dims))


@every_case
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_the_contents_of_padding_change_nothing(case, cut):
    """Outputs and gradients are those of zeros bit for bit, and match the truth."""
    q, k, v = draw(5, 40, dims=(3, 2))
    mask = torch.arange(40)[None] % 3 == 2
    inputs, upstream = inputs_of(case, 1), torch.randn(1, 1, 5, 2)
    found = []
    for junk in (0.0, torch.nan, torch.inf):
        filled = [torch.where(mask[:, None, :, None], x, junk) for x in (k, v)]
        with regime(cut):
            found.append(run(case, (q, *filled), inputs, upstream, key_mask=mask))
    assert_same(found[0].values(), found[1].values())
    assert_same(found[0].values(), found[2].values())
    for name, right in truth(case, (q, k, v), inputs, upstream, key_mask=mask).items():
        assert_near(found[0][name], right, name)


@every_case
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_queries_without_visible_keys_read_zero(case, cut):
    qkv, inputs = draw(3, 9), inputs_of(case, 1)
    with regime(cut):
        ours = run(case, qkv, inputs, torch.randn(1, 1, 3, 5), key_mask=torch.zeros(1, 9, dtype=torch.bool))
    assert all((x == 0).all() for x in ours.values())


@every_case
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_in_a_visible_token_reaches_the_output(case, where):
    tensors = dict(zip("qkv", draw(4, 6, dims=(3, 2)), strict=True))
    tensors[where][0, 0, 2, 1] = torch.nan
    out = attention(*tensors.values(), CASES[case].mechanism, inputs=inputs_of(case, 1), backend="triton")
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[{"q": (0, 0, 2), "k": ..., "v": (..., 1)}[where]] = True
    assert torch.equal(out.isnan(), expected)


@every_case
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_kernels_read_no_uninitialized_memory_and_repeat_bit_for_bit(case, cut):
    qkv, inputs, upstream = draw(33, 40, heads=2, dims=(3, 2)), inputs_of(case, 2), torch.randn(1, 2, 33, 2)
    mask = torch.arange(40)[None] < 20
    with regime(cut):
        clean = run(case, qkv, inputs, upstream, key_mask=mask)
        with poisoned():
            assert_same(run(case, qkv, inputs, upstream, key_mask=mask).values(), clean.values())


FAMILIES = {
    "plain": lambda q, k, v: (q, k, v),
    "keys and values with a mean": lambda q, k, v: (q, k + 20, v + 20),
    "all with a mean": lambda q, k, v: (q + 5, k + 5, v + 5),
    "small": lambda q, k, v: (q / 100, k / 100, v / 100),
}


@pytest.mark.parametrize(
    ("case", "family", "dtype"),
    [(case, family, list(HALF)[(i + j) % 2])
     for (i, case), (j, family) in product(enumerate(CASES), enumerate(FAMILIES)) if CASES[case].plain is not None],
)  # fmt: skip
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_half_precision_stays_within_budget(case, family, dtype, cut):
    """R3 for the output and, where float32 can tell them to a quarter of an ulp, the gradients."""
    kind, shrink = HALF[dtype], 0.1 if "exp" in case else 1.0  # e^20 would be beyond float16
    q, k, v = FAMILIES[family](*draw(48))
    qkv = [x.to(kind) for x in (shrink * q, shrink * k, v)]
    inputs, upstream = inputs_of(case, 1), torch.randn(1, 1, 48, 5).to(kind)
    exact = truth(case, qkv, inputs, upstream)
    with regime(cut):
        ours = run(case, qkv, inputs, upstream)
    single = run(case, [x.float() for x in qkv], inputs, upstream, "torch")
    leaves = [x.detach().requires_grad_() for x in qkv]
    rough = {name: x.to(kind).requires_grad_() for name, x in inputs.items()}
    out = CASES[case].plain(*leaves, leaves[0].new_ones(48, 48), rough)
    gradients = torch.autograd.grad(out, [*leaves, *rough.values()], upstream)
    plain = dict(zip(exact, (out.detach(), *gradients), strict=True))
    for name, right in exact.items():
        if name == "output":
            assert_within_budget(ours[name], right, plain[name], **FORWARD, name=name)
        elif fits(right, kind) and resolved(single[name], right, kind):
            assert_within_budget(ours[name].to(kind), right, plain[name], **GRADIENT, name=name)


@every_case
@pytest.mark.parametrize(("grid", "prefix", "cut"), [((5, 3), 1, "whole"), ((3, 13), 0, "spans")], ids=str)
def test_the_local_residual_matches_the_reference(case, grid, prefix, cut):
    tokens = prefix + grid[0] * grid[1]
    q, k, v = draw(tokens, heads=2)
    leaves, inputs = [q, k, v, torch.randn(1, 2, 9, 5)], inputs_of(case, 2)
    upstream = torch.randn(1, 2, tokens, 5)

    def gradients(kind: torch.dtype, backend: str) -> list[Tensor]:
        given = [x.to(kind).requires_grad_() for x in leaves]
        learned = {name: x.to(kind).requires_grad_() for name, x in inputs.items()}
        out = attention_with_residual(
            *given, CASES[case].mechanism, grid=grid, prefix=prefix, inputs=learned, backend=backend
        )
        return [out.detach(), *torch.autograd.grad(out, [*given, *learned.values()], upstream.to(kind))]

    with regime(cut):
        ours = gradients(torch.float32, "triton")
    for at, (mine, right) in enumerate(zip(ours, gradients(torch.float64, "reference"), strict=True)):
        assert_near(mine, right, f"result {at}")


@every_case
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_a_packed_projection_gives_what_its_parts_give(case, cut):
    qkv, inputs, upstream = torch.randn(2, 35, 3, 2, 4), inputs_of(case, 2), torch.randn(2, 2, 35, 4)
    leaf = qkv.clone().requires_grad_()
    with regime(cut):
        out = attention_qkv(leaf, CASES[case].mechanism, inputs=inputs, backend="triton")
        (found,) = torch.autograd.grad(out, leaf, upstream)
        parts = run(case, qkv.permute(2, 0, 3, 1, 4).unbind(), inputs, upstream)
    assert_same([out.detach(), *found.permute(2, 0, 3, 1, 4).unbind()], list(parts.values())[:4])


@pytest.mark.parametrize("case", ["blend"])
def test_a_call_without_gradients_repeats_its_plan_on_its_own_numbers(case):
    for _ in range(2):
        qkv, inputs = draw(9, heads=2), inputs_of(case, 2)
        out = attention(*qkv, CASES[case].mechanism, inputs=inputs, backend="triton")
        exact = {name: x.double() for name, x in inputs.items()}
        qkv = [x.double() for x in qkv]
        assert_near(out, attention(*qkv, CASES[case].mechanism, inputs=exact, backend="reference"), "output")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.parametrize("case", ["blend"])
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_a_compiled_call_equals_the_eager_one(case, cut):
    torch._dynamo.reset()
    qkv, inputs, upstream = draw(3, 5, heads=2, groups=1), inputs_of(case, 2), torch.randn(1, 2, 3, 5)

    def function(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        given = dict(zip(inputs, learned, strict=True))
        return attention(q, k, v, CASES[case].mechanism, inputs=given, backend="triton")

    with regime(cut):
        leaves = [x.clone().requires_grad_() for x in (*qkv, *inputs.values())]
        out = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
        found = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
        assert_same(found, run(case, qkv, inputs, upstream).values())


@pytest.mark.parametrize("case", ["blend"])
def test_causal_calls_are_refused_in_one_sentence(case):
    made = CASES[case].mechanism
    with pytest.raises(BackendError, match=f"mechanism '{made.name}' has no causal kernel"):
        attention(*draw(3), made, is_causal=True, inputs=inputs_of(case, 1), backend="triton")
