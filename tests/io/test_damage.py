"""A damaged file is refused or loads what was saved: it never crashes, never runs, never loads half."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import softless
from softless.errors import FileError
from tests.io.conftest import watching
from tests.io.files import Net, foreign_class, record, repack, same, saved, values, write

torch.manual_seed(0)
SAVED = values(Net())
with foreign_class("yacs.config", "CfgNode") as node:
    TORCH = saved({"model": SAVED, "epoch": 3, "config": node(MODEL=node(DEPTH=12))})
SAFETENSORS = save(SAVED)
PICKLE = record(TORCH, "data.pkl")

MANY = settings(max_examples=8 * settings().max_examples)
EDITS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damage")


def damaged(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for place, flip in edits:
        changed[place % len(data)] ^= flip
    return bytes(changed)


def outcome(folder, data: bytes) -> dict[str, torch.Tensor] | None:
    """What the model holds after loading; None if the file was refused and the model is as it was."""
    model = Net()
    before = values(model)
    path = write(folder, data)
    with watching() as deeds:
        try:
            report = softless.load_weights(model, path)
        except (FileError, RuntimeWarning) as refusal:  # NaN is a warning, and warnings are errors here
            report, said = None, str(refusal)
    assert deeds == []
    if report is None:
        assert said.startswith(f"{path}: ")
        assert same(model, before)
        return None
    assert report.tensors == len(SAVED)
    return values(model)


@MANY
@given(edits=EDITS)
def test_flipped_bytes_of_a_zip_are_noticed_wherever_they_matter(folder, edits):
    found = outcome(folder, damaged(TORCH, edits))
    if found is not None:
        model = Net()
        model.load_state_dict(found)
        assert same(model, SAVED)


@MANY
@given(edits=EDITS)
def test_a_pickle_with_a_flipped_bit_is_refused_or_describes_complete_tensors(folder, edits):
    """With the checksums made right again, as an attacker would."""
    outcome(folder, repack(TORCH, data_pkl=damaged(PICKLE, edits)))


@MANY
@given(edits=EDITS)
def test_flipped_bytes_of_safetensors_load_as_what_its_own_reader_finds(folder, edits):
    data = damaged(SAFETENSORS, edits)
    found = outcome(folder, data)
    if found is not None:
        model = Net()
        model.load_state_dict(load(data))
        assert same(model, found)


@pytest.mark.parametrize("data", [TORCH, SAFETENSORS], ids=["torch", "safetensors"])
@given(length=st.integers(0, 2**16))
def test_a_truncated_file_is_refused(folder, data, length):
    assert outcome(folder, data[: length % len(data)]) is None


@given(noise=st.binary(max_size=200))
def test_noise_is_refused(folder, noise):
    for data in (noise, repack(TORCH, data_pkl=noise), b"PK\x03\x04" + noise):
        assert outcome(folder, data) is None


def test_undamaged_files_load(folder):
    for data in (TORCH, SAFETENSORS, repack(TORCH)):
        model = Net()
        model.load_state_dict(outcome(folder, data))
        assert same(model, SAVED)
