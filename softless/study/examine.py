"""The measurements of a study: probes on trained twins, and timed calls of mechanisms on random tensors."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from softless.bench import scaling
from softless.bench.scaling import cases_named
from softless.data.augment import Augment
from softless.data.device_augment import finish
from softless.data.reading import Batch
from softless.errors import ArgumentError
from softless.functional import attention_weights
from softless.mechanisms import Mechanism, mechanism
from softless.nn.maps import attention_maps
from softless.probes import approximation
from softless.probes.capture import capture
from softless.probes.examination import examine
from softless.probes.interventions import induced_confusion, mask_out
from softless.probes.score_range import compare
from softless.stopwatch import free_bytes, steady_threads, threads, time_calls
from softless.study.plan import TimingPlan

TAUS = tuple(0.25 * step for step in range(1, 33))  # of the threshold rule: steps of the slider on the page
BATCH = 60  # images whose explicit weights are in memory at once
ROWS: dict[str, Mechanism] = {
    "softmax": mechanism("softmax"),
    "linear relu": mechanism("linear", phi="relu"),
    "inline": mechanism("inline"),
}
TOLERANCE = 0.1  # relative error up to which an approximation counts as safe
LINEAR_COPIES = 16  # tensors of q's size that the hungriest linear mechanism has in memory, q, k and v included

Advance = Callable[[str, float], None]  # what is being done, and the share of the work that this step was


class TwinExamination(TypedDict):
    """What the probes measured on one twin. `layers` are the fields of `LayerFindings`."""

    layers: list[dict[str, Any]]
    images: int
    mask_out: list[dict[str, Any]]
    induced: list[dict[str, Any]]
    maps: list[dict[str, Any]]
    collinear: dict[str, Any]
    row: dict[str, Any]


class SampleImages:
    """Test images as a model sees them."""

    def __init__(self, images: Batch, augment: Augment, device: str = "cpu"):
        self.images, self.augment, self.device = images, augment, device

    def batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `count` images with their labels, spread evenly over the set, which may be sorted by class."""
        total = len(self.images.labels)
        spread = torch.arange(min(count, total)) * total // min(count, total)
        for ids in spread.split(BATCH):
            yield self.prepare(ids), self.images.labels[ids].to(self.device)

    def prepare(self, ids: Tensor) -> Tensor:
        return finish(self.images.pixels[ids].to(self.device), self.augment)

    def one_per_class(self, count: int) -> Tensor:
        """Return the index of the first image of each of the first `count` classes."""
        labels = self.images.labels.tolist()
        return torch.tensor([labels.index(label) for label in sorted(set(labels))[:count]])


def examine_twin(
    model: nn.Module,
    sample: SampleImages,
    *,
    images: int,
    masked: int,
    shown: int,
    seed: int,
    advance: Callable[[int], None],
) -> TwinExamination:
    """Run every probe on one trained twin."""
    model = model.to(sample.device)
    examination = examine(model, sample.batches(images), advance=advance, tau=TAUS)
    is_softmax = {layer.mechanism for layer in examination.layers} == {"softmax"}
    pictures = sample.prepare(sample.one_per_class(shown))
    with torch.no_grad(), capture(model) as captured:
        model(pictures[:1])
    middle = captured.layers[len(captured.layers) // 2]
    has_grid = examination.layers[0].local_mass is not None
    masks = mask_out(model, sample.batches(masked), seed=seed) if has_grid else {}
    confused = induced_confusion(model, sample.batches(masked), seed=seed) if is_softmax else {}
    layers = [asdict(layer) for layer in examination.layers]
    for layer in layers:  # there are many thresholds: per head they would fill the document
        names = [name for name in layer["by_head"] if not name.startswith(("kept ", "discarded "))]
        layer["by_head"] = {name: layer["by_head"][name] for name in names}
    return {
        "layers": layers,
        "images": examination.images,
        "mask_out": [{"mask": name, "accuracy": asdict(accuracy)} for name, accuracy in masks.items()],
        "induced": [{"what": name, "accuracy": asdict(accuracy)} for name, accuracy in confused.items()],
        "maps": list(maps(model, pictures)),
        "collinear": {"layer": middle.name, **collinear(middle.q[0, 0], middle.k[0, 0])},
        "row": {"weights": compare(typical(middle.scores()[0, 0]))},
    }


def maps(model: nn.Module, pictures: Tensor) -> Iterator[dict[str, Any]]:
    """Yield weights plus local residual of each layer and picture, averaged over heads, as bytes; negatives are 0."""
    for layer in attention_maps(model, pictures):
        weights = layer.weights if layer.local is None else layer.weights + layer.local
        for index, rows in enumerate(weights.double().mean(1).clamp(min=0)):
            most = rows.amax(-1, keepdim=True)
            shown = (255 * rows / torch.where(most > 0, most, 1.0)).round().to(torch.uint8).cpu()
            packed = base64.b64encode(shown.numpy().tobytes()).decode()
            yield {"layer": layer.layer, "image": index, "weights": packed, "row_max": most.flatten().tolist()}


def collinear(queries: Tensor, k: Tensor) -> dict[str, Any]:
    """Show a real query p and its double q among real keys, in the plane of p and the keys' first principal direction.

    p is the query of the head with the largest positive part, so that relu leaves something of it.
    """
    queries, k = queries.double(), k.double()
    p = queries[queries.relu().norm(dim=1).argmax()]
    along = p / p.norm()
    rest = k - k.mean(0)
    rest = rest - (rest @ along)[:, None] * along
    across = torch.linalg.svd(rest, full_matrices=False).Vh[0]
    plane = torch.stack([along, across], 1)  # [d, 2]
    both = torch.stack([p, 2 * p])
    rows = []
    for label, chosen in ROWS.items():
        weights = attention_weights(both[None, None], k[None, None], chosen)[0, 0]
        rows.append({"label": label, "p": weights[0].tolist(), "q": weights[1].tolist()})
    return {"keys": (k @ plane).tolist(), "p": (p @ plane).tolist(), "q": (2 * p @ plane).tolist(), "rows": rows}


def typical(scores: Tensor) -> Tensor:
    """Return the row of scores with the median range."""
    reach = scores.amax(-1) - scores.amin(-1)
    return scores[reach.argsort()[len(reach) // 2]]


def png(pixels: Tensor) -> str:
    """Encode a uint8 image [3, h, w] as a data address."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def time_mechanisms(plan: TimingPlan, seed: int, device: str, advance: Advance) -> dict[str, Any]:
    """Time calls against the number of tokens, beside SDPA, with their memory; on one thread if the machine is busy."""
    cases = cases_named(plan.mechanisms)
    dims = sorted({case.head_dim or plan.head_dim for case in cases}, reverse=True)
    step = 1 / (len(plan.tokens) * (plan.repeats + 1) * (len(cases) + len(dims)))
    laps: list[scaling.Lap] = []
    with threads(steady_threads()):
        for tokens in plan.tokens:
            for dim in dims:
                q, k, v = _normal(seed, 3, plan.heads, tokens, dim, torch.float32).to(device).unbind()
                group = {case.label: case.mechanism for case in cases if (case.head_dim or plan.head_dim) == dim}
                tick = lambda label, tokens=tokens: advance(f"timing {label}, {tokens} tokens", step)  # noqa: E731
                try:
                    laps += scaling.race(q, k, v, group, repeats=plan.repeats, tick=tick)
                except RuntimeError as error:
                    if "memory" not in str(error):
                        raise
                    raise ArgumentError(f"{tokens} tokens do not fit in memory: shorten --tokens") from None
        used = torch.get_num_threads()
    by_case = sorted(laps, key=lambda lap: (lap.label, -lap.head_dim))  # stable: lengths stay in order
    trends = [scaling.trend(list(group)) for _, group in groupby(by_case, key=lambda lap: (lap.label, lap.head_dim))]
    return {
        "dtype": "float32", "threads": used, "heads": plan.heads, "head_dim": plan.head_dim,
        "tokens": list(plan.tokens), "laps": [asdict(lap) for lap in laps],
        "trends": [asdict(trend) for trend in trends],
    }  # fmt: skip


def time_twins(models: Mapping[str, nn.Module], pictures: Tensor, repeats: int, advance: Advance) -> dict[str, float]:
    """Return the seconds per image that each trained twin takes to answer; they take turns on the same pictures."""
    with threads(steady_threads()), torch.inference_mode():
        calls = {id_: partial(model, pictures) for id_, model in models.items()}
        tick = lambda id_: advance(f"timing the twin {id_}", 0.0)  # noqa: E731
        timings = time_calls(calls, pictures.device, repeats=repeats, tick=tick)
    return {id_: (time.eager_seconds or time.seconds) / len(pictures) for id_, time in timings.items()}


def compare_with_softmax(plan: TimingPlan, seed: int, advance: Advance) -> list[dict[str, Any]]:
    """Return how far mechanisms are from softmax, against the range of random scores; "uniform" is the baseline 1/n."""
    cases = cases_named(plan.mechanisms)
    q, k = _normal(seed, 2, plan.score_heads, plan.score_tokens, plan.head_dim, torch.float64).unbind()
    uniform = approximation.sweep(q, k, None, plan.deviations)
    curves = [("uniform", uniform)]
    for case in cases:
        advance(f"comparing {case.label} with softmax", 1 / len(cases))
        curves.append((case.label, approximation.sweep(q, k, case.mechanism, plan.deviations)))
    return [
        {
            "label": label,
            "approximates_softmax": approximation.approximates(points, uniform),
            "safe_range": approximation.safe_range(points, TOLERANCE),
            "points": [asdict(point) for point in points],
        }
        for label, points in curves
    ]


def _normal(seed: int, count: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, heads, tokens, dim, generator=generator, dtype=dtype)


def check_memory(plan: TimingPlan, device: str) -> None:
    """Refuse lengths that do not fit in memory, before anything is trained."""
    longest, free = max(plan.tokens), free_bytes(torch.device(device))
    needed = LINEAR_COPIES * plan.heads * longest * plan.head_dim * 4
    if free is not None and needed > 0.8 * free:
        raise ArgumentError(
            f"{longest} tokens need about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: shorten --tokens"
        )
