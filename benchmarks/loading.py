"""Does augmentation keep up? Updates with a recipe's augmented batches, as a share of those with one constant batch.

    python benchmarks/loading.py [--recipe cifar10] [--images 50000] [--graph] [--device cuda] [--set KEY=VALUE]

Images of random bytes lie on the device whole, as CIFAR-10 would; model, augmentation and update are the recipe's.
An epoch of each, in turn, three times; medians. Exit status 1 if the share is below 90 %.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable

import torch

from softless.data.loading import DeviceLoader
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler
from softless.errors import SoftlessError
from softless.train.devices import Devices
from softless.train.engine import Engine
from softless.train.recipe import parse_change, read_recipe
from softless.train.tasks.classify import ClassificationLoss, build

BAR = 0.9
ROUNDS = 3
CLASSES = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def rate(engine: Engine, batches: Iterable[Batch]) -> float:
    """Return the images per second. `failure` reads a flag on the device, so the call waits for all updates."""
    images, start = 0, time.perf_counter()
    for batch in batches:
        engine.update(batch)
        images += len(batch.labels)
    engine.failure()
    return images / (time.perf_counter() - start)


def main() -> int:
    args = arguments()
    recipe = read_recipe(args.recipe, map(parse_change, args.set))
    devices = Devices(args.device, recipe.precision, graph=args.graph)
    bytes_ = torch.randint(0, 256, (args.images, 3, recipe.image_size, recipe.image_size), dtype=torch.uint8)
    each = torch.arange(args.images)
    data = Batch(*(part.to(devices.device) for part in (bytes_, each % CLASSES, each)))

    def augmented() -> DeviceLoader:
        sampler = ResumableSampler(args.images, seed=0)
        return DeviceLoader(data, batch=recipe.batch, sampler=sampler, train=True, augment=recipe.augment)

    updates = len(augmented())
    model = build(recipe.model, recipe.image_size, CLASSES)
    engine = Engine(model, recipe, devices, ClassificationLoss(recipe, CLASSES), updates)
    constant = next(iter(augmented()))
    rate(engine, [constant] * 5)
    rates = [(rate(engine, [constant] * updates), rate(engine, augmented())) for _ in range(ROUNDS)]
    steady, moving = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"{args.recipe}, {recipe.image_size} px, batches of {recipe.batch}, {devices.device}")
    print(f"constant batch {steady:,.0f} images/s, augmented {moving:,.0f}: {moving / steady:.1%}, bar {BAR:.0%}")
    return int(moving < BAR * steady)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SoftlessError as error:
        sys.exit(f"error: {error}")
