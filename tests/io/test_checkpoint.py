"""Checkpoints (R14, R15): there whole or not at all, and damage is always noticed."""

import errno
import json
import random
import shutil
import warnings

import pytest
import torch

from softless.errors import FileError
from softless.io import checkpoint
from softless.io.checkpoint import drop_after, newest, read, save
from softless.io.files import Journal
from tests.io.faults import calls

FAILURES = (errno.ENOSPC, errno.EIO, errno.EROFS)


def parts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {"a.weight": torch.randn(3, 4, generator=generator), "a.bias": torch.randn(3, generator=generator)}
    return {"model": weights, "optimizer": {"a.weight/step": torch.tensor(3.0), "half": torch.ones(5).bfloat16()}}


def state(step):
    return {"step": step, "score": 0.1 * step, "classes": ["a", "é"], "none": None}


def same(found, step):
    expected = parts(step)
    assert (found.step, found.state) == (step, state(step))
    assert {name: sorted(part) for name, part in found.parts.items()} == {n: sorted(p) for n, p in expected.items()}
    assert all(torch.equal(found.parts[name][key], value) for name in expected for key, value in expected[name].items())
    assert all(
        found.parts[name][key].dtype == value.dtype for name in expected for key, value in expected[name].items()
    )


@pytest.fixture
def shelf(tmp_path):
    for step in (1, 2):
        save(tmp_path / "last", step, parts(step), state(step))
    return tmp_path / "last"


def test_a_checkpoint_is_read_bit_for_bit_as_it_was_saved(shelf):
    same(newest(shelf), 2)
    same(read(shelf / "step-00000001"), 1)


def test_every_reader_finds_the_tensors_in_one_order(tmp_path):
    """Ranks that share them out one after the other must agree; safetensors alone has an order of its own each time."""
    save(tmp_path, 1, {"model": {f"layer{n}": torch.zeros(1) for n in range(100)}}, {})
    found = list(read(tmp_path / "step-00000001").parts["model"])
    assert found == sorted(found)


def test_the_weights_are_a_plain_safetensors_file(shelf):
    from safetensors.torch import load_file

    assert torch.equal(load_file(shelf / "step-00000002/model.safetensors")["a.bias"], parts(2)["model"]["a.bias"])


def test_only_the_newest_checkpoints_are_kept(shelf):
    save(shelf, 3, parts(3), state(3))
    assert sorted(path.name for path in shelf.iterdir()) == ["step-00000002", "step-00000003"]
    save(shelf, 100_000_000, parts(4), state(4), keep=1)
    assert [path.name for path in shelf.iterdir()] == ["step-100000000"]


def test_save_keeps_the_checkpoint_named_by_also_and_deletes_later_ones(shelf):
    for step in (3, 4):
        save(shelf, step, parts(step), state(step), keep=1, also=1)
        assert sorted(path.name for path in shelf.iterdir()) == ["step-00000001", f"step-{step:08d}"]
    drop_after(shelf, 4)
    same(newest(shelf), 4)
    drop_after(shelf, 3)
    assert [path.name for path in shelf.iterdir()] == ["step-00000001"]


def test_save_keeps_the_new_checkpoint_and_deletes_later_ones(shelf):
    """As after a run that went back, to an earlier checkpoint or in the size of its images."""
    save(shelf, 9, parts(9), state(9))
    save(shelf, 3, parts(3), state(3))
    assert sorted(path.name for path in shelf.iterdir()) == ["step-00000002", "step-00000003"]
    save(shelf, 1, parts(1), state(1), keep=1)
    assert [path.name for path in shelf.iterdir()] == ["step-00000001"]
    same(newest(shelf), 1)


def test_an_empty_shelf_has_no_newest(tmp_path):
    assert newest(tmp_path / "none") is None
    (tmp_path / ".partial-step-00000001").mkdir()
    assert newest(tmp_path) is None


def test_the_newest_complete_checkpoint_is_used_with_a_warning(shelf):
    (shelf / "step-00000002/model.safetensors").unlink()
    with pytest.warns(RuntimeWarning, match=r"step-00000002 lacks model.safetensors; step-00000001 is used"):
        same(newest(shelf), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(shelf, 2, parts(2), state(2))
        same(newest(shelf), 2)


def test_if_no_checkpoint_is_complete_the_error_names_each(shelf):
    for place in shelf.iterdir():
        (place / "manifest.json").unlink()
    with pytest.raises(FileError, match=r"step-00000002 has no manifest.json; .*step-00000001 has no manifest.json"):
        newest(shelf)


def test_newest_finds_a_checkpoint_that_is_saved_while_it_searches(tmp_path, monkeypatch):
    def overtaken(place):
        if place.name == "step-00000001":
            save(tmp_path, 2, parts(2), state(2), keep=1)
        return read(place)

    save(tmp_path, 1, parts(1), state(1), keep=1)
    monkeypatch.setattr(checkpoint, "read", overtaken)
    same(newest(tmp_path), 2)


def test_newest_lists_the_shelf_again_if_a_training_changed_it(shelf, monkeypatch):
    places, missed = checkpoint.places, [[]]
    monkeypatch.setattr(checkpoint, "places", lambda shelf: missed.pop() if missed else places(shelf))
    same(newest(shelf), 2)


def test_save_replaces_links_and_files_named_like_checkpoints_and_keeps_link_targets(shelf, tmp_path):
    (shelf / "step-00000001").rename(tmp_path / "elsewhere")
    (shelf / "step-00000001").symlink_to(tmp_path / "elsewhere")
    (shelf / "step-00000003").symlink_to(tmp_path / "nowhere")
    (shelf / "step-00000009").write_text("a file")
    (shelf / ".partial-old-step-00000005").symlink_to(tmp_path / "elsewhere")
    save(shelf, 3, parts(3), state(3))
    assert sorted(path.name for path in shelf.iterdir()) == ["step-00000002", "step-00000003"]
    same(newest(shelf), 3)
    same(read(tmp_path / "elsewhere"), 1)


def test_swapped_missing_and_extra_files_are_named(shelf, tmp_path):
    one, two = shelf / "step-00000001", shelf / "step-00000002"
    shutil.copy(one / "model.safetensors", two / "model.safetensors")
    with pytest.raises(FileError, match=r"step-00000002/model.safetensors is damaged: its sha256"):
        read(two)
    (one / "notes.txt").write_text("x")
    with pytest.raises(FileError, match=r"has an unlisted notes.txt"):
        read(one)
    with pytest.raises(FileError, match="cannot be read: No such file"):
        read(shelf / "step-00000009")


def test_a_manifest_of_another_format_or_size_is_refused(shelf):
    path = shelf / "step-00000002/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["schema"] = "softless.checkpoint/9"
    path.write_bytes(checkpoint._json(manifest | {"sha256": checkpoint._digest(checkpoint._json(manifest))}))
    with pytest.raises(
        FileError, match=r"schema 'softless.checkpoint/9', and this version reads 'softless.checkpoint/1'"
    ):
        read(path.parent)
    path.write_bytes(b"[" * (2**20 + 1))
    with pytest.raises(FileError, match="larger than a manifest can be"):
        read(path.parent)


def assert_detected(place, name, data):
    path = place / name
    before = path.read_bytes()
    path.write_bytes(data)
    with pytest.raises(FileError):
        read(place)
    path.write_bytes(before)


def damage(shelf, flips, cuts, seed):
    """Every kind of file gets its share of flipped bits and of lost endings."""
    rng, place = random.Random(seed), shelf / "step-00000002"
    names = sorted(path.name for path in place.iterdir())
    for turn in range(flips):
        data = bytearray((place / names[turn % len(names)]).read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        assert_detected(place, names[turn % len(names)], bytes(data))
    for turn in range(cuts):
        data = (place / names[turn % len(names)]).read_bytes()
        assert_detected(place, names[turn % len(names)], data[: rng.randrange(len(data))])
    same(read(place), 2)


def test_flipped_bits_and_lost_endings_are_detected(shelf):
    damage(shelf, flips=120, cuts=40, seed=15)


@pytest.mark.slow
def test_1000_flipped_bits_and_300_lost_endings_are_detected(shelf):
    damage(shelf, flips=1000, cuts=300, seed=1500)


@pytest.mark.slow
def test_every_bit_of_the_manifest_counts(shelf):
    place = shelf / "step-00000002"
    data = (place / "manifest.json").read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert_detected(place, "manifest.json", bytes(changed))


@pytest.mark.parametrize("code", FAILURES, ids=errno.errorcode.get)
def test_the_previous_checkpoint_survives_whichever_system_call_fails(tmp_path, code):
    with calls() as counted:
        save(tmp_path / "count", 1, parts(1), state(1))
    reasons = {errno.ENOSPC: "No space left", errno.EIO: "Input/output error", errno.EROFS: "Read-only file system"}
    for at in range(len(counted.names)):
        shelf = tmp_path / str(at)
        save(shelf, 1, parts(1), state(1))
        save(shelf, 2, parts(2), state(2))
        with calls(at, code, torn=True) as failed:
            try:
                save(shelf, 3, parts(3), state(3))
                said = None
            except FileError as error:
                said = str(error)
        assert len(failed.names) > at
        assert said is not None
        assert said.startswith(f"the checkpoint {shelf / 'step-00000003'} cannot be written: {reasons[code]}")
        found = newest(shelf)
        same(found, found.step)
        assert found.step in (2, 3)
        save(shelf, 4, parts(4), state(4))
        same(newest(shelf), 4)
        assert max(path.name for path in shelf.iterdir()) == "step-00000004"
        assert not list(shelf.glob(".partial*"))


def test_a_log_goes_back_to_where_the_checkpoint_was(tmp_path):
    journal = Journal(tmp_path / "log.jsonl")
    journal.add({"step": 1})
    length = journal.sync()
    journal.add({"step": 2})
    journal.close()
    again = Journal(tmp_path / "log.jsonl", length)
    again.add({"step": 3})
    again.close()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'
    with pytest.raises(FileError, match="has 24 bytes, and the checkpoint was saved after 99"):
        Journal(tmp_path / "log.jsonl", 99)


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    journal = Journal(tmp_path / "log.jsonl")
    with calls(0, errno.ENOSPC), pytest.raises(FileError, match=r"log.jsonl cannot be written: No space left"):
        journal.add({"step": 1})
    journal.close()
    with pytest.raises(FileError, match="cannot be written: Is a directory"):
        Journal(tmp_path)
