"""A sound file taken apart by ffmpeg, piece by piece. Runs in a process of its own (`decoder_process`).

The file is hostile until it has been decoded: only formats and codecs of the lists below are opened, and nothing that
the file names beside itself (playlists).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from app.media.errors import UnusableMediaError

if TYPE_CHECKING:
    import av
    import numpy as np

MIN_RATE, MAX_RATE = 2_000, 768_000  # Hz, of the file
MAX_CHANNELS: Final = 64
MAX_BAD_PACKETS: Final = 8  # a player would go on, and so do we where little is lost
PROBE_BYTES: Final = 4 << 20
MAX_STREAMS: Final = 16

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
UNREADABLE: Final = "the file cannot be read: it is damaged, or no sound format that is known here"


def sound_pieces(file: io.BufferedIOBase, rate: int) -> Iterator[np.ndarray]:
    """Yield float32 samples [length] of the first sound in a file, mixed down, at `rate` Hz.

    Raises UnusableMediaError for whatever holds no sound or is damaged.
    """
    import av

    try:
        with av.open(file, "r", options=OPTIONS, metadata_errors="ignore") as container:
            yield from _pieces(container, rate)
    except UnusableMediaError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, MemoryError):
        raise UnusableMediaError(UNREADABLE) from None


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
