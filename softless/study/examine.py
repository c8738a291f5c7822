"""The probing half of a study: a trained twin on test images, through every probe, into plain numbers.

JSON of one twin: {"layers": [LayerFindings], "mask_out": [...], "induced": [...], "maps": [...], "collinear", "row"}
"""

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from softless.data.augment import Augment
from softless.data.device_augment import finish
from softless.data.reading import Batch
from softless.functional import attention_weights
from softless.mechanisms import Mechanism, mechanism
from softless.nn.maps import attention_maps
from softless.probes.capture import capture
from softless.probes.examination import examine
from softless.probes.findings import LayerFindings
from softless.probes.interventions import induced_confusion, mask_out
from softless.probes.score_range import compare

TAUS = tuple(0.25 * step for step in range(1, 33))  # of the threshold rule: steps of the slider on the page
TOGETHER = 60  # images a batch: their explicit weights are alive at once
ROWS: dict[str, Mechanism] = {
    "softmax": mechanism("softmax"),
    "linear relu": mechanism("linear", phi="relu"),
    "inline": mechanism("inline"),
}

Advance = Callable[[int], None]


class Exhibit:
    """Test images as a model sees them."""

    def __init__(self, images: Batch, augment: Augment, device: str = "cpu"):
        self.images, self.augment, self.device = images, augment, device

    def batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first `count`, evenly from the whole set: a set may be sorted by class."""
        for part in self._chosen(count).split(TOGETHER):
            yield self.seen(part), self.images.labels[part].to(self.device)

    def seen(self, ids: Tensor) -> Tensor:
        return finish(self.images.pixels[ids].to(self.device), self.augment)

    def first(self, count: int) -> Tensor:
        """As many images at once, evenly from the whole set."""
        return self.seen(self._chosen(count))

    def one_a_class(self, count: int) -> Tensor:
        """The first image of each of the first classes."""
        labels = self.images.labels.tolist()
        return torch.tensor([labels.index(label) for label in sorted(set(labels))[:count]])

    def _chosen(self, count: int) -> Tensor:
        total = len(self.images.labels)
        return torch.arange(min(count, total)) * total // min(count, total)


def examined(
    model: nn.Module, exhibit: Exhibit, *, images: int, masked: int, shown: int, seed: int, advance: Advance
) -> dict[str, Any]:
    """All that is asked of one twin."""
    model = model.to(exhibit.device)
    found = examine(model, exhibit.batches(images), advance=advance, tau=TAUS)
    first = found.layers[0]
    is_softmax = {layer.mechanism for layer in found.layers} == {"softmax"}
    pictures = exhibit.seen(exhibit.one_a_class(shown))
    with torch.no_grad(), capture(model) as captured:
        model(pictures[:1])
    middle = captured.layers[len(captured.layers) // 2]
    answers = [] if first.local_mass is None else mask_out(model, exhibit.batches(masked), seed=seed)
    confused = induced_confusion(model, exhibit.batches(masked), seed=seed) if is_softmax else ()
    return {
        "layers": [_plain(layer) for layer in found.layers],
        "images": found.images,
        "mask_out": [{"mask": each.mask, "accuracy": asdict(each.accuracy)} for each in answers],
        "induced": [asdict(each) for each in confused],
        "maps": list(maps(model, pictures)),
        "collinear": {"layer": middle.name, **collinear(middle.q[0, 0], middle.k[0, 0])},
        "row": asdict(compare(typical(middle.scores()[0, 0]))),
    }


def _plain(layer: LayerFindings) -> dict[str, Any]:
    """As JSON; what a threshold keeps is left out by head, because there are many thresholds."""
    found = asdict(layer)
    found["by_head"] = {
        name: each for name, each in found["by_head"].items() if not name.startswith(("kept ", "discarded "))
    }
    return found


def maps(model: nn.Module, pictures: Tensor) -> Iterator[dict[str, Any]]:
    """Weights and local residual of each layer and picture, heads averaged, a byte each; negative ones are 0."""
    for found in attention_maps(model, pictures):
        weights = found.weights if found.local is None else found.weights + found.local
        for index, rows in enumerate(weights.double().mean(1).clamp(min=0)):
            most = rows.amax(-1, keepdim=True)
            shown = (255 * rows / torch.where(most > 0, most, 1.0)).round().to(torch.uint8).cpu()
            packed = base64.b64encode(shown.numpy().tobytes()).decode()
            yield {"layer": found.layer, "image": index, "weights": packed, "row_max": most.flatten().tolist()}


def collinear(queries: Tensor, k: Tensor) -> dict[str, Any]:
    """A real query p and its double q over real keys, seen in the plane of p and the keys' first principal direction.

    p is the query of one head with the largest positive part: what relu leaves of it is not nothing.
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
    for label, made in ROWS.items():
        weights = attention_weights(both[None, None], k[None, None], made)[0, 0]
        rows.append({"label": label, "p": weights[0].tolist(), "q": weights[1].tolist()})
    return {"keys": (k @ plane).tolist(), "p": (p @ plane).tolist(), "q": (2 * p @ plane).tolist(), "rows": rows}


def typical(scores: Tensor) -> Tensor:
    """The row whose range is the median of all rows."""
    reach = scores.amax(-1) - scores.amin(-1)
    return scores[reach.argsort()[len(reach) // 2]]


def png(pixels: Tensor) -> str:
    """uint8 [3, h, w] as an address that holds the picture itself."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
