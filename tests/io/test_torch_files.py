"""Pickles made to crash torch.load or to exhaust the memory are refused, and foreign classes become stand-ins."""

import argparse
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import softless
from softless.errors import FileError
from softless.io import torch_files
from tests.io.files import body, repack, same, saved, values, write


class Names(list):
    """A list of a class of its own, as some training scripts save one."""


class Pair(tuple):
    """A tuple of a class of its own."""

    __slots__ = ()


def load(folder: Path, program: bytes, protocol: int = 2) -> softless.WeightsReport:
    pkl = b"\x80" + bytes([protocol]) + program
    return softless.load_weights(nn.Linear(1, 1), write(folder, repack(saved({}), data_pkl=pkl)))


@pytest.mark.parametrize(
    "extra",
    [
        argparse.Namespace(lr=0.1, model="vit"),
        Names(["a", "b"]),
        Pair((1, 2)),
        Path("runs/1"),
        {1, 2},
        frozenset({3}),
        1 + 2j,
        torch.float16,
        torch.Size([2, 3]),
        torch.device("cuda:1"),
        nn.Linear(2, 2),
        OrderedDict(a=Names([Names([1])])),
        [None, True, 2**70, -1.5, "text", b"bytes", (1, (2, (3,)))],
    ],
    ids=lambda extra: type(extra).__name__,
)
def test_weights_load_beside_values_of_other_classes(extra, tmp_path):
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    data = saved({"model": source.state_dict(), "extra": extra})
    softless.load_weights(model, write(tmp_path, data))
    assert same(model, values(source))


@pytest.mark.parametrize("protocol", [0, 1, 4, 5])
def test_other_pickle_protocols_are_refused_by_name(protocol, tmp_path):
    path = write(tmp_path, saved(nn.Linear(1, 1).state_dict(), pickle_protocol=protocol))
    said = "0 or 1" if protocol < 2 else protocol
    with pytest.raises(FileError, match=rf"its pickle has protocol {said}, and torch\.load\(weights_only=True\) reads"):
        softless.load_weights(nn.Linear(1, 1), path)


@pytest.mark.parametrize("name", ["os system", "posix system", "builtins eval", "__builtin__ exec", "builtins getattr"])
@pytest.mark.parametrize("name_only", [True, False])
def test_code_of_the_standard_library_is_refused_by_name(name, name_only, tmp_path):
    module, function = name.split()
    program = f"c{module}\n{function}\n".encode() + (b"." if name_only else b")R.")
    with pytest.raises(FileError, match="which is code and not a value: do not trust this file"):
        load(tmp_path, program)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "argparse.Namespace",
            "builtins.frozenset",
            "builtins.object",
            "collections.defaultdict",
            "datetime.timedelta",
        ),
        *("decimal.Decimal", "functools.partial", "pathlib.PosixPath", "pathlib._local.PosixPath", "uuid.UUID"),
    ],
)
def test_values_of_the_standard_library_become_stand_ins(name, tmp_path):
    module, _, value = name.rpartition(".")
    with pytest.raises(FileError, match=f"it holds a pickled '{name}', not a dictionary"):
        load(tmp_path, f"c{module}\n{value}\n)R.".encode())
    with pytest.raises(FileError, match="is code and not a value"):
        load(tmp_path, f"c{module}\n{value}.__class__\n.".encode())


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"K\x01",
        b"0.",
        b"1.",
        b"\x85.",
        b"K\x01\x86.",
        b"K\x01\x87.",
        b"t.",
        b"R.",
        b"K\x01)R.",
        b"cfoo\nbar\n)R)R.",
        b"K\x01K\x02\x93.",
        b"K\x01a.",
        b"NK\x01a.",
        b"N(K\x01e.",
        b"NK\x01K\x02s.",
        b"}(K\x01u.",
        b"}]K\x01s.",
        b"(o.",
        b"b.",
        b"h\x00.",
        b"q\x00.",
        b"g-1\n.",
        b"Np-1\n.",
        b"S'\\q\n.",
        b"I" + b"9" * 5000 + b"\n.",
        b"X\xff\xff\xff\xffab.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fab.",
        b"X\x02\x00\x00\x00\xff\xfe.",
        b"cfoo\n",
        b"\xff.",
        b"K\x012.",
        b"\x82\x01.",
        b"\x97.",
        b"K\x01Q.",
        b"]Q.",
    ],
)
def test_a_damaged_pickle_is_refused(program, tmp_path):
    with pytest.raises(FileError, match=r"its pickle is damaged|torch\.load refuses it|not a dictionary"):
        load(tmp_path, program)


DEEP = 50_000


@pytest.mark.parametrize(
    "program",
    [
        b"N" + b"\x85" * DEEP + b".",
        b"]" * DEEP + b"a" * (DEEP - 1) + b".",
        b"cfoo\nbar\nq\x00" + b"h\x00" * DEEP + b"N" + b"\x85R" * (DEEP + 1) + b".",
        b"}N" + b"\x85" * 6 * DEEP + b"K\x01s.",
        b"}N" + b"K\x01\x86" * 6 * DEEP + b"K\x01s.",
        b"}N" + b"\x85q\x00h\x00\x86" * 6 * DEEP + b"K\x01s.",
        b"}" + b"(" * 6 * DEEP + b"t" * 6 * DEEP + b"K\x01s.",
        b"N" + b"Q" * DEEP + b".",
        b"]q\x00" + b"h\x00a" * DEEP + b".",
    ],
    ids=[
        "tuples",
        "lists",
        "calls",
        "a key",
        "a key of pairs",
        "a memorized key",
        "a marked key",
        "references",
        "a cycle",
    ],
)
def test_deep_nesting_is_refused(program, tmp_path):
    """Python ends with a segmentation fault when it hashes such a key."""
    with pytest.raises(FileError, match="its pickle has values nested more than 1000 deep"):
        load(tmp_path, program)


def test_instructions_are_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_files, "MOST_INSTRUCTIONS", 100)
    with pytest.raises(FileError, match="it has no dictionary of tensors"):
        load(tmp_path, b"}" * 98 + b".")
    with pytest.raises(FileError, match="more than 100 instructions"):
        load(tmp_path, b"}" * 100 + b".")


@pytest.mark.parametrize(
    "maker", ["collections OrderedDict", "collections Counter", "__builtin__ set", "_codecs encode"]
)
def test_a_pickle_that_copies_a_large_value_many_times_is_refused(maker, tmp_path):
    """A call of eight bytes copies a value of a megabyte: torch.load would fill the memory."""
    large = body("x" * 10_000) if maker == "_codecs encode" else body([(str(i), i) for i in range(1_000)])
    call = "c{}\n{}\n".format(*maker.split()).encode()
    program = large + b"q\x00" + call + b"q\x01" + b"h\x01h\x00\x85R" * 1_000 + b"."
    with pytest.raises(FileError, match="its pickle copies one value many times"):
        load(tmp_path, program)


@pytest.mark.parametrize("module", ["__builtin__", "builtins"])
def test_a_bytearray_is_refused(module, tmp_path):
    """`bytearray(10**12)` takes as much memory as it says."""
    with pytest.raises(FileError, match="its pickle makes a bytearray"):
        load(tmp_path, f"c{module}\nbytearray\n".encode() + body(10**12) + b"\x85R.")


def test_no_environment_variable_lets_a_pickle_run(tmp_path):
    canary = tmp_path / "canary"
    path = write(tmp_path, repack(saved({}), data_pkl=b"\x80\x02cos\nmkdir\n" + body(str(canary)) + b"\x85R."))
    code = "import sys, torch, softless; softless.load_weights(torch.nn.Linear(1, 1), sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "which is code and not a value" in result.stderr
    assert not canary.exists()
