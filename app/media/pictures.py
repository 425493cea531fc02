"""Pictures as files: PNG, JPEG and WebP, and small ones to look at first. Computes in the caller's thread."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    from PIL.Image import Image

PictureFormat = Literal["png", "jpeg", "webp"]

PICTURE_FORMATS: Final[tuple[PictureFormat, ...]] = get_args(PictureFormat)
PICTURE_TYPES: Final[dict[PictureFormat, str]] = {form: f"image/{form}" for form in PICTURE_FORMATS}
BEST_QUALITY: Final = 100
FULL_COLOUR_QUALITY: Final = 90  # from here on JPEG keeps the colour of every pixel
THUMBNAIL_PIXELS: Final = 512  # of its longer side
SHEET_COLUMNS: Final = 4
SHEET_PIXELS: Final = 192  # of the longer side of one frame


def encode_picture(image: Image, form: PictureFormat, quality: int = BEST_QUALITY) -> bytes:
    """Return the file. `quality`, from 0 to 100, counts for JPEG and WebP; PNG keeps every bit."""
    file = io.BytesIO()
    shown = image if form != "jpeg" or image.mode in ("RGB", "L") else image.convert("RGB")
    shown.save(file, form.upper(), **_options(form, quality))
    return file.getvalue()


def thumbnail_of(image: Image) -> Image:
    """Return a copy that fits a small square."""
    return _fitted(image, THUMBNAIL_PIXELS)


def sheet_of(frames: Sequence[Image]) -> Image:
    """Return one picture with up to sixteen of the frames, evenly chosen, in rows."""
    from PIL import Image as Images

    count = min(len(frames), SHEET_COLUMNS**2)
    shown = [_fitted(frames[number * len(frames) // count], SHEET_PIXELS) for number in range(count)]
    width, height = shown[0].size
    rows = -(-count // SHEET_COLUMNS)
    sheet = Images.new("RGB", (width * min(count, SHEET_COLUMNS), height * rows))
    for number, frame in enumerate(shown):
        sheet.paste(frame, (number % SHEET_COLUMNS * width, number // SHEET_COLUMNS * height))
    return sheet


def _fitted(image: Image, pixels: int) -> Image:
    small = image.convert("RGB")
    small.thumbnail((pixels, pixels))
    return small


def _options(form: PictureFormat, quality: int) -> dict[str, Any]:
    match form:
        case "png":
            return {}
        case "jpeg":
            return {"quality": quality, "subsampling": 0 if quality >= FULL_COLOUR_QUALITY else 2}
        case "webp":
            return {"quality": quality}
