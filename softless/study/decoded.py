"""A set of small images decoded once, for many trainings in many processes.

    FOLDER/step-SIZE/   train.safetensors, test.safetensors: pixels, labels, ids, as `cached` gives them
                        state.json: fingerprints, and the images that were skipped: [{name: why}, {name: why}]

It is a checkpoint like any other: there whole or not at all, and every byte compared before it is believed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from softless.data.images import Images
from softless.data.loading import cached
from softless.data.reading import Batch, Damage
from softless.errors import FileError
from softless.io import checkpoint
from softless.train.assemble import Runtime

Parts = tuple[Images, Images]


class Decoded(NamedTuple):
    """The images to train and to test on, and name -> why of those that are not among them."""

    train: Batch
    test: Batch
    skipped: tuple[dict[str, str], dict[str, str]]


def decode(
    shelf: Path, parts: Parts, size: int, runtime: Runtime, tick: Callable[[int], None] = lambda _images: None
) -> None:
    """Put the decoded set on the shelf, unless it is there; what was skipped then is met again."""
    damages = [Damage(runtime.on_bad_image, len(part)) for part in parts]
    found = fetch(shelf, parts, size)
    if found is not None:
        for damage, skipped in zip(damages, found.skipped, strict=True):
            for each in skipped.items():
                damage.met(*each)
        return
    made = [
        cached(part, size=size, workers=runtime.workers, damage=damage, tick=tick)
        for part, damage in zip(parts, damages, strict=True)
    ]
    tensors = {name: dict(batch._asdict()) for name, batch in zip(("train", "test"), made, strict=True)}
    state = {"fingerprints": [part.fingerprint for part in parts], "skipped": [damage.skipped for damage in damages]}
    checkpoint.save(shelf, size, tensors, state, keep=1)


def fetch(shelf: Path, parts: Parts, size: int) -> Decoded | None:
    """The set from the shelf, if it holds these images at this size, whole."""
    try:
        found = checkpoint.newest(shelf)
    except FileError:
        return None
    wanted = [part.fingerprint for part in parts]
    if found is None or found.step != size or found.state.get("fingerprints") != wanted:
        return None
    train, test = (Batch(**found.parts[name]) for name in ("train", "test"))
    of_train, of_test = found.state.get("skipped", ({}, {}))  # shelves from before they were named have none
    return Decoded(train, test, (of_train, of_test))
