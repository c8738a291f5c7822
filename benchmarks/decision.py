"""How often the verdict of a study is right: simulated studies, whose true differences are known.

    python benchmarks/decision.py            # the table of docs/study.md: 1,000 studies per row, a minute
    python benchmarks/decision.py 200

A run of a twin answers an image right where

    mean + difficulty of the image + what this twin makes of it + luck of the seed + what this seed makes of it > 0

All five are normal, so that the true accuracy of a twin, over all seeds and images there could be, is exactly
Phi(mean / deviation of the sum). Each study has seven twins, of which the linear ones lose the same, and goes through
the rule as the records of a real one do (softless/study/decision.py).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from softless.study.decision import decide
from softless.study.tables import groups, shared_spread
from softless.study.twins import twins_named
from softless.train.metrics import Answers

TWINS = ("softmax", "inline", "softmax-local", "inline-local", "linear-relu", "linear-elu", "taylor")
LOSSES, SEEDS, IMAGES = (0, 1, 2, 4), (2, 3), (360, 3600)
ANSWERS = ("no", "yes", "cannot tell")

Row = tuple[int, int, int, dict[str, float]]  # seeds, images, points lost, share of each answer


@dataclass(frozen=True)
class World:
    """How answers vary. `luck` is the deviation over seeds of the true accuracy, in points."""

    accuracy: float = 0.96
    difficulty: float = 2.0
    taste: float = 0.5  # of a twin, image by image
    luck: float = 0.3
    chance: float = 1.0  # of a seed, image by image


def answers(world: World, loss: float, seeds: int, images: int, rng: np.random.Generator) -> np.ndarray:
    """bool [twins, seeds, images]: softmax twins at the accuracy of the world, linear ones `loss` points below."""
    normal = NormalDist()
    true = [world.accuracy - (loss / 100) * (not id_.startswith("softmax")) for id_ in TWINS]
    reach = sqrt(world.difficulty**2 + world.taste**2 + world.chance**2)
    z = [normal.inv_cdf(each) for each in true]
    luck = world.luck / 100 * reach / np.array([normal.pdf(each) for each in z])
    mean = np.array(z) * np.sqrt(reach**2 + luck**2)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    latent = world.chance * draw(len(TWINS), seeds, images)
    latent += world.difficulty * draw(images) + world.taste * draw(len(TWINS), 1, images)
    latent += (mean[:, None, None] + luck[:, None, None] * draw(len(TWINS), seeds, 1)).astype(np.float32)
    return latent > 0


def records(right: np.ndarray) -> list[dict[str, Any]]:
    """As a grid leaves them; the curve is flat from its first epoch."""
    return [
        {
            "twin": {"id": twin.id, "label": twin.label},
            "seed": seed,
            "status": "done",
            "accuracy": float(share),
            "answers": vars(Answers.of(bits)),
            "parameters": 60_000,
            "curve": [{"epoch": epoch, "accuracy": float(share)} for epoch in range(1, 11)],
        }
        for twin, runs, shares in zip(twins_named(TWINS), right, right.mean(2), strict=True)
        for seed, (bits, share) in enumerate(zip(runs, shares, strict=True))
    ]


def rates(
    world: World, loss: float, seeds: int, images: int, studies: int, rng: np.random.Generator
) -> dict[str, float]:
    """How often the first pair of a study of a true loss is answered with no, yes and cannot tell."""
    counts = dict.fromkeys(ANSWERS, 0)
    for _ in range(studies):
        grouped = groups(records(answers(world, loss, seeds, images, rng)))
        decision = decide(grouped, shared_spread(grouped), chance=0.1)
        counts[decision["pairs"][0]["answer"]] += 1
    return {answer: count / studies for answer, count in counts.items()}


def simulate(studies: int, world: World | None = None, seed: int = 0) -> list[Row]:
    """Of every number of seeds and images, and every loss."""
    rng, world = np.random.default_rng(seed), world or World()
    return [
        (seeds, images, loss, rates(world, loss, seeds, images, studies, rng))
        for seeds in SEEDS
        for images in IMAGES
        for loss in LOSSES
    ]


def markdown(rows: Sequence[Row]) -> str:
    """A wrong answer is no where at least the margin of 1 point is lost, and yes where less is."""
    lines = ["| seeds | test images | true loss | no | yes | cannot tell | wrong |", "|---|---|---|---|---|---|---|"]
    for seeds, images, loss, shares in rows:
        wrong = shares["no"] if loss >= 1 else shares["yes"]
        cells = [*(f"{shares[answer]:.1%}" for answer in ANSWERS), f"{wrong:.1%}"]
        unit = "point" if loss == 1 else "points"
        lines.append(f"| {seeds} | {images:,} | {loss} {unit} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(simulate(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)))
