"""A picture that somebody sent, as pixels. Computes in the caller's thread.

The file is hostile until it has been decoded: what it is its first bytes say, sizes are read and bounded before any
pixel is, and whatever Pillow raises means that it is damaged.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from app.media.errors import UnusableMediaError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS: Final = 4096 * 4096
MAX_SIDE: Final = 65_535  # of JPEG; no format needs more
MAX_RATIO: Final = 50  # of the sides: encoders enlarge the short one, and a line would become gigabytes
MAX_SCANS: Final = 200  # of a JPEG: each costs a pass over all pixels, files of cameras have ten
BACKGROUND: Final = (255, 255, 255)  # behind what is transparent

_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
)
_SCAN: Final = b"\xff\xda"


def read_picture(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Return a PNG, JPEG, WebP, BMP or the first frame of a GIF as an RGB picture, turned as it is to be seen.

    Transparent parts are white. Raises UnusableMediaError for all else, for damaged files and those of more than
    `max_pixels`.
    """
    from PIL import Image as Images

    form = _format_of(data)
    if form == "WEBP":  # Pillow sets the whole picture's memory aside when it opens one
        _check_size(*_webp_size(data), max_pixels)
    if form == "JPEG" and data.count(_SCAN) > MAX_SCANS:
        raise UnusableMediaError(f"the picture is written in more than {MAX_SCANS} passes")
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
