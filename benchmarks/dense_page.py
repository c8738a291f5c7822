"""What docs/results-dense.md compares, and its tables from the records of benchmarks/dense_results.py.

Seeds and test images are crossed, as in `softless.study.tables`. An image's share of the mIoU is linear in its pixels:

    m_i = mIoU + n mean_c (I_ic - IoU_c U_ic) / U_c           so mean_i m_i = mIoU

    I_ic, U_ic    pixels of image i that are of class c and called so, and that are of class c or called so
    I_c, U_c      their sums over the n images; IoU_c = I_c / U_c

AP has no such share, so its intervals are over seeds alone.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import gpu
import numpy as np

from softless.bench.documents import PASSES
from softless.report.units import counted
from softless.study.tables import Group, instead, interval, shared_spread

RESULTS = Path(__file__).parent / "results"
SCHEMA = "softless.results-dense/1"
PAGE = Path(__file__).parents[1] / "docs" / "results-dense.md"
MISSING, MISSED = "not run yet", "**MISSED**"
BACKBONES: dict[str, tuple[str, str, dict[str, str]]] = {  # label, model, and what is changed in it
    "inline-swin": ("InLine-Swin-T", "inline_swin_tiny", {}),
    "swin": ("Swin-T", "swin_tiny", {}),
    "regress-swin": ("InLine-Swin-T with regress", "inline_swin_tiny", {"model.mechanism": "regress"}),
    "inline-pvt": ("InLine-PVT-T", "inline_pvt_tiny", {}),
    "pvt": ("PVT-T", "pvt_tiny", {}),
}
TWINS = {"inline-swin": "swin", "regress-swin": "swin", "inline-pvt": "pvt"}
HEADS = {"": "none", "upernet": "UperNet", "fpn": "Semantic FPN", "faster_rcnn": "Faster R-CNN"}
PAIRS = {
    "pretrain": tuple((backbone, "") for backbone in BACKBONES),
    "camvid": (
        ("inline-swin", "upernet"), ("swin", "upernet"), ("regress-swin", "upernet"), ("inline-pvt", "fpn"),
        ("pvt", "fpn"),
    ),
    "bccd": tuple((backbone, "faster_rcnn") for backbone in ("inline-pvt", "pvt", "inline-swin", "swin")),
}  # fmt: skip
METRICS = {"camvid": ("miou", "mIoU"), "bccd": ("ap50", "AP50")}
PAPER = {
    ("camvid", "inline-swin"): 45.57, ("camvid", "swin"): 44.51, ("camvid", "inline-pvt"): 39.16,
    ("camvid", "pvt"): 36.57, ("bccd", "inline-pvt"): 40.2, ("bccd", "pvt"): 36.7,
}  # fmt: skip
TIMED = {"inline-swin": ("", "upernet", "faster_rcnn"), "inline-pvt": ("", "fpn", "faster_rcnn")}
FASTER = {("inline-swin", ""): 1.2, ("inline-pvt", ""): 1.3}  # any other: as fast

Record = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """A promise: what is measured, on which side of which limit it must be, and how it is written."""

    what: str
    sign: str
    limit: float
    value: float | None
    unit: str

    @property
    def verdict(self) -> str:
        if self.value is None:
            return MISSING
        reached = self.value >= self.limit if self.sign == ">=" else self.value <= self.limit
        return "reached" if reached else MISSED


def kept(part: str) -> dict[str, Record]:
    """Return the records of a part that are stored in the repository, by name."""
    path = RESULTS / f"results-dense-{part}.json"
    return {run["name"]: run for run in json.loads(path.read_text())["runs"]} if path.exists() else {}


def shares(confusions: np.ndarray) -> np.ndarray:
    """Return each image's share of the mIoU, [images], from confusion matrices [images, classes, classes]."""
    right = np.diagonal(confusions, axis1=1, axis2=2).astype(np.float64)
    either = confusions.sum(1) + confusions.sum(2) - right
    known = either.sum(0) > 0
    right, either = right[:, known], either[:, known]
    iou = right.sum(0) / either.sum(0)
    return iou.mean() + len(right) * ((right - iou * either) / either.sum(0)).mean(1)


def group(part: str, pair: tuple[str, str], runs: Iterable[Record]) -> Group:
    """Return the runs of a backbone in a head; the answers to single images are known where all of them are."""
    own = [run for run in runs if (run["backbone"], run["head"]) == pair]
    done = [run for run in own if run["status"] == "done"]
    images = [run["test"]["images"] for run in done]
    metric, _ = METRICS[part]
    return Group(
        pair[0], BACKBONES[pair[0]][0], tuple(100 * run["test"]["numbers"][metric] for run in done), len(own),
        instead(run["status"] for run in own) if own else MISSING,
        max((run["test"]["parameters"] for run in done), default=None),
        answers=np.array(images) if images and all(images) else None,
    )  # fmt: skip


def scores(part: str, runs: Sequence[Record]) -> str:
    """Return the table of a set: every backbone in its head, from all seeds, against its softmax twin."""
    metric = METRICS[part][1]
    columns = ["head", "backbone", "parameters", f"{metric} by seed", "mean", "minus its softmax twin", "interval",
               "validation", "classifier", "in the paper"]  # fmt: skip
    groups = {backbone: group(part, (backbone, head), runs) for backbone, head in PAIRS[part]}
    spread, family = shared_spread(groups), sum(backbone in TWINS for backbone in groups)
    rows = []
    for backbone, head in PAIRS[part]:
        mine, done = groups[backbone], [run for run in runs if run["backbone"] == backbone and run["status"] == "done"]
        paper = PAPER.get((part, backbone))
        cells = [mine.instead, *[""] * 6]
        if mine.mean is not None and mine.parameters is not None:
            seeds = ", ".join(f"{score:.2f}" for score in mine.scores)
            apart = interval(mine, groups[TWINS[backbone]], spread, family) if backbone in TWINS else None
            cells = [
                f"{mine.parameters / 1e6:.1f} M", seeds, f"{mine.mean:.2f}",
                "" if apart is None else f"{apart.difference:+.2f}",
                "" if apart is None or apart.half is None else f"{apart.low:+.2f} to {apart.high:+.2f}",
                f"{100 * fmean(run['best'] for run in done):.2f}",
                ", ".join(sorted({f"{100 * run['classifier']:.1f}" for run in done})),
            ]  # fmt: skip
        rows.append([HEADS[head], mine.label, *cells, "" if paper is None else f"{paper}"])
    return "\n\n".join([table(columns, rows), *conditions(part, runs)])


def conditions(part: str, runs: Sequence[Record]) -> list[str]:
    """Say what was trained, on how many images, and where; nothing without a run."""
    done = [run for run in runs if run["status"] == "done"]
    if not done:
        return []
    images, recipe, longest = done[0]["images"], done[0]["recipe"], max(run["seconds"] for run in done)
    tested = "" if part == "pretrain" else f", {done[0]['test']['tested']} to test on"
    epochs = " or ".join(counted(number, "epoch") for number in sorted({run["recipe"]["epochs"] for run in done}))
    sentence = (
        f"{images['train']:,} images to train on, {images['test']} to choose by{tested}; {epochs} of batch "
        f"{recipe['batch']}, {recipe['precision']}. {counted(len(done), 'run')} on {listed_machines(done)}, up to "
        f"{max(run['together'] for run in done)} at once; the longest trained for {longest:,.0f} s."
    )
    return [sentence]


def listed_machines(runs: Iterable[Record]) -> str:
    machines = {f"{run['machine']['processor']} with torch {run['versions']['torch']}" for run in runs}
    return " and ".join(sorted(machines))


def classifiers(runs: Sequence[Record]) -> str:
    """Return the table of the pretrained classifiers."""
    rows = []
    for backbone, (label, _, _) in BACKBONES.items():
        run = next((run for run in runs if run["backbone"] == backbone), None)
        cells = [MISSING, ""] if run is None else [instead([run["status"]]), ""]
        if run is not None and run["status"] == "done":
            cells = [f"{100 * run['best']:.2f}", f"{run['seconds']:,.0f}"]
        rows.append([label, *cells])
    columns = ("classifier", "top-1 of held-out images", "seconds of training")
    return "\n\n".join([table(columns, rows), *conditions("pretrain", runs)])


def rate(row: Record | None, key: str) -> float | None:
    return None if row is None or row[key] is None else float(row[key])


def ratio(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine / theirs


def timed(document: Record | None) -> dict[tuple[str, bool, str, bool], Record]:
    """Return the rows of the speed table by (backbone, whether it attends, head, whether it trains)."""
    rows = [] if document is None else document["rows"]
    return {(row["backbone"], row["attends"], row["head"], row["trains"]): row for row in rows}


def speed(document: Record | None) -> str:
    """Return the table of images per second and memory."""
    columns = ("backbones", "head", "pass", "InLine, images/s", "softmax", "ratio", "InLine without attention",
               "softmax without attention", "InLine, GB", "softmax, GB", "ratio")  # fmt: skip
    timings, rows = timed(document), []
    for backbone, heads in TIMED.items():
        for head in heads:
            for trains, name in PASSES.items():
                ways = ((backbone, True), (TWINS[backbone], True), (backbone, False), (TWINS[backbone], False))
                four = [timings.get((each, attends, head, trains)) for each, attends in ways]
                rates, memory = ([rate(row, key) for row in four] for key in ("images_per_second", "memory_bytes"))
                cells = [*map(written, rates[:2]), written(ratio(*rates[:2]), "x"), *map(written, rates[2:])]
                giga = [None if number is None else number / 1e9 for number in memory[:2]]
                cells += [*map(written, giga), written(ratio(*giga), "x")]
                labels = f"{BACKBONES[backbone][0]}, {BACKBONES[TWINS[backbone]][0]}"
                rows.append([labels, HEADS[head], name, *(cells if any(four) else [MISSING, *[""] * 7])])
    body = table(columns, rows)
    if document is None:
        return body
    height, width = document["image_size"]
    failed = [
        f"{BACKBONES[row['backbone']][0]} with head {HEADS[row['head']]}, {PASSES[row['trains']]}: {row['skipped']}."
        for row in document["rows"]
        if row["skipped"]
    ]
    about = (
        f"{document['batch']} images of {height} x {width}, {document['dtype']}, {listed_machines([document])}; "
        "ordinary calls, no CUDA graph. Memory is the most bytes held at once, weights included."
    )
    return "\n\n".join([body, about, *failed])


def written(number: float | None, unit: str = "") -> str:
    return "-" if number is None else f"{number:.3g}{unit}" if number < 1000 else f"{number:,.0f}{unit}"


def bars(runs: dict[str, Sequence[Record]], document: Record | None) -> list[Bar]:
    """Return every bar of the page, with what was measured so far."""
    camvid = group("camvid", ("inline-swin", "upernet"), runs["camvid"])
    taught = [run for run in runs["pretrain"] if run["backbone"] == "inline-swin" and run["status"] == "done"]
    trained = [run["seconds"] for run in runs["camvid"] if run["backbone"] == "inline-swin" and run["status"] == "done"]
    minutes = (taught[0]["seconds"] + max(trained)) / 60 if taught and trained else None
    promises = [
        Bar("CamVid, UperNet with InLine-Swin-T: test mIoU", ">=", 55, camvid.mean, " %"),
        Bar("the same: pretraining and training, on a shared GPU", "<=", 15, minutes, " minutes"),
    ]
    for backbone in ("inline-pvt", "inline-swin"):
        mean = group("bccd", (backbone, "faster_rcnn"), runs["bccd"]).mean
        promises.append(Bar(f"BCCD, Faster R-CNN with {BACKBONES[backbone][0]}: test AP50", ">=", 75, mean, " %"))
    rows = timed(document)
    for backbone, heads in TIMED.items():
        for head in heads:
            where = f"{BACKBONES[backbone][0]} against {BACKBONES[TWINS[backbone]][0]}, head: {HEADS[head]}"
            for key, trains, sign, limit, what in (
                ("images_per_second", False, ">=", FASTER.get((backbone, head), 1.0), "images/s"),
                ("memory_bytes", True, "<=", 1.0, "memory of training"),
            ):
                mine, theirs = (rows.get((each, True, head, trains)) for each in (backbone, TWINS[backbone]))
                value = ratio(rate(mine, key), rate(theirs, key))
                promises.append(Bar(f"{where}: {what}", sign, limit, value, "x"))
    return promises


def verdicts(promises: Iterable[Bar]) -> str:
    rows = [
        [bar.what, f"{bar.sign} {bar.limit:g}{bar.unit}", "" if bar.value is None else f"{bar.value:.4g}{bar.unit}",
         bar.verdict] for bar in promises
    ]  # fmt: skip
    return table(("what", "bar", "measured", "verdict"), rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stored() -> tuple[dict[str, Sequence[Record]], Record | None]:
    """Return what the page shows: the records of every part, and the table of speed."""
    path = RESULTS / "results-dense-speed.json"
    return {part: [*kept(part).values()] for part in PAIRS}, json.loads(path.read_text()) if path.exists() else None


def fill(page: str, runs: dict[str, Sequence[Record]], document: Record | None) -> str:
    """Return the page with its tables between their marks; what was not measured says so."""
    parts = {
        "bars": verdicts(bars(runs, document)), "pretrain": classifiers(runs["pretrain"]),
        "camvid": scores("camvid", runs["camvid"]), "bccd": scores("bccd", runs["bccd"]), "speed": speed(document),
    }  # fmt: skip
    for name, text in parts.items():
        page = gpu.fill(page, text, (f"<!-- {name} -->", f"<!-- /{name} -->"))
    return page
