"""The published formulas as anyone would type them: explicit, unfused, in the dtype that comes in.

Written from the papers, not from the library. A sum that changes sign is divided by all the same.
"""

from collections.abc import Callable
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

Formula = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


def visible(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """1 where key j is not after query i, in the dtype of q."""
    ones = q.new_ones(q.shape[2], k.shape[2])
    return ones.tril(k.shape[2] - q.shape[2]) if is_causal else ones


def divided(score: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    score = score * seen
    return (score @ v) / score.sum(-1, keepdim=True)


def subtracted(score: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """w_ij = (s/n) (a_ij - mean_j a_ij) + 1/n over the n keys that i sees."""
    n = seen.sum(-1, keepdim=True)
    score = score * seen
    weight = (scale * (score - score.sum(-1, keepdim=True) / n) + 1) / n * seen
    return weight @ v


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def unit_over_heads(x: Tensor) -> Tensor:
    return x / x.square().sum((1, 3), keepdim=True).sqrt()


def focused_map(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    x = x.relu() + 1e-6
    if "scale" in inputs:
        x = x / F.softplus(inputs["scale"])[:, None]
    size = x.square().sum((1, 3), keepdim=True).sqrt()
    return x**3 * size / (x**3).square().sum((1, 3), keepdim=True).sqrt()


def feature_map(name: str, t: float = 1.0) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    maps = {
        "identity": lambda x, _: x,
        "relu": lambda x, _: x.relu(),
        "leaky_relu": lambda x, _: F.leaky_relu(x, 0.01),
        "elu": lambda x, _: F.elu(x) + 1,
        "exp": lambda x, _: (t * x).exp(),
        "softmax": lambda x, _: x.softmax(-1),
        "affine_relu": lambda x, inputs: (x @ inputs["weight"].mT + inputs["bias"][:, None]).relu(),
        "focused": focused_map,
        "unit": lambda x, _: unit(x),
    }
    return maps[name]


def linear(phi: str, phi_k: str | None = None, t: float = 1.0) -> Formula:
    on_q, on_k = feature_map(phi, t), feature_map(phi_k or phi, t)
    return lambda q, k, v, seen, inputs: divided(on_q(q, inputs) @ on_k(k, inputs).mT, v, seen)


def unnormalized(phi: str) -> Formula:
    on = feature_map(phi)
    return lambda q, k, v, seen, inputs: (on(q, inputs) @ on(k, inputs).mT * seen) @ v


def inline(phi: str, phi_k: str | None = None, t: float = 1.0) -> Formula:
    on_q, on_k = feature_map(phi, t), feature_map(phi_k or phi, t)
    return lambda q, k, v, seen, inputs: subtracted(on_q(q, inputs) @ on_k(k, inputs).mT, v, seen, q.shape[-1] ** -0.5)


def printed(phi: str, t: float = 1.0) -> Formula:
    """InLine's eq. 4: as `inline`, with a sum over keys for their mean."""
    on = feature_map(phi, t)

    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        score, n = on(q, inputs) @ on(k, inputs).mT * seen, seen.sum(-1, keepdim=True)
        return ((score - score.sum(-1, keepdim=True) / n + 1 / n) * seen) @ v

    return formula


def blend(phi: str, t: float = 1.0) -> Formula:
    """The mean, what a division adds to it, and what InLine adds."""
    on = feature_map(phi, t)

    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        score, share = on(q, inputs) @ on(k, inputs).mT * seen, seen / seen.sum(-1, keepdim=True)
        a, b = (inputs[name][:, None, None] for name in ("divide", "subtract"))
        divided = score / score.sum(-1, keepdim=True) - share
        subtracted = q.shape[-1] ** -0.5 * share * (score - (share * score).sum(-1, keepdim=True))
        return (share + a * divided + b * subtracted) @ v

    return formula


def regress(
    phi: str = "identity", *, relative: bool = True, center: bool = True, gain: str = "dim", weighting: bool = False
) -> Formula:
    """v_mean + g (q - k_mean)^T (K + r I)^-1 C, query by query. Half precision has no inverse: it is float32's."""
    on = feature_map(phi)

    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        f_q, f_k = on(q, inputs), on(k, inputs)
        share = seen / seen.sum(-1, keepdim=True)
        if weighting:
            share = (q.mean(2, keepdim=True) @ k.mT * q.shape[-1] ** -0.5).softmax(-1)  # [b, h, 1, m]
        ridge = F.softplus(inputs["ridge"])[:, None, None, None] if "ridge" in inputs else 0.1
        factor = (1.0 if gain == "one" else q.shape[-1] ** -0.5) * (
            inputs["gain"][:, None, None] if "gain" in inputs else 1
        )
        mean = share @ f_k  # [b, h, n, d]
        apart = f_k[..., None, :, :] - mean[..., None, :]  # [b, h, n, m, d]
        spread = (share[..., None] * apart).mT @ apart
        size = (
            spread.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] if relative else 1 / seen.sum(-1)[:, None, None]
        )
        matrix = spread + ridge * size * torch.eye(f_k.shape[-1], dtype=q.dtype, device=q.device)
        inverse = torch.linalg.inv_ex(matrix.to(torch.promote_types(q.dtype, torch.float32))).inverse.to(q.dtype)
        x = (f_q - mean if center else f_q)[..., None, :] @ inverse @ apart.mT  # [b, h, n, 1, m]
        return (share * (1 + factor * x[..., 0, :])) @ v

    return formula


def softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    score = q @ k.mT * q.shape[-1] ** -0.5
    return score.masked_fill(seen == 0, -torch.inf).softmax(-1) @ v


def gaussian(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    return divided((-0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)).exp(), v, seen)


def efficient(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    hidden = (seen == 0)[..., None]  # [n, m, 1]
    shares = (
        k[..., None, :, :].expand(*k.shape[:2], len(seen), *k.shape[2:]).masked_fill(hidden, -torch.inf).softmax(-2)
    )
    return (shares @ q.softmax(-1)[..., None]).squeeze(-1) @ v


def confused(phi: str) -> Formula:
    on = feature_map(phi)
    return lambda q, k, v, seen, inputs: softmax(unit(on(q, inputs)), k, v, seen, inputs)


def taylor(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    return divided(1 + unit(q) @ unit(k).mT, v, seen)


def second_taylor(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    a = q @ k.mT * q.shape[-1] ** -0.5
    return divided(1 + a + a.square() / 2, v, seen)


def second_taylor_unit(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    a = unit(q) @ unit(k).mT
    return divided(1 + a + a.square() / 2, v, seen)


def hydra(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    return unit_over_heads(q) * (seen @ (unit_over_heads(k) * v))


def angular(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    return unit(0.5 * v + (unit(q) @ unit(k).mT * seen) @ v / pi)


def angular_exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    return unit(((0.5 + unit(q) @ unit(k).mT / pi) * seen) @ v)


def threshold(tau: float, expansion: str = "max", tail: str = "drop") -> Formula:
    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
        score = q @ k.mT * q.shape[-1] ** -0.5
        top = score.masked_fill(seen == 0, -torch.inf).amax(-1, keepdim=True)
        span = top - score.masked_fill(seen == 0, torch.inf).amin(-1, keepdim=True)
        x = score - top
        kept = (x > -tau).to(q.dtype) * seen
        if expansion == "max":
            weight = 1 + x
        elif expansion == "mean":
            weight = 1 + x - (x * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)
        else:
            rho = span.clamp(min=1e-3, max=tau)
            slope = (1 - (-rho).exp()) / rho
            weight = (1 + slope - slope * slope.log()) / 2 + slope * x
        weight = weight * kept
        if tail == "mean":
            gap = (span - tau).clamp(min=1e-3)
            weight = weight + (seen - kept) * (q.new_tensor(-tau).exp() - (-span).exp()) / gap
        return (weight @ v) / weight.sum(-1, keepdim=True)

    return formula


def cosformer(length: int | None = None) -> Formula:
    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
        place = torch.arange(len(seen)).to(q.dtype)
        cosine = (pi / 2 * (place[:, None] - place) / (length or len(seen))).cos()
        return divided(q.relu() @ k.relu().mT * cosine, v, seen)

    return formula


def performer(kind: str) -> Formula:
    def features(x: Tensor, w: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        along = torch.cat([x @ w.mT, -x @ w.mT], -1) if kind == "hyperbolic" else x @ w.mT
        return (along - x.square().sum(-1, keepdim=True) / 2).exp() * along.shape[-1] ** -0.5

    return lambda q, k, v, seen, inputs: divided(
        features(q, inputs["projection"]) @ features(k, inputs["projection"]).mT, v, seen
    )


def memory(rule: str) -> Formula:
    """The delta rule token by token, as its papers write it; what is `seen` is the causal order."""

    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        state, outputs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
        square = k.square().sum(-1, keepdim=True)
        beta = inputs["beta"][..., None]
        k, alpha = (unit(k), beta) if rule == "delta" else (k, (1 - (-beta * square).exp()) / square)
        for t in range(len(seen)):
            key = k[:, :, t, :, None]
            state = state + alpha[:, :, t, :, None] * key @ (v[:, :, t, None] - key.mT @ state)
            outputs.append(q[:, :, t, None] @ state)
        return torch.cat(outputs, 2)

    return formula


def decay(slopes: str, factor: float = 1.0) -> Formula:
    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
        h, place = torch.arange(q.shape[1]).double(), torch.arange(len(seen)).double()
        slope = 2 ** (-8 * (h + 1) / q.shape[1]) if slopes == "lightning" else -(1 - 2 ** (-5 - h)).log()
        fade = (-factor * slope[:, None, None] * (place[:, None] - place)).exp().to(q.dtype)
        return (q @ k.mT * fade * seen) @ v

    return formula


def rms(x: Tensor) -> Tensor:
    return x / x.square().mean((1, 3), keepdim=True).sqrt()


def transnormer(variant: str) -> Formula:
    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
        q, k = (F.elu(x) if variant == "t1" else F.elu(x) + 1 for x in (q, k))
        return rms((q @ k.mT * seen) @ v)

    return formula


def diagonal(variant: str, block: int) -> Formula:
    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        home = torch.arange(len(seen)) // block
        seen = seen * (home[:, None] == home)
        if variant == "t2":
            return softmax(q, k, v, seen, inputs)
        return rms((q @ k.mT * q.shape[-1] ** -0.5).relu() * seen @ v)

    return formula


def nearfar(window: int, first: int, of_q: str | None = "map", of_k: str | None = "map") -> Formula:
    """e^{s - max} of near tokens, c phi.phi of others. In a picture of one row, neighbors are a window."""

    def both(x: Tensor, matrix: Tensor | None) -> Tensor:
        x = x if matrix is None else x @ matrix.mT
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) * (x.shape[-1] / 2) ** 0.5

    def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        score, i, j = q @ k.mT * q.shape[-1] ** -0.5, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        near = (((i - j).abs() < window) | (j < first)) & (seen > 0)
        top = score.masked_fill(~near, -torch.inf).amax(-1, keepdim=True) if window or first else 0.0
        c = inputs["gain"].exp()[:, None, None] if window or first else 1.0
        far = c * (both(q, inputs.get(of_q)) @ both(k, inputs.get(of_k)).mT)
        return divided(torch.where(near, (score - top).exp(), far), v, seen)

    return formula


def mlla(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    """A picture of one row: channels of the first half stay, those of the second turn with the column."""
    half, place = q.shape[1] * q.shape[3] // 2, torch.arange(len(seen)).double()
    theta = 10000 ** (-torch.arange(half // 2).double() / (half // 2))
    cos, sin = ((place[:, None] * theta).cos().to(q.dtype), (place[:, None] * theta).sin().to(q.dtype))

    def turned(x: Tensor) -> Tensor:
        x = x.transpose(1, 2).flatten(2)
        a, b = x[..., half::2], x[..., half + 1 :: 2]
        x = torch.cat([x[..., :half], torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)
        return x.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    a, b = F.elu(q) + 1, F.elu(k) + 1
    return (turned(a) @ turned(b).mT * seen) @ v / (a @ b.mT * seen).sum(-1, keepdim=True)


def double_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _inputs: dict[str, Tensor]) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


FORMULAS: dict[str, Formula] = {
    "softmax": softmax,
    "softmax-relu": confused("relu"),
    "softmax-affine_relu": confused("affine_relu"),
    "general": gaussian,
    "linear": linear("elu"),
    "linear-identity": linear("identity"),
    "linear-relu": linear("relu"),
    "linear-leaky_relu": linear("leaky_relu"),
    "linear-exp": linear("exp", t=0.5),
    "linear-softmax": linear("softmax"),
    "linear-affine_relu": linear("affine_relu"),
    "linear-exp-elu": linear("exp", "elu"),
    "linear-elu-exp": linear("elu", "exp"),
    "linear-none": unnormalized("elu"),
    "linear-exp-none": unnormalized("exp"),
    "inline": inline("identity"),
    "inline-relu": inline("relu"),
    "inline-leaky_relu": inline("leaky_relu"),
    "inline-elu": inline("elu"),
    "inline-exp": inline("exp", t=0.2),
    "inline-elu-exp": inline("elu", "exp"),
    "inline-softmax": inline("softmax"),
    "inline-affine_relu": inline("affine_relu"),
    "inline-sum": printed("identity"),
    "inline-sum-exp": printed("exp", t=0.2),
    "blend": blend("elu"),
    "blend-relu": blend("relu"),
    "blend-exp": blend("exp", t=0.2),
    "blend-affine_relu": blend("affine_relu"),
    "regress": regress(),
    "regress-absolute": regress(relative=False),
    "regress-learned": regress(relative=False, gain="learned"),
    "regress-elu": regress("elu", center=False, gain="one"),
    "regress-affine_relu": regress("affine_relu", relative=False),
    "regress-query": regress(weighting=True),
    "efficient": efficient,
    "taylor": taylor,
    "taylor-2": second_taylor,
    "taylor-2-unit": second_taylor_unit,
    "hydra": hydra,
    "angular": angular,
    "angular-exact": angular_exact,
    "focused": linear("focused"),
    "focused-learned": linear("focused"),
    "threshold": threshold(1.0),
    "threshold-mean": threshold(0.9, "mean"),
    "threshold-minimax-mean": threshold(1.0, "minimax", "mean"),
    "threshold-wide": threshold(2.0),
    "nearfar": nearfar(5, 2),
    "nearfar-separate": nearfar(3, 0, of_q="map_q", of_k="map_k"),
    "nearfar-linear": nearfar(0, 0, of_q=None, of_k=None),
    "nearfar-neighborhood": nearfar(2, 1),
    "cosformer": cosformer(),
    "cosformer-fixed": cosformer(200),
    "performer": performer("positive"),
    "performer-hyperbolic": performer("hyperbolic"),
    "delta": memory("delta"),
    "efla": memory("efla"),
    "decay": decay("lightning"),
    "decay-retention": decay("retention", 0.5),
    "transnormer": transnormer("t2"),
    "transnormer-t1": transnormer("t1"),
    "diagonal": diagonal("t2", 5),
    "diagonal-t1": diagonal("t1", 5),
    "mlla": mlla,
    "a2": double_attention,
}
