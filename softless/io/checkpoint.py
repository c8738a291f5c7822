"""Checkpoints that survive a kill, a full disk and a flipped bit: they are complete, or they are refused.

A checkpoint is a folder on a shelf:

    last/                           the shelf
      step-00000400/
        model.safetensors           tensors, one file per part; any reader of safetensors opens it
        optimizer.safetensors
        state.json                  numbers
        manifest.json               size and sha256 of each file and of the manifest itself; written last
      .partial-step-00000400/       a checkpoint that is being written or removed; never read

Every file is synced, then the partial folder, and one rename puts the folder in its place. So a kill leaves the old
checkpoints and perhaps a partial folder, which the next save removes. Nothing is pickled. Every file is compared with
its sha256 before it is used, because safetensors has no checksum of its own.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Mapping
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
    """A saved checkpoint: tensors by part and name, and a state of plain numbers."""

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
    """Save a checkpoint on the shelf, delete old ones, and return the new folder.

    Only the newest `keep` checkpoints up to this step and that of step `also` stay; later ones exist if the run went
    back. If the system refuses to write, a `FileError` says why, and the old checkpoints are complete.
    """
    place = shelf / f"step-{step:08d}"
    with files.written_or_explained(f"the checkpoint {place}"):
        if not shelf.is_dir():
            shelf.mkdir(parents=True)
            files.sync_folder(shelf.parent)
        _clear_partial(shelf)
        try:
            _stage(partial := shelf / (_PARTIAL + place.name), step, parts, state)
            if place in places(shelf):  # it is damaged, or the run went back
                _remove(place)
            partial.replace(place)
        except BaseException:
            with suppress(OSError):
                _clear_partial(shelf)
            raise
        files.sync_folder(shelf)
        saved = places(shelf)
        at = saved.index(place)
        for old in (*saved[:at], *saved[at + keep :]):
            if _step(old) != also:
                _remove(old)
    return place


def drop_after(shelf: Path, step: int) -> None:
    """Delete the checkpoints after a step, for a run that goes back to it."""
    with files.written_or_explained(f"the checkpoints in {shelf}"):
        for place in places(shelf):
            if _step(place) > step:
                _remove(place)


def newest(shelf: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, with a warning for each newer one that is damaged; None if none was saved.

    If a training changes the shelf meanwhile, the search starts again.
    """
    before = places(shelf)
    damaged: list[str] = []
    for place in before:
        try:
            checkpoint = read(place)
        except FileError as error:
            damaged.append(str(error))
            continue
        if damaged and before != places(shelf):
            return newest(shelf)
        for problem in damaged:
            warnings.warn(f"{problem}; {place.name} is used instead", RuntimeWarning, stacklevel=2)
        return checkpoint
    if before != places(shelf):
        return newest(shelf)
    if damaged:
        raise FileError(f"no checkpoint in {shelf} is complete: {'; '.join(damaged)}")
    return None


def read(place: Path) -> Checkpoint:
    """Read a checkpoint and compare every file with the manifest; a `FileError` names the file that differs."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        manifest = _manifest(place)
        files = {name: _verified(place / name, fact) for name, fact in manifest["files"].items()}
        state = json.loads(files.pop(STATE))
        # Sorted, because safetensors has no order and ranks exchange tensors one after the other.
        parts = {name.removesuffix(TENSORS): dict(sorted(load(data).items())) for name, data in sorted(files.items())}
    except OSError as error:
        raise FileError(f"the checkpoint {place} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"the checkpoint {place} is not a checkpoint of softless ({error})") from error
    return Checkpoint(place, manifest["step"], parts, state)


def _stage(partial: Path, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    from safetensors.torch import save as to_bytes

    partial.mkdir()
    facts: dict[str, dict[str, Any]] = {}

    def write(name: str, data: bytes) -> None:
        files.write(partial / name, data)
        facts[name] = {"bytes": len(data), "sha256": _digest(data)}

    for name, tensors in parts.items():
        write(name + TENSORS, to_bytes({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}))
    write(STATE, _json(dict(state)))
    manifest = {"schema": SCHEMA, "step": step, "files": facts}
    files.write(partial / MANIFEST, _json(manifest | {"sha256": _digest(_json(manifest))}))
    files.sync_folder(partial)


def _manifest(place: Path) -> dict[str, Any]:
    """Return the manifest if it is undamaged and lists exactly the files in the folder."""
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
        intact = stated == _digest(_json(manifest)) and data == _json(manifest | {"sha256": stated})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise FileError(f"{path} is damaged: its sha256 is not the one it states")
    if manifest["schema"] != SCHEMA:
        raise FileError(f"{path} has schema {manifest['schema']!r}, and this version reads {SCHEMA!r}")
    listed = {*manifest["files"], MANIFEST}
    if listed != here:
        differences = {"lacks": listed - here, "has an unlisted": here - listed}
        says = [f"{verb} {', '.join(sorted(names))}" for verb, names in differences.items() if names]
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


def places(shelf: Path) -> list[Path]:
    """Return the folders of the checkpoints on a shelf, complete or damaged, the newest first."""
    folders = [path for path in shelf.iterdir() if _NAME.fullmatch(path.name)] if shelf.is_dir() else []
    return sorted(folders, key=_step, reverse=True)


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def _remove(place: Path) -> None:
    """Rename a checkpoint before deleting it, so that a kill does not leave half of it."""
    partial = place.with_name(f"{_PARTIAL}old-{place.name}")
    place.replace(partial)
    _delete(partial)


def _clear_partial(shelf: Path) -> None:
    for path in shelf.iterdir():
        if path.name.startswith(_PARTIAL):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a folder with its files, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
