"""Every mechanism and option that the laws are tried on, inputs to try them with, and how an answer is judged.

A new mechanism is covered by its formula in oracle.py and a line in CASES.
"""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import softless
from softless.algebra.state import AnyState
from tests.laws import oracle, oracle_scored
from tests.variants import ALWAYS, WITH_EXAMPLES

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
EDGES = (1, 2, 3, 7, 17, 63, 64, 65, 127, 128, 129, 130, 131, 193, 257)  # a chunk is 64 tokens


class Case(NamedTuple):
    id: str
    name: str
    made: softless.Mechanism
    options: dict[str, Any]
    inputs: tuple[str, ...]
    largest: float  # scale of q and k beyond which the true answer overflows
    forms: tuple[bool, ...]  # what is_causal may be
    waits: str | None = None  # for `make slow`

    def __repr__(self) -> str:
        return self.id


EITHER, ALL_ONLY, CAUSAL_ONLY = (False, True), (False,), (True,)


def case(
    name: str, largest: float = 1e3, forms: tuple[bool, ...] = EITHER, waits: str | None = None, **options: Any
) -> Case:
    labels = [f"{key}={getattr(value, '__name__', value)}" for key, value in options.items()]
    made = softless.mechanism(name, **options)
    return Case(" ".join([name, *labels]), name, made, options, made.inputs, largest, forms, waits)


def square_similarity(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).square()


def square_plus_one(x: Tensor) -> Tensor:
    return x.square() + 1


CASES = [
    case("softmax"),
    case("softmax", confusion="relu"),
    case("softmax", confusion="affine_relu", waits=ALWAYS),
    case("general", sim=square_similarity),
    case("linear"),
    case("linear", phi="relu"),
    case("linear", phi="leaky_relu", waits=ALWAYS),
    case("linear", phi="identity"),
    case("linear", phi="exp"),
    case("linear", phi="exp", t=0.2, waits=ALWAYS),
    case("linear", phi="softmax"),
    case("linear", phi="affine_relu", waits=ALWAYS),
    case("linear", phi=square_plus_one, waits=ALWAYS),
    case("linear", phi="elu", phi_k="relu", waits=ALWAYS),
    case("linear", phi="exp", phi_k="relu"),
    case("linear", phi="relu", phi_k="exp"),
    case("linear", normalize="none"),
    case("linear", phi="identity", normalize="none", waits=ALWAYS),
    case("linear", phi="exp", normalize="none", largest=10),
    case("inline"),
    case("inline", phi="relu"),
    case("inline", phi="leaky_relu"),
    case("inline", phi="elu", waits=ALWAYS),
    case("inline", phi="exp", t=0.2, largest=30),
    case("inline", phi="softmax", waits=ALWAYS),
    case("inline", gain="sum"),
    case("inline", phi="exp", t=0.2, gain="sum", largest=30, waits=WITH_EXAMPLES),
    case("inline", phi="affine_relu"),
    case("inline", phi=square_plus_one),
    case("inline", phi="identity", phi_k="exp", largest=10),
    case("inline", phi="exp", phi_k="identity", largest=10, waits=ALWAYS),
    case("blend"),
    case("blend", phi="relu"),
    case("blend", phi="identity", waits=WITH_EXAMPLES),
    case("blend", phi="exp", t=0.2, largest=30),
    case("blend", phi="affine_relu", waits=ALWAYS),
    case("blend", phi="relu", phi_k="exp", largest=10, waits=ALWAYS),
    case("regress", forms=ALL_ONLY),
    case("regress", relative=False),
    case("regress", relative=False, ridge="learned", gain="learned"),
    case("regress", relative=False, phi="affine_relu", waits=WITH_EXAMPLES),
    case("regress", phi="elu", center=False, gain="one", forms=ALL_ONLY),
    case("regress", phi="relu", phi_k="leaky_relu", ridge=1.0, relative=False, center=False, waits=ALWAYS),
    case("regress", weighting="query", forms=ALL_ONLY),
    case("regress", weighting="query", phi=square_plus_one, relative=False, forms=ALL_ONLY, waits=ALWAYS),
    case("efficient"),
    case("taylor"),
    case("taylor", order=2, waits=WITH_EXAMPLES),
    case("taylor", order=2, normalize=True),
    case("hydra"),
    case("angular"),
    case("angular", exact=True),
    case("focused"),
    case("focused", p=2.0, waits=ALWAYS),
    case("focused", learned_scale=True),
    case("threshold"),
    case("threshold", expansion="mean", waits=ALWAYS),
    case("threshold", expansion="minimax"),
    case("threshold", tail="mean"),
    case("threshold", tau=0.5, expansion="mean", tail="mean", waits=ALWAYS),
    case("threshold", tau=0.5, expansion="minimax", tail="mean"),
    case("threshold", tau=2.5),
    case("threshold", tau=2.5, expansion="minimax", tail="mean", waits=ALWAYS),
    case("nearfar", window=3, first=2),
    case("nearfar", window=70, first=1, maps="identity", waits=WITH_EXAMPLES),
    case("nearfar", window=1, first=0, maps="separate", features=3),
    case("nearfar", window=0, first=0, maps="identity", waits=WITH_EXAMPLES),
    case("nearfar", neighborhood=3, first=1, forms=ALL_ONLY),
    case("cosformer", forms=ALL_ONLY, waits=ALWAYS),
    case("cosformer", length=300),
    case("performer", largest=10),
    case("performer", largest=10, features=3, kind="hyperbolic", waits=ALWAYS),
    case("delta", forms=CAUSAL_ONLY),
    case("efla", forms=CAUSAL_ONLY),
    case("decay", forms=CAUSAL_ONLY),
    case("decay", forms=CAUSAL_ONLY, slopes="retention", factor=0.5, waits=ALWAYS),
    case("transnormer"),
    case("transnormer", variant="t1", waits=ALWAYS),
    case("diagonal", block=5),
    case("diagonal", variant="t1", block=16, waits=ALWAYS),
    case("mlla", forms=ALL_ONLY),
    case("a2", forms=ALL_ONLY),
]
CASES += [
    case(name, forms=ALL_ONLY if name in oracle_scored.NOT_CAUSAL else EITHER, **options)
    for name, options in oracle_scored.CASES
]
FORMULAS = oracle.FORMULAS | oracle_scored.FORMULAS
STATELESS = ("softmax", "general", "threshold", "diagonal", *oracle_scored.FORMULAS)
SQUARE = ("diagonal", "sparse", "longformer", "reformer", "nearfar")  # as many queries as keys, unless causal
PLACED = ("sparse", "longformer", "linformer")  # what a query sees depends on where it stands, padding counted
WHOLE, CAUSAL = ([each for each in CASES if form in each.forms] for form in EITHER)
STATEFUL = [each for each in CAUSAL if each.name not in STATELESS]
FORMS = [pytest.param(each, form, id=f"{each}-{'causal' if form else 'all'}") for each in CASES for form in each.forms]
every_form = pytest.mark.parametrize(("case", "is_causal"), FORMS)

A_TOKEN = ("beta",)  # inputs of one number a token: [B, G, M]


class Ask(NamedTuple):
    """One question: q [B, H, N, d], k [B, G, M, d], v [B, G, M, e], and what the mechanism needs besides."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    inputs: dict[str, Tensor]
    picture: bool = False  # tokens are a picture, of two columns if that many fit

    @property
    def extra(self) -> dict[str, Any]:
        """What the call says beyond q, k and v."""
        grid = (self.q.shape[2] // 2, 2) if self.q.shape[2] % 2 == 0 else (1, self.q.shape[2])
        return {"inputs": self.inputs, **({"grid": grid} if self.picture and self.q.shape[2] else {})}

    def to(self, dtype: torch.dtype) -> "Ask":
        inputs = {name: x.to(dtype) for name, x in self.inputs.items()}
        return self._replace(q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype), inputs=inputs)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Ask":
        """The same change to all that has a batch and tokens, seen as [B, ., N]; the mask as [B, 1, N]."""
        mask = None if self.key_mask is None else change(self.key_mask[:, None])[:, 0]
        inputs = {name: change(x) if name in A_TOKEN else x for name, x in self.inputs.items()}
        return Ask(*map(change, self[:3]), mask, inputs, self.picture)

    def tokens(self, start: int, stop: int) -> "Ask":
        return self.each(lambda x: x[:, :, start:stop])

    def row(self, b: int) -> "Ask":
        return self.each(lambda x: x[b : b + 1])


def ask(
    case: Case,
    queries: int,
    keys: int | None = None,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (4, 3),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Ask:
    """A question of unit scale, without a mask."""
    rng = torch.Generator().manual_seed(seed)
    (d, e), keys = dims, queries if keys is None else keys
    e = d if case.name == "hydra" else e  # hydra multiplies q, k and v channel by channel
    d = 4 if case.name == "mlla" else d  # mlla turns channels by fours
    shapes = (heads[0], queries, d), (heads[1], keys, d), (heads[1], keys, e)
    q, k, v = (torch.randn(batch, *shape, generator=rng, dtype=torch.float64) for shape in shapes)
    inputs = {}
    for name, shape in case.made.needed(q, k).items():
        drawn = torch.randn(*shape, generator=rng, dtype=torch.float64)
        inputs[name] = drawn.sigmoid() if name in A_TOKEN else drawn
    return Ask(q, k, v, None, inputs, case.made.needs_grid).to(dtype)


@st.composite
def asks(draw: st.DrawFn, case: Case, *, masked: bool = False, longest: int = 131) -> Ask:
    """Lengths around chunk edges, scales over six decades, offset values, grouped heads, dead queries and keys."""
    tokens = draw(st.one_of(st.sampled_from([n for n in EDGES if n <= longest]), st.integers(1, longest)))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    dims = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    made = ask(case, tokens, heads=heads, dims=dims, seed=draw(st.integers(0, 2**32 - 1)))
    size_q, size_k = (min(case.largest, 10.0 ** draw(st.integers(-3, 3))) for _ in "qk")
    offset = draw(st.sampled_from([0.0, 1.0, 1e4]))
    q, k, v = made.q * size_q, made.k * size_k, made.v + offset
    if draw(st.booleans()):
        q[:, :, :: draw(st.integers(1, 4))] = 0
    if draw(st.booleans()):
        k[:, :, :: draw(st.integers(1, 4))] = 0
    key_mask = draw(masks(tokens)) if masked else None
    return made._replace(q=q, k=k, v=v, key_mask=key_mask)


@st.composite
def masks(draw: st.DrawFn, tokens: int, batch: int = 2) -> Tensor:
    """Padding at the left, the right, or anywhere; one row may be all padding."""
    place, rows = torch.arange(tokens), []
    for _ in range(batch):
        cut = draw(st.integers(0, tokens))
        holes = torch.rand(tokens, generator=torch.Generator().manual_seed(cut)) < 0.5
        kinds = {"none": place >= 0, "left": place >= cut, "right": place < cut, "holes": holes, "all": place < 0}
        rows.append(kinds[draw(st.sampled_from(list(kinds)))])
    return torch.stack(rows)


def nested(sequences: Iterable[Tensor]) -> Tensor:
    """[1, H, n, ...] of each as a nested tensor [B, H, j, ...]; gradients go back to each."""
    rows = [each[0].transpose(0, 1) for each in sequences]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def several(case: Case, *lengths: tuple[int, int], **shape: Any) -> list[Ask]:
    """A question a sequence, of so many queries and keys; they share the inputs that are not a token's own."""
    rows = [ask(case, *each, batch=1, seed=seed, **shape) for seed, each in enumerate(lengths)]
    shared = {name: x for name, x in rows[0].inputs.items() if name not in A_TOKEN}
    return [each._replace(inputs=each.inputs | shared) for each in rows]


def packed(rows: list[Ask]) -> Ask:
    """All of them as one question."""
    inputs = {
        name: nested(each.inputs[name] for each in rows) if name in A_TOKEN else x for name, x in rows[0].inputs.items()
    }
    return Ask(*(nested(each) for each in zip(*(row[:3] for row in rows), strict=True)), None, inputs)


def streamed(case: Case, at: Ask, cuts: Iterable[int], state: AnyState | None = None) -> tuple[Tensor, AnyState]:
    """The causal output, cut before these tokens, the state carried over; and the last state."""
    tokens, outputs = at.q.shape[2], []
    edges = [0, *(cut for cut in cuts if 0 < cut < tokens), tokens]
    for start, stop in pairwise(edges):
        q, k, v, mask, inputs, _ = at.tokens(start, stop)
        out, state = softless.attention_with_state(q, k, v, case.made, state, key_mask=mask, inputs=inputs)
        outputs.append(out)
    return torch.cat(outputs, 2), state


class Answer(NamedTuple):
    """The true output, the error that tolerance 1 allows each row, and the rows to judge: [B, H, N, .]."""

    out: Tensor
    bound: Tensor
    safe: Tensor


def true_rows(case: Case, at: Ask, *, is_causal: bool = False, **call: Any) -> oracle.Rows:
    """Explicit weights by the formula. What is masked is replaced first: it may be NaN."""
    q, k = at.q.double(), at.k.double().repeat_interleave(at.q.shape[1] // at.k.shape[1], 1)
    if at.key_mask is not None:
        k = torch.where(at.key_mask[:, None, :, None], k, 0.0)
    limits = torch.finfo(at.q.dtype).eps, torch.finfo(at.q.dtype).tiny
    inputs = {name: x.double() for name, x in at.inputs.items()}
    if at.key_mask is not None:
        inputs |= {name: torch.where(at.key_mask[:, None], inputs[name], 0.0) for name in A_TOKEN if name in inputs}
    seen = oracle.visible(q, k, is_causal, at.key_mask)
    call |= {"is_causal": is_causal} if case.name in ("cosformer", "nearfar") else {}
    call |= {"grid": at.extra["grid"]} if at.picture else {}
    return FORMULAS[case.name](q, k, seen, oracle.Limits(*limits), inputs, **case.options, **call)


def normalized(case: Case) -> tuple[int, ...]:
    """The dimensions over which an output has a length of its own: 1, or over all heads the root of their size."""
    if case.name == "transnormer" or case.options.get("variant") == "t1":
        return (1, 3)
    return (-1,) if case.name == "angular" else ()


def true_answer(case: Case, at: Ask, **call: Any) -> Answer:
    weights, size, safe = true_rows(case, at, **call)
    v = at.v.double().repeat_interleave(at.q.shape[1] // at.v.shape[1], 1)
    if at.key_mask is not None:
        v = torch.where(at.key_mask[:, None, :, None], v, 0.0)
    largest = v.abs().max() if v.numel() else 0.0
    if case.name == "hydra":
        channels = v.transpose(2, 3).flatten(1, 2)[..., None]  # [B, H d, M, 1]
        out = (weights @ channels).squeeze(-1).unflatten(1, (v.shape[1], -1)).transpose(2, 3)
        size, safe = (x.unflatten(1, (v.shape[1], -1)).transpose(2, 3) for x in (size, safe))
        return Answer(out, 1 + size * largest, safe)
    out, bound = weights @ v, (1 + size * largest)[..., None]
    if dims := normalized(case):  # the output is h / |h|: an error of h counts 1 / |h| times
        top, size = out.abs().amax(dims, keepdim=True), 1 if dims == (-1,) else math.prod(out.shape[d] for d in dims)
        out = out / torch.where(top > 0, top, 1.0)
        length = top * out.square().sum(dims, keepdim=True).sqrt()
        bound = torch.where(length > 0, 2 * size * bound / torch.where(length > 0, length, 1.0), 0.0)
        bound = bound.amax(dims, keepdim=True).expand(*out.shape[:3], 1)
        kind = torch.finfo(at.q.dtype)
        safe = safe & ((length == 0) | (length >= kind.tiny / kind.eps)).expand(*out.shape[:3], 1)[..., 0]
        out = oracle.unit(out, dims) * size**0.5
    return Answer(out, bound, safe[..., None])


def assert_answers(actual: Tensor, true: Answer, what: str) -> None:
    """Every judged row is finite and within its bound."""
    assert actual.shape == true.out.shape, f"{what}: shape {list(actual.shape)}, needed {list(true.out.shape)}"
    error = (actual.double() - true.out).abs()
    allowed = TOLERANCE[actual.dtype] * true.bound
    wrong = true.safe & ~(error <= allowed)  # NaN is wrong
    worst = torch.where(wrong, error / allowed, 0.0).nan_to_num(torch.inf).max() if wrong.numel() else 0.0
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} off, up to {worst:.3g} times the bound"
