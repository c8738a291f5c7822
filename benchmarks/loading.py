"""Does augmentation keep up? Training steps with augmented batches, as a share of those with one constant batch.

    python benchmarks/loading.py [--model inline_deit_tiny] [--size 32] [--batch 1024] [--steps 50] [--device cuda]

Images of random bytes lie on the device whole, as CIFAR-10 would; the augmentation is the paper's with a padded crop.
The two take turns, three times; medians. Exit status 1 if the share is below 90 %.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F

import softless
from softless.data.augment import Augment
from softless.data.device_loading import DeviceLoader
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler

BAR = 0.9
ROUNDS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="inline_deit_tiny")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def rate(step, batches: Iterable[Batch], device: str) -> float:
    """Images a second."""
    images, start = 0, time.perf_counter()
    for pixels, labels, _ in batches:
        step(pixels, labels)
        images += len(labels)
    if device == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - start)


def main() -> int:
    asked = arguments()
    count = asked.batch * asked.steps
    pixels = torch.randint(0, 256, (count, 3, asked.size, asked.size), dtype=torch.uint8, device=asked.device)
    data = Batch(pixels, torch.arange(count, device=asked.device) % 10, torch.arange(count, device=asked.device))
    model = softless.create_model(asked.model, num_classes=10, img_size=asked.size, device=asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=asked.device == "cuda")
    run = torch.compile(model) if asked.compile else model

    def step(pixels: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(asked.device, torch.bfloat16, enabled=asked.device == "cuda"):
            loss = F.cross_entropy(run(pixels), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def augmented() -> DeviceLoader:
        sampler = ResumableSampler(count, seed=0)
        return DeviceLoader(data, batch=asked.batch, sampler=sampler, train=True, augment=Augment(crop="padded"))

    constant = next(iter(augmented()))
    rate(step, [constant] * 5, asked.device)
    rates = [
        (rate(step, [constant] * asked.steps, asked.device), rate(step, augmented(), asked.device))
        for _ in range(ROUNDS)
    ]
    steady, moving = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"{asked.model}, {asked.size} px, batches of {asked.batch}, {asked.device}")
    print(f"constant batch {steady:,.0f} images/s, augmented {moving:,.0f}: {moving / steady:.1%}, bar {BAR:.0%}")
    return int(moving < BAR * steady)


if __name__ == "__main__":
    sys.exit(main())
