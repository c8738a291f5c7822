"""Shows docstrings as they are written: doctests and aligned tables become code blocks, prose stays prose."""

import re

import griffe


def fence(text: str) -> str:
    return "\n\n".join(_fence(paragraph) for paragraph in re.split(r"\n\s*\n", text))


def _fence(paragraph: str) -> str:
    if paragraph.startswith(">>> "):
        return f"```pycon\n{paragraph}\n```"
    if all(re.search(r"\S {2,}\S", line) or line.startswith(" ") for line in paragraph.splitlines()):
        return f"```text\n{paragraph}\n```"
    return paragraph


class PlainDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = fence(obj.docstring.value)
