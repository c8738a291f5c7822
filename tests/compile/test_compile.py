"""The public call compiles whole, forward and backward, for any length, and exports: R11."""

import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from softless import attention, attention_with_state, list_mechanisms
from softless.nn import Attention
from tests.numerics.cases import CASES, FORMS, STATEFUL, Draw, attend, draw, gradients, grid

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.compile,
    # Both are torch's own, raised while it compiles, and say nothing about what it compiled.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]

# At every change one of each mechanism compiles, these for any length; make slow takes all options, both ways.
MECHANISMS = [
    "softmax",
    "general",
    "linear",
    "inline",
    "efficient",
    "taylor",
    "hydra",
    "angular",
    "focused",
    "threshold",
]
# A loop over chunks is unrolled: another number of them is another graph.
UNROLLED = ("delta", "efla", "decay", "decay-retention", "regress-absolute", "regress-learned", "regress-affine_relu")
# And options that make another graph, as causal as they can be; performer's causal one takes the longest of all.
OTHERS = ["linear-affine_relu", "threshold-minimax-mean", "cosformer-fixed", "performer", "delta", "efla", "decay"]
OTHERS += [
    "blend",
    "regress",
    "regress-learned",
    "transnormer",
    "diagonal",
    "mlla",
    "a2",
    "topk",
    "sparse",
    "longformer",
    "linformer",
    "nystrom",
    "agent",
    "soft",
]
OTHERS += ["nearfar", "nonlocal-dot", "emanet", "reformer", "asymmetric_nonlocal"]

# In the chunks of inline, whose length is a symbol there, lie those of the other kernels.
BOTH_WAYS = [(case, form) for case in ("softmax", "inline") for form in FORMS[case]]
KERNELS = ["linear", "efficient", "taylor", "hydra", "angular", "focused"]
ANY_LENGTH = BOTH_WAYS + [(case, case not in KERNELS) for case in MECHANISMS if case not in ("softmax", "inline")]
ONE_LENGTH = [(case, FORMS[case][-1] and case != "performer") for case in OTHERS] + [("linear-exp", False)]


def cases(chosen: list[tuple[str, bool]], among: Collection[str] = CASES.keys()) -> pytest.MarkDecorator:
    params = [
        pytest.param(
            *each,
            marks=[] if each in chosen else [pytest.mark.slow],
            id=f"{'causal' if each[1] else 'all'}-{each[0]}",
        )
        for each in ((case, form) for case in CASES if case in among for form in FORMS[case])
    ]
    return pytest.mark.parametrize(("case", "is_causal"), params)


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call(case: str, is_causal: bool):
    """`attention` as a function of tensors alone."""

    def run(q: Tensor, k: Tensor, v: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return attention(q, k, v, CASES[case], is_causal=is_causal, inputs=inputs, grid=grid(case, q))

    return run


def results(run, given: Draw, *, dynamic: bool = False) -> list[Tensor]:
    """Output and gradients; `dynamic` marks the tokens of q, k and v as a dimension of any length."""
    torch.manual_seed(11)
    leaves = [x.detach().clone().requires_grad_() for x in given.leaves()]
    for x in leaves[:3] if dynamic else []:
        torch._dynamo.mark_dynamic(x, 2)
    out = run(*given.rebuilt(*leaves))
    return [out, *gradients(out, torch.randn(out.shape, dtype=out.dtype), leaves)]


def assert_same(compiled: list[Tensor], eager: list[Tensor], tolerance: float = 1e-12) -> None:
    for name, ours, theirs in zip(["output", *"qkv", *range(9)], compiled, eager, strict=False):
        assert ours.dtype == theirs.dtype
        error, bound = (ours - theirs).abs().max().item(), tolerance * (1 + theirs.abs().max().item())
        assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


def test_no_mechanism_waits_to_be_compiled():
    assert {CASES[case].name for case, _ in (*ANY_LENGTH, *ONE_LENGTH)} == set(list_mechanisms())


@cases(ONE_LENGTH)
def test_compiled_attention_matches_eager(case, is_causal):
    given, run = draw(case, 70, 2, kv_heads=1), call(case, is_causal)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, given), results(run, given))


@cases(BOTH_WAYS, ["softmax", "inline", "linear"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
def test_inductor_matches_eager(case, is_causal, dtype):
    given, run = draw(case, 70, 4).to(dtype), call(case, is_causal)
    compiled = torch.compile(run, fullgraph=True)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_same(results(compiled, given), results(run, given), tolerance)


@cases(ANY_LENGTH, CASES.keys() - UNROLLED)
def test_another_length_needs_no_other_graph(case, is_causal):
    run = call(case, is_causal)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (193, 321):  # a graph for one block of far tokens, as 127 have, is for no other number
            given = draw(case, tokens, 2, kv_heads=1)
            assert_same(results(compiled, given, dynamic=True), results(run, given))


DYNAMIC = [("linear", False), ("inline", False), ("softmax", False), ("softmax", True)]
# With every size a symbol, shapes of chunks take long to reason about.
DYNAMIC += [pytest.param(case, True, marks=pytest.mark.slow) for case in ("linear", "inline")]


@pytest.mark.parametrize(("case", "is_causal"), DYNAMIC)
def test_all_dimensions_may_be_dynamic(case, is_causal):
    run = call(case, is_causal)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = 7 if case == "softmax" else 5  # SDPA takes its scale, and so the head dimension, as a constant
        for tokens, dim, batch in ((127, 7, 3), (193, other, 6)):  # no two sizes equal: torch would take them for one
            given = draw(case, tokens, dim, batch=batch, heads=4, kv_heads=2)
            assert_same([compiled(*given)], [run(*given)])


DECODED = ["linear", "inline"]
DECODED += [
    pytest.param(case, marks=pytest.mark.slow) for case in MECHANISMS if case in STATEFUL and case not in DECODED
]


@pytest.mark.parametrize("case", DECODED)
def test_decoding_compiles_once(case):
    """Prefill is one graph, every later token another."""
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, state, inputs):
        return attention_with_state(q, k, v, CASES[case], state, inputs=inputs)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    given = draw(case, 8, 2)
    (*prompt, inputs) = given.tokens(slice(5))
    _, expected_state = step(*prompt, None, inputs)
    _, state = compiled(*prompt, None, inputs)
    for i in (5, 6, 7):
        (*token, inputs) = given.tokens(slice(i, i + 1))
        token, inputs = [x.contiguous() for x in token], {name: x.contiguous() for name, x in inputs.items()}
        expected, expected_state = step(*token, expected_state, inputs)
        out, state = compiled(*token, state, inputs)
        assert_same([out, *state[1:]], [expected, *expected_state[1:]])
    assert counter.frame_count == 2


@cases([*BOTH_WAYS, ("linear", False), ("threshold", True)], ["softmax", "inline", "linear", "threshold"])
def test_padding_compiles(case, is_causal):
    given = draw(case, 70, 2, batch=2)
    mask = torch.rand(2, 70) > 0.3

    def run(q, k, v, inputs):
        return attention(q, k, v, CASES[case], is_causal=is_causal, inputs=inputs, key_mask=mask)

    assert_same(results(torch.compile(run, fullgraph=True, backend="aot_eager"), given), results(run, given))


@pytest.mark.parametrize("case", ["inline", "softmax", "focused-learned"])
@pytest.mark.parametrize("local", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_module_compiles(case, local):
    layer = Attention(12, 3, CASES[case], local=local)
    x = torch.randn(2, 9, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same([compiled(x, (2, 4))], [layer(x, (2, 4))], 1e-6)


FRESH = """
import torch, softless

@torch.compile(fullgraph=True, backend="aot_eager")
def run(q, k, v):
    return softless.attention(q, k, v, {name!r}, is_causal={is_causal})

q, k, v = (torch.randn(1, 2, 70, 4, requires_grad=True) for _ in "qkv")
out = run(q, k, v)
out.sum().backward()
eager = softless.attention(q, k, v, {name!r}, is_causal={is_causal})
assert torch.allclose(out, eager, atol=1e-5), (out - eager).abs().max()
assert q.grad.isfinite().all()
print("same")
"""


LATER = [pytest.param(*each, marks=pytest.mark.slow) for each in (("efficient", True), ("softmax", False))]


@pytest.mark.parametrize(("name", "is_causal"), [("inline", False), *LATER])
def test_the_first_call_of_a_process_may_be_compiled(name, is_causal):
    """`softless.attention` is imported when first used, here while it is being traced."""
    code = FRESH.format(name=name, is_causal=is_causal)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


class Head(torch.nn.Module):
    def __init__(self, case: str, is_causal: bool, inputs: dict[str, Tensor] | None = None):
        super().__init__()
        self.case, self.is_causal, self.inputs = case, is_causal, inputs or {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.case, Draw(q, k, v, self.inputs), is_causal=self.is_causal)


EXPORTED = [("inline", False), ("linear", False), ("linear", True), ("softmax", False), ("softmax", True)]
EXPORTED += [("topk", True), ("longformer", False)]
RANGES = {"topk": (2, 4096), "linformer": (2, 199), "cosformer-fixed": (2, 199)}  # from k on, or below the length


def documented(form: str) -> set[str]:
    """The mechanisms that docs/mechanisms.md says are exported with a dynamic number of tokens."""
    page = (ROOT / "docs" / "mechanisms.md").read_text()
    row = next(line for line in page.split("## Exporting")[1].splitlines() if line.startswith(f"| {form} |"))
    return set(re.findall("`([a-z0-9_]+)`", row))


def test_the_table_of_exports_names_mechanisms_alone():
    assert documented("not causal") | documented("causal") <= set(list_mechanisms())


@cases(EXPORTED)
def test_the_mechanisms_that_the_docs_name_export_with_any_number_of_tokens_and_no_others(case, is_causal):
    least, most = RANGES.get(case, (2, 4096))
    tokens, drawn = torch.export.Dim("tokens", min=least, max=most), draw(case, 70, 4)
    head, shapes = Head(case, is_causal, drawn.inputs), {key: {2: tokens} for key in "qkv"}
    if CASES[case].name not in documented("causal" if is_causal else "not causal"):
        with pytest.raises(Exception, match=r"Constraints violated|non-negative|needs grid|beta"):  # torch's and ours
            torch.export.export(head, drawn[:3], dynamic_shapes=shapes)
        return
    exported = torch.export.export(head, drawn[:3], dynamic_shapes=shapes)
    for length in (2, 63, 64, 70, 193):
        given = draw(case, length, 4)[:3]
        assert_same([exported.module()(*given)], [head(*given)])


@pytest.mark.parametrize("case", ["inline", "linear"])
def test_a_causal_graph_exports_for_its_length(case):
    head, given = Head(case, True), draw(case, 193, 4)[:3]
    assert_same([torch.export.export(head, given).module()(*given)], [head(*given)])


@pytest.mark.parametrize("local", [False, True])
def test_the_module_exports(local):
    layer = Attention(12, 3, local=local)
    x = torch.randn(2, 9, 12)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(layer, (x, (2, 4)), dynamic_shapes=({0: batch}, (None, None)))
    other = torch.randn(5, 9, 12)
    assert_same([exported.module()(other, (2, 4))], [layer(other, (2, 4))], 1e-6)
