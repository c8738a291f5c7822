"""The page of `softless study`: index.html beside report.json, one file that fetches nothing.

`write_page` reads the document, asks one file a subject for its figures, and fills static/study.html. The figures
travel as JSON in the colors of paper; static/*.js draws them in the theme of the reader.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.io.files import write_text
from softless.report.page import require
from softless.study.page import accuracy as study_accuracy
from softless.study.page import locality as study_locality
from softless.study.page import queries as study_queries
from softless.study.page import range as study_range
from softless.study.page import speed as study_speed
from softless.study.page import viewer as study_viewer
from softless.study.page import words as study_words
from softless.study.page.figure import Figure
from softless.study.page.style import DARK, looks
from softless.study.schema import NAME, read

if TYPE_CHECKING:
    from markupsafe import Markup

SUBJECTS = (study_accuracy, study_viewer, study_queries, study_locality, study_range, study_speed)
FILTERS = ("after", "bare", "cells", "first_sentence", "sentence")
LARGEST = 4_000_000  # bytes of a CSV that the page carries; one that is larger is handed out as JSON
SCRIPTS = ("labels.js", "figures.js", "threshold.js", "viewer.js", "start.js")


def write_page(folder: Path) -> Path:
    """Make folder/index.html from folder/report.json; an old page is replaced in one step."""
    require("plotly", "jinja2", by="the page of a study")
    path, document = folder / "index.html", read(folder)
    write_text(path, page(document, _files(folder, document)))
    return path


def _files(folder: Path, document: dict[str, Any]) -> dict[str, str]:
    """The CSVs that a document names, by part, as far as they lie in its folder and are small enough to carry."""
    here = {each.name: each for each in folder.glob("*.csv") if each.is_file() and each.stat().st_size <= LARGEST}
    named = {part: name for part, name in (document.get("files") or {}).items() if isinstance(name, str)}
    return {
        part: here[name].read_text(encoding="utf-8", errors="replace") for part, name in named.items() if name in here
    }


def page(document: dict[str, Any], files: dict[str, str]) -> str:
    """The page of a document; `files` are CSVs by part, which it carries and hands out."""
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs

    twins = looks(document["twins"])
    sections = [subject.section(document, twins) for subject in SUBJECTS]
    figures = [figure for section in sections for figure in section.figures]
    parts = {figure.id: (figure.part, figure.within or figure.part) for figure in figures}
    parts |= {"tables": ("tables", "tables"), "decision": ("decision", "decision"), "whole": (NAME, "")}
    drawn = {
        "dark": DARK,
        "twins": [
            {key: getattr(look, key) for key in ("id", "label", "mechanism", "color", "glyph", "strokes")}
            for look in twins.values()
        ],
        "figures": [_drawn(figure) for figure in figures],
        "files": files,
    }
    tables = [study_words.paper_table(table) for table in document.get("tables") or []]
    every = [*(table for section in sections for table in section.tables), *tables]
    parts |= {table.part: (table.part, table.within or table.part) for table in every if table.part}
    environment = Environment(loader=PackageLoader("softless.study.page", "static"), autoescape=True)
    environment.filters |= {name: getattr(study_words, name) for name in FILTERS}
    return environment.get_template("study.html").render(
        report=document,
        sections=sections,
        id=id,
        looks=list(twins.values()),
        dark=DARK,
        numbers={figure.id: number for number, figure in enumerate(figures, start=1)},
        table_numbers={id(table): number for number, table in enumerate(every, start=1)},
        tables=tables,
        links={name: _link(*part, files) for name, part in parts.items()},
        layers=study_words.layers(document, twins),
        viewer_layers=study_viewer.layers(document),
        decision=study_words.decision(document),
        facts=study_words.facts(document),
        images=study_words.images(document),
        made=study_words.made(document),
        css=_trusted(_static("study.css")),
        plotly=_trusted(get_plotlyjs()),
        script=_trusted("\n".join(map(_static, SCRIPTS))),
        report_json=_inert(document),
        figure_json=_inert(drawn),
    )


def _drawn(figure: Figure) -> dict[str, Any]:
    """A figure as the script reads it."""
    return {
        "id": figure.id,
        "columns": figure.columns,
        "twins": [panel.twin for panel in figure.panels],
        "picks": [vars(pick) for pick in figure.picks],
        "panels": [json.loads(panel.plot.to_json()) for panel in figure.panels],
    }


def _link(part: str, within: str, files: dict[str, str]) -> "Markup":
    """To a CSV or to a part of report.json, both of which the page carries."""
    from markupsafe import Markup

    if part in files:
        return Markup('Data: <a href="#{0}" data-file="{0}" download="{0}.csv">{0}.csv</a>').format(part)
    label = f"{within}.json" if within else NAME
    return Markup('Data: <a href="#{0}" data-part="{0}" download="{1}">{1}</a>').format(within, label)


def _static(name: str) -> str:
    return (files("softless.study.page") / "static" / name).read_text(encoding="utf-8")


def _inert(value: Any) -> "Markup":
    """JSON that ends no script, whatever texts are in it."""
    return _trusted(json.dumps(value, allow_nan=False).replace("<", "\\u003c"))


def _trusted(text: str) -> "Markup":
    from markupsafe import Markup

    return Markup(text)  # noqa: S704
