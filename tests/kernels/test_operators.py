"""The kernels as PyTorch operators: opcheck, compilation, autocast, recomputation; memory, addresses (R5, R6, R11)."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import softless
from softless import attention
from softless.errors import UnsupportedError
from softless.functional import attention_qkv, attention_with_residual
from softless.kernels.parallel import ops  # noqa: F401, a counter knows the operators that exist when it is made
from tests.kernels.cases import CASES, assert_same, draw, poisoned, regime, run

pytestmark = [
    pytest.mark.kernels,
    # Both are torch's own, raised while it compiles, and say nothing about what it compiled.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
opchecked = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck looks at its own copies'

KERNELS = sorted(Path(softless.__file__).parent.glob("kernels/**/*.py"))
ELU = ("elu", "elu", "divide", False, 1.0, 1.0, 0.0, True)
IDENTITY = ("identity", "identity", "subtract", False, 0.5, 1.0, 0.0, True)


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def asking(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def heads_last(x: Tensor) -> Tensor:
    """The last dimension is not contiguous, and the heads lie inside the tokens."""
    return x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)


def tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


MASK = torch.tensor([[True, False, True]])
ARGUMENTS = {
    "plain": lambda: (*asking(*draw(2, 3, heads=2, groups=1, dims=(2, 3))), None, None, None, *ELU, [0, 0, 0]),
    "tokens first": lambda: (*asking(*map(tokens_first, draw(3, heads=2))), None, None, None, *ELU, [0, 0, 0]),
    "heads last": lambda: (*asking(*map(heads_last, draw(3, heads=2))), None, None, None, *ELU, [0, 0, 0]),
    "packed with taps": lambda: (
        *asking(torch.randn(1, 3, 3, 1, 2)),
        None,
        None,
        MASK,
        *asking(torch.randn(1, 1, 9, 2)),
        None,
        *IDENTITY,
        [1, 1, 2],
    ),
    "in slices": lambda: (*asking(*draw(2, dims=(2, 130))), None, None, None, *ELU, [0, 0, 0]),
}


@opchecked
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_the_forward_operator_passes_opcheck(kind):
    """Schema, autograd registration, fake tensors, and compilation with dynamic shapes."""
    from softless.kernels.parallel.ops import attend_op

    torch.library.opcheck(attend_op.registered, ARGUMENTS[kind]())


@opchecked
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_the_backward_operator_passes_opcheck(kind):
    from softless.kernels.parallel.ops import attend_backward_op, attend_op

    given = [x.detach() if isinstance(x, Tensor) else x for x in ARGUMENTS[kind]()]
    out, records = attend_op(*given)
    torch.library.opcheck(attend_backward_op.registered, (torch.randn_like(out), *given[:6], records, *given[6:]))


@opchecked
def test_operators_in_spans_pass_opcheck():
    """With records that the backward pass reads."""
    from softless.kernels.parallel.ops import attend_backward_op, attend_op

    with regime("spans"):
        torch.library.opcheck(attend_op.registered, ARGUMENTS["plain"]())
        given = [x.detach() if isinstance(x, Tensor) else x for x in ARGUMENTS["plain"]()]
        out, records = attend_op(*given)
        torch.library.opcheck(attend_backward_op.registered, (torch.randn_like(out), *given[:6], records, *given[6:]))


def results(function, leaves: list[Tensor], upstream: Tensor, *, dynamic: bool = False) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    for x in leaves if dynamic else []:
        torch._dynamo.mark_dynamic(x, 2)
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def on_kernels(case: str):
    return lambda q, k, v: attention(q, k, v, CASES[case].mechanism, backend="triton")


@pytest.mark.parametrize("case", ["linear-elu", "taylor"])
def test_a_compiled_call_equals_the_eager_one(case):
    qkv, upstream = draw(3, 5, heads=2, groups=1), torch.randn(1, 2, 3, 5)
    compiled = torch.compile(on_kernels(case), fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, qkv, upstream), results(on_kernels(case), qkv, upstream))


def test_another_length_reuses_the_compiled_graph():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(on_kernels("linear-elu"), fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (127, 193):
            qkv, upstream = draw(tokens), torch.randn(1, 1, tokens, 5)
            found = results(compiled, qkv, upstream, dynamic=True)
            assert_same(found, results(on_kernels("linear-elu"), qkv, upstream))
    assert counter.frame_count == 1


def test_a_packed_projection_with_a_residual_and_a_mask_compiles():
    def function(qkv: Tensor, taps: Tensor) -> Tensor:
        return attention_qkv(qkv, taps=taps, grid=(1, 2), prefix=1, key_mask=MASK, backend="triton")

    leaves, upstream = [torch.randn(1, 3, 3, 1, 2), torch.randn(1, 1, 9, 2)], torch.randn(1, 1, 3, 2)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, leaves, upstream), results(function, leaves, upstream))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_does_not_change_gradients(reentrant):
    qkv, upstream = draw(3, 5), torch.randn(1, 1, 3, 5)

    def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(on_kernels("linear-elu"), q, k, v, use_reentrant=reentrant)

    found = []
    for function in (again, on_kernels("linear-elu")):
        leaves = asking(*qkv)
        out = function(*leaves)
        out.backward(upstream)
        found.append([out.detach(), *(x.grad for x in leaves)])
    assert_same(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_sdpa_does(dtype):
    """Half precision in and out of the kernels, float32 gradients for float32 leaves."""
    leaves, upstream = asking(*draw(3, 5)), torch.randn(1, 1, 3, 5)
    with torch.autocast("cpu", dtype=dtype):
        out = on_kernels("linear-elu")(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]
    by_hand = run("linear-elu", [x.to(dtype) for x in leaves], upstream)
    assert out.dtype == dtype
    assert all(x.dtype == torch.float32 for x in found[1:])
    assert_same(found, [by_hand.out, *(x.float() for x in by_hand[1:])])


def test_autocast_casts_taps_too():
    q, k, v = draw(2, dims=(2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention_with_residual(q, k, v, torch.randn(1, 1, 9, 3), grid=(1, 2), backend="triton")
    assert out.dtype == torch.bfloat16


def test_a_second_derivative_is_refused_in_one_sentence():
    q, k, v = asking(*draw(3, 5))
    first = torch.autograd.grad(on_kernels("linear-elu")(q, k, v).square().sum(), q, create_graph=True)[0]
    with pytest.raises(UnsupportedError, match="softless::attend_backward has no derivative"):
        first.square().sum().backward()


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_the_gradient_of_one_input_alone_is_the_same(wanted):
    """What needs no gradient gets none, and changes nothing for what does."""
    tensors, upstream = dict(zip("qkv", draw(3, 5), strict=True)), torch.randn(1, 1, 3, 5)
    every = dict(zip("qkv", run("linear-elu", tensors.values(), upstream)[1:], strict=True))
    leaf = tensors[wanted].detach().requires_grad_()
    out = on_kernels("linear-elu")(*{**tensors, wanted: leaf}.values())
    assert_same(torch.autograd.grad(out, [leaf], upstream), [every[wanted]])


def test_one_tensor_may_be_query_key_and_value():
    x, upstream = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    apart = run("inline-elu", [x, x.clone(), x.clone()], upstream)
    leaf = x.clone().requires_grad_()
    out = attention(leaf, leaf, leaf, CASES["inline-elu"].mechanism, backend="triton")
    assert_same([out.detach()], [apart.out])
    torch.testing.assert_close(torch.autograd.grad(out, leaf, upstream)[0], sum(apart[1:]))


@pytest.mark.parametrize("cut", ["whole", "spans"])
@pytest.mark.parametrize("case", ["linear-elu", "efficient"])
def test_kernels_read_no_uninitialized_memory(case, cut):
    """R5; with padding, the last tile of which is empty."""
    qkv, upstream = draw(33, 40, dims=(3, 2)), torch.randn(1, 1, 33, 2)
    with regime(cut):
        clean = run(case, qkv, upstream, key_mask=torch.arange(40)[None] < 20)
        with poisoned():
            assert_same(run(case, qkv, upstream, key_mask=torch.arange(40)[None] < 20), clean)


def test_kernels_with_slices_and_taps_read_no_uninitialized_memory():
    leaves, upstream = [*draw(4, dims=(2, 130)), torch.randn(1, 1, 9, 130)], torch.randn(1, 1, 4, 130)

    def function(*leaves: Tensor) -> Tensor:
        return attention_with_residual(*leaves, grid=(1, 3), prefix=1, backend="triton")

    clean = results(function, leaves, upstream)
    with poisoned():
        assert_same(results(function, leaves, upstream), clean)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_every_program_number_is_64_bits_wide(path):
    """R6: `tl.program_id(...)` appears only as `tl.program_id(...).to(tl.int64)`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    asked = [call for call in calls if ast.unparse(call.func).endswith("program_id")]
    cast = [ast.unparse(call) for call in calls if ast.unparse(call).endswith(".to(tl.int64)")]
    assert [ast.unparse(call) for call in asked if f"{ast.unparse(call)}.to(tl.int64)" not in cast] == []
    assert len(asked) == sum("program_id(" in each for each in cast)


def test_the_program_number_check_finds_kernels():
    """The test above has something to look at."""
    assert sum(path.read_text().count("tl.program_id(") for path in KERNELS) >= 5


@pytest.mark.parametrize("cut", ["whole", "spans"])
def test_strides_beyond_31_bits_are_harmless_for_dimensions_of_one(cut):
    qkv, upstream = draw(3, 5, dims=(3, 2)), torch.randn(1, 1, 3, 2)
    far = [x.as_strided(x.shape, (2**31 + 8, 2**33, *x.stride()[2:])) for x in qkv]
    with regime(cut):
        assert_same(run("linear-elu", far, upstream), run("linear-elu", qkv, upstream))


def test_a_token_stride_beyond_31_bits_is_harmless_for_a_single_token():
    qkv, upstream = draw(1, 1, batch=2, dims=(3, 2)), torch.randn(2, 1, 1, 2)
    far = [x.as_strided(x.shape, (x.stride(0), 2**31, 2**32, 1)) for x in qkv]
    assert_same(run("linear-elu", far, upstream), run("linear-elu", qkv, upstream))


@pytest.mark.parametrize("case", ["linear-elu", "inline-exp", "taylor", "efficient"])
def test_auto_takes_torch_on_a_cpu_even_in_the_interpreter(case):
    """The interpreter is for tests: nobody gets it without asking."""
    qkv, upstream = draw(3, 5), torch.randn(1, 1, 3, 5)
    assert_same(run(case, qkv, upstream, "auto"), run(case, qkv, upstream, "torch"))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_flops_of_the_operators_are_counted(local, packed):
    """Two products and their gradients, as in plain torch; the residual's, which has none there, are counted too."""
    qkv = torch.randn(2, 1 + 3 * 4, 3, 2, 8, requires_grad=True)
    taps, grid = (torch.randn(2, 2, 9, 8, requires_grad=True), (3, 4)) if local else (None, None)

    def count(backend: str) -> int:
        with FlopCounterMode(display=False) as counter:
            if packed or not local:
                out = attention_qkv(qkv, "inline", taps=taps, grid=grid, prefix=int(local), backend=backend)
            else:
                q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
                out = attention_with_residual(q, k, v, taps, "inline", grid=grid, prefix=1, backend=backend)
            out.sum().backward()
        return counter.get_total_flops()

    products, residual = 2 * 2 * (2 * 2 * 13 * 8 * 8), 2 * 9 * (2 * 2 * 12 * 8)
    assert count("triton") == 3 * (products + residual * local)
    assert count("torch") == pytest.approx(3 * products, rel=0.03)  # a mean there is a small product


def test_the_first_call_imports_no_compiler():
    """It would take seconds; who compiles has imported it already."""
    code = """
import sys, torch, softless
x = torch.randn(1, 1, 5, 4, requires_grad=True)
softless.attention(x, x, x, backend="triton").sum().backward()
softless.attention(x, x, x, "linear", is_causal=True, backend="triton").sum().backward()
assert "torch._dynamo" not in sys.modules, "torch._dynamo"
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
