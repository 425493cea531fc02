"""A sound file that somebody sent as samples of one channel. Computes in the caller's thread.

The file is hostile until it has been decoded: only formats and codecs of the lists below are opened, nothing that the
file names beside itself (playlists), and memory and time are bounded by what comes out, not by what headers claim.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from app.media.errors import UnusableMediaError

if TYPE_CHECKING:
    import av
    import numpy as np

MAX_RECORDING_S: Final = 3600.0
DECODE_S: Final = 120.0  # an hour of the usual formats takes a few seconds
MIN_RATE, MAX_RATE = 2_000, 768_000  # Hz, of the file
MAX_CHANNELS: Final = 64
MAX_BAD_PACKETS: Final = 8  # a player would go on, and so do we where little is lost
PROBE_BYTES: Final = 4 << 20
MAX_STREAMS: Final = 16
LOUDEST: Final = 1.0

# Containers that hold their sound themselves. Not among them: playlists and lists of other files (hls, concat, dash).
FORMATS: Final = (
    "wav,w64,aiff,au,caf,flac,ogg,mp3,aac,ac3,eac3,amr,amrnb,amrwb,asf,avi,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,"
    "mpeg,mpegts,wv,tta,ape"
)
CODECS: Final = (
    "aac,ac3,alac,amrnb,amrwb,libopencore_amrnb,libopencore_amrwb,ape,eac3,flac,gsm_ms,mp1float,mp2float,mp3float,mp1,"
    "mp2,mp3,opus,libopus,vorbis,speex,tta,wavpack,wmav1,wmav2,wmapro,adpcm_ms,adpcm_ima_wav,adpcm_ima_qt,adpcm_swf,"
    "pcm_alaw,pcm_mulaw,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_s8,pcm_u8,pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,"
    "pcm_s32be,pcm_s32le"
)
OPTIONS: Final = {
    "format_whitelist": FORMATS,
    "codec_whitelist": CODECS,  # so no picture on a sleeve is decoded either
    "protocol_whitelist": "none",
    "probesize": str(PROBE_BYTES),
    "max_streams": str(MAX_STREAMS),
}


def decode_recording(
    data: bytes,
    *,
    rate: int,
    max_s: float = MAX_RECORDING_S,
    stop: threading.Event | None = None,
) -> np.ndarray:
    """Return the first sound in a file as float32 samples [length] within -1 and 1, mixed down, at `rate` Hz.

    Raises UnusableMediaError for whatever holds no sound, is damaged, longer than `max_s`, or takes too long; also when
    `stop` is set, by whoever no longer waits.
    """
    import av

    if not data:
        raise UnusableMediaError("the file is empty")
    try:
        with av.open(io.BytesIO(data), "r", options=OPTIONS, metadata_errors="ignore") as container:
            samples = _decode(container, rate, max_s, stop)
    except UnusableMediaError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, MemoryError):
        raise UnusableMediaError(
            "the file cannot be read: it is damaged, or no sound format that is known here"
        ) from None
    return samples


def _decode(
    container: av.container.InputContainer, rate: int, max_s: float, stop: threading.Event | None
) -> np.ndarray:
    """Fill memory that the system hands out as it is written to, so that a short file takes little."""
    import numpy as np

    limit = int(max_s * rate)
    samples = np.empty(limit, dtype=np.float32)
    length, began = 0, time.monotonic()
    for piece in _pieces(container, rate):
        if length + len(piece) > limit:
            raise UnusableMediaError(f"the recording is longer than {max_s:g} seconds")
        samples[length : length + len(piece)] = piece
        length += len(piece)
        if time.monotonic() - began > DECODE_S or (stop is not None and stop.is_set()):
            raise UnusableMediaError("the recording takes too long to decode")
    if not length:
        raise UnusableMediaError("the recording has no length")
    samples = samples[:length]
    if not np.isfinite(samples).all():
        raise UnusableMediaError("the recording holds values that are no numbers")
    return np.clip(samples, -LOUDEST, LOUDEST, out=samples)


def _pieces(container: av.container.InputContainer, rate: int) -> Iterator[np.ndarray]:
    """Yield samples as they are decoded and resampled, the mean of the channels: the loudness of one voice stays."""
    import av

    resampler: av.AudioResampler | None = None
    for frame in _frames(container):
        if not MIN_RATE <= frame.sample_rate <= MAX_RATE:
            raise UnusableMediaError(f"the recording's rate is not within {MIN_RATE} and {MAX_RATE} Hz")
        if not 1 <= frame.layout.nb_channels <= MAX_CHANNELS:
            raise UnusableMediaError(f"the recording has more than {MAX_CHANNELS} channels")
        if resampler is None:
            resampler = av.AudioResampler(format="fltp", layout=frame.layout, rate=rate)
        frame.pts = None  # times in a file may jump; samples follow each other
        for made in resampler.resample(frame):
            yield made.to_ndarray().mean(axis=0)
    for made in resampler.resample(None) if resampler is not None else ():
        yield made.to_ndarray().mean(axis=0)


def _frames(container: av.container.InputContainer) -> Iterator[av.AudioFrame]:
    """Yield the frames of the first sound, passing over a few packets that are damaged."""
    import av

    if not container.streams.audio:
        raise UnusableMediaError("the file holds no sound")
    stream = container.streams.audio[0]
    if stream.codec_context is None or stream.codec_context.name not in CODECS.split(","):
        raise UnusableMediaError("the file's sound is in a codec that is not known here")
    stream.codec_context.thread_count = 1
    num_bad = 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.FFmpegError:
            num_bad += 1
            if num_bad > MAX_BAD_PACKETS:
                raise
            continue
        yield from (frame for frame in frames if isinstance(frame, av.AudioFrame))
