"""A hostile file is inert: nothing in it runs, no file, process or socket is made, and the model stays as it was."""

import importlib
import io
import json
import os
import pathlib
import pickle
import runpy
import shutil
import struct
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import softless
from softless.errors import FileError
from tests.io.files import Net, body, foreign_class, record, repack, same, saved, values, write

Payload = Callable[[Path], bytes]


class Act:
    """Pickles as a call of `function` with `arguments`, and may set a state."""

    def __init__(self, function: object, *arguments: object, state: object = None) -> None:
        self.recipe = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[object, ...]:
        return self.recipe


def by_hand(before: bytes, after: bytes) -> Payload:
    """A piece of program that makes the canary, with its name put in the middle."""
    return lambda canary: before + body(str(canary)) + after


REFUSED: dict[str, Payload] = {
    "os.system": lambda canary: body(Act(os.system, f"touch {canary}")),
    "os.mkdir": lambda canary: body(Act(os.mkdir, str(canary))),
    "os.open": lambda canary: body(Act(os.open, str(canary), os.O_CREAT | os.O_WRONLY)),
    "os.symlink": lambda canary: body(Act(os.symlink, "nowhere", str(canary))),
    "eval": lambda canary: body(Act(eval, f"open({str(canary)!r}, 'w').close()")),
    "exec": lambda canary: body(Act(exec, f"open({str(canary)!r}, 'w').close()")),
    "eval, protocol 4": lambda canary: body(Act(eval, f"open({str(canary)!r}, 'w').close()"), 4),
    "os.mkdir, protocol 4": lambda canary: body(Act(os.mkdir, str(canary)), 4),
    "list of map": lambda canary: body(Act(list, Act(map, os.mkdir, [str(canary)]))),
    "Path.touch": lambda canary: body(Act(pathlib.Path.touch, canary)),
    "getattr": lambda canary: body(getattr) + body(canary) + body("touch") + b"\x86R)R",
    "subprocess.call": lambda canary: body(Act(subprocess.call, ["touch", str(canary)])),
    "subprocess.check_output": lambda canary: body(Act(subprocess.check_output, ["touch", str(canary)])),
    "commands.getoutput": lambda canary: body(Act(subprocess.getoutput, f"touch {canary}")),
    "shutil.copy": lambda canary: body(Act(shutil.copy, __file__, str(canary))),
    "pickle.loads": lambda canary: body(Act(pickle.loads, pickle.dumps(Act(os.mkdir, str(canary))))),
    "runpy": lambda canary: body(Act(runpy.run_path, write_script(canary))),
    "importlib": lambda canary: body(Act(importlib.import_module, "os")) + b"0" + body(Act(os.mkdir, str(canary))),
    "INST": by_hand(b"(", b"ios\nmkdir\n"),
    "OBJ": by_hand(b"(cos\nmkdir\n", b"o"),
    "REDUCE of GLOBAL": by_hand(b"cos\nmkdir\n(", b"tR"),
    "REDUCE of STACK_GLOBAL": by_hand(b"\x8c\x02os\x8c\x05mkdir\x93", b"\x85R"),
    "a name from the memo": by_hand(b"\x8c\x05mkdirr\xff\xff\x00\x000\x8c\x02osj\xff\xff\x00\x00\x93", b"\x85R"),
    "a name of another module": by_hand(b"\x80\x04\x8c\x07pathlib\x8c\x08os.mkdir\x93", b"\x85R"),
    "exec in a dictionary": lambda canary: b"}K\x01" + body(Act(exec, f"open({str(canary)!r}, 'w').close()")) + b"s",
    "exec in a tuple": lambda canary: body((1, [Act(exec, f"open({str(canary)!r}, 'w').close()")])),
}


UNREADABLE = (
    *("eval, protocol 4", "os.mkdir, protocol 4", "importlib", "INST", "OBJ"),
    *("REDUCE of STACK_GLOBAL", "a name from the memo", "a name of another module"),
)
"""Payloads with an instruction that torch.load(weights_only=True) does not have."""


def write_script(canary: Path) -> str:
    path = canary.with_suffix(".py")
    path.write_text(f"open({str(canary)!r}, 'w').close()")
    return str(path)


def torch_file(config: bytes) -> bytes:
    """A file whose weights are in order and whose settings are `config`."""
    net = Net()
    pkl = record(saved({"model": net.state_dict()}), "data.pkl")
    assert pkl.endswith(b"s.")
    whole = pkl[:-1] + body("config") + config + b"s."
    return repack(saved({"model": net.state_dict()}), data_pkl=whole)


@pytest.mark.parametrize("name", REFUSED)
def test_a_payload_is_refused_and_does_nothing(name, tmp_path, watch):
    canary = tmp_path / "canary"
    payload = REFUSED[name](canary)
    pickle.loads(b"\x80\x02" + payload + b".")
    assert os.path.lexists(canary), "the payload is alive"
    canary.rmdir() if canary.is_dir() else canary.unlink()
    model = Net()
    before = values(model)
    settings, whole = torch_file(payload), repack(saved({}), data_pkl=b"\x80\x02" + payload + b".")
    says = "Unsupported operand" if name in UNREADABLE else "its pickle names '.*', which is code and not a value"
    for data in (settings, whole):
        path = write(tmp_path, data)
        with watch() as deeds, pytest.raises(FileError, match=says):
            softless.load_weights(model, path)
        assert deeds == []
        assert not os.path.lexists(canary)
        assert same(model, before)


def deed(member: str, canary: Path) -> Callable[..., object]:
    def act(self: object, *arguments: object) -> object:
        canary.touch()
        return dict.__new__(self) if member == "__new__" else None

    return act


@pytest.mark.parametrize("member", ["__new__", "__setstate__", "__setitem__", "__init__"])
def test_a_foreign_class_is_never_constructed_nor_given_its_state(member, tmp_path, watch):
    """Not even where its package can be imported."""
    canary = tmp_path / "canary"
    with foreign_class("bad.package", "Bad", **{member: deed(member, canary)}) as bad:
        value = dict.__new__(bad)
        dict.update(value, a=1)
        value.__dict__["b"] = 2
        text = body(Act(bad)) if member == "__init__" else body(value)
        pickle.loads(b"\x80\x02" + text + b".")
        assert canary.exists(), "the payload is alive"
        canary.unlink()
        model = Net()
        before = values(model)
        beside = write(tmp_path, torch_file(text))
        alone = write(tmp_path, repack(saved({}), data_pkl=b"\x80\x02" + text + b"."), "alone.pth")
        with (
            watch() as deeds,
            pytest.raises(FileError, match=r"it holds a pickled 'bad\.package\.Bad', not a dictionary"),
        ):
            softless.load_weights(model, alone)
        assert same(model, before)
        with watch() as more_deeds:
            report = softless.load_weights(model, beside)
        assert report.ignored == ("bad.package.Bad",)
        assert not same(model, before)
        assert deeds == more_deeds == []
        assert not canary.exists()


@pytest.mark.parametrize("package", ["numpy", "torch"])
def test_code_of_other_packages_is_named_in_the_report_and_not_run(package, tmp_path, watch):
    canary = tmp_path / "canary.npy"
    text = body(Act(np.save, str(canary), 1) if package == "numpy" else Act(torch.save, 1, str(canary)))
    pickle.loads(b"\x80\x02" + text + b".")
    assert canary.exists(), "the payload is alive"
    canary.unlink()
    path = write(tmp_path, torch_file(text))
    with watch() as deeds:
        report = softless.load_weights(Net(), path)
    assert deeds == []
    assert not canary.exists()
    assert [name.rpartition(".")[2] for name in report.ignored] == ["save"]


def test_a_payload_among_the_weights_is_refused(tmp_path):
    net = Net()
    pkl = record(saved(net.state_dict()), "data.pkl")
    tensor = pkl.index(b"ctorch._utils\n_rebuild_tensor_v2\n")
    for text in (b"cbad\nBad\n)R", b"cbad\nBad\n)\x81"):
        hostile = pkl[:tensor] + text + b"X\x01\x00\x00\x00a" + pkl[tensor:]
        with pytest.raises(
            FileError, match=r": it should hold only tensors by name, and holds .* \(a pickled 'bad\.Bad'\)"
        ):
            softless.load_weights(Net(), write(tmp_path, repack(saved(net.state_dict()), data_pkl=hostile)))


def forged(offset=0, size=(2, 3), stride=(3, 1), storage="FloatStorage", key="0", count=6, more=b"") -> bytes:
    """A file of one tensor with six numbers of storage, whose note says what it likes."""
    whole = b"(" + body("storage") + f"ctorch\n{storage}\n".encode() + body(key) + body("cpu") + body(count) + b"tQ"
    note = b"ctorch._utils\n_rebuild_tensor_v2\n(" + whole + body(offset) + body(size) + body(stride) + b"\x89}"
    pkl = b"\x80\x02}" + body("weight") + note + more + b"tRs."
    return repack(saved({"weight": torch.arange(6.0).view(2, 3)}), data_pkl=pkl)


def load_forged(tmp_path: Path, data: bytes, **options: object) -> torch.Tensor:
    model = torch.nn.ParameterDict({"weight": torch.zeros(options.pop("shape", (2, 3)))})
    before = values(model)
    try:
        softless.load_weights(model, write(tmp_path, data))
    except FileError:
        assert same(model, before)
        raise
    return model["weight"]


def test_an_honest_tensor_layout_loads(tmp_path):
    numbers = torch.arange(6.0)
    assert torch.equal(load_forged(tmp_path, forged()), numbers.view(2, 3))
    assert torch.equal(load_forged(tmp_path, forged(size=(3, 2), stride=(1, 3)), shape=(3, 2)), numbers.view(2, 3).t())
    assert torch.equal(
        load_forged(tmp_path, forged(offset=1, size=(2, 1), stride=(4, 9)), shape=(2, 1)), numbers[1::4, None]
    )
    assert load_forged(tmp_path, forged(offset=99, size=(0, 5), stride=(9, 9)), shape=(0, 5)).shape == (0, 5)


@pytest.mark.parametrize(
    "note",
    [
        {"size": (2, 4), "stride": (4, 1)},
        {"offset": 1},
        {"count": 5},
        {"count": 7},
        {"count": 7, "size": (7,), "stride": (1,)},
        {"count": 10**12, "size": (10**12,), "stride": (1,)},
        {"count": -1},
        {"storage": "DoubleStorage"},
        {"storage": "QInt8Storage"},
        {"size": (2, 2), "stride": (1 << 40, 1)},
        {"size": (1 << 40,), "stride": (1,)},
        {"size": (), "stride": (), "offset": 6},
        {"size": (-2, 3)},
        {"stride": (-3, 1)},
        {"offset": -1},
        {"size": (1 << 62, 1 << 62, 0), "stride": (1, 1, 1)},
        {"size": (1,), "stride": (1 << 63,)},
        {"offset": 10**5000},
        {"size": (2, 3, 1)},
        {"size": (2.0, 3)},
        {"size": (True, 6), "stride": (6, 1)},
        {"size": (False, 6), "stride": (6, 1)},
        {"size": (6,), "stride": (True,)},
        {"size": (5,), "stride": (1,), "offset": True},
        {"size": 6},
        {"offset": None},
        {"more": body({"conj": True})},
        {"key": "1"},
        {"key": "../data.pkl"},
    ],
    ids=" ".join,
)
def test_torch_refuses_a_tensor_that_its_storage_cannot_hold(tmp_path, note):
    with pytest.raises(FileError, match=r"torch\.load refuses it"):
        load_forged(tmp_path, forged(**note))


@pytest.mark.parametrize(
    ("note", "says"),
    [
        ({"size": (2, 3), "stride": (0, 1)}, r"'weight' has size \[2, 3\] and stride \[0, 1\]: its elements overlap"),
        ({"size": (2, 3), "stride": (2, 1)}, "its elements overlap"),
        ({"size": (1 << 62,), "stride": (0,)}, "its elements overlap"),
        ({"size": (1 << 32, 1 << 31, 0), "stride": (1, 1, 1)}, "mis-shaped weight"),
        ({"size": (1,) * 65, "stride": (1,) * 65}, "mis-shaped weight"),
    ],
)
def test_a_tensor_that_shares_or_lacks_elements_is_refused(tmp_path, note, says):
    with pytest.raises(FileError, match=says):
        load_forged(tmp_path, forged(**note))


def zipped(*records: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in records:
            archive.writestr(name, content)
    return buffer.getvalue()


PKL = ("archive/data.pkl", record(saved({"weight": torch.zeros(2, 3)}), "data.pkl"))
VERSION = ("archive/version", b"3\n")


def test_a_zip_bomb_is_refused(tmp_path):
    bomb = zipped(PKL, ("archive/data/0", bytes(50_000_000)), method=zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    with pytest.raises(FileError, match="its records claim more bytes than the file has"):
        load_forged(tmp_path, bomb)
    small = zipped(PKL, ("archive/data/0", bytes(24)), ("archive/padding", os.urandom(99)), method=zipfile.ZIP_DEFLATED)
    with pytest.raises(FileError, match="is compressed, and torch compresses nothing"):
        load_forged(tmp_path, small)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


def test_records_that_overlap_are_refused(tmp_path):
    """Many entries of the directory, one piece of the file: each would be read in full."""
    buffer = io.BytesIO(zipped(PKL, ("archive/data/0", bytes(10_000))))
    with zipfile.ZipFile(buffer, "a") as archive:
        entry = archive.getinfo("archive/data/0")
        for i in range(1, 100):
            twin = zipfile.ZipInfo(f"archive/data/{i}")
            twin.header_offset, twin.CRC = entry.header_offset, entry.CRC
            twin.file_size = twin.compress_size = entry.file_size
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
        archive._didModify = True
    with pytest.raises(FileError, match="its records claim more bytes than the file has"):
        load_forged(tmp_path, buffer.getvalue())


@pytest.mark.parametrize("change", [{"compress_size": 23}, {"file_size": 23}, {"compress_type": zipfile.ZIP_DEFLATED}])
def test_a_directory_that_disagrees_with_itself_is_refused(tmp_path, change):
    buffer = io.BytesIO(zipped(PKL, ("archive/data/0", bytes(24))))
    with zipfile.ZipFile(buffer, "a") as archive:
        for name, value in change.items():
            setattr(archive.getinfo("archive/data/0"), name, value)
        archive._didModify = True
    with pytest.raises(FileError, match="its record 'archive/data/0' is compressed, and torch compresses nothing"):
        load_forged(tmp_path, buffer.getvalue())


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: zipped(PKL, PKL), "two of its records have the same name"),
        (lambda: zipped(("readme.txt", b"hello")), "not one that torch.save wrote: it has no single data.pkl"),
        (lambda: zipped(PKL, ("other/data.pkl", b"N.")), "it has no single data.pkl"),
        (lambda: zipped(PKL, (PKL[0].upper(), b"N.")), "two of its records have the same name"),
        (lambda: zipped(PKL, ("other/data", b"")), "it has no single data.pkl"),
        (lambda: zipped(PKL, VERSION) + b" ", "it is a zip file with other data before or behind it"),
        (lambda: b"PK\x03\x04" + zipped(PKL, VERSION), "it is a zip file with other data before or behind it"),
        (lambda: zipped(PKL), "torch.load refuses it"),
        (lambda: zipped(PKL, VERSION), "data/0"),
        (lambda: zipped(PKL, VERSION, ("archive/data/0", b"")), r"record size \(0 bytes\) does not match"),
        (lambda: zipped(PKL, VERSION, ("archive/data/0", bytes(24)), ("archive/byteorder", b"odd")), "endianness"),
        (lambda: saved({}, _use_new_zipfile_serialization=False), "format of torch before 1.6, which is not supported"),
        (lambda: pickle.dumps({}), "it is a bare pickle"),
        (lambda: b"<!DOCTYPE html><p>404", r"it begins with b'<!DOCTYP', and is neither safetensors nor a zip file"),
        (lambda: b"", r"it begins with b'', and is neither"),
        (lambda: b"\x02" + bytes(7) + b"{}", r"do not fit ParameterDict: missing weight$"),
        (lambda: b"\xff" * 7 + b"\x7f{", "it is no intact safetensors file"),
        (lambda: b"\x09" + bytes(7) + b'{"a":{}} ', "it is no intact safetensors file"),
    ],
)  # fmt: skip
def test_a_file_of_another_format_is_refused_with_the_reason(tmp_path, data, says):
    with pytest.raises(FileError, match=says):
        load_forged(tmp_path, data())


def tensor_file(dtype: object, shape: object = (2, 4), count: int = 4) -> bytes:
    """A safetensors file of one tensor, whose header says what it likes."""
    header = json.dumps({"weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, count]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(count)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E8M0", "U16", "C64", "F2", "", 4, None])
@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (True, 4), (2.0, 4), (-1, 4), (1 << 70,), "24"])
def test_a_safetensors_header_is_answered_or_refused_whatever_it_says(tmp_path, dtype, shape):
    for count in (1, 4, 6, 8, 16, 64):
        for wanted in ((2, 4), (2, 2)):
            try:
                load_forged(tmp_path, tensor_file(dtype, shape, count), shape=wanted)
            except FileError as error:
                text = str(error)
                assert "\n" not in text.replace(str(tmp_path), ""), text


def test_numbers_of_half_a_byte_are_refused(tmp_path):
    with pytest.raises(
        FileError,
        match=r"it holds numbers that torch cannot convert: 'weight' \(torch.float4|no intact safetensors file",
    ):
        load_forged(tmp_path, tensor_file("F4"), shape=(2, 2))


def test_reading_a_pickle_takes_memory_in_proportion_to_the_file(tmp_path):
    bomb = repack(saved({}), data_pkl=b"\x80\x02" + b"}" * 50_000 + b"q\x00h\x00" * 20_000 + b".")
    path = write(tmp_path, bomb)
    tracemalloc.start()
    with pytest.raises(FileError, match="it has no dictionary of tensors"):
        softless.load_weights(Net(), path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * len(bomb)
