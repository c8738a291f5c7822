"""The page of a study of text: the frame, the figures and the scripts of the image study, with sections of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softless.io.files import write_text
from softless.report import units
from softless.report.page import COLORS, INK, require
from softless.study.decision import CANNOT
from softless.study.page import csv_files_of, frame
from softless.study.page.figure import Look, Table
from softless.study.page.text import MISSING, origin, short
from softless.study.schema import FairPair
from softless.study.text.figures import decoding_section, perplexity_section, recall_section, sample_section
from softless.study.text.schema import TextDocument, TextTwinResult, read_text_study
from softless.study.text.twins import TEXT_TWINS
from softless.train.language_recipe import SOFTMAX


def write_text_page(folder: Path) -> Path:
    """Write folder/index.html from folder/report.json; an old page is replaced in one step."""
    require("plotly", "jinja2", by="the page of a study")
    path, document = folder / "index.html", read_text_study(folder)
    write_text(path, text_page(document, csv_files_of(folder, document["files"])))
    return path


def text_page(document: TextDocument, csv_files: dict[str, str]) -> str:
    """Return the HTML of a document; the page carries the CSV files, by part, and offers them for download."""
    of_twins = text_looks(document["twins"])
    sections = [
        perplexity_section(document, of_twins), recall_section(document, of_twins),
        decoding_section(document, of_twins), sample_section(document),
    ]  # fmt: skip
    return frame(
        document, sections, of_twins, csv_files, decision=decision_of(document), facts=facts(document), images="",
        origin=origin(document), layers=[], viewer_layers={},  # type: ignore[arg-type]
    )  # fmt: skip


def text_looks(twins: Sequence[TextTwinResult]) -> dict[str, Look]:
    """Return the look of each twin by id: a color of its own, and a dash after the last color. Softmax is black."""
    known = [twin.id for twin in TEXT_TWINS if twin.id != SOFTMAX]
    by_id = {}
    for twin in twins:
        place = known.index(twin["id"]) if twin["id"] in known else len(known)
        color = INK if twin["id"] == SOFTMAX else COLORS[place % len(COLORS)]
        variant = 0 if twin["id"] == SOFTMAX else place // len(COLORS)
        by_id[twin["id"]] = Look(twin["id"], twin["label"], twin["mechanism"], color, variant)
    return by_id


def facts(document: TextDocument) -> str:
    """Say how much text, and how many twins and seeds were studied."""
    data, twins = document["data"], document["twins"]
    seeds = max((len(twin.get("seeds") or []) for twin in twins), default=0)
    count = max((twin.get("parameters") or 0 for twin in twins), default=0)
    of = data.get("whole") or 0
    read = (data.get("train") or 0) + (data.get("test") or 0)
    shortened = f" of the text's {units.size(of)}" if read < of else ""
    return (
        f"{units.size(data.get('train') or 0)} of text to train on and {units.size(data.get('test') or 0)} to test on"
        f"{shortened}, {units.counted(len(twins), 'twin')}, {units.counted(seeds, 'seed')} each. The twins are Llamas "
        f"with {units.count(count)} parameters that read sequences of {data.get('length') or 0:,.0f} tokens."
    )


def decision_of(document: TextDocument) -> dict[str, Any] | None:
    """Return the answer and the table of the pairs, the headline first; None without a pair."""
    decided = document.get("decision")
    if not decided or not decided["pairs"]:
        return None
    pairs, margin = decided["pairs"], decided["margin"]
    first = min(max(decided.get("headline") or 0, 0), len(pairs) - 1)
    ordered = [pairs[first], *(pair for place, pair in enumerate(pairs) if place != first)]
    rule = (
        f"The difference is in bits per byte more than softmax. A loss of {margin:g} or less does not matter here: "
        f"“no” means that the whole interval lies below {margin:g}, “yes” that it lies above. The intervals of all "
        "comparisons hold together with 95% confidence."
    )
    alone = any(pair.get("low") is None for pair in ordered)
    notes = (rule, *((f"{MISSING}: one seed has no interval over seeds.",) if alone else ()))
    columns = ("comparison", "softmax needed?", "bits per byte more", "interval", "perplexity", "parameters")
    rows = tuple(_pair(pair) for pair in ordered)
    reasons = [
        f"{pair['labels'][1]} against {pair['labels'][0]}: {pair['because']}." for pair in ordered[1:]
        if pair["answer"] == CANNOT and pair["because"] != ordered[0]["because"]
    ]  # fmt: skip
    return {
        "answer": ordered[0]["answer"],
        "table": Table("", "", columns, rows, notes, "decision"),
        "reasons": reasons,
    }


def _pair(pair: FairPair) -> tuple[str, ...]:
    low, high, difference = pair.get("low"), pair.get("high"), pair.get("difference")
    between = MISSING if low is None or high is None else f"{low:+.3f} to {high:+.3f}"
    more = MISSING if difference is None else f"{100 * (2**difference - 1):+.1f}%"
    sizes = list(dict.fromkeys(short(count, ",.0f") for count in pair.get("parameters") or []))
    counts = MISSING if not sizes else f"{sizes[0]} both" if len(sizes) == 1 else f"{sizes[1]} against {sizes[0]}"
    versus = f"{pair['labels'][1]} against {pair['labels'][0]}"
    return versus, pair["answer"], short(difference, "+.3f"), between, more, counts
