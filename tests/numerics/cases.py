"""Every mechanism, with each option that changes its arithmetic, and the tensors to try it on."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from softless import Mechanism, attention, mechanism
from tests.variants import WITH_EXAMPLES, Variant


def gaussian(q: Tensor, k: Tensor) -> Tensor:
    return (-0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)).exp()


CASES: dict[str, Mechanism] = {
    "softmax": mechanism("softmax"),
    "softmax-relu": mechanism("softmax", confusion="relu"),
    Variant("softmax-affine_relu"): mechanism("softmax", confusion="affine_relu"),
    "general": mechanism("general", sim=gaussian),
    "linear": mechanism("linear"),
    "linear-identity": mechanism("linear", phi="identity"),
    Variant("linear-relu", WITH_EXAMPLES): mechanism("linear", phi="relu"),
    Variant("linear-leaky_relu"): mechanism("linear", phi="leaky_relu"),
    "linear-exp": mechanism("linear", phi="exp", t=0.5),
    Variant("linear-softmax"): mechanism("linear", phi="softmax"),
    Variant("linear-affine_relu"): mechanism("linear", phi="affine_relu"),
    Variant("linear-exp-elu", WITH_EXAMPLES): mechanism("linear", phi="exp", phi_k="elu"),
    Variant("linear-elu-exp"): mechanism("linear", phi="elu", phi_k="exp"),
    "linear-none": mechanism("linear", normalize="none"),
    Variant("linear-exp-none", WITH_EXAMPLES): mechanism("linear", phi="exp", normalize="none"),
    "inline": mechanism("inline"),
    Variant("inline-relu", WITH_EXAMPLES): mechanism("inline", phi="relu"),
    "inline-leaky_relu": mechanism("inline", phi="leaky_relu"),
    Variant("inline-elu"): mechanism("inline", phi="elu"),
    "inline-exp": mechanism("inline", phi="exp", t=0.2),
    Variant("inline-elu-exp"): mechanism("inline", phi="elu", phi_k="exp"),
    Variant("inline-softmax", WITH_EXAMPLES): mechanism("inline", phi="softmax"),
    "inline-affine_relu": mechanism("inline", phi="affine_relu"),
    "inline-sum": mechanism("inline", gain="sum"),
    Variant("inline-sum-exp", WITH_EXAMPLES): mechanism("inline", phi="exp", t=0.2, gain="sum"),
    "blend": mechanism("blend"),
    Variant("blend-relu", WITH_EXAMPLES): mechanism("blend", phi="relu"),
    "blend-exp": mechanism("blend", phi="exp", t=0.2),
    Variant("blend-affine_relu"): mechanism("blend", phi="affine_relu"),
    "regress": mechanism("regress"),
    "regress-absolute": mechanism("regress", relative=False),
    "regress-learned": mechanism("regress", relative=False, ridge="learned", gain="learned"),
    Variant("regress-elu", WITH_EXAMPLES): mechanism("regress", phi="elu", center=False, gain="one"),
    Variant("regress-affine_relu"): mechanism("regress", phi="affine_relu", relative=False),
    "regress-query": mechanism("regress", weighting="query"),
    "efficient": mechanism("efficient"),
    "taylor": mechanism("taylor"),
    Variant("taylor-2", WITH_EXAMPLES): mechanism("taylor", order=2),
    Variant("taylor-2-unit"): mechanism("taylor", order=2, normalize=True),
    "hydra": mechanism("hydra"),
    "angular": mechanism("angular"),
    Variant("angular-exact", WITH_EXAMPLES): mechanism("angular", exact=True),
    "focused": mechanism("focused"),
    Variant("focused-learned", WITH_EXAMPLES): mechanism("focused", learned_scale=True),
    "threshold": mechanism("threshold"),
    Variant("threshold-mean"): mechanism("threshold", expansion="mean", tau=0.9),
    "threshold-minimax-mean": mechanism("threshold", expansion="minimax", tail="mean"),
    "threshold-wide": mechanism("threshold", tau=2.0),
    "nearfar": mechanism("nearfar", window=5, first=2),
    Variant("nearfar-separate", WITH_EXAMPLES): mechanism("nearfar", window=3, first=0, maps="separate", features=3),
    Variant("nearfar-linear"): mechanism("nearfar", window=0, first=0, maps="identity"),
    Variant("nearfar-neighborhood", WITH_EXAMPLES): mechanism("nearfar", neighborhood=3, first=1),
    Variant("cosformer"): mechanism("cosformer"),
    "cosformer-fixed": mechanism("cosformer", length=200),
    "performer": mechanism("performer"),
    Variant("performer-hyperbolic"): mechanism("performer", kind="hyperbolic", features=4),
    "delta": mechanism("delta"),
    "efla": mechanism("efla"),
    "decay": mechanism("decay"),
    Variant("decay-retention"): mechanism("decay", slopes="retention", factor=0.5),
    "transnormer": mechanism("transnormer"),
    Variant("transnormer-t1"): mechanism("transnormer", variant="t1"),
    "diagonal": mechanism("diagonal", block=5),
    Variant("diagonal-t1"): mechanism("diagonal", variant="t1", block=5),
    "mlla": mechanism("mlla"),
    "a2": mechanism("a2"),
    "topk": mechanism("topk", k=2),
    "sparse": mechanism("sparse", stride=5),
    Variant("sparse-fixed"): mechanism("sparse", pattern="fixed", stride=6, summary=2),
    Variant("longformer", WITH_EXAMPLES): mechanism("longformer", window=4, global_tokens=2),
    "linformer": mechanism("linformer", rank=2, length=200),
    "nystrom": mechanism("nystrom", landmarks=3),
    Variant("agent"): mechanism("agent", agents=4),
    Variant("soft", WITH_EXAMPLES): mechanism("soft", landmarks=4),
    Variant("nonlocal-dot"): mechanism("nonlocal", pairing="dot"),
    Variant("nonlocal-concatenation"): mechanism("nonlocal", pairing="concatenation"),
    Variant("asymmetric_nonlocal"): mechanism("asymmetric_nonlocal", pyramid=(1, 4)),
    "emanet": mechanism("emanet", bases=5, detach=False),
    "reformer": mechanism("reformer", buckets=4, rounds=2, window=5),
}

# Their denominators may change sign; they are held to a bar only where |mass| >= 0.1 sum |s|.
SIGN_CHANGING = {"linear-identity", "linear-leaky_relu", "threshold-wide"}
STATEFUL = [name for name, made in CASES.items() if made.carries_state]
CAUSALITY = {"all": False, "causal": True}
FORMS = {case: [form for form in CAUSALITY.values() if made.lacks(form) is None] for case, made in CASES.items()}
CAUSAL = [case for case in CASES if True in FORMS[case]]


def forms(chosen: Iterable[str] = CASES, *, both: bool = True) -> pytest.MarkDecorator:
    """Each case, causal and not, where it has both forms; without `both`, causal speaks for the other until `slow`."""
    each = [
        pytest.param(case, form, id=f"{name}-{case}", marks=[pytest.mark.slow] * (not both and form != FORMS[case][-1]))
        for case in chosen
        for name, form in CAUSALITY.items()
        if form in FORMS[case]
    ]
    return pytest.mark.parametrize(("case", "is_causal"), each)


every_form, one_form = forms(), forms(both=False)
# One head is as good as another, but some have norms over all of them.
HEADS = {case: 2 if CASES[case].name in ("hydra", "focused", "transnormer", "diagonal") else 1 for case in CASES}
NORMALIZED = [case for case in CASES if case.startswith(("angular", "transnormer", "diagonal-t1"))]  # their outputs are


class Draw(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    inputs: dict[str, Tensor]

    def to(self, dtype: torch.dtype) -> "Draw":
        inputs = {name: x.to(dtype) for name, x in self.inputs.items()}
        return Draw(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), inputs)

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.inputs.values()]

    def rebuilt(self, *leaves: Tensor) -> "Draw":
        return Draw(*leaves[:3], dict(zip(self.inputs, leaves[3:], strict=True)))

    def tokens(self, here: slice) -> "Draw":
        inputs = {name: x[:, :, here] if name == "beta" else x for name, x in self.inputs.items()}
        return Draw(self.q[:, :, here], self.k[:, :, here], self.v[:, :, here], inputs)


def draw(
    case: str, tokens: int, dim: int, *, batch: int = 1, heads: int = 2, kv_heads: int | None = None, width: int = 0
) -> Draw:
    """Standard normal q, k, v (v as wide as q, or `width`) and inputs, float64."""
    kv_heads = heads if kv_heads is None else kv_heads
    dim = 4 if case == "mlla" else dim  # it turns channels by fours
    width = width if width and case != "hydra" else dim
    q = torch.randn(batch, heads, tokens, dim, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, tokens, dim, dtype=torch.float64)
    v = torch.randn(batch, kv_heads, tokens, width, dtype=torch.float64)
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in CASES[case].needed(q, k).items()}
    return Draw(q, k, v, {name: x.sigmoid() if name == "beta" else x for name, x in inputs.items()})


def attend(case: str, given: Draw, *, is_causal: bool, backend: str = "auto", **options: object) -> Tensor:
    q, k, v, inputs = given
    call = {"is_causal": is_causal, "inputs": inputs, "grid": grid(case, q), "backend": backend}
    return attention(q, k, v, CASES[case], **call, **options)


def grid(case: str, q: Tensor) -> tuple[int, int] | None:
    """The tokens as a picture of one row, where a mechanism reads one."""
    return (1, q.shape[2]) if CASES[case].needs_grid and q.shape[2] else None


def gradients(out: Tensor, upstream: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(out, leaves, upstream.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5


def steady(case: str, q: Tensor, k: Tensor, *, is_causal: bool) -> Tensor:
    """Which rows [B, H, N] have a denominator that keeps away from zero: |mass| >= 0.1 sum |s|."""
    if case not in SIGN_CHANGING:
        return torch.ones(q.shape[:3], dtype=torch.bool)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril(k.shape[2] - q.shape[2]) if is_causal else visible
    if case == "threshold-wide":
        s = torch.where(visible, scores(q, k), -torch.inf)
        x = s - s.amax(-1, keepdim=True)
        weight = torch.where(x > -2, 1 + x, 0.0)
    else:
        phi = {"linear-identity": lambda x: x, "linear-leaky_relu": torch.nn.functional.leaky_relu}[case]
        weight = torch.where(visible, phi(q) @ phi(k).repeat_interleave(q.shape[1] // k.shape[1], 1).mT, 0.0)
    return weight.sum(-1).abs() >= 0.1 * weight.abs().sum(-1)


def smooth(case: str, given: Draw, *, is_causal: bool, margin: float = 1e-2) -> bool:
    """Whether every kink (a feature map's corner, a threshold, a tie for the maximum) is `margin` away."""
    q, k, _, inputs = given
    if not steady(case, q, k, is_causal=is_causal).all():
        return False
    if min(q.abs().min(), k.abs().min()) < margin:
        return False
    if "affine_relu" in case:
        corners = [x @ inputs["weight"].mT + inputs["bias"][:, None] for x in (q, k)]
        return all(x.abs().min() > margin for x in corners)
    if case in ("nonlocal-concatenation", "topk"):
        return _far_from_corners(case, given, is_causal) > margin
    if "threshold" in case:
        s = scores(q, k)
        rows = [s[..., i, : i + 1] for i in range(s.shape[-2])] if is_causal else list(s.unbind(-2))
        tau = CASES[case].tau
        return all(_clear(row, tau, margin) for row in rows)
    return True


def _far_from_corners(case: str, given: Draw, is_causal: bool) -> float:
    """The least of |w.[q, k]|, or of the steps between the second and the third best key."""
    q, k, _, inputs = given
    if case == "topk":
        ordered = masked_scores(q, k, is_causal).sort(-1, descending=True).values
        return (ordered[..., 1] - ordered[..., 2]).nan_to_num(torch.inf).min().item()
    of_q, of_k = inputs["weight"][:, None].chunk(2, -1)
    return (q @ of_q.mT + (k @ of_k.mT).mT).abs().min().item()


def _clear(row: Tensor, tau: float, margin: float) -> bool:
    ordered = row.sort(-1).values
    top, low = ordered[..., -1:], ordered[..., :1]
    ties = bool((ordered.diff(dim=-1) < margin).any())
    edges = ((row - (top - tau)).abs() < margin).any() or ((top - low - tau).abs() < margin).any()
    return not ties and not edges


def draw_smooth(case: str, tokens: int, dim: int, *, is_causal: bool, **options: int) -> Draw:
    """The first draw that is smooth."""
    for _ in range(10_000):
        given = draw(case, tokens, dim, **options)
        if smooth(case, given, is_causal=is_causal):
            return given
    raise AssertionError(f"{case}: no smooth draw")


def masked_scores(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    s = scores(q, k)
    return torch.where(torch.ones_like(s[0, 0]).bool().tril(k.shape[2] - q.shape[2]), s, -torch.inf) if is_causal else s


def judged(case: str, q: Tensor, k: Tensor, *, is_causal: bool) -> Tensor:
    """Rows [B, H, N] with one right answer: steady, and no score so near a threshold that rounding picks the side."""
    rows = steady(case, q, k, is_causal=is_causal)
    if "threshold" not in case and case != "topk":
        return rows
    s = masked_scores(q, k, is_causal)
    if case == "topk":
        best = s.topk(min(CASES[case].k, s.shape[-1]), -1).values[..., -1:]
        return rows & ~((s != best) & ((s - best).abs() < 1e-4 * (1 + best.abs()))).any(-1)
    top = s.amax(-1, keepdim=True)
    near = (s - top + CASES[case].tau).abs() < 1e-4 * (1 + top.abs())
    return rows & ~near.any(-1)
