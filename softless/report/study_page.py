"""The page of `softless study`: index.html beside report.json, one file that fetches nothing.

`write_page` reads the document, asks one file a subject for its figures, and fills static/study.html. The figures
travel as JSON in the colors of paper; static/*.js draws them in the theme of the reader.
"""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softless.errors import FileError
from softless.report import (
    study_accuracy,
    study_locality,
    study_queries,
    study_range,
    study_speed,
    study_viewer,
    study_words,
)
from softless.report.page import require
from softless.report.study_document import NAME, read
from softless.report.study_figure import Figure
from softless.report.study_style import DARK, looks

if TYPE_CHECKING:
    from markupsafe import Markup

SUBJECTS = (study_accuracy, study_viewer, study_queries, study_locality, study_range, study_speed)
SCRIPTS = ("figures.js", "threshold.js", "viewer.js", "start.js")


def write_page(folder: Path) -> Path:
    """Make folder/index.html from folder/report.json; it is there whole or as it was."""
    require("plotly", "jinja2", by="the page of a study")
    path, beside = folder / "index.html", folder / f".index.html.{os.getpid()}"
    text = page(read(folder), {each.name for each in folder.iterdir() if each.is_file()})
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise FileError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    return path


def page(document: dict[str, Any], beside: set[str]) -> str:
    """The page of a document; `beside` are the files it may link to."""
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs

    twins = looks(document["twins"])
    sections = [subject.section(document, twins) for subject in SUBJECTS]
    figures = [figure for section in sections for figure in section.figures]
    parts = {figure.id: (figure.part, figure.within or figure.part) for figure in figures}
    parts |= {"tables": ("tables", "tables"), "whole": (NAME, "")}
    drawn = {
        "dark": DARK,
        "twins": [{"id": look.id, "label": look.label, "color": look.color} for look in twins.values()],
        "figures": [_drawn(figure) for figure in figures],
    }
    environment = Environment(loader=PackageLoader("softless.report", "static"), autoescape=True)
    environment.filters |= {"sentence": study_words.sentence, "cell": study_words.cell}
    return environment.get_template("study.html").render(
        report=document,
        sections=sections,
        looks=twins.values(),
        dark=DARK,
        numbers={figure.id: number for number, figure in enumerate(figures, start=1)},
        links={name: _link(*part, document, beside) for name, part in parts.items()},
        layers=study_words.layers(document, twins),
        viewer_layers=study_viewer.layers(document),
        facts=study_words.facts(document),
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
        "picks": [vars(pick) for pick in figure.picks],
        "panels": [json.loads(panel.plot.to_json()) for panel in figure.panels],
    }


def _link(part: str, within: str, document: dict[str, Any], beside: set[str]) -> "Markup":
    """To the file of a part, or to what the page carries of report.json."""
    from markupsafe import Markup

    name = {NAME: NAME, **(document.get("files") or {})}.get(part)
    if isinstance(name, str) and name in beside:
        return Markup('Data: <a href="{0}" download>{0}</a>').format(name)
    label = f"{within}.json" if within else NAME
    return Markup('Data: <a href="#{0}" data-part="{0}" download="{1}">{1}</a>').format(within, label)


def _static(name: str) -> str:
    return (files("softless.report") / "static" / name).read_text(encoding="utf-8")


def _inert(value: Any) -> "Markup":
    """JSON that ends no script, whatever texts are in it."""
    return _trusted(json.dumps(value, allow_nan=False).replace("<", "\\u003c"))


def _trusted(text: str) -> "Markup":
    from markupsafe import Markup

    return Markup(text)  # noqa: S704
