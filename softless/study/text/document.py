"""The report of a study of text: put report.json together, and write it with its CSV files and its page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from softless.data.text import Text
from softless.io.files import write_json, write_text
from softless.machine import circumstances, timestamp
from softless.study.document import as_csv
from softless.study.grid import GridResult
from softless.study.schema import NAME, Estimated
from softless.study.tables import Group, Spread
from softless.study.text import schema
from softless.study.text.decoding import DecodingPoint
from softless.study.text.measures import decide_text, entropy, recall_results, spread_of_bits, text_groups
from softless.study.text.page import write_text_page
from softless.study.text.plan import TextOptions
from softless.study.text.run import TextRecord
from softless.study.text.verdict import text_verdict
from softless.train.language_recipe import LanguageRecipe


def assemble_text(
    options: TextOptions,
    device: str,
    recipe: LanguageRecipe,
    texts: tuple[Text, Text],
    *,
    whole: int,
    grid_result: GridResult,
    recalled: GridResult,
    decoding: Sequence[DecodingPoint],
    samples: Mapping[str, str],
    prompt: str,
) -> schema.TextDocument:
    """Put the document together, without its files; `whole` are the bytes of the text before it was shortened."""
    by_twin, chance = text_groups(grid_result.records), -entropy(texts[1].data)
    spread = spread_of_bits(by_twin, chance)
    where = circumstances(device, "transformers")
    document: schema.TextDocument = {
        "schema": schema.TEXT_SCHEMA, "command": options.command(device), "date": timestamp(),
        "versions": where["versions"], "machine": where["machine"], "seed": options.seed, "preset": options.preset,
        "data": {
            "name": Path(options.text).name, "train": len(texts[0].data), "test": len(texts[1].data),
            "sequences": max((group.examples for group in by_twin.values()), default=0), "length": recipe.length,
            "tokens": recipe.tokens, "recipe": options.recipe, "epochs": recipe.all_epochs, "chance": -chance,
            "whole": whole,
        },
        "decision": decide_text(by_twin, spread, chance=chance, margin=options.margin), "verdict": [],
        "twins": text_twin_results(by_twin, spread, grid_result.records, samples), "prompt": prompt,
        "recall": recall_results(recalled.records), "decoding": cast("list[schema.DecodingResult]", list(decoding)),
        "files": {},
    }  # fmt: skip
    document["verdict"] = text_verdict(document, by_twin, spread, grid_result.left + recalled.left)
    return document


def text_twin_results(
    by_twin: Mapping[str, Group], spread: Spread, records: Sequence[TextRecord], samples: Mapping[str, str]
) -> list[schema.TextTwinResult]:
    """Return one entry per twin: its runs, and their mean bits per byte with the interval over seeds."""
    results = []
    for id_, group in by_twin.items():
        runs: Any = [record for record in records if record["twin"]["id"] == id_]
        done = [run for run in runs if run["status"] == "done"]
        results.append({
            "id": id_, "label": group.label, "mechanism": runs[0]["twin"]["mechanism"],
            "options": runs[0]["twin"]["options"], "parameters": group.parameters,
            "seconds": fmean(run["seconds"] for run in done) if done else None, "bits_per_byte": bits(group, spread),
            "perplexity": fmean(run["perplexity"] for run in done) if done else None, "sample": samples.get(id_),
            "seeds": [{key: run[key] for key in schema.TextSeed.__annotations__} for run in runs],
        })  # fmt: skip
    return cast("list[schema.TextTwinResult]", results)


def bits(group: Group, spread: Spread) -> Estimated | None:
    """Return the mean bits per byte with its 95 % interval over seeds, which one seed does not have."""
    if group.mean is None:
        return None
    mean, half = -group.mean, spread.margin(len(group.scores))
    ends = (None, None) if half is None else (mean - half, mean + half)
    return {"mean": mean, "low": ends[0], "high": ends[1], "n": len(group.scores)}


def write_text_study(folder: Path, document: schema.TextDocument) -> Path:
    """Write the CSV files, report.json and the page; return the path of the page."""
    curves = [
        {"twin": twin["id"], "seed": seed["seed"], **point}
        for twin in document["twins"]
        for seed in twin["seeds"] or []
        for point in seed["curve"] or []
    ]
    decision = document["decision"]
    lists: dict[str, Sequence[Any]] = {
        "twins": document["twins"], "curves": curves, "decision": decision["pairs"] if decision else [],
        "recall": document["recall"] or [], "decoding": document["decoding"] or [],
    }  # fmt: skip
    for name, items in lists.items():
        if items:
            write_text(folder / f"{name}.csv", as_csv(items))
    document["files"] = {name: f"{name}.csv" for name, items in lists.items() if items}
    write_json(folder / NAME, document)
    return write_text_page(folder)
