"""Batches are what the set, the sampler and the transform say, with any number of workers and from any position."""

import multiprocessing
import os
import random
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from softless.data import Sample, open_images
from softless.data.augment import PLAIN, Augment, squeeze, transform
from softless.data.device_augment import finish
from softless.data.loading import cached, loader
from softless.data.reading import Bad, Damage, Draw, Reader, read_all, seeded
from softless.data.sampler import ResumableSampler, update_key
from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage
from tests.data.pictures import encoded, folder, parquet, pixels

HEAVY = Augment(crop="resized", operations=2, magnitude=10.0, erase=0.0)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = parquet(tmp_path_factory.mktemp("set") / "a.parquet", [row % 3 for row in range(23)])
    return open_images(path, "train")


def batches(images, *, state=None, workers=0, rank=0, ranks=1, repeats=1, augment=HEAVY, train=True, batch=4):
    sampler = ResumableSampler(len(images), seed=5, rank=rank, ranks=ranks, repeats=repeats, shuffle=train)
    sampler.load_state_dict(state or {"epoch": 2, "position": 0})
    return loader(
        images, size=16, batch=batch, sampler=sampler, train_transform=train, augment=augment, workers=workers
    )


def same(a, b) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)
    )


def test_a_batch_holds_normalized_pixels_labels_and_ids(images):
    found = list(batches(images))
    assert len(found) == 23 // 4
    for batch in found:
        assert (batch.pixels.dtype, batch.pixels.shape) == (torch.float32, (4, 3, 16, 16))
        assert batch.labels.tolist() == [images.labels[i] for i in batch.ids]
    assert len({i for batch in found for i in batch.ids.tolist()}) == 20


def test_workers_change_nothing_and_draw_nothing_from_the_trainer(images):
    def everything():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = everything()
    alone = list(batches(images))
    assert everything() == before
    assert same(alone, list(batches(images, workers=2)))
    assert everything() == before


@pytest.mark.parametrize("repeats", [1, 2])
def test_resuming_after_any_batch_gives_the_other_batches(images, repeats):
    whole = list(batches(images, repeats=repeats))
    for done in range(len(whole) + 1):
        first = batches(images, repeats=repeats)
        kept = [batch for _, batch in zip(range(done), first, strict=False)]
        later = batches(images, repeats=repeats, state=first.sampler.state_dict())
        assert len(later) == len(whole) - done
        assert same(kept + list(later), whole)


def test_an_image_is_augmented_in_the_same_way_wherever_it_comes(images):
    alone = {int(i): p for batch in batches(images) for i, p in zip(batch.ids, batch.pixels, strict=True)}
    for rank in range(3):
        for batch in batches(images, rank=rank, ranks=3, batch=2):
            for i, p in zip(batch.ids.tolist(), batch.pixels, strict=True):
                assert i not in alone or torch.equal(alone[i], p)
    later = batches(images, state={"epoch": 3, "position": 0})
    assert not same(list(later), list(batches(images)))


def test_repeats_of_an_image_are_augmented_differently(images):
    found = list(batches(images, repeats=3, batch=3))
    different = sum(not torch.equal(batch.pixels[0], batch.pixels[1]) for batch in found)
    assert {len(set(batch.ids.tolist())) for batch in found} == {1}
    assert different > len(found) / 2


def test_erased_rectangles_follow_from_the_update_also_after_resuming(images):
    erasing = Augment(crop="none", flip=0.0, operations=0, erase=1.0)
    complete = list(batches(images, augment=erasing))
    plain = list(batches(images, augment=replace(erasing, erase=0.0)))
    assert all((a.pixels != b.pixels).flatten(1).any(1).all() for a, b in zip(complete, plain, strict=True))
    first = batches(images, augment=erasing)
    before = [batch for _, batch in zip(range(2), first, strict=False)]
    assert same(before + list(batches(images, augment=erasing, state=first.sampler.state_dict())), complete)
    update = 2 * len(complete) + 1  # epoch 2, its second batch
    generator = torch.Generator().manual_seed(update_key(5, update, 0))
    raw = torch.stack([torch.from_numpy(squeeze(images[i].image, 16)) for i in complete[1].ids.tolist()])
    assert torch.equal(complete[1].pixels, finish(raw, erasing, generator))


def test_a_blank_batch_has_the_shape_of_one_image(images):
    blank = batches(images).blank()
    assert [tuple(part.shape) for part in blank] == [(1, 3, 16, 16), (1,), (1,)]


def test_every_rank_has_the_same_number_of_training_batches(images):
    counts = {len(list(batches(images, rank=rank, ranks=2, batch=3))) for rank in range(2)}
    assert counts == {23 // 2 // 3}


def test_a_test_epoch_has_every_image_once_resized_as_in_the_paper(images):
    found = list(batches(images, train=False, augment=Augment()))
    assert [i for batch in found for i in batch.ids.tolist()] == list(range(23))
    assert len(batches(images, train=False)) == len(found) == 6
    side = int(16 / 0.875)
    square = images[7].image.resize((side, side), Image.Resampling.BICUBIC)
    edge = (side - 16) // 2
    expected = np.asarray(square.crop((edge, edge, edge + 16, edge + 16))).transpose(2, 0, 1)
    assert torch.equal(found[1].pixels[3], finish(torch.from_numpy(expected.copy())[None], Augment())[0])


def test_crops_that_are_padded_are_crops_of_the_padded_image():
    augment = Augment(crop="padded", padding=2, flip=0.0, operations=0, erase=0.0)
    image = Image.fromarray(pixels(3, 16, 16))
    padded = np.pad(np.asarray(image), ((2, 2), (2, 2), (0, 0))).transpose(2, 0, 1)
    possible = {padded[:, y : y + 16, x : x + 16].tobytes() for y in range(5) for x in range(5)}
    change, seen = transform(augment, 16, train=True), set()
    for number in range(100):
        with seeded(number):
            seen.add(np.asarray(change(image)).tobytes())
    assert seen <= possible
    assert len(seen) > 15


def test_the_plain_transform_only_resizes():
    image = Image.fromarray(pixels(3))
    expected = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    for change in (transform(PLAIN, 16, train=True), transform(PLAIN, 16, train=False), lambda x: squeeze(x, 16)):
        assert np.array_equal(np.asarray(change(image)), expected)


def test_every_magnitude_of_every_operation_runs():
    change = transform(Augment(operations=15, magnitude=10.0, magnitude_std=1e-5, crop="none"), 16, train=True)
    for number in range(40):
        with seeded(number):
            assert change(Image.fromarray(pixels(number))).shape == (3, 16, 16)


def test_one_pixel_and_long_images_can_be_cropped():
    change = transform(Augment(), 16, train=True)
    for size in ((1, 1), (1, 300), (300, 1)):
        assert change(Image.new("RGB", size)).shape == (3, 16, 16)


def test_cached_decodes_and_squeezes_the_complete_set(images):
    told = []
    found = cached(images, size=16, tick=told.append)
    assert found.pixels.shape == (23, 3, 16, 16)
    assert found.labels.tolist() == images.labels.tolist()
    assert found.ids.tolist() == list(range(23))
    assert sum(told) == 23
    assert np.array_equal(found.pixels[4].numpy(), squeeze(images[4].image, 16))
    assert same([found], [cached(images, size=16, workers=2)])


class Damaged:
    """A set whose first images are bad."""

    def __init__(self, bad: int, total: int) -> None:
        self.bad, self.labels = bad, np.arange(total) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        if index < self.bad:
            raise BadImage(f"{index}.jpg", "it is damaged")
        return Sample(Image.new("RGB", (8, 8)), int(self.labels[index]), f"{index}.jpg")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_bad_image_raises_an_error_that_names_it(tmp_path, workers):
    images = open_images(parquet(tmp_path / "d.parquet", [0, 1] * 2, images=[b"x", *[encoded()] * 3]), "train")
    with pytest.raises(BadImage, match=r"d\.parquet\[row 0\]: it is"):
        list(batches(images, workers=workers))
    with pytest.raises(BadImage, match=r"d\.parquet\[row 0\]: it is"):
        cached(images, size=8, workers=workers)


def skipping(images, *, train, batch=50):
    sampler = ResumableSampler(len(images), seed=0)
    return loader(
        images, size=8, batch=batch, sampler=sampler, train_transform=train, augment=PLAIN, workers=0,
        on_bad_image="skip",
    )  # fmt: skip


def test_skipped_images_are_recorded_once_and_batches_stay_complete():
    images = Damaged(2, 2000)
    found = skipping(images, train=True)
    for epoch in range(2):
        found.sampler.set_epoch(epoch)
        seen = [i for batch in found for i in batch.ids.tolist()]
        assert len(seen) == 2000
        assert set(seen) == set(range(2, 2000))
    assert found.skipped == dict.fromkeys(["0.jpg", "1.jpg"], "it is damaged")
    assert found.sampler.position == 2000


def test_a_test_leaves_skipped_images_out():
    images = Damaged(2, 2000)
    found = skipping(images, train=False)
    assert sorted(i for batch in found for i in batch.ids.tolist()) == list(range(2, 2000))
    whole = cached(images, size=8, damage=(damage := Damage("skip", 2000)))
    assert damage.skipped == found.skipped == dict.fromkeys(["0.jpg", "1.jpg"], "it is damaged")
    assert whole.ids.tolist() == list(range(2, 2000))
    assert whole.labels.tolist() == images.labels[2:].tolist()
    assert len(whole.pixels) == 1998


def test_more_than_one_bad_image_in_a_thousand_raises_an_error():
    images = Damaged(3, 2000)
    with pytest.raises(
        FileError, match=r"3 of 2000 images are damaged by now, and skip leaves out at most 0\.1% of them: 2"
    ):
        list(skipping(images, train=True))
    with pytest.raises(FileError, match=r"at most 0\.1% of them: 2"):
        cached(images, size=8, damage=Damage("skip", 2000))


def test_a_test_leaves_out_a_batch_of_only_bad_images():
    images = Damaged(1, 1000)
    assert sum(len(batch.ids) for batch in skipping(images, train=False, batch=1)) == 999


def test_training_replaces_a_batch_of_bad_images_by_the_next_sound_one():
    """Every update has its batch, also of a run that goes on from there."""
    images = Damaged(2, 2000)
    whole = skipping(images, train=True, batch=1)
    order = whole.sampler.order().tolist()
    seen = [batch.ids.item() for batch in whole]
    following = dict(zip(order, order[1:] + order[:1], strict=True))
    expected = [index if index > 1 else following[index] for index in order]
    assert seen == expected
    later = skipping(images, train=True, batch=1)
    later.sampler.advance(order.index(0))
    assert [batch.ids.item() for batch in later] == expected[order.index(0) :]


def test_the_search_for_a_sound_image_wraps_around_the_order():
    images = Damaged(2, 2000)
    sampler = ResumableSampler(2000, seed=0, rank=1, ranks=2)
    found = loader(
        images, size=8, batch=2, sampler=sampler, train_transform=True, augment=PLAIN, workers=0, on_bad_image="skip"
    )
    order = np.array([*range(2, 1999), 0, 1999, 1])  # rank 1 has the places 1, 3, ..., and last 0 and 1
    sampler.order = lambda: order
    assert [batch.ids.tolist() for batch in found][-1] == [3, 3]
    assert found.skipped.keys() == {"0.jpg", "1.jpg"}


class Deadly:
    """A decoder that dies, as none of ours does."""

    def __getitem__(self, index):
        os._exit(9)


def test_a_worker_that_dies_raises_a_file_error():
    reader = Reader(Deadly(), lambda image: image)
    with pytest.raises(FileError, match="a process that reads images died"):
        list(read_all(reader, [[Draw(0)]], workers=1))


def test_workers_survive_signals_to_stop(images):
    reader, draws = Reader(images, partial(squeeze, size=8)), [[Draw(i % len(images))] for i in range(200)]
    reading = read_all(reader, draws, workers=2)
    next(reading)
    for worker in multiprocessing.active_children():
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, each)
    assert len(list(reading)) == 199


def test_a_reader_returns_pixels_or_a_reason_for_every_image(tmp_path):
    root = folder(tmp_path, {"": {"a": 1, "b": 1}})
    (root / "b" / "0.png").write_bytes(b"")
    reader = Reader(open_images(root, "train"), lambda image: squeeze(image, 8))
    ((found, bad),) = read_all(reader, [[Draw(0), Draw(1)]], workers=0)
    assert found.ids.tolist() == [0]
    assert bad == (Bad(str(root / "b" / "0.png"), "it is empty"),)


def test_invalid_loader_arguments_are_refused(images):
    sampler = ResumableSampler(len(images), seed=0)
    usual = {"size": 8, "batch": 4, "sampler": sampler, "train_transform": True, "augment": PLAIN, "workers": 0}
    for change, says in (
        ({"batch": 24}, "a batch of 24 needs 24 images, and an epoch has 23: set a batch of at most 23"),
        ({"batch": 0}, "a batch of 0 has no image: it must be at least 1 on each rank"),
        ({"workers": -1}, "workers is -1"),
        ({"sampler": ResumableSampler(9, seed=0)}, "made for 9 images, and the set has 23"),
        ({"on_bad_image": "ignore"}, "'ignore' and must be 'fail' or 'skip'"),
    ):
        with pytest.raises(ArgumentError, match=says):
            loader(images, **usual | change)
    with pytest.raises(ArgumentError, match="take 69000 GB, and at most 32 GB"):
        cached(images, size=10**6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"crop": "center"}, "crop is 'center' and must be one of resized, padded, none"),
        ({"crop_mode": "round"}, "crop_mode is 'round' and must be one of squash, center, border"),
        ({"area": (0.5, 0.1)}, "area is"),
        ({"flip": 2.0}, "flip is 2.0 and must be from 0 to 1"),
        ({"erase": -0.1}, "erase is -0.1"),
        ({"crop_share": 0.0}, "crop_share is 0.0"),
        ({"magnitude": 11.0}, "magnitude is 11.0 and must be from 0 to 10"),
        ({"std": (1.0, 0.0, 1.0)}, "must be positive"),
    ],
)
def test_an_invalid_augmentation_is_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        Augment(**options)
