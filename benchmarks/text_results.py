"""Nine language models that differ only in attention: train them on whole texts, and fill docs/results-text.md.

    python benchmarks/text_results.py run --text shakespeare.txt --text wikitext2 --out runs/text --pack 12 --minutes 9
    python benchmarks/text_results.py keep runs/text/*    # writes benchmarks/results/results-text-*.json
    python benchmarks/text_results.py restore runs/text   # the kept runs as folders, to go on from there
    python benchmarks/text_results.py page                # fills the page from the records

`run` trains, tests recall and times decoding with what `softless study --text FILE --full` uses. It can be stopped, and
continues where it was if it is called again; its last line says how much is left. `--pack` processes share the device.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import gpu

from softless.errors import ArgumentError, FileError, SoftlessError
from softless.io.files import write_json
from softless.machine import circumstances
from softless.report.units import counted, listed
from softless.study.grid import Silent, read_record
from softless.study.text.measures import decide_text, entropy, recall_results, spread_of_bits, text_groups
from softless.study.text.pipeline import TextStudy, plan_text
from softless.study.text.plan import MARGIN, TextOptions
from softless.study.text.twins import TEXT_TWINS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results-text.md"
LARGE = RESULTS / "decoding.json"  # benchmarks/decoding.py
SCHEMA, NAME, ABOUT, COST = "softless.results-text/1", "results-text-", "text.json", "cost.json"
TEXTS = ("tinyshakespeare", "wikitext2")  # as the page has them
PARTS = ("texts", "recall", "cost")
RECIPE, EPOCHS, SEEDS = "text-small", 4, 3
SHARED = ("schema", "recipe", "versions", "machine")  # what all runs of a text have in common
MISSING = "not run yet"


class Lines(Silent):
    """One line for each run; `StudyWatcher`."""

    def begin(self, runs: int, finished: int) -> None:
        print(f"{runs} runs, {finished} of them finished before", flush=True)

    def advance(self, label: str, amount: float) -> None: ...

    def say(self, sentence: str) -> None:
        print(sentence, flush=True)

    def ran(self, record: Any) -> None:
        result = record["reason"]
        if record["status"] == "done":
            longest = {point["task"]: f"{point['accuracy']:.1%}" for point in record.get("points", ())}
            result = str(longest or f"{record['bits_per_byte']:.4f} bits per byte")
        print(f"{record['twin']['id']:8} {record['seed']}  {result}  {record['wall_seconds']:.1f} s", flush=True)


def run(args: argparse.Namespace) -> int:
    ends = None if args.minutes is None else time.time() + 60 * args.minutes
    studies = [study_of(text, args) for text in args.text]
    watch, left, parts = Lines(), 0, args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise ArgumentError(f"--parts has {listed(sorted(unknown))}, and the parts are {listed(PARTS)}")
    for study in studies if "texts" in parts else ():
        left += study.train(watch, ends).left
        train, test = study.texts
        about = {"name": study.options.out.name, "train": len(train.data), "test": len(test.data)}
        write_json(study.options.out / ABOUT, {**about, "chance": entropy(test.data)})
    if "recall" in parts:
        left += studies[0].recall(watch, ends).left
    if "cost" in parts:
        points, out = studies[0].decode(watch, ends), studies[0].options.out
        write_json(out / COST, {**circumstances("cpu", "transformers"), "points": points})
        left += len(studies[0].twins) - len({point["twin"] for point in points})
    print(f"{left} left" + (": call again" if left else ""))
    return 0


def study_of(text: str, args: argparse.Namespace) -> TextStudy:
    """Return the study of one text, in a folder that is named after it. Recall and decoding do not depend on it."""
    options = TextOptions(
        out=args.out / Path(text).stem, text=text, preset="full", recipe=args.recipe, epochs=args.epochs,
        seeds=args.seeds, twins=args.twins and tuple(args.twins.split(",")), tokens=args.tokens,
        pack=args.pack, device=args.device,
    )  # fmt: skip
    return plan_text(options)


def keep(folders: Sequence[Path]) -> int:
    """Write what was measured to one file per text, one for recall and one for decoding."""
    documents = {}
    for folder in folders:
        if (folder / ABOUT).exists():
            grid = json.loads((folder / "twins" / "grid.json").read_bytes())
            about = {"text": json.loads((folder / ABOUT).read_bytes()), "recipe": grid["recipe"]}
            documents[folder.name] = about | together(records(folder / "twins"))
        if recalled := records(folder / "recall"):
            documents["recall"] = together(recalled)
        if (folder / COST).exists():
            documents["cost"] = json.loads((folder / COST).read_bytes())
    if not documents:
        raise FileError(f"{listed([str(folder) for folder in folders])}: nothing was measured there")
    for name, document in documents.items():
        path = RESULTS / f"{NAME}{name}.json"
        path.write_text(json.dumps({"schema": SCHEMA, **document}) + "\n")
        print(path)
    return 0


def restore(folder: Path) -> int:
    """Write the kept runs as folders of records; `run` then skips them. Recall belongs to the first text."""
    for name, part in (*((name, f"{name}/twins") for name in TEXTS), ("recall", f"{TEXTS[0]}/recall")):
        if (path := RESULTS / f"{NAME}{name}.json").exists():
            document = json.loads(path.read_bytes())
            shared, runs = {key: document[key] for key in ("versions", "machine")}, folder / part / "runs"
            runs.mkdir(parents=True, exist_ok=True)
            for run in document["runs"]:
                write_json(runs / f"{run['twin']['id']}-{run['seed']}.json", shared | run)
    return 0


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return records without what all of them share, which is written once."""
    shared = {key: runs[0][key] for key in ("versions", "machine")}
    return shared | {"runs": [{key: value for key, value in run.items() if key not in SHARED} for run in runs]}


def records(folder: Path) -> list[Any]:
    return [read_record(path) for path in sorted((folder / "runs").glob("*.json"))]


def fill(page: str, documents: Mapping[str, dict[str, Any]]) -> str:
    """Return the page with its tables between their marks; what was not measured says so."""
    parts = {name: perplexity(documents.get(name)) for name in TEXTS}
    parts |= {
        "recall": recall(documents.get("recall")),
        "cost": cost(documents.get("cost")),
        "large": large(documents.get("large")),
    }
    for name, text in parts.items():
        page = gpu.fill(page, text, (f"<!-- {name} -->", f"<!-- /{name} -->"))
    return page


def perplexity(document: dict[str, Any] | None) -> str:
    """Return the table of one text: bits per byte of every twin, and the comparison with softmax."""
    columns = ("twin", "parameters", "bits per byte by seed", "mean", "more than softmax", "interval",
               "softmax needed?", "tokens/s")  # fmt: skip
    if document is None:
        return table(columns, [(twin.label, MISSING, *[""] * (len(columns) - 2)) for twin in TEXT_TWINS])
    text, recipe, runs = document["text"], document["recipe"], document["runs"]
    groups = text_groups(runs)
    spread = spread_of_bits(groups, -text["chance"])
    pairs = {
        pair["linear"]: pair for pair in decide_text(groups, spread, chance=-text["chance"], margin=MARGIN)["pairs"]
    }
    rows = []
    for twin in TEXT_TWINS:
        group, pair = groups.get(twin.id), pairs.get(twin.id)
        if group is None or group.mean is None:
            rows.append((twin.label, MISSING if group is None else group.instead, *[""] * (len(columns) - 2)))
            continue
        done = [run for run in runs if run["twin"]["id"] == twin.id and run["status"] == "done"]
        tokens = text["train"] // recipe["length"] // recipe["batch"] * recipe["batch"] * recipe["length"]
        speed = fmean(tokens * recipe["epochs"] / run["seconds"] for run in done)
        known = pair is not None and pair["difference"] is not None
        inside = "" if pair is None or pair["low"] is None else f"{pair['low']:+.3f} to {pair['high']:+.3f}"
        rows.append((
            twin.label, f"{group.parameters:,}", ", ".join(f"{-score:.3f}" for score in group.scores),
            f"{-group.mean:.3f}", f"{pair['difference']:+.3f}" if known else "", inside,
            pair["answer"] if known else "", f"{speed:,.0f}",
        ))  # fmt: skip
    return f"{table(columns, rows)}\n\n{conditions(document)}"


def conditions(document: dict[str, Any]) -> str:
    """Say what was trained, on what and where."""
    text, recipe = document["text"], document["recipe"]
    model, most = recipe["model"], max(run["together"] for run in document["runs"])
    share = f", with up to {most} runs at once: the speeds are those of one of them" if most > 1 else ""
    return (
        f"{text['train']:,} bytes to train on, {text['test']:,} to test on; {counted(model['depth'], 'block')} of "
        f"{counted(model['dim'], 'channel')} and {counted(model['heads'], 'head')}, sequences of {recipe['length']} "
        f"bytes, batches of {recipe['batch']}, {counted(recipe['epochs'], 'epoch')}, {recipe['precision']}. The "
        f"frequencies of single bytes give {text['chance']:.2f} bits per byte. {where(document)}{share}."
    )


def where(document: dict[str, Any]) -> str:
    versions = document["versions"]
    processor = document["machine"]["processor"]
    return f"Measured on {processor}, torch {versions['torch']}, transformers {versions['transformers']}"


def recall(document: dict[str, Any] | None) -> str:
    """Return the table of recall by length: the mean over seeds, and the lowest seed in brackets."""
    runs = [] if document is None else document["runs"]
    points = {(point["twin"], point["task"], point["tokens"]): point for point in recall_results(runs)}
    lengths = sorted({tokens for _, _, tokens in points})
    rows = []
    for twin in TEXT_TWINS:
        for task in ("recall", "induction"):
            by_length = [points.get((twin.id, task, tokens)) for tokens in lengths]
            known = [point["accuracy"] for point in by_length if point is not None and point["accuracy"] is not None]
            cells = [f"{100 * (value['mean'] or 0):.1f} ({100 * (value['low'] or 0):.1f})" for value in known]
            seeds = str(known[0]["n"]) if known else MISSING
            rows.append((twin.label, task, seeds, *(cells or [""] * len(lengths))))
    body = table(("twin", "task", "seeds", *(f"{tokens:g} tokens" for tokens in lengths)), rows)
    return body if document is None else f"{body}\n\n{where(document)}."


def cost(document: dict[str, Any] | None) -> str:
    """Return the table of decoding: milliseconds and kilobytes per sequence, after so many tokens."""
    points = [] if document is None else document["points"]
    at = {(point["twin"], point["tokens"]): point for point in points}
    lengths = sorted({tokens for _, tokens in at})
    columns = ["twin", *(f"ms after {n:,}" for n in lengths), *(f"kB after {n:,}" for n in lengths)]
    rows = []
    for twin in TEXT_TWINS:
        by_length = [at[twin.id, tokens] for tokens in lengths if (twin.id, tokens) in at]
        cells = [f"{1e3 * point['seconds']:.2f}" for point in by_length] + [
            f"{point['bytes'] / 1e3:,.0f}" for point in by_length
        ]
        rows.append((twin.label, *(cells or [MISSING, *[""] * (len(columns) - 2)])))
    body = table(columns if lengths else ("twin", "ms, kB"), rows)
    return body if document is None else f"{body}\n\n{where(document)}, one thread."


def large(document: dict[str, Any] | None) -> str:
    """Return the table of a model of the size of SmolLM2-135M: tokens per second, against softmax, and the bound."""
    ways, measures = ("softmax", "linear", "inline", "delta", "none"), ("generate", "compiled step", "train",
                                                                        "train, compiled")  # fmt: skip
    rows = [] if document is None else document["rows"]
    rate = {(row["what"], row["way"]): row["tokens_per_second"] for row in rows}
    lines = [(what, *(speed(rate.get((what, way)), rate.get((what, "softmax"))) for way in ways)) for what in measures]
    body = table(("tokens/s", *ways[:-1], "no attention"), lines)
    if document is None:
        return body
    return (
        f"{body}\n\n{document['parameters'] / 1e6:.0f} M parameters, {document['dtype'].removeprefix('torch.')}, "
        f"{document['device']}, torch {document['torch']}, transformers {document['transformers']}; decoding "
        f"{document['batch']} sequences after {document['context']:,} tokens, training on sequences of "
        f"{document['length']:,}."
    )


def speed(rate: float | None, softmax: float | None) -> str:
    if rate is None:
        return MISSING
    return f"{rate:,.0f}" + (f" ({rate / softmax:.2f}x)" if softmax else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *(row[: len(columns)] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stored() -> dict[str, dict[str, Any]]:
    """Return what the page shows, by the name of its part."""
    paths = {name: RESULTS / f"{NAME}{name}.json" for name in (*TEXTS, "recall", "cost")} | {"large": LARGE}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run", help="train the twins, test recall, time decoding")
    train.add_argument("--text", action="append", required=True, help="a text; once for each")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--pack", type=int, default=1, help="processes that share the device")
    train.add_argument("--minutes", type=float, help="begin nothing that would end later")
    train.add_argument("--parts", default=",".join(PARTS), help="recall and cost need no GPU")
    train.add_argument("--recipe", default=RECIPE)
    train.add_argument("--epochs", type=int, default=EPOCHS)
    train.add_argument("--seeds", type=int, default=SEEDS)
    train.add_argument("--twins", help="default: all nine")
    train.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), help="tokens before decoding")
    train.add_argument("--device", default="auto")
    commands.add_parser("keep", help="store the records").add_argument("folders", type=Path, nargs="+")
    commands.add_parser("restore", help="write the kept runs as folders").add_argument("folder", type=Path)
    commands.add_parser("page", help="fill the page from the records")
    args = parser.parse_args()
    try:
        if args.command == "run":
            return run(args)
        if args.command == "keep":
            return keep(args.folders)
        if args.command == "restore":
            return restore(args.folder)
        PAGE.write_text(fill(PAGE.read_text(), stored()))
    except SoftlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
