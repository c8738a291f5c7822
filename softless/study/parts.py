"""What a study has found out so far, kept part by part, so that the same command goes on where it was.

    DIR/parts/NAME.json    {"asked": all that the part depends on, "found": its numbers}

A part that was asked for otherwise, or that is damaged, is made again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from softless.io.files import to_json, write_text


class Parts:
    """The parts in a study's folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "parts"

    def part(self, name: str, asked: dict[str, Any], make: Callable[[], Any]) -> Any:
        """What was found before, or what `make` finds now."""
        path, asked = self.folder / f"{name}.json", json.loads(json.dumps(asked))
        before = self._read(path)
        if isinstance(before, dict) and before.get("asked") == asked and "found" in before:
            return before["found"]
        document = {"asked": asked, "found": make()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(path, to_json(document) + "\n")
        return json.loads(to_json(document))["found"]

    def _read(self, path: Path) -> Any:
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
