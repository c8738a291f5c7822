"""Save a converted model: a complete folder, or none."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from softless.conversion.layers import Layers
from softless.errors import FileError
from softless.io.files import sync_folder, write_json, written_or_explained

NAME = "conversion.json"


def save(layers: Layers, document: Mapping[str, Any], folder: Path, also: Iterable[Any] = ()) -> None:
    """Write the model aside and rename it; the folder of an earlier conversion is replaced."""
    check_target(folder)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    with written_or_explained(f"the converted model {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            layers.save(aside)
            for part in also:
                part.save_pretrained(aside)
            write_json(aside / NAME, document)
            if folder.exists():
                shutil.rmtree(folder)
            aside.replace(folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_folder(folder.parent)


def check_target(folder: Path) -> None:
    """Refuse a folder that holds anything but a conversion."""
    if folder.exists() and not (folder / NAME).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(f"{folder} exists and is no conversion: choose another folder")
