"""Draw docs/pictures/regress.svg: python benchmarks/regress_picture.py

60 keys in two dimensions lie close to a line, and the value of a key tells on which side of the line it lies. The
color behind them is the value that a query at that place reads.
"""

from pathlib import Path

import torch

import softless

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "regress.svg"
TOKENS, CELLS, REACH, SIDE, GAP, TOP = 60, 20, 2.0, 250, 24, 34  # REACH: of queries, in both directions
READERS = {
    "softmax": "softmax",
    "inline": "inline",
    "regress": softless.mechanism("regress", gain="one"),
}


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [N, 2] and values [N, 1] of -1 and 1."""
    generator = torch.Generator().manual_seed(4)
    along, across = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    value = torch.sign(across)
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / 2**0.5
    return torch.stack([along, 0.08 * across + 0.12 * value], -1) @ turn.T, value[:, None]


def color(value: float) -> str:
    """From blue (-1) over white to orange (1)."""
    share = min(abs(value), 1.0)
    far = (230, 126, 34) if value > 0 else (41, 98, 180)
    return "#" + "".join(f"{round(255 + share * (part - 255)):02x}" for part in far)


def panel(name: str, k: torch.Tensor, v: torch.Tensor, left: int) -> list[str]:
    steps = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS * 2 * REACH - REACH
    q = torch.cartesian_prod(steps, steps)  # x, then y
    out = softless.attention(q[None, None], k[None, None], v[None, None], READERS[name], backend="reference")
    cell = SIDE / CELLS
    lines = [f'<text x="{left + SIDE / 2:.0f}" y="22" text-anchor="middle">{name}</text>']
    for index, value in enumerate(out.flatten().tolist()):
        x, y = left + index // CELLS * cell, TOP + SIDE - (index % CELLS + 1) * cell
        lines.append(f'<rect x="{x:g}" y="{y:g}" width="{cell:g}" height="{cell:g}" fill="{color(value)}"/>')
    for (x, y), value in zip(k.tolist(), v.flatten().tolist(), strict=True):
        if max(abs(x), abs(y)) < REACH:
            place = f'cx="{left + (x / REACH + 1) * SIDE / 2:.1f}" cy="{TOP + (1 - y / REACH) * SIDE / 2:.1f}"'
            lines.append(f'<circle {place} r="4" fill="{color(value)}" stroke="#222" shape-rendering="auto"/>')
    lines.append(f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"/>')
    return lines


def picture() -> str:
    k, v = tokens()
    width, height = len(READERS) * (SIDE + GAP) - GAP + 2, TOP + SIDE + 2
    parts = [line for i, name in enumerate(READERS) for line in panel(name, k, v, 1 + i * (SIDE + GAP))]
    font = 'font-family="sans-serif" font-size="16" shape-rendering="crispEdges"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, ground, *parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes")
