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
from tests.numerics.budget import FORWARD, GRADIENT, assert_within_budget, worst
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
    "regress": Case(mechanism("regress"), eager.regress()),
    "regress-learned": Case(mechanism("regress", ridge="learned", gain="learned"), eager.regress(gain="learned")),
    "regress-ridge": Case(mechanism("regress", phi="elu", ridge="learned"), eager.regress("elu")),
    "regress-gain": Case(mechanism("regress", phi="relu", ridge=0.01, gain="learned")),
    "regress-raw": Case(mechanism("regress", phi="elu", center=False, gain="one"),
                        eager.regress("elu", center=False, gain="one")),
    "regress-softmax": Case(mechanism("regress", phi="softmax"), eager.regress("softmax")),
}  # fmt: skip
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
@pytest.mark.parametrize("case", ["blend", "regress", "regress-learned"])
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
    """R3 for the output and, where float32 can tell them to a quarter of an ulp, the gradients.

    The gradient of a factor is one sum over all outputs, whose terms cancel. So its own ulp bounds no error, and it
    is held to the error of the plain formula alone.
    """
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
            budget = GRADIENT | {"ulps": torch.inf} if name in inputs else GRADIENT
            assert_within_budget(ours[name].to(kind), right, plain[name], **budget, name=name)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_gradients_stay_within_budget_where_keys_are_fewer_than_channels(dtype, cut):
    """Beside the ridge, the covariance of such keys is singular, and large terms of their gradients cancel."""
    kind, (q, k, v) = HALF[dtype], draw(17, batch=4, dims=(40, 5))
    qkv, upstream = [x.to(kind) for x in (q, k + 3, v)], torch.randn(4, 1, 17, 5).to(kind)
    exact = truth("regress", qkv, {}, upstream)
    with regime(cut):
        ours = run("regress", qkv, {}, upstream)
    for name, right in exact.items():
        assert worst(ours[name], right) <= 2 * torch.finfo(kind).eps * right.abs().max().item(), name


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


@pytest.mark.parametrize("case", ["blend", "regress", "regress-learned"])
def test_a_call_without_gradients_repeats_its_plan_on_its_own_numbers(case):
    for _ in range(2):
        qkv, inputs = draw(9, heads=2), inputs_of(case, 2)
        out = attention(*qkv, CASES[case].mechanism, inputs=inputs, backend="triton")
        exact = {name: x.double() for name, x in inputs.items()}
        qkv = [x.double() for x in qkv]
        assert_near(out, attention(*qkv, CASES[case].mechanism, inputs=exact, backend="reference"), "output")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.parametrize("case", ["blend", "regress", "regress-learned"])
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


REGRESS = [case for case in CASES if case.startswith("regress")]
KEYS = {
    "one token": lambda: draw(5, 1),
    "two tokens": lambda: draw(5, 2),
    "fewer tokens than channels": lambda: draw(9, 7, dims=(33, 5)),
    "keys of rank one": lambda: _with_keys(torch.randn(1, 1, 40, 1) * torch.randn(8)),
    "a channel that is constant": lambda: _with_keys(torch.randn(1, 1, 40, 8) * (torch.arange(8) != 3) + 1),
    "small keys": lambda: _with_keys(1e-4 * torch.randn(1, 1, 40, 8)),
}


def _with_keys(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v = draw(9, 40)
    return q, k, v


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("case", ["regress", "regress-learned"])
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_regression_of_few_or_dependent_keys_matches_the_weights(case, kind, cut):
    with regime(cut):
        assert_true(case, KEYS[kind]())


@pytest.mark.parametrize("case", REGRESS)
@pytest.mark.parametrize("cut", ["whole", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_keys_read_the_mean(case, cut, dtype):
    """And their gradients are zero, but for those of the mean."""
    q, k, v = (x.to(dtype) for x in draw(9, 40))
    k, upstream, inputs = k[:, :, :1].expand_as(k), torch.ones(1, 1, 9, 5), inputs_of(case, 1)
    with regime(cut):
        ours = run(case, (q, k, v), inputs, upstream)
    mean = v.double().mean(2, keepdim=True).expand(1, 1, 9, 5)
    torch.testing.assert_close(ours["output"].double(), mean, atol=4 * torch.finfo(dtype).eps, rtol=0)
    torch.testing.assert_close(ours["v"].double(), torch.full((1, 1, 40, 5), 9 / 40).double(), atol=1e-2, rtol=0)
    assert all((ours[name] == 0).all() for name in ours if name not in ("output", "v"))


@pytest.mark.parametrize("ridge", [0.0, 1e-4, 100.0])
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_every_ridge_is_as_good_as_in_torch(ridge, cut):
    """Without a ridge, float32 itself is far from the truth where keys have small variances."""
    made, (q, k, v) = mechanism("regress", ridge=ridge), draw(20, 60, dims=(16, 5))
    exact, plain = (
        attention(*(x.to(kind) for x in (q, k, v)), made, backend=backend)
        for kind, backend in ((torch.float64, "reference"), (torch.float32, "torch"))
    )
    with regime(cut):
        out = attention(q, k, v, made, backend="triton")
    assert worst(out, exact) <= 4 * worst(plain, exact) + 2e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck looks at its own copies'
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.parametrize("case", ["blend", "regress", "regress-learned"])
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_the_operators_pass_opcheck(case, cut):
    from softless.kernels.parallel.ops import attend_backward_op, attend_op

    torch._dynamo.reset()
    learned, spec = torch.rand(2, 2), CASES[case].mechanism.kernel_spec(0.5)
    factors = None if case == "regress" else learned.requires_grad_()
    leaves = [x.requires_grad_() for x in draw(2, 3, heads=2, groups=1, dims=(2, 3))]
    given = (*leaves, None, None, factors, *spec, [0, 0, 0])
    with regime(cut):
        torch.library.opcheck(attend_op.registered, given)
        given = [x.detach() if isinstance(x, Tensor) else x for x in given]
        out, records = attend_op(*given)
        torch.library.opcheck(attend_backward_op.registered, (torch.randn_like(out), *given[:6], records, *given[6:]))


@pytest.mark.parametrize("case", ["regress", "regress-softmax"])
@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_packed_sequences_are_each_as_on_their_own(case, cut):
    offsets = torch.tensor([0, 9, 9, 44, 45])
    tokens = [torch.randn(45, heads, dim) for heads, dim in ((2, 8), (1, 8), (1, 5))]

    def packs(kind: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [x.to(kind).requires_grad_() for x in tokens]
        return leaves, [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in leaves]

    upstream = torch.randn(45, 2, 5)
    with regime(cut):
        leaves, qkv = packs(torch.float32)
        out = attention(*qkv, CASES[case].mechanism, backend="triton").transpose(1, 2).values()
        found = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    leaves, qkv = packs(torch.float64)
    rows = zip(*(x.transpose(1, 2).unbind() for x in qkv), strict=True)
    each = [[x.transpose(0, 1)[None] for x in row] for row in rows]
    out = torch.cat([attention(*x, CASES[case].mechanism, backend="reference")[0].transpose(0, 1) for x in each])
    exact = [out.detach(), *torch.autograd.grad(out, leaves, upstream.double())]
    for name, mine, right in zip(("output", *"qkv"), found, exact, strict=True):
        assert_near(mine, right, name)


def test_causal_calls_are_refused_in_one_sentence():
    with pytest.raises(BackendError, match="mechanism 'blend' has no causal kernel"):
        attention(*draw(3), CASES["blend"].mechanism, is_causal=True, inputs=inputs_of("blend", 1), backend="triton")


@pytest.mark.parametrize(
    "options",
    [{"relative": False}, {"weighting": "query"}, {"phi": "affine_relu"}, {"phi": torch.sin}],
    ids=["absolute ridge", "weighting", "affine", "function"],
)
def test_options_without_a_kernel_are_refused_in_one_sentence(options):
    made = mechanism("regress", **options)
    inputs = {name: torch.zeros(shape) for name, shape in made.input_shapes(1, 8).items()}
    with pytest.raises(BackendError, match="no kernel computes mechanism 'regress' with these options"):
        attention(*draw(3), made, inputs=inputs, backend="triton")


def test_wide_heads_of_regress_are_refused_in_one_sentence():
    with pytest.raises(BackendError, match="head dimensions up to 128, and q has 130, v has 5"):
        attention(*draw(3, dims=(130, 5)), "regress", backend="triton")
