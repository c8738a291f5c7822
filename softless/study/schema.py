"""The document of a study, report.json (schema softless.study/4): its types, and the function that reads it.

A number is null where it could not be measured. A part is null, empty or absent where the study did not ask for it.
The reader therefore treats a missing key as null, and checks a file against these types before anything is drawn.
Except for seconds, bytes, date and load, the numbers of a study repeat exactly from its seed.
"""

# ruff: noqa: UP013 (one line per object: the types are laid out as the JSON is)

import json
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

from softless.errors import FileError
from softless.machine import Machine

NAME, SCHEMA = "report.json", "softless.study/4"
LARGEST = 1e300  # larger numbers and NaN cannot be drawn
KINDS = {str: "a text", float: "a number", int: "a whole number", bool: "true or false", list: "a list"}

Number = float | None
Text = str | None
Size = list[int] | None  # [width, height]

# A mean over n values with its 95 % interval, which one value alone does not have.
Estimated = TypedDict("Estimated", {"mean": Number, "low": Number, "high": Number, "n": Number})

# Sizes of the images before they were resized; then the images, and what the recipe made of them. `chance` is the
# share of the most frequent class among the test images.
ImageSizes = TypedDict("ImageSizes", {"smallest": Size, "median": Size, "largest": Size})
DataPart = TypedDict("DataPart", {
    "name": str, "train": Number, "test": Number, "classes": list[str], "image_size": object, "patch": Number,
    "grid": list[int], "came": ImageSizes | None, "tokens": Number, "recipe": Text, "epochs": Number, "chance": Number,
    "split": Text,
})  # fmt: skip

# Two twins that differ in attention alone: the difference in points of accuracy, and the answer (no, yes or cannot
# tell). `headline` is the index of the pair that the study answers for.
FairPair = TypedDict("FairPair", {
    "softmax": str, "linear": str, "labels": list[str], "difference": Number, "low": Number, "high": Number,
    "parameters": list[Number] | None, "answer": str, "because": str, "would_tell": Text,
})  # fmt: skip
DecisionPart = TypedDict("DecisionPart", {"margin": float, "pairs": list[FairPair], "headline": int | None})

# A row of the verdict. The first row has the answer, and some rows have a table.
SmallTable = TypedDict("SmallTable", {"columns": list[str], "rows": list[list[object]]})
Finding = TypedDict("Finding", {
    "about": str, "says": str, "answer": NotRequired[Text], "table": NotRequired[SmallTable | None],
})  # fmt: skip

# A twin, and its trainings from each seed. A training is done, diverged or failed.
CurvePoint = TypedDict("CurvePoint", {"epoch": float, "accuracy": Number, "loss": Number})
SeedResult = TypedDict("SeedResult", {
    "seed": Number, "accuracy": Number, "loss": Number, "seconds": Number, "curve": list[CurvePoint] | None,
    "status": Text, "reason": Text,
})  # fmt: skip
TwinResult = TypedDict("TwinResult", {
    "id": str, "label": str, "mechanism": str, "options": object, "local": object, "cut": object, "tables": object,
    "parameters": Number, "macs": Number, "seconds_per_epoch": Number, "accuracy": Estimated | None,
    "seeds": list[SeedResult] | None,
})  # fmt: skip

# A table of the paper, answered by the twins of this study.
PaperTable = TypedDict("PaperTable", {
    "id": Text, "title": str, "says": Text, "columns": list[str], "rows": list[list[object]], "paper": Text,
    "setting": Text,
})  # fmt: skip

# The part of `probes.findings.LayerFindings` that is read again, and how many test images per twin were examined.
ExaminedCounts = TypedDict("ExaminedCounts", {"images": Number, "masked": Number})
HistogramPart = TypedDict("HistogramPart", {"edges": list[float], "counts": list[float]})
LayerResult = TypedDict("LayerResult", {
    "twin": str, "name": str, "confusions": Estimated | None, "confusion_histogram": HistogramPart | None,
    "local_mass": Estimated | None, "local_baseline": Number, "score_range": Estimated | None,
    "first_order_error": Estimated | None, "effective_rank": Estimated | None, "verdict": Text,
})  # fmt: skip
MaskedAccuracy = TypedDict("MaskedAccuracy", {"twin": str, "mask": str, "accuracy": Estimated | None})
InducedAccuracy = TypedDict("InducedAccuracy", {"twin": str, "what": str, "accuracy": Estimated | None})

# A query p, its double q and the keys in a plane, and the weights that each mechanism gives to the keys.
CollinearRow = TypedDict("CollinearRow", {"label": str, "p": list[float], "q": list[float]})
CollinearPart = TypedDict("CollinearPart", {
    "twin": str, "layer": str, "keys": list[list[float]], "p": list[float], "q": list[float],
    "rows": list[CollinearRow],
})  # fmt: skip

# Error of mechanisms against the range of random scores, the layers of the twins, and what a threshold keeps of them.
RangePoint = TypedDict("RangePoint", {"range": Number, "error": Number, "bound": Number})
RangeCurve = TypedDict("RangeCurve", {"label": str, "safe_range": Number, "points": list[RangePoint]})
LayerRange = TypedDict("LayerRange", {"twin": str, "layer": str, "range": Estimated | None, "error": Estimated | None})
ThresholdCurve = TypedDict("ThresholdCurve", {
    "twin": str, "layer": str, "tau": list[float], "kept": list[float], "discarded": list[float],
})  # fmt: skip
Distribution = TypedDict("Distribution", {"name": str, "weights": list[float]})
RangePart = TypedDict("RangePart", {
    "curves": list[RangeCurve] | None, "layers": list[LayerRange] | None, "threshold": list[ThresholdCurve] | None,
    "distributions": list[Distribution] | None,
})  # fmt: skip

# The attention viewer. `weights` is base64, one byte per weight, relative to `row_max`.
ViewerImage = TypedDict("ViewerImage", {"png": str, "label": str, "name": str})
ViewerMap = TypedDict("ViewerMap", {"twin": str, "layer": str, "image": int, "weights": str, "row_max": list[float]})
ViewerPart = TypedDict("ViewerPart", {"grid": list[int], "images": list[ViewerImage], "maps": list[ViewerMap]})

# Calls on random tensors, then the twins at their own number of tokens. `crossover` is the number of tokens from which
# a mechanism is faster than SDPA. A ratio above 1 is faster than the softmax twin of the same kind; `together` is the
# number of runs that shared the device while training.
LapResult = TypedDict("LapResult", {
    "label": str, "tokens": float, "head_dim": float, "seconds": Number, "fastest": Number, "speedup": Number,
    "peak_bytes": Number,
})  # fmt: skip
TrendResult = TypedDict("TrendResult", {
    "label": str, "head_dim": float, "crossover": Number, "faster_everywhere": bool | None,
})  # fmt: skip
TwinSpeed = TypedDict("TwinSpeed", {
    "twin": str, "label": str, "training_seconds": Number, "inference_seconds": Number, "training_ratio": Number,
    "inference_ratio": Number, "together": Number,
})  # fmt: skip
OwnSpeed = TypedDict("OwnSpeed", {"tokens": float, "rows": list[TwinSpeed]})
SpeedPart = TypedDict("SpeedPart", {
    "dtype": str, "threads": Number, "heads": Number, "head_dim": float, "tokens": list[int] | None,
    "laps": list[LapResult], "trends": list[TrendResult] | None, "own": OwnSpeed | None,
})  # fmt: skip

StudyDocument = TypedDict("StudyDocument", {
    "schema": str, "command": str, "date": str, "versions": dict[str, str], "machine": Machine, "seed": Number,
    "preset": str, "data": DataPart, "decision": DecisionPart | None, "verdict": list[Finding],
    "twins": list[TwinResult], "tables": list[PaperTable] | None, "examined": ExaminedCounts | None,
    "layers": list[LayerResult] | None, "mask_out": list[MaskedAccuracy] | None,
    "induced": list[InducedAccuracy] | None, "collinear": CollinearPart | None, "range": RangePart | None,
    "viewer": ViewerPart | None, "speed": SpeedPart | None, "files": dict[str, object] | None,
})  # fmt: skip


def read(folder: Path, kind: Any = StudyDocument, schema: str = SCHEMA) -> StudyDocument:
    """Read report.json in a folder; a file that is missing, damaged or of another schema raises a FileError."""
    path, (document, actual) = folder / NAME, load(folder)
    if actual != schema:
        raise FileError(f"{str(path)!r} has schema {actual!r}, and a page is made of {schema!r}: run softless study")
    try:
        check(document, kind)
        _check_twins(document)
    except FileError as error:
        raise FileError(f"{str(path)!r}: {error}") from None
    return cast("StudyDocument", document)


def load(folder: Path) -> tuple[Any, object]:
    """Load report.json in a folder, and the name of its schema, without a check."""
    path = folder / NAME
    if not path.is_file():
        raise FileError(f"{str(folder)!r} is not a report: it has no {NAME}, which softless study writes")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{str(path)!r} is damaged: {error}") from None
    return document, document.get("schema") if isinstance(document, dict) else None


def check(value: Any, kind: Any, where: str = "") -> None:
    """Raise a FileError that names the place where a value does not have the type `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if type(None) in arguments:
        if value is not None:
            check(value, arguments[0], where)
    elif is_typeddict(kind) or origin is dict:
        if not isinstance(value, dict):
            raise _unfit(value, "an object", where)
        for key, inner in (dict.fromkeys(value, arguments[1]) if origin else _hints(kind)).items():
            check(value.get(key), inner, f"{where}.{key}".lstrip("."))
    elif origin is list:
        if not isinstance(value, list):
            raise _unfit(value, KINDS[list], where)
        for index, item in enumerate(value):
            check(item, arguments[0], f"{where}[{index}]")
    elif kind is not object:
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fits or (kind in (int, float) and not abs(value) <= LARGEST):
            raise _unfit(value, KINDS[kind], where)


_hints = cache(get_type_hints)


def _unfit(value: Any, needed: str, where: str) -> FileError:
    return FileError(f"{where} is {'missing' if value is None else f'{value!r:.40}'}, and {needed} was needed")


def _check_twins(document: dict[str, Any]) -> None:
    """Every part names twins that `twins` lists."""
    known = {twin["id"] for twin in document["twins"]}
    parts = {name: document.get(name) or [] for name in ("layers", "mask_out", "induced", "recall", "decoding")}
    parts |= {f"range.{name}": (document.get("range") or {}).get(name) or [] for name in ("layers", "threshold")}
    parts["viewer.maps"] = (document.get("viewer") or {}).get("maps", [])
    for name, items in parts.items():
        for index, item in enumerate(items):
            if item["twin"] not in known:
                raise FileError(f"{name}[{index}] is about the twin {item['twin']!r}, which twins does not list")
