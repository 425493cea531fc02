"""Frames as a film: H.264 in MP4, which every browser plays. Computes in the caller's thread.

The same frames give the same bytes on any machine: one encoding thread, and no dates in the file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from app.media.errors import MediaError

if TYPE_CHECKING:
    import av
    import numpy as np
    from PIL.Image import Image

FILM_TYPE: Final = "video/mp4"
NEARLY_LOSSLESS: Final = "17"  # x264's constant rate factor: differences are not seen
MAX_DENOMINATOR: Final = 1001  # 29.97 frames a second are 30000/1001
INDEX_BYTES: Final = 4096  # set aside for the index at the front: players begin before they have everything
INDEX_FRAME_BYTES: Final = 32
BT709: Final = 1  # how colours are meant, as HD video has it (ITU-T H.273)


def encode_film(frames: Sequence[Image], fps: float) -> bytes:
    """Return the MP4 of at least one frame; all have one size. Odd sizes grow by a row or column.

    Raises MediaError.
    """
    import av

    if not frames or not fps > 0:
        raise MediaError("a film needs a frame and a rate")
    file = io.BytesIO()
    index_bytes = INDEX_BYTES + INDEX_FRAME_BYTES * len(frames)
    options = {"moov_size": str(index_bytes), "fflags": "+bitexact"}
    try:
        with av.open(file, "w", format="mp4", options=options) as container:
            rate = Fraction(fps).limit_denominator(MAX_DENOMINATOR)
            stream = container.add_stream("libx264", rate=rate, options={"crf": NEARLY_LOSSLESS})
            pixels = _even(frames[0])
            stream.height, stream.width = pixels.shape[:2]
            stream.pix_fmt = "yuv420p"
            stream.codec_context.thread_count = 1
            stream.codec_context.color_primaries = BT709
            stream.codec_context.color_trc = BT709
            stream.codec_context.colorspace = BT709
            for frame in _converted(frames):
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    except av.FFmpegError as error:
        raise MediaError(f"the film could not be encoded: {type(error).__name__}") from error
    return file.getvalue()


def _converted(frames: Sequence[Image]) -> Iterator[av.VideoFrame]:
    import av
    from av.video.reformatter import Colorspace

    for number, image in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(_even(image), format="rgb24")
        made = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
        made.pts = number
        yield made


def _even(image: Image) -> np.ndarray:
    """Return pixels uint8 [height, width, 3]: the encoder halves colour in both directions."""
    import numpy as np

    pixels = np.asarray(image.convert("RGB"))
    rows, columns = pixels.shape[0] % 2, pixels.shape[1] % 2
    return np.pad(pixels, ((0, rows), (0, columns), (0, 0)), mode="edge") if rows or columns else pixels
