"""The causal kernels against explicit weights in float64, in Triton's interpreter: R1, R2, R5, R6, R9."""

import pytest
import torch
from torch import Tensor

from softless import Mechanism, attention, attention_with_state, mechanism
from softless.algebra.kernel_spec import KernelSpec
from softless.algebra.state import State
from softless.kernels.causal import tiles as causal_tiles
from softless.kernels.causal.ops import continued
from tests.kernels.cases import poisoned

pytestmark = pytest.mark.kernels

DIVIDE, SUBTRACT, NONE = "divide", "subtract", "none"
EXACT = 1e-5  # R1 for float32


def specified(reader: str, phi: str, d: int, phi_k: str | None = None) -> tuple[Mechanism, KernelSpec]:
    """A mechanism, and what the kernels need to know about it."""
    if phi == "taylor":
        return mechanism("taylor"), KernelSpec("unit", "unit", DIVIDE, constant=True)
    scale = 0.5 * d**-0.5 if reader == SUBTRACT else 0.7 if reader == NONE else 1.0
    name, options = ("inline", {}) if reader == SUBTRACT else ("linear", {"normalize": reader})
    return mechanism(name, phi=phi, phi_k=phi_k, **options), KernelSpec(phi, phi_k or phi, reader, scale=scale)


def scaled(reader: str, spec: KernelSpec) -> dict[str, float]:
    return {} if reader == DIVIDE else {"scale": spec.scale}


def draw(tokens: int, d: int = 5, e: int = 3, *, batch: int = 1, heads: int = 1, groups: int = 1) -> list[Tensor]:
    shapes = (heads, d), (groups, d), (groups, e)
    return [torch.randn(batch, h, tokens, width).requires_grad_() for h, width in shapes]


def segments_of(monkeypatch: pytest.MonkeyPatch, segments: int, length: int) -> None:
    monkeypatch.setattr(causal_tiles, "cut", lambda *_: (segments, length))


def gradients(outputs: list[Tensor], leaves: list[Tensor], seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float = EXACT) -> None:
    for a, b in zip(ours, exact, strict=True):
        assert a.shape == b.shape
        error = (a.detach().double() - b.detach()).abs().max().item() if b.numel() else 0.0
        size = b.abs().max().item() if b.numel() else 0.0
        assert error <= tolerance * (1 + size), f"off by {error:.1e} where numbers reach {size:.1e}"


@pytest.mark.parametrize(
    ("reader", "phi", "phi_k", "tokens", "d", "e", "heads", "groups"),
    [
        (DIVIDE, "elu", None, 33, 5, 3, 2, 1),
        (DIVIDE, "relu", None, 16, 33, 40, 1, 1),
        (DIVIDE, "softmax", "elu", 17, 5, 8, 1, 1),
        (DIVIDE, "taylor", None, 20, 5, 3, 1, 1),
        (SUBTRACT, "identity", None, 15, 8, 1, 4, 2),
        (SUBTRACT, "leaky_relu", None, 32, 3, 5, 1, 1),
        (SUBTRACT, "softmax", None, 2, 3, 5, 1, 1),
        (NONE, "elu", None, 34, 1, 3, 1, 1),
        (NONE, "identity", "relu", 1, 4, 4, 1, 1),
    ],
)
def test_causal_outputs_and_gradients_match_the_weights(reader, phi, phi_k, tokens, d, e, heads, groups):
    leaves = draw(tokens, d, e, heads=heads, groups=groups)
    made, spec = specified(reader, phi, d, phi_k)
    out, _ = continued(*leaves, None, None, spec)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = attention(*wide, made, is_causal=True, backend="reference", **scaled(reader, spec))
    assert_close([out, *gradients([out], leaves)], [exact, *gradients([exact], wide)])


@pytest.mark.parametrize("reader", [DIVIDE, SUBTRACT, NONE])
@pytest.mark.parametrize("segments", [2, 3])
def test_cutting_into_segments_does_not_change_the_results(monkeypatch, reader, segments):
    leaves = draw(50)
    made, spec = specified(reader, "elu", 5)
    segments_of(monkeypatch, segments, 32 if segments == 2 else 20)
    out, state = continued(*leaves, None, None, spec)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = attention(*wide, made, is_causal=True, backend="reference", **scaled(reader, spec))
    assert_close([out, *gradients([out], leaves)], [exact, *gradients([exact], wide)])
    _, after = attention_with_state(*wide, made, **scaled(reader, spec))
    assert_close([state.k_mean, state.v_mean, state.comoment], [after.k_mean, after.v_mean, after.comoment])


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("reader", [DIVIDE, SUBTRACT])
def test_hidden_tokens_are_not_read_and_get_no_gradient(monkeypatch, reader, segments):
    """Left padding of more than a segment, holes, and a row that is all padding."""
    segments_of(monkeypatch, segments, 40 if segments == 1 else 16)
    leaves = draw(40, batch=3)
    mask = torch.rand(3, 40) < 0.7
    mask[0, :20], mask[2] = False, False
    hidden = ~mask[:, None, :, None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    leaves[1:] = [torch.where(hidden, torch.nan, x.detach()).requires_grad_() for x in leaves[1:]]
    made, spec = specified(reader, "elu", 5)
    out, state = continued(*leaves, mask, None, spec)
    exact = attention(*wide, made, is_causal=True, key_mask=mask, backend="reference", **scaled(reader, spec))
    found = gradients([out], leaves)
    assert_close([out, *found], [exact, *gradients([exact], wide)])
    assert (out[0, :, : mask[0].nonzero()[0]] == 0).all()
    assert all((g.masked_select(hidden) == 0).all() for g in found[1:])
    assert state.n.flatten().tolist() == mask.sum(-1).tolist()


@pytest.mark.parametrize("phi", ["elu", "taylor"])
@pytest.mark.parametrize("cut", [1, 20])
def test_a_sequence_cut_anywhere_continues_from_the_algebras_state(phi, cut):
    q, k, v = (x.detach() for x in draw(36, heads=2))
    made, spec = specified(DIVIDE, phi, 5)
    first, state = continued(*(x[:, :, :cut] for x in (q, k, v)), None, None, spec)
    theirs = attention_with_state(*(x[:, :, :cut].double() for x in (q, k, v)), made)[1]
    assert [x.shape for x in state[1:]] == [x.shape for x in theirs[1:]]
    assert [x.dtype for x in state] == [torch.int64, *[torch.float32] * 4]
    assert_close(list(state[1:]), list(theirs[1:]))
    assert (state.n == theirs.n).all()
    given = State(theirs.n, *(x.float() for x in theirs[1:]))
    exact = attention(q.double(), k.double(), v.double(), made, is_causal=True, backend="reference")
    for before in (state, given):
        second, _ = continued(*(x[:, :, cut:] for x in (q, k, v)), None, before, spec)
        assert_close([torch.cat([first, second], 2)], [exact])


@pytest.mark.parametrize(
    ("reader", "phi", "groups", "segments"),
    [(DIVIDE, "elu", 1, 1), (SUBTRACT, "identity", 2, 2), (NONE, "elu", 2, 1), (DIVIDE, "taylor", 1, 2)],
)
def test_gradients_flow_through_the_state_in_and_out(monkeypatch, reader, phi, groups, segments):
    q, k, v = draw(24, heads=2, groups=groups)
    made, spec = specified(reader, phi, 5)
    past = attention_with_state(*(torch.randn(1, h, 9, w) for h, w in ((2, 5), (groups, 5), (groups, 3))), made)[1]
    segments_of(monkeypatch, segments, 24 if segments == 1 else 16)
    ours = [q, k, v, *(x.detach().requires_grad_() for x in past[1:4])]
    wide = [x.detach().double().requires_grad_() for x in ours]
    out, after = continued(*ours[:3], None, State(past.n, *ours[3:], past.shift), spec)
    known = State(past.n, *wide[3:], past.shift.double())
    exact, truth = attention_with_state(*wide[:3], made, known, **scaled(reader, spec))
    found = gradients([out, *after[1:4]], ours)
    right = gradients([exact, *truth[1:4]], wide)
    if phi == "taylor":  # a constant has no gradient
        right[3][..., 0], right[5][..., 0, :] = 0, 0
    assert_close([out, *after[1:4], *found], [exact, *truth[1:4], *right])


def test_values_of_several_column_blocks_match_the_weights():
    leaves = draw(20, 40, 70)
    made, spec = specified(SUBTRACT, "relu", 40)
    past = attention_with_state(torch.randn(1, 1, 9, 40), torch.randn(1, 1, 9, 40), torch.randn(1, 1, 9, 70), made)[1]
    ours = [*leaves, *(x.detach().requires_grad_() for x in past[1:4])]
    wide = [x.detach().double().requires_grad_() for x in ours]
    out, after = continued(*ours[:3], None, State(past.n, *ours[3:], past.shift), spec)
    known = State(past.n, *wide[3:], past.shift.double())
    exact, truth = attention_with_state(*wide[:3], made, known, scale=spec.scale)
    assert_close([out, *gradients([out, *after[1:4]], ours)], [exact, *gradients([exact, *truth[1:4]], wide)])


@pytest.mark.parametrize("reader", [DIVIDE, SUBTRACT, NONE])
def test_later_tokens_do_not_change_earlier_outputs(monkeypatch, reader):
    segments_of(monkeypatch, 2, 32)
    q, k, v = (x.detach() for x in draw(50))
    _, spec = specified(reader, "elu", 5)
    before, _ = continued(q, k, v, None, None, spec)
    for cut in (1, 20, 32, 40):
        changed = [torch.cat([x[:, :, :cut], 5 * torch.randn_like(x[:, :, cut:])], 2) for x in (q, k, v)]
        after, _ = continued(*changed, None, None, spec)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])


@pytest.mark.parametrize("reader", [DIVIDE, SUBTRACT, NONE])
@pytest.mark.parametrize("given", [True, False])
def test_decoding_one_token_matches_the_causal_kernel(reader, given):
    q, k, v = (x.detach() for x in draw(30, batch=2, heads=2))
    _, spec = specified(reader, "elu", 5)
    _, state = continued(q, k, v, None, None, spec) if given else (None, None)
    token = [x.detach() for x in draw(1, batch=2, heads=2)]
    mask = torch.tensor([[True], [False]])
    token[1][1], token[2][1] = torch.nan, torch.nan
    out, after = continued(*token, mask, state, spec, step=True)
    expected, truth = continued(*token, mask, state, spec)
    assert_close([out, *after[1:]], [expected.double(), *(x.double() for x in truth[1:])])
    assert torch.equal(after.n, truth.n)


def test_decoding_one_taylor_token_matches_the_causal_kernel():
    made, spec = specified(DIVIDE, "taylor", 5)
    q, k, v = (x.detach() for x in draw(9))
    _, state = continued(*(x[:, :, :8] for x in (q, k, v)), None, None, spec)
    out, after = continued(*(x[:, :, 8:] for x in (q, k, v)), None, state, spec, step=True)
    exact, truth = attention_with_state(q.double(), k.double(), v.double(), made)
    assert_close([out, *after[1:]], [exact[:, :, 8:], *truth[1:]])


def test_a_query_without_mass_reads_the_mean_and_nan_propagates():
    q, k, v = (x.detach() for x in draw(6))
    q[:, :, 3] = -1
    out, _ = continued(q, k.abs(), v, None, None, KernelSpec("relu", "relu", DIVIDE))
    assert_close([out[:, :, 3]], [v[:, :, :4].double().mean(2)])
    k[:, :, 2] = torch.nan
    out, state = continued(q, k, v, None, None, KernelSpec("elu", "elu", DIVIDE))
    assert out[:, :, :2].isfinite().all()
    assert out[:, :, 2:].isnan().all()
    assert state.k_mean.isnan().all()


def test_causal_kernels_read_no_uninitialized_memory(monkeypatch):
    segments_of(monkeypatch, 3, 16)
    leaves = draw(40, 33, 33)
    made, spec = specified(DIVIDE, "elu", 33)
    past = attention_with_state(*(torch.randn(1, 1, 4, 33) for _ in "qkv"), made)[1]
    mask = torch.arange(40)[None] > 3
    with poisoned():
        out, after = continued(*leaves, mask, past, spec)
        found = gradients([out, *after[1:4]], leaves)
        step, later = continued(*(x.detach()[:, :, :1] for x in leaves), None, after, spec, step=True)
    assert all(x.isfinite().all() for x in (out, *after[1:], *found, step, *later[1:]))
    assert after.n.item() == 40
    assert later.n.item() == 41


def test_packed_projections_are_read_in_place_and_written_by_token():
    packed = torch.randn(2, 18, 3, 2, 5).requires_grad_()
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    made, spec = specified(SUBTRACT, "identity", 5)
    out, _ = continued(q, k, v, None, None, spec)
    assert out.transpose(1, 2).is_contiguous()
    wide = packed.detach().double().requires_grad_()
    exact = attention(*wide.permute(2, 0, 3, 1, 4), made, is_causal=True, backend="reference", scale=spec.scale)
    assert_close([out, *gradients([out], [packed])], [exact, *gradients([exact], [wide])])


def test_causal_kernels_use_64_bit_offsets():
    """Strides of 2^31 on dimensions of size 1: a product in 32 bits would leave the tensor."""
    q, k, v = (x.detach() for x in draw(1))
    far = [x.as_strided(x.shape, (2**31, 2**31, 2**31, 1)) for x in (q, k, v)]
    _, spec = specified(DIVIDE, "elu", 5)
    leaves = [x.requires_grad_() for x in far]
    out, _ = continued(*leaves, None, None, spec)
    assert_close([out], [v.double()])
    assert all(x.isfinite().all() for x in gradients([out], leaves))
    assert torch.equal(continued(*(x.detach() for x in far), None, None, spec, step=True)[0], out.detach())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_causal_operators_pass_opcheck():
    q, k, v = draw(5, heads=2)
    _, spec = specified(DIVIDE, "elu", 5)
    past = continued(*(x.detach() for x in draw(3, heads=2)), None, None, spec)[1]
    state = [x.squeeze(2).contiguous() for x in past[:4]]
    operator = torch.ops.softless.causal.default
    torch.library.opcheck(operator, (q, k, v, None, None, None, None, None, *spec[:5], True))
    torch.library.opcheck(operator, (q, k, v, torch.ones(1, 5).bool(), *state, *spec[:5], True))
    step = [x.detach()[:, :, :1] for x in (q, k, v)]
    torch.library.opcheck(operator, (*step, None, None, None, None, None, *spec[:5], False))
    torch.library.opcheck(torch.ops.softless.causal_step.default, (*step, None, *state, *spec[:5]))


def test_a_compiled_causal_call_is_one_graph_with_the_same_numbers():
    _, spec = specified(SUBTRACT, "elu", 5)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        return continued(q, k, v, None, None, spec)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (17, 24):
        leaves = draw(tokens)
        ours, theirs = compiled(*leaves)[0], call(*leaves)[0]
        assert torch.equal(ours, theirs)
        for a, b in zip(gradients([ours], leaves), gradients([theirs], leaves), strict=True):
            assert torch.equal(a, b)


def test_two_causal_runs_are_bitwise_equal(monkeypatch):
    segments_of(monkeypatch, 2, 32)
    leaves = [x.detach().bfloat16().requires_grad_() for x in draw(40)]
    _, spec = specified(DIVIDE, "elu", 5)
    runs = []
    for _ in range(2):
        out, state = continued(*leaves, None, None, spec)
        runs.append([out, *state, *gradients([out], leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("tokens", "heads", "share", "segments"),
    [(4096, 128, 64, 2), (16_384, 32, 64, 8), (4096, 264, 64, 1), (65_536, 16, 64, 16), (100, 1, 64, 1), (0, 1, 64, 1),
     (16_384, 9, 64, 12), (16_384, 9, 22, 26)],
)  # fmt: skip
def test_segments_fill_the_machine_and_states_take_a_tenth_of_the_output(tokens, heads, share, segments):
    found, length = causal_tiles.cut(tokens, heads, share)
    assert found == segments
    assert found * length >= tokens
    assert length % causal_tiles.ALIGNED == 0
    assert found == 1 or 4 * share * found <= 0.1 * 2 * tokens
