"""Texts: their two parts never overlap, their tokens give back their bytes, and a bad text is named in one sentence."""

import json

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from softless.data.sampler import ResumableSampler
from softless.data.sequences import IGNORED, SequenceLoader, TokenizedText
from softless.data.text import Text, is_text, open_test_text, open_text, open_texts
from softless.data.tokens import ByteTokenizer, PairTokenizer, digest_of, learn_pairs, read_pairs
from softless.errors import ArgumentError, FileError

POEM = "Schläft ein Lied in allen Dingen,\ndie da träumen fort und fort — 🌙\n"
LEARNED = learn_pairs(Text("poem", POEM.encode() * 20), 300)


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def rows(path, **columns):
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), LEARNED], ids=["bytes", "bpe"])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
def test_tokens_give_back_the_bytes_of_any_text(tokenizer, text):
    data = text.encode()
    tokens = tokenizer.encode(data)
    assert tokenizer.decode(tokens) == data
    assert tokenizer.sizes[tokens.long()].sum() == len(data)
    assert 0 <= tokens.long().min() <= tokens.long().max() < tokenizer.count


def test_a_long_text_that_is_encoded_in_parts_round_trips():
    data = (POEM * 2000).encode()
    tokens = LEARNED.encode(data)
    assert LEARNED.decode(tokens) == data
    assert len(tokens) < len(data) / 2


def test_learning_tokens_is_deterministic_and_a_file_brings_them_back(tmp_path):
    again = learn_pairs(Text("poem", POEM.encode() * 20), 300)
    assert again.file == LEARNED.file
    path = tmp_path / "tokenizer.json"
    path.write_text(LEARNED.file)
    read = read_pairs(path, digest_of(LEARNED))
    assert (read.count, read.pieces) == (300, LEARNED.pieces)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "it is no file of byte-pair tokens"),
        ("{}", "it is no file of byte-pair tokens"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 7}, "merges": []}}), "not numbered from 0"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}), "do not hold every byte"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"\u4e00": 0}, "merges": []}}), "it is no file of byte-pair"),
    ],
)
def test_a_file_that_holds_no_tokens_is_refused(content, says):
    with pytest.raises(FileError, match=rf"^x\.json: .*{says}"):
        PairTokenizer(content, "x.json")


def test_tokens_that_changed_since_the_run_began_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileError, match=r"the tokens of the run cannot be read \(No such file"):
        read_pairs(path, "")
    path.write_text(LEARNED.file + " ")
    with pytest.raises(FileError, match=r"it is damaged: its sha256 is not the one in run\.json"):
        read_pairs(path, digest_of(LEARNED))


def test_a_text_too_short_for_its_vocabulary_says_how_many_tokens_it_gives():
    with pytest.raises(
        ArgumentError, match=r"x: its 11 bytes to train on give 260 tokens, and vocabulary is 4096: set"
    ):
        learn_pairs(Text("x", b"hello hello"), 4096)


@given(text=st.text(alphabet="aä—🌙", min_size=2, max_size=60), share=st.floats(0.05, 0.9))
def test_the_two_parts_of_a_text_are_the_text_and_no_character_is_cut(tmp_path_factory, text, share):
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(text.encode())
    try:
        train, test = open_texts(path, share)
    except FileError:
        assert len(text.encode()) * min(share, 1 - share) < 5  # less than a character is left of one part
        return
    assert train.data.decode() + test.data.decode() == text
    assert train.data
    assert test.data


@pytest.mark.parametrize(
    ("files", "source", "train", "test"),
    [
        ({"a.txt": "0123456789"}, "a.txt", "012345678", "9"),
        ({"a-train.txt": "seen", "a-valid.txt": "new"}, "a-train.txt", "seen", "new"),
        ({"a-train.txt": "seen", "a-valid.txt": "new"}, "a-valid.txt", "seen", "new"),
        ({"a-train.txt": "seen", "a-val.txt": "new", "a-test.txt": "newer"}, "a-train.txt", "seen", "new"),
        ({"a-train.txt": "0123456789"}, "a-train.txt", "012345678", "9"),
        ({"d/b.txt": "56789", "d/a.txt": "0123", "d/c.md": "no"}, "d", "0123\n5678", "9"),
        ({"d/train/b.txt": "b", "d/train/a.txt": "a", "d/val/c.txt": "c"}, "d", "a\nb", "c"),
        ({"d/train/a.txt": "0123456789"}, "d", "012345678", "9"),
    ],
)
def test_the_parts_of_texts_are_found_as_those_of_images(tmp_path, files, source, train, test):
    write(tmp_path, files)
    assert [text.data.decode() for text in open_texts(tmp_path / source)] == [train, test]
    assert open_test_text(tmp_path / source).data.decode() == test
    assert is_text(tmp_path / source)


def test_a_note_beside_images_does_not_make_them_text(tmp_path):
    write(tmp_path, {"images/README.txt": "about", "images/train/README.txt": "about"})
    for name in ("images/train/rose", "images/train/lily", "images/val/rose"):
        (tmp_path / name).mkdir(parents=True)
    assert not is_text(tmp_path / "images")
    write(tmp_path, {"tables/README.txt": "about", "tables/x.parquet": "damaged"})
    assert not is_text(tmp_path / "tables")
    assert not is_text(tmp_path / "tables/x.parquet")


def test_a_note_among_images_of_no_class_does_not_make_them_text(tmp_path):
    assert is_text(write(tmp_path, {"readme.txt": "about", "Makefile": "all:"}))
    assert not is_text(write(tmp_path, {"1.JPG": "damaged"}))


def test_hold_out_takes_the_end_of_the_training_text_and_leaves_the_test_text_alone(tmp_path):
    write(tmp_path, {"a-train.txt": "0123456789", "a-test.txt": "new"})
    assert [text.data for text in open_texts(tmp_path / "a-train.txt", 0.3)] == [b"0123456", b"789"]
    assert open_test_text(tmp_path / "a-train.txt", 0.3).data == b"new"
    with pytest.raises(ArgumentError, match=r"hold_out is 1\.0 and must be at least 0 and below 1"):
        open_texts(tmp_path / "a-train.txt", 1.0)


def test_rows_of_parquet_are_joined_by_line_ends_and_split_by_their_column(tmp_path):
    whole = rows(tmp_path / "x.parquet", text=["ab", None, "cdefghi"])
    assert [text.data for text in open_texts(whole)] == [b"ab\n\ncdefgh", b"i"]
    split = rows(tmp_path / "y.parquet", text=["a", "b", "c"], split=["train", "test", "train"])
    assert [text.data for text in open_texts(split)] == [b"a\nc", b"b"]
    rows(tmp_path / "z-train.parquet", text=["a"])
    rows(tmp_path / "z-test.parquet", text=["b"])
    assert [text.data for text in open_texts(tmp_path / "z-train.parquet")] == [b"a", b"b"]
    assert is_text(whole)
    assert not is_text(rows(tmp_path / "i.parquet", text=["a"], image=[b""], label=[0]))
    assert not is_text(None)
    assert not is_text("digits")


@pytest.mark.parametrize(
    ("files", "source", "says"),
    [
        ({}, "none.txt", "there is no such text file, folder of text files or parquet file"),
        ({"a.txt": b"abc\xff"}, "a.txt", r"it is not UTF-8 text: its byte 3 is 0xff \(invalid start byte\)"),
        ({"a.txt": b"ab\xc3"}, "a.txt", r"it is not UTF-8 text: its byte 2 is 0xc3 \(unexpected end of data\)"),
        ({"a.txt": ""}, "a.txt", "a.txt: it is empty"),
        ({"a.txt": "x"}, "a.txt", "leaves one of two parts empty"),
        ({"d/a.md": "x"}, "d", r"it holds no file that ends in \.txt"),
        ({"d/a-test.txt": "x", "d/b.txt": "y"}, "d", r"a-test\.txt is one part of a set: give that file, or folders"),
        ({"a-test.txt": "x"}, "a-test.txt", r"there is no -train\.txt or -trainval\.txt beside it to train on"),
        ({"a.parquet": "x"}, "a.parquet", "it is no intact parquet file"),
    ],
)
def test_a_text_that_cannot_be_read_is_named_in_one_sentence(tmp_path, files, source, says):
    write(tmp_path, files)
    with pytest.raises(FileError, match=says) as error:
        open_texts(tmp_path / source)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_parquet_column_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(FileError, match="its column text is int64, and strings are needed"):
        open_text(rows(tmp_path / "x.parquet", text=[1, 2]), "train")
    with pytest.raises(FileError, match="it has columns words, and text is needed"):
        open_text(rows(tmp_path / "y.parquet", words=["a"]), "train")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), LEARNED], ids=["bytes", "bpe"])
def test_the_sequences_of_a_test_text_predict_every_token_but_the_first_once(tokenizer):
    data = POEM.encode() * 3
    text = TokenizedText(Text("poem", data), tokenizer, 10, train=False)
    inputs, targets, _ = text.batch(torch.arange(text.count))
    real = targets != IGNORED
    assert tokenizer.decode(targets[real]) == data[tokenizer.sizes[inputs[0, 0]] :]
    assert torch.equal(inputs.flatten()[1:][real.flatten()[:-1]], targets.flatten()[:-1][real.flatten()[:-1]])
    assert torch.equal(inputs.flatten()[: len(text.tokens)], text.tokens.long())


def test_the_sequences_to_train_on_are_complete():
    text = TokenizedText(Text("digits", b"0123456789"), ByteTokenizer(), 4, train=True)
    inputs, targets, _ = text.batch(torch.arange(text.count))
    assert [bytes(row.tolist()) for row in inputs] == [b"0123", b"4567"]
    assert [bytes(row.tolist()) for row in targets] == [b"1234", b"5678"]
    assert text.named(1) == "digits[tokens 4 to 8]"


@pytest.mark.parametrize(("train", "part"), [(True, "train"), (False, "test")])
def test_a_text_shorter_than_one_sequence_is_refused(train, part):
    says = (
        rf"x: its text to {part} on has 4 tokens \(4 bytes\), and one sequence needs 5: the length 4 and a token after"
    )
    with pytest.raises(FileError, match=says):
        TokenizedText(Text("x", b"abcd"), ByteTokenizer(), 4, train=train)
    TokenizedText(Text("x", b"abcde"), ByteTokenizer(), 4, train=train)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_see_every_sequence_once(ranks):
    text = TokenizedText(Text("x", bytes(range(65, 91)) * 8), ByteTokenizer(), 5, train=False)
    seen = []
    for rank in range(ranks):
        sampler = ResumableSampler(text.count, seed=3, rank=rank, ranks=ranks)
        batches = SequenceLoader(text, sampler, torch.device("cpu"), batch=4, train=False)
        found = [*batches]
        assert len(found) <= batches.per_epoch
        seen += [sequence for batch in found for sequence in batch.ids.tolist()]
    assert sorted(seen) == list(range(text.count))


def test_a_loader_goes_on_where_it_was():
    text = TokenizedText(Text("x", bytes(range(65, 91)) * 8), ByteTokenizer(), 5, train=True)

    def batches():
        return SequenceLoader(text, ResumableSampler(text.count, seed=3), torch.device("cpu"), batch=4, train=True)

    whole, first, later = batches(), batches(), batches()
    expected = [batch.ids.tolist() for batch in whole]
    assert [len(ids) for ids in expected] == [4] * whole.per_epoch
    begun = [batch.ids.tolist() for batch, _ in zip(first, range(3), strict=False)]
    later.sampler.load_state_dict({"epoch": 0, "position": 12})
    assert begun + [batch.ids.tolist() for batch in later] == expected
    assert torch.equal(whole.blank().inputs, text.batch(torch.tensor([0])).inputs)
