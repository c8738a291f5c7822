"""What a set of images was when a training began, in plain numbers, and what has changed since, in words.

    summary       {"source", "train": part, "test": part}
    part          {"images", "fingerprint", "classes": {name: [images, sha256 over their sizes in bytes]}}

Sets with the same fingerprints are the same set, wherever it lies. The rest of a summary serves to say what differs.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from softless.data.images import Images

DIGITS = 16  # of a class's sha256, in hexadecimal
NAMED = 3  # classes that a sentence names

Summary = Mapping[str, Any]


def summary(source: str | None, train: Images, test: Images) -> dict[str, Any]:
    """What to keep of a set."""
    return {"source": source or "digits", "train": _part(train), "test": _part(test)}


def what_changed(before: Summary, now: Summary) -> str | None:
    """The first difference between two sets as half a sentence about both; None where they are the same images."""
    changed = [part for part in ("train", "test") if before[part]["fingerprint"] != now[part]["fingerprint"]]
    if not changed:
        return None
    if before["source"] != now["source"]:
        return f"{_size(before)}, and {_size(now)}"
    part = changed[0]
    old, new, source = before[part]["classes"], now[part]["classes"], now["source"]
    gone, added = ([name for name in one if name not in other] for one, other in ((old, new), (new, old)))
    if gone or added:
        words = [f"{_names(names)} {word}" for names, word in ((added, "new"), (gone, "gone")) if names]
        return f"{source} has other classes since: {' and '.join(words)}"
    counts = {name: (old[name][0], new[name][0]) for name in new if old[name][0] != new[name][0]}
    if counts:
        name, (then, today) = next(iter(counts.items()))
        rest = len(counts) - 1
        more = f", and {rest} more {'class has' if rest == 1 else 'classes have'} changed" if rest else ""
        return f"class {name!r} of {source} had {_images(then)} to {part} on, and has {today:,} now{more}"
    if others := [name for name in new if old[name] != new[name]]:
        where = f"the images of {_names(others)} of {source} to {part} on"
        return f"{where} are as many as before, and their sizes in bytes differ"
    return f"the images of {source} to {part} on are as many as before, and their names or their order differ"


def _part(images: Images) -> dict[str, Any]:
    order = np.argsort(images.labels, kind="stable")
    counts = np.bincount(images.labels, minlength=len(images.classes))
    sizes = np.split(images.sizes[order].astype("<i8"), np.cumsum(counts)[:-1])
    digests = [hashlib.sha256(each.tobytes()).hexdigest()[:DIGITS] for each in sizes]
    by_class = {name: [len(each), digest] for name, each, digest in zip(images.classes, sizes, digests, strict=True)}
    return {"images": len(images), "fingerprint": images.fingerprint, "classes": by_class}


def _size(set_: Summary) -> str:
    part = set_["train"]
    return f"{set_['source']} has {_images(part['images'])} in {len(part['classes'])} classes to train on"


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count:,} images"


def _names(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMED])) + (", ..." if len(names) > NAMED else "")
    return f"{'class' if len(names) == 1 else 'classes'} {shown}"
