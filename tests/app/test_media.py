"""Files of pictures, films and sounds hold what they were made from."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from app.media.errors import MediaError
from app.media.film import encode_film
from app.media.pictures import encode_picture, sheet_of, thumbnail_of
from app.media.sound import SOUND_FORMATS, encode_sound


def noise(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def tone(rate: int = 44_100, seconds: float = 0.5) -> np.ndarray:
    times = np.arange(int(rate * seconds)) / rate
    return np.stack([np.sin(2 * np.pi * hertz * times) for hertz in (440, 660)]).astype(np.float32) / 2


def test_png_keeps_every_bit() -> None:
    picture = noise()
    again = Image.open(io.BytesIO(encode_picture(picture, "png")))
    assert np.array_equal(np.asarray(again), np.asarray(picture))


@pytest.mark.parametrize("form", ["jpeg", "webp"])
def test_lossy_pictures_stay_near_and_shrink(form: str) -> None:
    picture = noise().resize((256, 192), Image.Resampling.BICUBIC)
    best, small = (encode_picture(picture, form, quality) for quality in (100, 20))  # type: ignore[arg-type]
    difference = np.asarray(Image.open(io.BytesIO(best)), float) - np.asarray(picture, float)
    assert np.abs(difference).mean() < 10
    assert len(small) < len(best) / 3


def test_jpeg_takes_pictures_with_transparency() -> None:
    assert Image.open(io.BytesIO(encode_picture(noise().convert("RGBA"), "jpeg"))).mode == "RGB"


def test_a_thumbnail_fits_and_a_sheet_shows_frames_in_rows() -> None:
    assert thumbnail_of(noise(2048, 1024)).size == (512, 256)
    frames = [Image.new("RGB", (40, 30), (10 * number, 0, 0)) for number in range(25)]
    sheet = sheet_of(frames)
    assert sheet.size == (160, 120)
    assert [sheet.getpixel((40 * column, 0))[0] for column in range(4)] == [0, 10, 30, 40]
    assert sheet_of(frames[:2]).size == (80, 30)


@pytest.mark.parametrize(("fps", "seconds"), [(8, 1.125), (29.97, 0.3), (0.5, 18.0)])
def test_a_film_has_its_frames_rate_and_colours(fps: float, seconds: float) -> None:
    frames = [Image.new("RGB", (64, 48), (20 * number, 200, 40)) for number in range(9)]
    with av.open(io.BytesIO(encode_film(frames, fps))) as film:
        stream = film.streams.video[0]
        shown = [frame.to_ndarray(format="rgb24")[20, 20] for frame in film.decode(video=0)]
        assert (stream.codec.name, stream.width, stream.height) == ("h264", 64, 48)
        assert stream.duration is not None
        assert float(stream.duration * stream.time_base) == pytest.approx(seconds, rel=0.01)
    assert len(shown) == 9
    for number, colour in enumerate(shown):
        assert np.abs(colour.astype(int) - (20 * number, 200, 40)).max() <= 4


def test_the_same_frames_give_the_same_bytes_and_players_begin_at_once() -> None:
    frames = [noise(seed=number) for number in range(3)]
    content = encode_film(frames, 8)
    assert content == encode_film(frames, 8)
    assert content.index(b"moov") < content.index(b"mdat")


def test_odd_sizes_grow_by_a_row_or_column() -> None:
    with av.open(io.BytesIO(encode_film([noise(33, 17)], 8))) as film:
        assert (film.streams.video[0].width, film.streams.video[0].height) == (34, 18)


def test_no_frames_are_no_film() -> None:
    with pytest.raises(MediaError):
        encode_film([], 8)


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_lossless_sounds_hold_the_samples(form: str) -> None:
    samples = tone()
    with av.open(io.BytesIO(encode_sound(samples, 44_100, form))) as sound:  # type: ignore[arg-type]
        got = np.concatenate([frame.to_ndarray().reshape(-1, 2) for frame in sound.decode(audio=0)])
    assert np.array_equal(got.T, np.rint(samples * 32_767).astype(np.int16))


@pytest.mark.parametrize("form", SOUND_FORMATS)
@pytest.mark.parametrize("rate", [16_000, 44_100, 96_000])
def test_any_rate_fits_any_format_and_length_stays(form: str, rate: int) -> None:
    content = encode_sound(tone(rate, 1.0), rate, form)  # type: ignore[arg-type]
    if form == "pcm":
        assert len(content) / 2 / 24_000 == pytest.approx(1.0, abs=0.01)
        return
    with av.open(io.BytesIO(content)) as sound:
        stream = sound.streams.audio[0]
        length = sum(frame.samples for frame in sound.decode(audio=0)) / stream.rate
    assert length == pytest.approx(1.0, abs=0.13)  # aac ends with whole blocks


@pytest.mark.parametrize("form", SOUND_FORMATS)
@pytest.mark.parametrize("rate", [2000, 44_100, 192_000])
@pytest.mark.parametrize("length", [1, 40])
def test_a_sound_of_a_few_samples_is_still_a_file(form: str, rate: int, length: int) -> None:
    content = encode_sound(np.full((2, length), 0.5, np.float32), rate, form)  # type: ignore[arg-type]
    if form == "pcm":
        assert np.frombuffer(content, "<i2").any()
        return
    container = {"opus": "ogg"}.get(form, form)  # so little says not itself what it is
    with av.open(io.BytesIO(content), format=container) as sound:
        assert sum(frame.samples for frame in sound.decode(audio=0)) > 0


def test_a_lossy_sound_keeps_its_tone() -> None:
    with av.open(io.BytesIO(encode_sound(tone(seconds=1.0), 44_100, "mp3"))) as sound:
        left = np.concatenate([frame.to_ndarray()[0] for frame in sound.decode(audio=0)])
        rate = sound.streams.audio[0].rate
    loudest = np.abs(np.fft.rfft(left)).argmax() * rate / len(left)
    assert loudest == pytest.approx(440, abs=3)


@pytest.mark.parametrize("samples", [np.full((1, 10), np.nan), np.zeros((0, 0)), np.zeros(10)])
def test_what_is_no_sound_is_refused(samples: np.ndarray) -> None:
    with pytest.raises(MediaError):
        encode_sound(samples, 44_100, "wav")
