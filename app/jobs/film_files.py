"""What is kept of a finished video, and of one on its way. Blocking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from app.engine.diffusion.request import Made
from app.media.film import encode_film
from app.media.pictures import encode_picture, sheet_of, thumbnail_of

if TYPE_CHECKING:
    from PIL.Image import Image

FILM: Final = "video.mp4"
THUMBNAIL: Final = "thumbnail.webp"
SHEET: Final = "spritesheet.webp"
PICTURE_QUALITY = 80


def files_of(made: Made) -> dict[str, bytes]:
    """Return what is kept of a video, by name."""
    middle = made.frames[len(made.frames) // 2]
    return {
        FILM: encode_film(made.frames, made.fps),
        THUMBNAIL: thumbnail(middle),
        SHEET: encode_picture(sheet_of(made.frames), "webp", PICTURE_QUALITY),
    }


def thumbnail(image: Image) -> bytes:
    return encode_picture(thumbnail_of(image), "webp", PICTURE_QUALITY)
