"""The machine gives the value that unpickling would, and a note wherever unpickling would import or call."""

import pickle
import pickletools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softless.errors import FileError
from softless.io import inert
from softless.io.inert import Call, Name, Reference, read_pickle
from tests.io.files import body

NUMBERS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = st.text() | st.integers(-1000, 1000)
PLAIN = st.recursive(
    NUMBERS,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.lists(inner, max_size=5).map(tuple),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(3, 5))
def test_plain_values_come_out_as_they_went_in(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol)) == (value, ())


@given(value=st.recursive(NUMBERS.filter(lambda x: not isinstance(x, bytes)), st.lists), protocol=st.integers(0, 2))
def test_old_protocols_are_read_too(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol)) == (value, ())


def test_shared_values_stay_shared_and_cycles_stay_cycles():
    shared: list[object] = [1]
    found, _ = read_pickle(pickle.dumps([shared, shared]))
    assert found[0] is found[1]
    shared.append(shared)
    found, _ = read_pickle(pickle.dumps(shared))
    assert found[1] is found
    pair: tuple[list[object]] = ([],)
    pair[0].append(pair)
    found, _ = read_pickle(pickle.dumps(pair))
    assert found[0][0] is found


@pytest.mark.parametrize("protocol", range(2, 6))
def test_sets_come_out_as_lists(protocol):
    (names, frozen), _ = read_pickle(pickle.dumps(({"a"}, frozenset({"b"})), protocol))
    if protocol >= 4:
        assert (names, frozen) == (["a"], ["b"])
    else:
        assert (names.name, frozen.name) == ("builtins.set", "builtins.frozenset")


@pytest.mark.parametrize(
    ("program", "name", "arguments"),
    [
        (b"cfoo.bar\nBaz\n)R.", "foo.bar.Baz", ()),
        (b"cfoo.bar\nBaz\nK\x05\x85R.", "foo.bar.Baz", (5,)),
        (b"\x80\x02cfoo.bar\nBaz\n)\x81.", "foo.bar.Baz", ()),
        (b"\x80\x04\x8c\x03foo\x8c\x07bar.Baz\x93)}\x92.", "foo.bar.Baz", ()),
        (b"(K\x05ifoo.bar\nBaz\n.", "foo.bar.Baz", [5]),
        (b"(cfoo.bar\nBaz\nK\x05o.", "foo.bar.Baz", (5,)),
        (b"cfoo\nbar baz qux\n)R.", "foo.bar baz qux", ()),
        (b"(ifoo\nbar baz qux\n.", "foo.bar baz qux", []),
        (b"cfoo.bar\nBaz\n)R}(K\x01K\x02ub.", "foo.bar.Baz", ()),
        (b"cfoo.bar\nBaz\n)RK\x01a.", "foo.bar.Baz", ()),
        (b"cfoo.bar\nBaz\n)R(K\x01K\x02u.", "foo.bar.Baz", ()),
    ],
)
def test_every_way_to_call_leaves_a_note(program, name, arguments):
    value, names = read_pickle(program)
    assert isinstance(value, Call)
    assert (value.name, value.arguments, names) == (name, arguments, (name,))


def test_a_name_and_a_reference_are_notes():
    value, names = read_pickle(b"ctorch\nFloatStorage\n.")
    assert isinstance(value, Name)
    assert (value.full, names) == ("torch.FloatStorage", ("torch.FloatStorage",))
    for program in (b"X\x01\x00\x00\x00aQ.", b"Pa\n."):
        value, _ = read_pickle(program)
        assert isinstance(value, Reference)
        assert value.identity == "a"


def test_no_instruction_of_pickle_is_forgotten():
    """A new Python's new instruction is refused until someone has thought about it."""
    refused = {opcode.name for opcode in pickletools.opcodes} - set(inert._RULES)
    assert refused == {"DUP", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
    for program in (b"K\x012.", b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.", b"\x97.", b"N\x98."):
        with pytest.raises(FileError, match=r"its pickle has the instruction [A-Z0-9_]+, and no checkpoint has"):
            read_pickle(program)


@pytest.mark.parametrize("name", ["os system", "posix system", "builtins eval", "__builtin__ exec", "builtins getattr"])
@pytest.mark.parametrize("name_only", [True, False])
def test_code_of_the_standard_library_is_refused_by_name(name, name_only):
    module, function = name.split()
    program = f"c{module}\n{function}\n".encode() + (b"." if name_only else b")R.")
    with pytest.raises(FileError, match="which is code and not a value: do not trust this file"):
        read_pickle(program)


@pytest.mark.parametrize("module", sorted(inert.VALUES))
def test_values_of_the_standard_library_are_notes(module):
    for name in inert.VALUES[module].split():
        read_pickle(f"c{module}\n{name}\n.".encode())
        with pytest.raises(FileError, match="is code and not a value"):
            read_pickle(f"c{module}\n{name}.__class__\n.".encode())


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"K\x01",
        b"K\x01K\x02.",
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
        b"\x8c\x03fooK\x02\x93.",
        b"K\x01\x8c\x03foo\x93.",
        b"K\x01a.",
        b"NK\x01a.",
        b"N(K\x01e.",
        b"NK\x01K\x02s.",
        b"}(K\x01u.",
        b"(o.",
        b"b.",
        b"h\x00.",
        b"q\x00.",
        b"g-1\n.",
        b"Np-1\n.",
        b"Np99999999999999999999\n.",
        b"S'\\q\n.",
        b"I" + b"9" * 5000 + b"\n.",
        b"X\xff\xff\xff\xffab.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fab.",
        b"X\x02\x00\x00\x00\xff\xfe.",
        b"cfoo\n",
        b"\xff.",
    ],
)
def test_a_damaged_program_is_refused(program):
    with pytest.raises(FileError, match="its pickle is damaged"):
        read_pickle(program)


DEEP = 50_000


@pytest.mark.parametrize(
    "program",
    [
        b"N" + b"\x85" * DEEP + b".",
        b"]" * DEEP + b"a" * (DEEP - 1) + b".",
        b"cfoo\nbar\nq\x00" + b"h\x00" * DEEP + b"N" + b"\x85R" * (DEEP + 1) + b".",
        b"}N" + b"\x85" * 6 * DEEP + b"K\x01s.",
        b"N" + b"Q" * DEEP + b".",
        b"(" * DEEP + b"t" * DEEP + b".",
    ],
    ids=["tuples", "lists", "calls", "a key", "references", "marks"],
)
def test_nesting_has_no_limit_and_does_no_harm(program):
    """Python itself ends with a segmentation fault where it hashes such a key."""
    read_pickle(program)


def test_keys_that_cannot_be_hashed_safely_are_keys_like_no_other():
    value, _ = read_pickle(b"}(" + b"".join(body(key) + b"N" for key in ("a", 1, 1.5, (2,), None, 2**40)) + b"u.")
    assert [key for key in value if isinstance(key, str | int)] == ["a", 1]
    assert len(value) == 6


def test_instructions_are_counted(monkeypatch):
    monkeypatch.setattr(inert, "MOST_INSTRUCTIONS", 100)
    read_pickle(b"]" * 50 + b"0" * 49 + b".")
    with pytest.raises(FileError, match="more than 100 instructions"):
        read_pickle(b"}" * 101 + b".")
