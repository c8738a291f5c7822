"""Bytes become a picture in RGB or one error with a name and a reason; nothing else, whatever they are (R17)."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

from softless.errors import FileError
from softless.io import pictures
from softless.io.pictures import BadImage, decode, picture_size, read
from tests.data.pictures import FORMS, encoded, mutants, pixels


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_every_format_decodes_to_its_pixels(form):
    image = decode(encoded(1, form), "x")
    assert (image.mode, image.size) == ("RGB", (20, 24))
    difference = np.abs(np.asarray(image).astype(int) - pixels(1).astype(int))
    lossless = form in ("png", "lossless webp", "bmp", "tiff", "lzw tiff")
    assert difference.max() == 0 if lossless else difference.mean() < 12


@pytest.mark.parametrize(
    ("mode", "form"),
    [("L", "png"), ("LA", "png"), ("P", "png"), ("1", "png"), ("RGBA", "png"), ("CMYK", "jpeg"), ("L", "jpeg"),
     ("P", "gif"), ("RGBA", "webp"), ("P", "bmp"), ("CMYK", "tiff"), ("RGBA", "lzw tiff"), ("YCbCr", "tiff")],
)  # fmt: skip
def test_every_mode_becomes_rgb(mode, form):
    image = decode(encoded(1, form, mode), "x")
    assert image.mode == "RGB"
    expected = np.asarray(Image.fromarray(pixels(1)).convert(mode).convert("RGB")).astype(int)
    assert np.abs(np.asarray(image).astype(int) - expected).mean() < 12


def test_16_bits_lose_their_lower_eight_and_not_their_upper():
    levels = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    for kind in ("PNG", "TIFF"):
        image = decode(saved(Image.fromarray(levels), kind), "x")
        assert np.array_equal(np.asarray(image)[..., 0], levels >> 8)


def test_pixels_that_are_not_gray_levels_are_refused():
    for values, says in (
        (np.ones((2, 2), np.float32), "floating-point numbers"),
        (np.full((2, 2), 70000, np.int32), "run from 70000 to 70000, and 16 bits are the most"),
        (np.full((2, 2), -1, np.int32), "run from -1"),
    ):
        with pytest.raises(BadImage, match=says):
            decode(saved(Image.fromarray(values), "TIFF"), "x")


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns_a_picture_upright(turn):
    upright = Image.fromarray(pixels(2))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # PIL's transpositions that a camera would have done
    stored = upright.transpose(undo[turn]) if turn > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = turn
    image = decode(saved(stored, "PNG", exif=exif), "x")
    assert np.array_equal(np.asarray(image), pixels(2))


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
def test_a_picture_with_damaged_exif_data_is_decoded(form):
    image = decode(saved(Image.fromarray(pixels(2)), form, exif=b"Exif\0\0no notes of a camera"), "x")
    assert image.size == Image.fromarray(pixels(2)).size


def test_the_orientation_is_read_beside_an_exif_tag_of_the_wrong_type():
    stored = saved(Image.fromarray(pixels(2)).transpose(Image.Transpose.ROTATE_90), "JPEG", exif=bad_notes())
    assert decode(stored, "x").size == Image.fromarray(pixels(2)).size


def bad_notes() -> bytes:
    """Orientation 6, and a rational resolution that says it is text."""
    entries = [(0x112, 3, 1, b"\6\0\0\0"), (0x11A, 2, 3, b"a\0\0\0")]
    return (
        b"Exif\0\0II*\0\x08\0\0\0"
        + struct.pack("<H", len(entries))
        + b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries)
        + b"\0\0\0\0"
    )


def test_a_tile_larger_than_any_picture_is_not_decoded():
    """A picture of 16 x 16 pixels stored in one tile of 22,000 x 22,000."""
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: 22_000, 323: 22_000, 324: 0, 325: 40}
    start = 8 + 2 + 12 * len(tags) + 4
    tags[324] = start
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = (
        b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + zlib.compress(bytes(1000)).ljust(40, b"\0")
    )
    with pytest.raises(BadImage, match="its tiles have 484000000 pixels each, and 50000000 are the most"):
        decode(data, "x")


def test_one_pixel_is_a_picture():
    for kind in pictures.FORMATS:
        image = decode(saved(Image.new("RGB", (1, 1), (200, 100, 50)), kind), "x")
        assert image.size == (1, 1)


def test_an_animation_is_its_first_picture():
    frames = [Image.fromarray(pixels(seed)).convert("P") for seed in (1, 2)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(np.asarray(decode(data, "x")), np.asarray(frames[0].convert("RGB")))


def test_a_color_profile_is_no_obstacle():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.array_equal(np.asarray(decode(encoded(1, "png", icc_profile=profile), "x")), pixels(1))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is this large."""
    small = bytearray(encoded())
    small[16:24] = struct.pack(">II", width, height)

    small[29:33] = struct.pack(">I", zlib.crc32(small[12:29]))
    return bytes(small)


@pytest.mark.parametrize("size", [(10_000, 5_001), (30_000, 30_000), (2**31 - 1, 2**31 - 1), (50_000_001, 1)])
def test_more_than_50_megapixels_are_refused_before_they_are_decoded(size):
    with pytest.raises(BadImage, match="pixels"):
        decode(bomb(*size), "bomb.png")


def test_exactly_50_megapixels_are_not_too_many():
    with pytest.raises(BadImage, match="damaged"):  # the pixels are missing, the size is not the reason
        decode(bomb(10_000, 5_000), "x")


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"8BPS\0\1", b"<svg/>", b"P6 1 1 255 abc"]
)
def test_a_file_of_another_format_is_refused_with_its_name(data):
    with pytest.raises(BadImage, match=r"^cat\.jpg: it is (empty|no intact)") as caught:
        decode(data, "cat.jpg")
    assert isinstance(caught.value, FileError)
    assert caught.value.name == "cat.jpg"
    assert "\n" not in str(caught.value)


def outcome(form: str, data: bytes) -> str:
    """Decoded in RGB, or refused with the name; anything else raises."""
    try:
        image = decode(data, f"a.{form}")
    except BadImage as error:
        return "refused" if error.name == f"a.{form}" and error.why else f"refused without a word: {error}"
    assert image.mode == "RGB"
    return "decoded"


def test_150_mutated_files_are_decoded_or_refused():
    outcomes = [outcome(form, data) for form, data in mutants(150, seed=17)]
    assert {"decoded", "refused"} == set(outcomes)


@pytest.mark.parametrize("form", FORMS)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_picture_is_refused(form, share):
    data = encoded(4, form)
    assert outcome(form, data[: int(share * len(data))]) == "refused"


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_without_its_last_bytes_is_refused(form):
    data = encoded(5, form)
    assert [cut for cut in range(1, 40) if outcome(form, data[:-cut]) == "decoded"] == []


def test_bytes_after_the_end_are_no_damage():
    for form in ("jpeg", "png", "webp", "bmp"):
        assert outcome(form, encoded(5, form) + b"some camera's notes") == "decoded"
    assert outcome("gif", encoded(5, "gif") + b"\r\n\0") == "decoded"


@given(noise=st.binary(max_size=300))
def test_noise_is_refused(noise):
    for start in (b"", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"BM", b"II*\0"):
        assert outcome("x", start + noise) == "refused"


def test_only_a_regular_file_is_read(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    assert read(tmp_path / "a.png", "a") == encoded()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for name, says in (
        (".", "not a file"),
        ("pipe.png", "not a file"),
        ("no.png", "No such file"),
        ("loop.png", "loop|symbolic"),
    ):
        with pytest.raises(BadImage, match=says):
            read(tmp_path / name, name)


def test_a_file_larger_than_any_picture_is_not_read(tmp_path):
    with (tmp_path / "big.png").open("wb") as file:
        file.truncate(pictures.MOST_BYTES + 1)
    with pytest.raises(BadImage, match="more than the 400000000 of the largest picture"):
        read(tmp_path / "big.png", "big.png")


@pytest.mark.parametrize("form", FORMS)
def test_the_size_of_a_picture_is_read_from_its_header(form, tmp_path):
    data = encoded(0, form)
    (tmp_path / "a").write_bytes(data)
    assert picture_size(data, "a") == picture_size(tmp_path / "a", "a") == decode(data, "a").size == (20, 24)


@pytest.mark.parametrize("turn", range(1, 9))
def test_the_size_is_that_of_the_picture_turned_upright(turn):
    exif = Image.Exif()
    exif[0x112] = turn
    data = encoded(0, "jpeg", exif=exif)
    assert picture_size(data, "a") == decode(data, "a").size


def test_bytes_without_a_size_are_refused():
    for data in (b"", b"none", encoded()[:20]):
        with pytest.raises(BadImage, match="a: its size cannot be read"):
            picture_size(data, "a")
