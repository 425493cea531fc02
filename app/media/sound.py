"""Samples as a sound file in the formats of OpenAI's speech endpoint. Computes in the caller's thread."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from app.media.errors import MediaError

if TYPE_CHECKING:
    import av
    import numpy as np

SoundFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]

SOUND_FORMATS: Final[tuple[SoundFormat, ...]] = get_args(SoundFormat)
SOUND_TYPES: Final[dict[SoundFormat, str]] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
PCM_RATE: Final = 24_000  # of bare samples, which say nothing of themselves: what OpenAI sends
LOUDEST: Final = 32_767
MAX_CHANNELS: Final = 2  # more are mixed down
PIECE_SAMPLES: Final = 65_536
SHORTEST_S: Final = 0.1  # of what is resampled: a few samples are lost in the filter


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    container: str
    bit_rate: int = 0  # 0: nothing is lost
    rates: tuple[int, ...] = ()  # Hz that it takes; (): any


_CODECS: Final[dict[SoundFormat, _Codec]] = {
    "mp3": _Codec("libmp3lame", "mp3", 192_000, (48_000, 44_100, 32_000, 24_000, 22_050, 16_000)),
    "opus": _Codec("libopus", "ogg", 160_000, (48_000,)),
    "aac": _Codec("aac", "adts", 192_000, (48_000, 44_100, 32_000, 24_000, 22_050, 16_000)),
    "flac": _Codec("flac", "flac"),
}


def encode_sound(samples: np.ndarray, rate: int, form: SoundFormat) -> bytes:
    """Return the file of float samples [channels, length] within -1 and 1. Raises MediaError.

    wav and flac hold 16 bits a sample at `rate`; pcm is bare, one channel at 24 kHz; the others are lossy. All but
    wav and flac end in silence where there is less than a tenth of a second.
    """
    import av

    whole = _as_integers(samples)
    if form not in ("wav", "flac"):
        whole = _long_enough(whole, rate)
    try:
        if form == "wav":
            return _wav(whole, rate)
        if form == "pcm":
            return b"".join(_bytes_of(frame) for frame in _resampled(whole, rate, "s16", "mono", PCM_RATE))
        return _encoded(whole, rate, _CODECS[form])
    except av.FFmpegError as error:
        raise MediaError(f"the sound could not be encoded: {type(error).__name__}") from error


def _as_integers(samples: np.ndarray) -> np.ndarray:
    """Return int16 [length, channels]; beyond -1 and 1 is cut off."""
    import numpy as np

    if samples.ndim != 2 or not samples.size or not np.isfinite(samples).all():
        raise MediaError("a sound is finite samples of at least one channel")
    heard = samples if samples.shape[0] <= MAX_CHANNELS else samples.mean(axis=0, keepdims=True)
    whole: np.ndarray = np.rint(np.clip(heard, -1.0, 1.0) * LOUDEST).astype("<i2")
    return np.ascontiguousarray(whole.T)


def _long_enough(samples: np.ndarray, rate: int) -> np.ndarray:
    """Return samples [length, channels] with silence behind them up to the shortest length."""
    import numpy as np

    missing = round(SHORTEST_S * rate) - len(samples)
    return np.pad(samples, ((0, missing), (0, 0))) if missing > 0 else samples


def _wav(samples: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(samples.shape[1])
        writing.setsampwidth(2)
        writing.setframerate(rate)
        writing.writeframes(samples.tobytes())
    return file.getvalue()


def _encoded(samples: np.ndarray, rate: int, codec: _Codec) -> bytes:
    import av

    file = io.BytesIO()
    chosen = rate if not codec.rates or rate in codec.rates else _nearest(rate, codec.rates)
    layout = "mono" if samples.shape[1] == 1 else "stereo"
    with av.open(file, "w", format=codec.container, options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(codec.name, rate=chosen, layout=layout)
        assert isinstance(stream, av.AudioStream)
        if codec.bit_rate:
            stream.bit_rate = codec.bit_rate
        form = "s16" if codec.name == "flac" else (stream.codec.audio_formats or [])[0].name
        for frame in _resampled(samples, rate, form, layout, chosen):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def _nearest(rate: int, rates: tuple[int, ...]) -> int:
    """The lowest that loses nothing, else the highest."""
    return min((one for one in rates if one >= rate), default=max(rates))


def _resampled(
    samples: np.ndarray, rate: int, form: str, layout: str, new_rate: int
) -> Iterator[av.AudioFrame]:
    import av

    resampler = av.AudioResampler(format=form, layout=layout, rate=new_rate)
    own = "mono" if samples.shape[1] == 1 else "stereo"
    for begin in range(0, len(samples), PIECE_SAMPLES):
        piece = samples[begin : begin + PIECE_SAMPLES]
        frame = av.AudioFrame.from_ndarray(piece.reshape(1, -1), format="s16", layout=own)
        frame.sample_rate = rate
        frame.pts = begin
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


def _bytes_of(frame: av.AudioFrame) -> bytes:
    return frame.to_ndarray().astype("<i2").tobytes()
