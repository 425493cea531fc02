"""A picture that somebody sent, as pixels. Computes in the caller's thread.

The file is hostile until it has been decoded: what it is its first bytes say, sizes are read and bounded before any
pixel is, and whatever Pillow raises means that it is damaged. What lies around the pixels Pillow reads in Python, an
item at a time, and holds up everything else meanwhile: millions of empty items are refused before.
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from app.media.errors import UnusableMediaError

if TYPE_CHECKING:
    from PIL.Image import Image

logging.getLogger("PIL").setLevel(logging.WARNING)  # below, it writes down who took a picture, and where

MAX_PIXELS: Final = 4096 * 4096
MAX_SIDE: Final = 65_535  # of JPEG; no format needs more
MAX_RATIO: Final = 50  # of the sides: encoders enlarge the short one, and a line would become gigabytes
MAX_SCANS: Final = 200  # of a JPEG: each costs a pass over all pixels, files of cameras have ten
MAX_SEGMENTS: Final = (
    4096  # of a JPEG in front of its pixels, bytes that fill up included; cameras write dozens
)
MAX_CHUNKS: Final = 65_536  # of a PNG; 16 megapixels in pieces of 1 kB
MAX_BLOCKS: Final = 65_536  # of a GIF in front of its first picture, of 255 bytes at most
BACKGROUND: Final = (255, 255, 255)  # behind what is transparent

_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
)
_SCAN: Final = b"\xff\xda"
_BARE: Final = frozenset({0x01, *range(0xD0, 0xD9)})  # JPEG markers without a length
_RUN_LENGTHS: Final = frozenset({1, 2})  # BMP's compression, which Pillow undoes in Python


def read_picture(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Return a PNG, JPEG, WebP, BMP or the first frame of a GIF as an RGB picture, turned as it is to be seen.

    Transparent parts are white. Raises UnusableMediaError for all else, for damaged files and those of more than
    `max_pixels`.
    """
    from PIL import Image as Images

    form = _format_of(data)
    _check_items(form, data, max_pixels)
    try:
        with Images.open(io.BytesIO(data), formats=[form]) as image:
            _check_size(*image.size, max_pixels)
            image.load()
            return _as_rgb(_upright(image))
    except UnusableMediaError:
        raise
    except Images.DecompressionBombError:
        raise _too_large(max_pixels) from None
    except Exception:  # its parsers raise whatever their input makes them raise
        raise UnusableMediaError("the picture is damaged") from None


def _format_of(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    form = next((form for magic, form in _MAGIC if data.startswith(magic)), None)
    if form is None:
        raise UnusableMediaError("this is no PNG, JPEG, WebP, GIF or BMP file")
    return form


def _check_items(form: str, data: bytes, max_pixels: int) -> None:
    """Refuse what costs more than its pixels do."""
    match form:
        case "WEBP":  # Pillow sets the whole picture's memory aside when it opens one
            _check_size(*_webp_size(data), max_pixels)
        case "JPEG":
            if data.count(_SCAN) > MAX_SCANS:
                raise UnusableMediaError(f"the picture is written in more than {MAX_SCANS} passes")
            _check_number(_jpeg_segments(data), MAX_SEGMENTS)
        case "PNG":
            _check_number(_png_chunks(data), MAX_CHUNKS)
        case "GIF":
            _check_number(_gif_blocks(data), MAX_BLOCKS)
        case "BMP":
            if _little(data[14:18]) >= 40 and _little(data[30:34]) in _RUN_LENGTHS:
                raise UnusableMediaError(
                    "the picture is compressed by run lengths: send a plain BMP, or a PNG"
                )


def _check_number(items: Iterator[int], most: int) -> None:
    if next(itertools.islice(items, most, None), None) is not None:
        raise UnusableMediaError(f"the picture's file is in more than {most} pieces")


def _jpeg_segments(data: bytes) -> Iterator[int]:
    """Yield where each step of a reader begins, up to the first pixels."""
    place = 2
    while place + 4 <= len(data) and data[place : place + 2] != _SCAN:
        yield place
        marker = data[place + 1]
        is_segment = data[place] == 0xFF and marker not in (0, 0xFF) and marker not in _BARE
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big") if is_segment else 1


def _png_chunks(data: bytes) -> Iterator[int]:
    place = 8
    while place + 8 <= len(data):
        yield place
        place += 12 + int.from_bytes(data[place : place + 4], "big")


def _gif_blocks(data: bytes) -> Iterator[int]:
    """Yield where each block begins, up to the first picture."""
    place = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    while place + 2 <= len(data) and data[place] == 0x21:
        place += 2
        while place < len(data) and data[place]:
            yield place
            place += 1 + data[place]
        yield place
        place += 1


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE) or width * height > max_pixels:
        raise _too_large(max_pixels)
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UnusableMediaError(f"one side of the picture is more than {MAX_RATIO} times the other")


def _too_large(max_pixels: int) -> UnusableMediaError:
    return UnusableMediaError(f"the picture has more than {max_pixels} pixels")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Read the width and height of a WebP file's canvas (RFC 9649, section 2)."""
    match data[12:16]:
        case b"VP8X":
            return _little(data[24:27]) + 1, _little(data[27:30]) + 1
        case b"VP8L":
            bits = _little(data[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF
        case _:
            raise UnusableMediaError("the picture is damaged")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _upright(image: Image) -> Image:
    """Turn a picture as its camera noted; a note that cannot be read is none."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # of its own parser, over what the file holds
        return image


def _as_rgb(image: Image) -> Image:
    from PIL import Image as Images

    if image.mode.startswith("I"):  # 16 bits of grey: the upper eight
        return _upper_bits(image).convert("RGB")
    if image.has_transparency_data:
        shown = Images.new("RGB", image.size, BACKGROUND)
        whole: Any = image.convert("RGBA")
        shown.paste(whole, mask=whole.getchannel("A"))
        return shown
    return image.convert("RGB")


def _upper_bits(image: Image) -> Image:
    import numpy as np
    from PIL import Image as Images

    grey = np.asarray(image).astype(np.int64)
    return Images.fromarray((grey.clip(0, 0xFFFF) >> 8).astype(np.uint8))
