"""The page of a study: index.html beside report.json, one file that fetches nothing.

`write_page` reads the document, asks one module per subject for its figures, and fills static/study.html. The figures
are stored as JSON in the colors of the light theme; static/*.js draws them in the theme of the reader. The study of
text fills the same frame with sections of its own (study/text/page.py).
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from softless.io.files import write_text
from softless.report.page import require
from softless.study.page import figure_accuracy, figure_attention, figure_queries, figure_range, figure_speed, text
from softless.study.page.figure import DARK, Figure, Look, Section, Table, looks
from softless.study.schema import NAME, StudyDocument, read

SECTIONS = (
    figure_accuracy.section, figure_attention.viewer_section, figure_queries.section, figure_attention.locality_section,
    figure_range.section, figure_speed.section,
)  # fmt: skip
FILTERS = ("after", "bare", "cells", "first_sentence", "sentence")
LARGEST = 4_000_000  # bytes of a CSV that the page carries; the data of a larger CSV is offered as JSON
SCRIPTS = ("labels.js", "figures.js", "threshold.js", "viewer.js", "start.js")


def write_page(folder: Path) -> Path:
    """Write folder/index.html from folder/report.json; an old page is replaced in one step."""
    require("plotly", "jinja2", by="the page of a study")
    path, document = folder / "index.html", read(folder)
    write_text(path, page(document, csv_files_of(folder, document.get("files"))))
    return path


def csv_files_of(folder: Path, files: Mapping[str, object] | None) -> dict[str, str]:
    """Read the CSV files that a document names, if they lie in its folder and are small enough to carry."""
    here = {path.name: path for path in folder.glob("*.csv") if path.is_file() and path.stat().st_size <= LARGEST}
    return {
        part: here[name].read_text(encoding="utf-8", errors="replace")
        for part, name in (files or {}).items()
        if isinstance(name, str) and name in here
    }


def page(document: StudyDocument, csv_files: dict[str, str]) -> str:
    """Return the HTML of a document; the page carries the CSV files, by part, and offers them for download."""
    twins, tables = looks(document["twins"]), document.get("tables") or []
    sections = [section(document, twins) for section in SECTIONS]
    return frame(
        document, sections, twins, csv_files, tables=[text.paper_table(table) for table in tables],
        layers=text.layers(document, twins), viewer_layers=figure_attention.viewer_layers(document),
        decision=text.decision(document), facts=text.facts(document), images=text.images(document),
        origin=text.origin(document),
    )  # fmt: skip


def frame(
    document: Mapping[str, Any],
    sections: Sequence[Section],
    twins: Mapping[str, Look],
    csv_files: dict[str, str],
    *,
    tables: Sequence[Table] | None = None,
    **texts: Any,
) -> str:
    """Fill static/study.html with sections, and with texts by their names there; `tables` are those of the paper."""
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs

    figures = [figure for section in sections for figure in section.figures]
    parts = {figure.id: (figure.part, figure.within or figure.part) for figure in figures}
    parts |= {"tables": ("tables", "tables"), "decision": ("decision", "decision"), "whole": (NAME, "")}
    keys = ("id", "label", "mechanism", "color", "glyph", "strokes")
    figure_data = {
        "dark": DARK,
        "twins": [{key: getattr(look, key) for key in keys} for look in twins.values()],
        "figures": [_as_json(figure) for figure in figures],
        "files": csv_files,
    }
    every = [*(table for section in sections for table in section.tables), *(tables or ())]
    parts |= {table.part: (table.part, table.within or table.part) for table in every if table.part}
    environment = Environment(loader=PackageLoader("softless.study.page", "static"), autoescape=True)
    environment.filters |= {name: getattr(text, name) for name in FILTERS}
    return environment.get_template("study.html").render(
        report=document, sections=sections, id=id, looks=list(twins.values()), dark=DARK, tables=tables, **texts,
        numbers={figure.id: number for number, figure in enumerate(figures, start=1)},
        table_numbers={id(table): number for number, table in enumerate(every, start=1)},
        links={name: _link(*part, csv_files) for name, part in parts.items()},
        css=_static("study.css"), plotly=get_plotlyjs(), script="\n".join(map(_static, SCRIPTS)),
        report_json=_inert(document), figure_json=_inert(figure_data),
    )  # fmt: skip


def _as_json(figure: Figure) -> dict[str, Any]:
    """Return a figure as static/figures.js reads it."""
    return {
        "id": figure.id,
        "columns": figure.columns,
        "twins": [panel.twin for panel in figure.panels],
        "picks": [vars(pick) for pick in figure.picks],
        "panels": [json.loads(panel.plot.to_json()) for panel in figure.panels],
    }


def _link(part: str, within: str, csv_files: dict[str, str]) -> tuple[str, str, str]:
    """Return (kind, place, file name) of a download: a CSV file or, without one, a part of report.json."""
    if part in csv_files:
        return "file", part, f"{part}.csv"
    return "part", within, f"{within}.json" if within else NAME


def _static(name: str) -> str:
    return (files("softless.study.page") / "static" / name).read_text(encoding="utf-8")


def _inert(value: object) -> str:
    """Return JSON that cannot end the script element it stands in, whatever texts are in it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
