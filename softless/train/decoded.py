"""A set of small images decoded once, for many trainings in many processes.

    FOLDER/step-SIZE/   train.safetensors, test.safetensors: pixels, labels, ids, as `cached` gives them

It is a checkpoint like any other: there whole or not at all, and every byte compared before it is believed.
"""

from collections.abc import Callable
from pathlib import Path

from softless.data.damage import Damage
from softless.data.images import Images
from softless.data.loading import cached
from softless.data.reading import Batch
from softless.errors import FileError
from softless.io import checkpoint
from softless.train.assemble import Means

Parts = tuple[Images, Images]


def decode(
    shelf: Path, parts: Parts, size: int, means: Means, tick: Callable[[int], None] = lambda _images: None
) -> None:
    """Put the decoded set on the shelf, unless it is there."""
    if fetch(shelf, parts, size) is not None:
        return
    made = [
        cached(part, size=size, workers=means.workers, damage=Damage(means.on_bad_image, len(part)), tick=tick)
        for part in parts
    ]
    tensors = {name: dict(batch._asdict()) for name, batch in zip(("train", "test"), made, strict=True)}
    checkpoint.save(shelf, size, tensors, {"fingerprints": [part.fingerprint for part in parts]}, keep=1)


def fetch(shelf: Path, parts: Parts, size: int) -> tuple[Batch, Batch] | None:
    """(train, test) from the shelf, if it holds these images at this size, whole."""
    try:
        found = checkpoint.newest(shelf)
    except FileError:
        return None
    wanted = [part.fingerprint for part in parts]
    if found is None or found.step != size or found.state.get("fingerprints") != wanted:
        return None
    train, test = (Batch(**found.parts[name]) for name in ("train", "test"))
    return train, test
