"""Batches on their way to a device: read and augmented as they are needed, or kept there and augmented there."""

from collections.abc import Iterator

import torch
from torch import Tensor

from softless.data.augment import Augment
from softless.data.damage import Damage
from softless.data.device_augment import finish
from softless.data.device_loading import DeviceLoader
from softless.data.images import Images
from softless.data.loading import Loader
from softless.data.reading import Batch
from softless.data.sampler import ResumableSampler
from softless.train.devices import Devices


class Feed:
    """The images of one part of a set, an epoch at a time."""

    def __init__(
        self,
        images: Images,
        batches: Loader | DeviceLoader,
        augment: Augment,
        device: torch.device,
        damage: Damage,
        *,
        size: int,
        train: bool,
    ):
        self.images, self.batches, self.augment, self.device, self.train = images, batches, augment, device, train
        self.damage, self.size, self.classes, self.per_epoch = damage, size, len(images.classes), len(batches)

    @property
    def sampler(self) -> ResumableSampler:
        return self.batches.sampler

    @property
    def passes(self) -> int:
        """Batches of an epoch on the rank that has most: sound images may be fewer, and ranks share them unevenly."""
        return -(-self.sampler.total // (self.sampler.ranks * self.batches.batch))

    def blank(self) -> Tensor:
        """One image of nothing, as a model sees it."""
        return torch.zeros(1, 3, self.size, self.size, device=self.device)

    def skipped(self, devices: Devices) -> dict[str, str]:
        """Name -> why of the images that were left out so far, by any rank; each of them asks."""
        ranks = devices.gather(self.damage.skipped)
        return dict(sorted(each for rank in ranks for each in rank.items()))

    def begin(self, epoch: int) -> None:
        """To train, an epoch that was begun goes on where it is; to test, all images come again."""
        if self.train:
            self.sampler.set_epoch(epoch)
        else:
            self.sampler.load_state_dict({"epoch": 0, "position": 0})

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def finish(self, batch: Batch, number: int = 0) -> tuple[Tensor, Tensor]:
        """Pixels as a model sees them, and labels, on the device; what is random follows from the number."""
        if isinstance(self.batches, DeviceLoader):
            return batch.pixels, batch.labels
        pixels, labels = (part.to(self.device, non_blocking=True) for part in (batch.pixels, batch.labels))
        generator = torch.Generator(self.device).manual_seed(number) if self.train else None
        return finish(pixels, self.augment, generator), labels
