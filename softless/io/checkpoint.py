"""Checkpoints that a kill, a full disk or a flipped bit cannot turn into wrong numbers.

A checkpoint is a folder on a shelf, and it is there whole or not at all:

    last/                           the shelf
      step-00000400/
        model.safetensors           tensors, a file a part; any reader of safetensors opens it
        optimizer.safetensors
        state.json                  numbers
        manifest.json               size and sha256 of each file, and of itself; written last
      .partial-step-00000400/       a folder being written or removed; nobody reads it

Every file is synced, then the partial folder; one rename puts it in its place. A kill therefore leaves the old
checkpoints and perhaps a partial folder, which the next save removes. Nothing is pickled, and no byte is believed
before its sha256 has been compared: safetensors has no checksum of its own.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from softless.errors import FileError
from softless.io import files

SCHEMA = "softless.checkpoint/1"
STATE, MANIFEST, TENSORS = "state.json", "manifest.json", ".safetensors"
LARGEST_MANIFEST = 2**20
_NAME, _PARTIAL = re.compile(r"step-(\d{8,})"), ".partial-"


class Checkpoint(NamedTuple):
    """What was saved: tensors by part and name, and numbers."""

    path: Path
    step: int
    parts: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(
    shelf: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int = 2,
    also: int | None = None,
) -> Path:
    """Put a checkpoint on the shelf, then take off what came later, of a run that went back, and all but `keep`
    and that of update `also`.

    A `FileError` says what the system refused; the checkpoints that were there are still whole.
    """
    place = shelf / f"step-{step:08d}"
    with files.written_or_explained(f"the checkpoint {place}"):
        if not shelf.is_dir():
            shelf.mkdir(parents=True)
            files.sync_folder(shelf.parent)
        _clear_partial(shelf)
        try:
            _stage(partial := shelf / (_PARTIAL + place.name), step, parts, state)
            if place in _places(shelf):  # damaged, or of a run that went back
                _remove(place)
            partial.replace(place)
        except BaseException:
            with suppress(OSError):
                _clear_partial(shelf)
            raise
        files.sync_folder(shelf)
        places = _places(shelf)
        at = places.index(place)
        for gone in (*places[:at], *places[at + keep :]):
            if _step(gone) != also:
                _remove(gone)
    return place


def drop_after(shelf: Path, step: int) -> None:
    """Take off what came after an update, of a run that goes back there."""
    with files.written_or_explained(f"the checkpoints in {shelf}"):
        for place in _places(shelf):
            if _step(place) > step:
                _remove(place)


def any_in(shelf: Path) -> bool:
    """Whether the shelf has a checkpoint, whole or damaged."""
    return bool(_places(shelf))


def newest(shelf: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, with a warning for each later one that is not; None on an empty shelf.

    A training beside it may take off what was just listed: where the shelf has changed, it is looked at again.
    """
    while True:
        places = _places(shelf)
        found, damaged = _first_whole(places)
        if (found and not damaged) or places == _places(shelf):
            break
    if found is None:
        if damaged:
            raise FileError(f"no checkpoint in {shelf} is whole: {'; '.join(damaged)}")
        return None
    for sentence in damaged:
        warnings.warn(f"{sentence}; {found.path.name} is used in its place", RuntimeWarning, stacklevel=2)
    return found


def read(place: Path) -> Checkpoint:
    """A checkpoint, every byte compared with its manifest; a `FileError` names the file that differs."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        manifest = _manifest(place)
        files = {name: _verified(place / name, fact) for name, fact in manifest["files"].items()}
        state = json.loads(files.pop(STATE))
        # In one order, which safetensors has not: ranks exchange tensors one after the other.
        parts = {name.removesuffix(TENSORS): dict(sorted(load(data).items())) for name, data in sorted(files.items())}
    except OSError as error:
        raise FileError(f"the checkpoint {place} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"the checkpoint {place} holds what no checkpoint of softless holds ({error})") from error
    return Checkpoint(place, manifest["step"], parts, state)


def _first_whole(places: Iterable[Path]) -> tuple[Checkpoint | None, list[str]]:
    """The first that can be read, and what is wrong with those before it."""
    damaged: list[str] = []
    for place in places:
        try:
            return read(place), damaged
        except FileError as error:
            damaged.append(str(error))
    return None, damaged


def _stage(partial: Path, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    from safetensors.torch import save as to_bytes

    partial.mkdir()
    facts: dict[str, dict[str, Any]] = {}
    for name, tensors in parts.items():
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        facts[name + TENSORS] = _written(partial / (name + TENSORS), to_bytes(plain))
    facts[STATE] = _written(partial / STATE, _json(dict(state)))
    manifest = {"schema": SCHEMA, "step": step, "files": facts}
    files.write(partial / MANIFEST, _json(manifest | {"sha256": _digest(_json(manifest))}))
    files.sync_folder(partial)


def _written(path: Path, data: bytes) -> dict[str, Any]:
    files.write(path, data)
    return {"bytes": len(data), "sha256": _digest(data)}


def _manifest(place: Path) -> dict[str, Any]:
    """The manifest, if every byte of it is as it was written and it speaks of the files that are there."""
    here = {path.name for path in place.iterdir()}
    if MANIFEST not in here:
        raise FileError(f"the checkpoint {place} has no {MANIFEST}")
    path = place / MANIFEST
    if path.stat().st_size > LARGEST_MANIFEST:
        raise FileError(f"{path} is larger than a manifest can be")
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
        stated = manifest.pop("sha256")
        whole = stated == _digest(_json(manifest)) and data == _json(manifest | {"sha256": stated})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise FileError(f"{path} is damaged: its sha256 is not the one it states")
    if manifest["schema"] != SCHEMA:
        raise FileError(f"{path} has schema {manifest['schema']!r}, and {SCHEMA!r} is read here")
    listed = {*manifest["files"], MANIFEST}
    if listed != here:
        missing, extra = sorted(listed - here), sorted(here - listed)
        says = [
            f"{word} {', '.join(names)}" for word, names in (("lacks", missing), ("has an unlisted", extra)) if names
        ]
        raise FileError(f"the checkpoint {place} {' and '.join(says)}")
    return manifest


def _verified(path: Path, fact: Mapping[str, Any]) -> bytes:
    size = path.stat().st_size
    if size != fact["bytes"]:
        raise FileError(f"{path} is damaged: it has {size:,} bytes, and {fact['bytes']:,} were written")
    data = path.read_bytes()
    if _digest(data) != fact["sha256"]:
        raise FileError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}")
    return data


def _places(shelf: Path) -> list[Path]:
    """The checkpoints on a shelf, the newest first."""
    found = [path for path in shelf.iterdir() if _NAME.fullmatch(path.name)] if shelf.is_dir() else []
    return sorted(found, key=_step, reverse=True)


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def _remove(place: Path) -> None:
    """Out of sight by one rename, so that a kill leaves no half of it in its place."""
    partial = place.with_name(f"{_PARTIAL}old-{place.name}")
    place.replace(partial)
    _delete(partial)


def _clear_partial(shelf: Path) -> None:
    for path in shelf.iterdir():
        if path.name.startswith(_PARTIAL):
            _delete(path)


def _delete(path: Path) -> None:
    """A folder and all that is in it; of a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
