"""README.md's picture and its table of speed, from the measurements in benchmarks/results.

    python benchmarks/front_page.py          # writes docs/pictures/front.svg and README.md's table

The picture shows accuracy on real images (twins-cifar10.json, twins-imagenette.json) and images per second of a whole
model (the newest gpu-DATE.json). The table compares a plain call (the newest host-DATE.json) with the same call in a
CUDA graph (gpu-DATE.json).
"""

import json
from pathlib import Path
from typing import Any

from gpu import fill, newest

from softless.study.tables import Group, groups

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "pictures" / "front.svg"
MARKS = ("<!-- speed: python benchmarks/front_page.py -->", "<!-- end of speed -->")

PAIRS = (("softmax", "inline"), ("softmax-local", "inline-local"))
MODELS = "inline_deit_tiny at {} px, images per second, against timm's"
PIXELS = (224, 1024, 2048)

WIDTH, HEIGHT, LEFT, MIDDLE, BASE, TALL = 880, 300, 56, 470, 246, 150
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-size: 15px; font-weight: 600 }
.quiet { fill: #57606a } .softmax { fill: #6e7781 } .inline { fill: #0550ae }"""


def twins(images: str) -> dict[str, Group]:
    return groups(json.loads((RESULTS / f"twins-{images}.json").read_text())["runs"])


def gpu_row(group: str, what: str | None = None) -> dict[str, Any]:
    evidence = newest()
    assert evidence is not None
    return next(row for row in evidence["rows"] if row["group"] == group and what in (None, row["what"]))


def cpu_ratio(what: str) -> float:
    rows = json.loads(max(RESULTS.glob("cpu-*.json")).read_text())["rows"]
    return next(row["ratio"] for row in rows if row["what"] == what)


def plain_call(what: str) -> float:
    """Return how many times faster than its rival a plain call was, by the clock."""
    rows = json.loads(max(RESULTS.glob("host-*.json")).read_text())["rows"]
    return next(row["ratio"] for row in rows if row["what"] == what)


def table() -> str:
    """Six rows: a plain call against a plain call, and a CUDA graph against a CUDA graph."""
    lines = ["| what runs | plain call | in a CUDA graph |", "|---|---|---|"]
    for mechanism in ("inline", "linear"):
        ratio = cpu_ratio(f"{mechanism} forward, N = 4096, against SDPA")
        lines.append(
            f"| 2 CPU cores, `{mechanism}` forward, 1 head of 64, 4,096 tokens, against SDPA | {ratio:.1f}x | |"
        )
    for group, what, shape in (
        ("forward at every N, against SDPA", "inline [4, 16, 4096, 64]", "[4, 16, 4096, 64]"),
        ("forward [256, 6, 197, 32], against SDPA", "inline", "[256, 6, 197, 32]"),
    ):
        row, plain = gpu_row(group, what), plain_call(f"inline forward {shape}")
        lines.append(f"| H200, `inline` forward {shape}, against SDPA | {plain:.1f}x | {row['value']:.1f}x |")
    for pixels, batch in ((224, 256), (2048, 4)):
        row = gpu_row(MODELS.format(pixels))
        plain = plain_call(f"InLine-DeiT-T {pixels} px, batch {batch}, torch.compile")
        name = f"H200, `inline_deit_tiny` at {pixels} px, compiled, images per second, against timm's DeiT-T"
        lines.append(f"| {name} | {plain:.1f}x | {row['value']:.1f}x |")
    return "\n".join(lines)


def bar(at: float, share: float, kind: str, label: str) -> str:
    tall = TALL * share
    return (
        f'<rect class="{kind}" x="{at}" y="{BASE - tall:.1f}" width="40" height="{tall:.1f}" rx="2"/>'
        f'<text x="{at + 20}" y="{BASE - tall - 6:.1f}" text-anchor="middle">{label}</text>'
    )


def picture() -> str:
    """SVG: on the left accuracy of two pairs on two sets of images, on the right images per second."""
    marks = [
        f'<text class="title" x="{LEFT}" y="30">Accuracy of small models, in percent</text>',
        f'<text class="title" x="{MIDDLE}" y="30">Speed: images per second, DeiT-T = 1</text>',
    ]
    at = LEFT
    for images, name in (("cifar10", "CIFAR-10"), ("imagenette", "Imagenette")):
        groups = twins(images)
        marks.append(f'<text class="quiet" x="{at + 87}" y="{BASE + 38}" text-anchor="middle">{name}</text>')
        for pair, under in zip(PAIRS, ("alone", "+ local"), strict=True):
            for kind, id_ in zip(("softmax", "inline"), pair, strict=True):
                mean = groups[id_].mean or 0
                marks.append(bar(at, mean / 100, kind, f"{mean:.1f}"))
                at += 42
            marks.append(f'<text class="quiet" x="{at - 43}" y="{BASE + 18}" text-anchor="middle">{under}</text>')
            at += 8
        at += 14
    at = MIDDLE
    ratios = [gpu_row(MODELS.format(pixels))["value"] for pixels in PIXELS]
    for pixels, ratio in zip(PIXELS, ratios, strict=True):
        marks += [bar(at, 1 / max(ratios), "softmax", "1"), bar(at + 42, ratio / max(ratios), "inline", f"{ratio:.1f}")]
        marks.append(f'<text class="quiet" x="{at + 41}" y="{BASE + 18}" text-anchor="middle">{pixels} px</text>')
        at += 130
    for x, kind in ((LEFT, "softmax"), (LEFT + 96, "inline")):
        marks.append(f'<rect class="{kind}" x="{x}" y="44" width="12" height="12" rx="2"/>')
        marks.append(f'<text x="{x + 18}" y="55">{kind}</text>')
    marks.append(
        f'<text class="quiet" x="{MIDDLE}" y="55">InLine-DeiT-T against timm\'s DeiT-T, H200, CUDA graphs</text>'
    )
    marks.append(f'<line x1="{LEFT - 10}" x2="{WIDTH - 20}" y1="{BASE}" y2="{BASE}" stroke="#d0d7de"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *marks, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
    README.write_text(fill(README.read_text(), table(), MARKS))
