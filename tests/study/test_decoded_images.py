"""A set decoded once: what comes off the shelf is what was decoded, for the same images at the same size only."""

import pytest
import torch

from softless.data.loading import cached
from softless.io.pictures import BadImage
from softless.study import twin_run
from softless.study.twin_run import decode, fetch
from softless.train.assemble import Runtime
from tests.train.jobs import Pictures

PARTS = (Pictures(30, 0), Pictures(12, 1))


class Torn(Pictures):
    """The third cannot be decoded."""

    def __getitem__(self, index):
        if index == 2:
            raise BadImage(self.names(index), "it is torn")
        return super().__getitem__(index)


@pytest.fixture
def shelf(tmp_path):
    decode(tmp_path / "images", PARTS, 4, Runtime())
    return tmp_path / "images"


def test_the_shelf_gives_back_what_was_decoded(shelf):
    found = fetch(shelf, PARTS, 4)
    assert found is not None
    assert found.skipped == ({}, {})
    for batch, part in zip(found[:2], PARTS, strict=True):
        fresh = cached(part, size=4)
        for name in ("pixels", "labels", "ids"):
            assert torch.equal(getattr(batch, name), getattr(fresh, name))
            assert getattr(batch, name).dtype == getattr(fresh, name).dtype


def test_a_set_is_decoded_once(shelf, monkeypatch):
    monkeypatch.setattr(twin_run, "cached", lambda *_, **__: pytest.fail("it decoded again"))
    decode(shelf, PARTS, 4, Runtime())


def test_stored_images_name_the_skipped_images_and_fail_unless_skipping_is_allowed(tmp_path, monkeypatch):
    parts = (Torn(1000), PARTS[1])
    decode(tmp_path, parts, 4, Runtime(on_bad_image="skip"))
    found = fetch(tmp_path, parts, 4)
    assert found is not None
    assert found.skipped == ({"picture 2": "it is torn"}, {})
    assert len(found.train.ids) == 999
    monkeypatch.setattr(twin_run, "cached", lambda *_, **__: pytest.fail("it decoded again"))
    decode(tmp_path, parts, 4, Runtime(on_bad_image="skip"))
    with pytest.raises(BadImage, match="picture 2: it is torn"):
        decode(tmp_path, parts, 4, Runtime())


def test_progress_counts_every_decoded_image(tmp_path):
    told = []
    decode(tmp_path, PARTS, 4, Runtime(), told.append)
    assert sum(told) == 42


@pytest.mark.parametrize(
    ("parts", "size"), [((Pictures(30, 2), PARTS[1]), 4), ((PARTS[0], Pictures(12, 3)), 4), (PARTS, 8)]
)
def test_other_images_and_other_sizes_are_decoded_anew(shelf, parts, size):
    assert fetch(shelf, parts, size) is None
    decode(shelf, parts, size, Runtime())
    found = fetch(shelf, parts, size)
    assert found is not None
    assert found[0].pixels.shape[-1] == size


def test_a_damaged_shelf_is_filled_again(shelf):
    for path in shelf.rglob("train.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert fetch(shelf, PARTS, 4) is None
    decode(shelf, PARTS, 4, Runtime())
    assert fetch(shelf, PARTS, 4) is not None


def test_an_empty_shelf_has_nothing(tmp_path):
    assert fetch(tmp_path / "none", PARTS, 4) is None
