"""Pictures that people send: what is read, how it looks, and what is refused before it costs anything."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.media.errors import UnusableMediaError
from app.media.picture_in import read_picture

RED, BLUE = (250, 10, 20), (10, 20, 250)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def half_red(size: tuple[int, int] = (40, 20)) -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def is_near(pixel: Any, colour: tuple[int, int, int]) -> bool:
    return max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) < 12


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that claims a size, whatever it holds."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_format_is_read_as_it_looks(form: str) -> None:
    image = read_picture(encoded(half_red(), form))
    assert (image.mode, image.size) == ("RGB", (40, 20))
    assert is_near(image.getpixel((5, 10)), RED)
    assert is_near(image.getpixel((35, 10)), BLUE)


def test_a_picture_is_turned_as_its_camera_noted() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned right by a quarter
    image = read_picture(encoded(half_red(), "JPEG", exif=exif, quality=95))
    assert image.size == (20, 40)
    assert is_near(image.getpixel((10, 5)), RED)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    shown = image.convert("P", palette=Image.Palette.ADAPTIVE) if mode == "P" else image.convert(mode)
    if mode == "P":
        shown.info["transparency"] = shown.getpixel((0, 0))
    assert read_picture(encoded(shown, "PNG")).getpixel((4, 4)) == (255, 255, 255)


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    grey = np.full((6, 6), 0x8000, dtype=np.uint16)
    assert read_picture(encoded(Image.fromarray(grey), "PNG")).getpixel((3, 3)) == (128, 128, 128)


def test_printing_inks_become_light() -> None:
    image = read_picture(encoded(half_red().convert("CMYK"), "JPEG", quality=95))
    assert image.mode == "RGB"
    assert is_near(image.getpixel((5, 10)), RED)


def test_a_film_shows_its_first_frame() -> None:
    film = encoded(
        Image.new("RGB", (8, 8), RED), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), BLUE)]
    )
    assert is_near(read_picture(film).getpixel((4, 4)), RED)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"RIFF\0\0\0\0WAVEfmt ", b"%PDF-1.7", b"<svg/>", b"II*\0" + bytes(64)]
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(UnusableMediaError, match="no PNG, JPEG, WebP, GIF or BMP"):
        read_picture(data)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_files_are_refused_wherever_they_end(form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(noise), form)
    for length in {2, 4, 12, 20, 30, len(whole) // 2, len(whole) - 40}:
        with pytest.raises(UnusableMediaError):
            read_picture(whole[:length])


@pytest.mark.parametrize("seed", range(40))
def test_whatever_bytes_are_changed_there_is_a_picture_or_a_refusal(seed: int) -> None:
    noise = np.random.default_rng(seed)
    form = ["PNG", "JPEG", "WEBP", "GIF", "BMP"][seed % 5]
    data = bytearray(encoded(half_red(), form))
    for place in noise.integers(0, len(data), 6):
        data[place] = int(noise.integers(0, 256))
    with contextlib.suppress(UnusableMediaError):
        assert read_picture(bytes(data), max_pixels=10_000).mode == "RGB"


@pytest.mark.parametrize("size", [(60_000, 60_000), (5000, 5000), (2**31 - 1, 1), (1, 60_000)])
def test_a_bomb_is_refused_from_its_header(size: tuple[int, int]) -> None:
    began = time.perf_counter()
    with pytest.raises(UnusableMediaError, match=r"pixels|times the other"):
        read_picture(png_of(*size))
    assert time.perf_counter() - began < 1.0


def test_a_webp_canvas_is_bounded_before_it_is_opened() -> None:
    canvas = (16_382).to_bytes(3, "little") * 2
    data = b"RIFF" + bytes(4) + b"WEBPVP8X" + (10).to_bytes(4, "little") + bytes(4) + canvas + bytes(64)
    with pytest.raises(UnusableMediaError, match="pixels"):
        read_picture(data)


def test_a_line_that_encoders_would_blow_up_is_refused() -> None:
    with pytest.raises(UnusableMediaError, match="times the other"):
        read_picture(encoded(Image.new("RGB", (2000, 1)), "PNG"))


def test_a_jpeg_of_thousands_of_passes_is_refused() -> None:
    data = encoded(half_red(), "JPEG", progressive=True)
    scan = data.index(b"\xff\xda")
    with pytest.raises(UnusableMediaError, match="passes"):
        read_picture(data[:scan] + data[scan:-2] * 500)


def test_the_callers_limit_counts() -> None:
    with pytest.raises(UnusableMediaError, match="more than 100 pixels"):
        read_picture(encoded(half_red(), "PNG"), max_pixels=100)


def bmp_of_run_lengths(width: int, height: int, pairs: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 0, 0, 0, 256, 0)
    start = 14 + len(head) + 1024
    return b"BM" + struct.pack("<IHHI", start + len(pairs), 0, 0, start) + head + bytes(1024) + pairs


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\xff\xd8" + b"\xff\xe1\x00\x02" * 3_000_000, "pieces"),
        (b"\xff\xd8" + b"\xff" * 12_000_000, "pieces"),
        (png_of(8, 8)[:33] + (struct.pack(">I", 0) + b"abCd" + bytes(4)) * 1_000_000, "pieces"),
        (b"GIF89a" + bytes([8, 0, 8, 0, 0, 0, 0]) + b"\x21\xfe\x01a\x00" * 2_400_000, "pieces"),
        (bmp_of_run_lengths(4096, 4096, b"\x01\x01" * 6_000_000), "run lengths"),
    ],
    ids=["JPEG segments", "JPEG filling", "PNG chunks", "GIF comments", "BMP runs"],
)
def test_millions_of_empty_pieces_cost_no_time(data: bytes, match: str) -> None:
    began = time.process_time()
    with pytest.raises(UnusableMediaError, match=match):
        read_picture(data)
    assert time.process_time() - began < 1.0


def test_pictures_of_many_pieces_are_read() -> None:
    """A colour profile of 255 segments in a JPEG, a PNG in pieces of a kilobyte, a GIF with a long comment."""
    picture = half_red((300, 200))
    jpeg = encoded(picture, "JPEG")
    jpeg = jpeg[:2] + (b"\xff\xe2" + struct.pack(">H", 1000) + bytes(998)) * 255 + jpeg[2:]
    for data in (jpeg, encoded(picture, "GIF", comment=b"x" * 100_000), encoded(picture, "PNG")):
        assert read_picture(data).size == (300, 200)


def test_what_a_camera_noted_reaches_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    exif = Image.Exif()
    exif[0x013B] = "Zebedee"  # the artist
    data = encoded(half_red(), "JPEG", exif=exif)
    caplog.clear()
    read_picture(data)
    assert "Zebedee" not in caplog.text
