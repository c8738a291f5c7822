"""What `softless explain` says of a model: its stages, what attention has of them, and the same with softmax."""

from dataclasses import asdict
from typing import Any

from softless.bench.anatomy import anatomy
from softless.bench.published import FACTS
from softless.commands.layout import page, plain_table
from softless.commands.model import model_options, settled
from softless.mechanisms import resolve
from softless.models.table import Config
from softless.report import units

SCHEMA = "softless.explain-model/1"
FAMILIES = {
    "deit": ("DeiT", "a class token and one stage of blocks on 16 x 16 patches"),
    "pvt": ("PVT", "four stages, each with positions of its own; a mean at the end"),
    "swin": ("Swin", "four stages, 2 x 2 tokens merged between them; a mean at the end"),
    "cswin": ("CSwin", "four stages, a convolution between them; a mean at the end"),
}


def document(name: str, image_size: tuple[int, int] | None, words: dict[str, str]) -> dict[str, Any]:
    """Count a model and its softmax twin at one image size, their own if none is given."""
    options = model_options(name, words)
    config = settled(name, options)
    size = image_size or config.img_size
    found, facts = anatomy(name, size, **options), FACTS[name]
    printed = {"top1": facts.paper_top1, "parameters": round(facts.paper_parameters * 1e6)}
    return {
        "schema": SCHEMA,
        "model": name,
        "family": config.family,
        "about": _about(config),
        "options": words,
        "image_size": list(size),
        "native_size": list(config.img_size),
        "stages": [asdict(stage) for stage in found.stages],
        "rest": asdict(found.rest),
        "attention": asdict(found.attention),
        "total": asdict(found.total),
        "softmax_twin": _twin(name, size, config, options),
        "paper": None if words else printed | {"macs": round(facts.paper_macs * 1e9)},
        "notes": ["A MAC is a product and a sum, two FLOPs. Norms, exponentials and sums are not counted."],
    }


def _about(config: Config) -> str:
    family, what = FAMILIES[config.family]
    made = resolve(config.mechanism).name
    mixed = sum(config.mixed)
    if made == "softmax" or not mixed:
        return f"{family}: {what}"
    local = " with local residual" if config.local else ""
    blocks = "all" if mixed == sum(config.depths) else f"{mixed} of {sum(config.depths)}"
    return f"{family}, {blocks} blocks {made}{local}: {what}"


def _twin(name: str, size: tuple[int, int], config: Config, options: dict[str, Any]) -> dict[str, int] | None:
    if not any(config.mixed) or (resolve(config.mechanism).name == "softmax" and not config.local):
        return None
    return asdict(anatomy(name, size, **options | {"mechanism": "softmax", "local": False}).total)


def show(document: dict[str, Any]) -> None:
    """What it is, its stages, a verdict."""
    facts = []
    if document["options"]:
        facts.append(("options", "  ".join(f"{name}={value}" for name, value in document["options"].items())))
    own = document["image_size"] == document["native_size"]
    native = "" if own else f"; its own are {units.picture(document['native_size'])}"
    facts.append(("images", f"{units.picture(document['image_size'])}{native}"))
    if paper := document["paper"]:
        counts = f"{units.count(paper['parameters'])} parameters, {units.macs(paper['macs'])}"
        facts.append(("paper", f"{paper['top1']:.1f}% top-1 on ImageNet-1K; it prints {counts}"))
    notes = ["attn: attention's share of the parameters, and of the MACs", *document["notes"]]
    page(document["model"], f"  {document['about']}", facts, _table(document), verdict(document), notes)


def _table(document: dict[str, Any]) -> Any:
    table = plain_table("stage", "tokens", "blocks", "dim", "heads", "params", "MACs", "attn", gap=1)
    table.add_column("attention", overflow="fold")
    for number, stage in enumerate(document["stages"], 1):
        table.add_row(
            str(number),
            units.picture(stage["grid"]),
            *(str(stage[name]) for name in ("blocks", "dim", "heads")),
            *_counts(stage["total"]),
            _shares(stage["attention"], stage["total"]),
            "\n".join(_kind(kind, stage["blocks"]) for kind in stage["kinds"]),
        )
    table.add_row("rest", "", "", "", "", *_counts(document["rest"]), "", "patches, norms, head")
    shares = _shares(document["attention"], document["total"])
    table.add_row("total", "", "", "", "", *_counts(document["total"]), shares, "", style="bold")
    return table


def verdict(document: dict[str, Any]) -> str:
    """Size, attention's part of it, and the softmax twin in a sentence each."""
    total, attention = document["total"], document["attention"]
    parts = [attention[name] / total[name] for name in ("parameters", "macs")]
    says = f"{document['model']}: {units.count(total['parameters'])} parameters, {units.macs(total['macs'])} at "
    says += f"{units.picture(document['image_size'])}; attention has {units.percent(parts[0])} and "
    says += f"{units.percent(parts[1])} of them."
    if document["softmax_twin"] is None:
        return says
    twin = document["softmax_twin"]["macs"]
    return (
        f"{says} With softmax in its place: {units.macs(twin)}, {units.compare(twin / total['macs'], 'more', 'less')}."
    )


def _counts(count: dict[str, int]) -> tuple[str, str]:
    return units.count(count["parameters"]), units.macs(count["macs"]).removesuffix("MAC")


def _shares(part: dict[str, int], whole: dict[str, int]) -> str:
    """41/38%: of the parameters, and of the multiply-adds."""
    return "/".join(f"{100 * part[name] / whole[name]:.0f}" for name in ("parameters", "macs")) + "%"


def _kind(kind: dict[str, Any], blocks: int) -> str:
    number = "" if kind["blocks"] == blocks else f"{kind['blocks']} "
    local = " + 3x3" if kind["local"] else ""
    return f"{number}{kind['mechanism']}{local}, {kind['sees']}"
