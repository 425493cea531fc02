"""Sound files that somebody sent: every usual format is read, and nothing hostile costs memory, time or secrets."""

from __future__ import annotations

import io
import struct
import sys
import threading
import time
import tracemalloc
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from app.media import recording
from app.media.errors import UnusableMediaError
from app.media.recording import decode_recording
from app.media.sound import SOUND_FORMATS, SoundFormat, encode_sound
from app.media.sound_in import sound_pieces

RATE = 16_000
TONE_HZ = 440.0


def tone(seconds: float, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """Samples [channels, length] of one tone."""
    times = np.arange(round(seconds * rate)) / rate
    return np.tile(0.5 * np.sin(2 * np.pi * TONE_HZ * times), (channels, 1)).astype(np.float32)


def wav(
    payload: bytes,
    *,
    rate: int = RATE,
    channels: int = 1,
    kind: int = 1,
    bits: int = 16,
    size: int | None = None,
) -> bytes:
    """A WAV file of any header, honest or not."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * block % 2**32, block % 2**16, bits)
    data = b"data" + struct.pack("<I", len(payload) if size is None else size) + payload
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def refused(data: bytes, match: str, **options: float) -> None:
    with pytest.raises(UnusableMediaError, match=match):
        decode_recording(data, rate=RATE, **options)


@pytest.mark.parametrize("form", [form for form in SOUND_FORMATS if form != "pcm"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2)])
def test_usual_formats_become_one_channel_at_the_asked_rate(
    form: SoundFormat, rate: int, channels: int
) -> None:
    samples = decode_recording(encode_sound(tone(1.0, rate, channels), rate, form), rate=RATE)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert abs(len(samples) - RATE) < 0.1 * RATE
    spectrum = np.abs(np.fft.rfft(samples[:RATE]))
    assert abs(spectrum.argmax() * RATE / min(RATE, len(samples)) - TONE_HZ) < 5
    assert 0.4 < np.abs(samples).max() < 0.6


def test_sixteen_bits_at_the_asked_rate_are_read_exactly() -> None:
    whole = np.random.default_rng(1).integers(-32_768, 32_767, 50_000, dtype="<i2")
    samples = decode_recording(wav(whole.tobytes()), rate=RATE)
    assert np.array_equal(samples, whole.astype(np.float32) / 32_768)


def test_a_videos_sound_is_taken() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        film, sound = container.add_stream("libx264", rate=10), container.add_stream("aac", rate=RATE)
        film.width = film.height = 32
        for _ in range(10):
            container.mux(
                film.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24"))
            )
        frame = av.AudioFrame.from_ndarray(tone(1.0), format="fltp", layout="mono")
        frame.sample_rate = RATE
        container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
        container.mux(film.encode(None))
    assert abs(len(decode_recording(file.getvalue(), rate=RATE)) - RATE) < 0.2 * RATE


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "the file is empty"),
        (b"this is a shopping list, not a sound\n" * 100, "cannot be read"),
        (bytes(4096), "cannot be read"),
        (np.random.default_rng(0).bytes(20_000), "cannot be read"),
        (wav(b""), "no length|cannot be read"),
        (b"RIFF\x00\x00\x00\x00WAVE", "cannot be read|holds no sound"),
        (wav(bytes(2000), kind=0x5050), "codec|cannot be read"),
        (wav(bytes(2000), rate=1), "rate|cannot be read"),
        (wav(bytes(2000), rate=2**31 - 1), "rate|cannot be read"),
        (wav(bytes(65_000), channels=500), "channels|cannot be read"),
        (wav(bytes(2000), channels=0), "no length|cannot be read"),
        (wav(struct.pack("<f", float("nan")) * 500, kind=3, bits=32), "no numbers"),
    ],
)
def test_what_is_no_recording_is_refused(data: bytes, match: str) -> None:
    refused(data, match)


def test_a_header_that_claims_too_much_is_taken_by_what_is_there() -> None:
    samples = decode_recording(wav(bytes(32_000), size=2**32 - 1), rate=RATE)
    assert len(samples) == 16_000


def test_a_recording_past_the_limit_is_refused() -> None:
    data = wav(bytes(2 * RATE * 3))
    assert len(decode_recording(data, rate=RATE, max_s=3)) == 3 * RATE
    refused(data, "longer than 2.5 seconds", max_s=2.5)


def test_a_bomb_is_refused_before_it_fills_memory() -> None:
    """Hours of silence in a small file: 20,000 s at 8 kHz are 640 MB of samples at 16 kHz."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=8000, layout="mono")
        for number in range(5000):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 32_000), np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts = 8000, number * 32_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = file.getvalue()
    assert len(data) < 4_000_000
    tracemalloc.start()
    began = time.monotonic()
    refused(data, "longer than 600 seconds", max_s=600)
    assert time.monotonic() - began < 20
    assert tracemalloc.get_traced_memory()[1] < 60_000_000
    tracemalloc.stop()


def box(name: bytes, body: bytes, version: int | None = None) -> bytes:
    """A box of an MP4 file; one with a version and flags is a full box (ISO 14496-12)."""
    told = b"" if version is None else struct.pack(">I", version)
    return struct.pack(">I", 8 + len(told) + len(body)) + name + told + body


def mp4_that_claims(num_samples: int, num_tracks: int) -> bytes:
    """A fragmented MP4 of a few kilobytes whose index says that each track has so many samples."""
    entry = box(b".mp3", struct.pack(">6xH8xHH4xI", 1, 1, 16, RATE << 16))
    table = box(b"stsd", struct.pack(">I", 1) + entry, 0)
    table += b"".join(box(name, bytes(4), 0) for name in (b"stts", b"stsc", b"stco")) + box(
        b"stsz", bytes(8), 0
    )
    files = box(b"dinf", box(b"dref", struct.pack(">I", 1) + box(b"url ", b"", 1), 0))
    media = box(b"mdhd", struct.pack(">8xI8x", RATE), 0) + box(b"hdlr", b"\0\0\0\0soun" + bytes(13), 0)
    media += box(b"minf", box(b"smhd", bytes(4), 0) + files + box(b"stbl", table))
    numbers = range(1, num_tracks + 1)
    movie = box(b"mvhd", struct.pack(">8xI84x", RATE), 0)
    for number in numbers:
        movie += box(b"trak", box(b"tkhd", struct.pack(">8xI68x", number), 7) + box(b"mdia", media))
    defaults = (box(b"trex", struct.pack(">5I", number, 1, 1, 1, 0), 0) for number in numbers)
    file = box(b"ftyp", b"isom\0\0\0\0isom") + box(b"moov", movie + box(b"mvex", b"".join(defaults)))
    for number in numbers:
        run = box(b"trun", struct.pack(">II", num_samples, 8), 1)
        told = box(b"tfhd", struct.pack(">I", number), 0x020000) + run
        file += box(b"moof", box(b"mfhd", struct.pack(">I", 1), 0) + box(b"traf", told))
    return file + box(b"mdat", bytes(4096))


def test_an_index_that_claims_gigabytes_takes_no_memory_of_ours() -> None:
    """12 kB whose index would take 1.5 GB in a player."""
    data = mp4_that_claims(2_600_000, num_tracks=16)
    assert len(data) < 12_000
    before, began = peak_kb(), time.monotonic()
    refused(data, "cannot be read")
    assert peak_kb() - before < 100_000
    assert time.monotonic() - began < 20


def test_a_decoder_that_dies_costs_its_own_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = [sys.executable, "-c", "import os, sys; sys.stdin.buffer.read(); os.abort()"]
    with monkeypatch.context() as patch:
        patch.setattr(recording, "command", lambda: crash)
        refused(wav(bytes(2000)), "cannot be read")
    assert len(decode_recording(wav(bytes(32_000)), rate=RATE)) == RATE


def test_a_decoding_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(recording, "command", lambda: endless)
    monkeypatch.setattr(recording, "DECODE_S", 0.5)
    began = time.monotonic()
    refused(wav(bytes(8 << 20)), "too long to decode")
    assert time.monotonic() - began < 20


def test_a_picture_on_the_sleeve_is_not_decoded() -> None:
    """A PNG of 400 megapixels would take 1.2 GB."""
    picture = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(picture, "PNG")
    sound = encode_sound(tone(1.0), RATE, "mp3")
    frame = b"\x00image/png\x00\x03\x00" + picture.getvalue()
    tag = b"APIC" + struct.pack(">I", len(frame)) + b"\x00\x00" + frame
    size = bytes((len(tag) >> shift) & 0x7F for shift in (21, 14, 7, 0))
    before = peak_kb()
    samples = decode_recording(b"ID3\x03\x00\x00" + size + tag + sound, rate=RATE)
    assert abs(len(samples) - RATE) < 0.1 * RATE
    assert peak_kb() - before < 300_000


def peak_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{path}'\n",
        '<?xml version="1.0"?><MPD type="static"><Period><AdaptationSet mimeType="audio/mp4"><Representation>'
        "<BaseURL>file://{path}</BaseURL></Representation></AdaptationSet></Period></MPD>",
    ],
)
def test_a_playlist_reads_no_file_of_this_machine(playlist: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.wav"
    secret.write_bytes(wav(bytes(32_000)))
    refused(playlist.format(path=secret).encode(), "cannot be read")


def test_a_damaged_middle_costs_little_and_a_cut_end_nothing() -> None:
    whole = encode_sound(tone(3.0), RATE, "mp3")
    damaged = whole[:8000] + bytes(50) + whole[8050:]
    for data in (damaged, whole[: len(whole) // 2]):
        assert len(decode_recording(data, rate=RATE)) > RATE


def test_random_damage_never_does_more_than_refuse() -> None:
    noise = np.random.default_rng(5)
    for form in ("mp3", "opus", "flac", "aac", "wav"):
        whole = np.frombuffer(encode_sound(tone(0.5), RATE, form), np.uint8)
        for _ in range(40):
            damaged = whole.copy()
            damaged[noise.integers(0, len(whole), 20)] = noise.integers(0, 256, 20)
            try:
                pieces = list(sound_pieces(io.BytesIO(damaged.tobytes()), RATE))
            except UnusableMediaError:
                continue
            assert sum(map(len, pieces)) < 60 * RATE


def test_a_decoding_that_nobody_waits_for_ends() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnusableMediaError, match="too long"):
        decode_recording(wav(bytes(320_000)), rate=RATE, stop=stop)


def test_a_stock_wav_writer_is_read() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(2)
        writing.setsampwidth(1)
        writing.setframerate(8000)
        writing.writeframes(bytes([128]) * 16_000)
    samples = decode_recording(file.getvalue(), rate=RATE)
    assert abs(len(samples) - RATE) < 50
    assert np.abs(samples).max() < 0.01
