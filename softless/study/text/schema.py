"""The document of a study of text, report.json (schema softless.text-study/1): its types."""

# ruff: noqa: UP013 (one line per object: the types are laid out as the JSON is)

from pathlib import Path
from typing import TypedDict, cast

from softless.machine import Machine
from softless.study.schema import DecisionPart, Estimated, Finding, Number, Text, read

TEXT_SCHEMA = "softless.text-study/1"

# Bytes to train and to test on, and the bits per byte of the frequencies of single bytes (`chance`).
TextPart = TypedDict("TextPart", {
    "name": str, "train": Number, "test": Number, "sequences": Number, "length": Number, "tokens": Text,
    "recipe": Text, "epochs": Number, "chance": Number, "whole": Number,
})  # fmt: skip

# A twin, and its trainings from each seed. `sample` is how it continues the prompt of the study.
BitsPoint = TypedDict("BitsPoint", {"epoch": float, "bits_per_byte": Number})
TextSeed = TypedDict("TextSeed", {
    "seed": Number, "status": Text, "reason": Text, "bits_per_byte": Number, "perplexity": Number, "seconds": Number,
    "curve": list[BitsPoint] | None,
})  # fmt: skip
TextTwinResult = TypedDict("TextTwinResult", {
    "id": str, "label": str, "mechanism": str, "options": object, "parameters": Number, "seconds": Number,
    "bits_per_byte": Estimated | None, "perplexity": Number, "sample": Text, "seeds": list[TextSeed] | None,
})  # fmt: skip

# Accuracy on a synthetic task at one length, over seeds; a decode step after so many tokens.
RecallResult = TypedDict("RecallResult", {
    "twin": str, "label": str, "task": str, "tokens": float, "inside": bool, "accuracy": Estimated | None,
})  # fmt: skip
DecodingResult = TypedDict("DecodingResult", {
    "twin": str, "label": str, "tokens": float, "seconds": Number, "bytes": Number,
})  # fmt: skip

TextDocument = TypedDict("TextDocument", {
    "schema": str, "command": str, "date": str, "versions": dict[str, str], "machine": Machine, "seed": Number,
    "preset": str, "data": TextPart, "decision": DecisionPart | None, "verdict": list[Finding],
    "twins": list[TextTwinResult], "prompt": Text, "recall": list[RecallResult] | None,
    "decoding": list[DecodingResult] | None, "files": dict[str, object] | None,
})  # fmt: skip


def read_text_study(folder: Path) -> TextDocument:
    """Read report.json of a study of text; a file that is missing, damaged or of another schema raises a FileError."""
    return cast("TextDocument", read(folder, TextDocument, TEXT_SCHEMA))
