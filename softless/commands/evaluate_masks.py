"""The part of `softless evaluate` for segmentations: mIoU, the IoU of each class, and pixel accuracy."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from softless.commands.arguments import OnBad
from softless.commands.common import console, emit_json, must_be_finite, plain, plain_table, warnings_in_one_line
from softless.commands.progress import progress
from softless.errors import ArgumentError
from softless.report import units

SCHEMA = "softless.evaluate-masks/1"


class EvaluatedMasks(TypedDict):
    """The JSON document of a segmentation. Shares run from 0 to 1, and are None where there is nothing to divide by."""

    schema: str
    target: str
    step: int
    data: str
    device: str
    images: int
    pixels: int  # with a class
    miou: float
    pixel_accuracy: float
    loss: float
    images_per_second: float  # with decoding
    by_class: dict[str, float | None]  # IoU
    recall: dict[str, float | None]
    skipped: dict[str, str]  # name of each image that is bad, and why


def evaluate_masks(
    target: str, data: str | None, batch: int, device: str, workers: int, on_bad_image: OnBad, json: bool
) -> None:
    """Run the best model of a run on every image once, and show its scores."""
    from softless.data.masked_sources import open_masked, open_masked_test
    from softless.data.reading import Damage
    from softless.train.devices import Devices, runnable
    from softless.train.tasks import all_skipped, evaluate
    from softless.train.tasks.segment import PixelCounts, segment_loader, trained

    with warnings_in_one_line():
        model, recipe, about = trained(Path(target))
    source = about["data"] if data is None else data
    if data is None:
        images = open_masked_test(source, recipe.masks, recipe.hold_out)
    else:
        images = open_masked(source, "test", recipe.masks)
    if [*images.classes] != about["classes"]:
        theirs, ours = (", ".join(names) for names in (about["classes"], images.classes))
        raise ArgumentError(f"{target} was trained on classes {theirs}, and the masks have {ours}")
    devices = Devices(device, runnable(recipe.precision, device))
    damage, start = Damage(on_bad_image, len(images)), time.monotonic()
    recipe = replace(recipe, batch=min(batch, recipe.batch), accumulate=1)
    batches = segment_loader(images, recipe, 0, devices, damage, train=False, workers=workers)
    with progress(len(images), not json and devices.main) as advance:

        class Shown(PixelCounts):
            """Counts that move the bar."""

            def add(self, model, batch) -> None:  # type: ignore[no-untyped-def]
                super().add(model, batch)
                advance("evaluating", len(batch.ids) * devices.ranks)

        metrics = partial(Shown, len(images.classes), devices.device)
        scores = evaluate(model.to(devices.device), batches, metrics, devices).scores()
    must_be_finite(scores.loss, target, f"the images of {source}")
    skipped = all_skipped(batches, devices)
    count = len(images) - len(skipped)
    document: EvaluatedMasks = {
        "schema": SCHEMA,
        "target": target,
        "step": about["step"],
        "data": source,
        "device": str(devices.device),
        "images": count,
        "pixels": scores.pixels,
        "miou": scores.miou,
        "pixel_accuracy": scores.accuracy,
        "loss": scores.loss,
        "images_per_second": count / max(time.monotonic() - start, 1e-9),
        "by_class": dict(zip(images.classes, scores.by_class, strict=True)),
        "recall": dict(zip(images.classes, scores.recall, strict=True)),
        "skipped": skipped,
    }
    if not devices.main:
        return
    if json:
        emit_json(document)
    else:
        _show(document)


def _show(document: EvaluatedMasks) -> None:
    out = console()
    lines = (
        f"{units.counted(document['images'], 'image')} of {plain(document['data'])}, {document['device']}",
        *(f"skipped {plain(name)}: {plain(why)}" for name, why in document["skipped"].items()),
        f"mIoU            {document['miou']:.2%}   mean over the classes",
        f"pixel accuracy  {document['pixel_accuracy']:.2%}",
        f"speed           {units.short(document['images_per_second'])} images/s, decoding included",
        "",
    )
    out.print("\n".join(lines), soft_wrap=True)
    table = plain_table("class", "IoU", "found")
    for name, share in document["by_class"].items():
        table.add_row(plain(name), *("-" if x is None else f"{x:.2%}" for x in (share, document["recall"][name])))
    out.print(table)
