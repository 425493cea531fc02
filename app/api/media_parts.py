"""The pictures and recordings of a chat request: whether the model takes them, and what they hold, decoded.

Every refusal names the part; nothing of what was sent is quoted. Only a few requests hold decoded media at a time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, unquote_to_bytes

from app.api.errors import invalid, unsupported
from app.api.messages import ChatMessage, ContentPart
from app.api.remote_media import RemoteMedia
from app.media.errors import UnusableMediaError
from app.settings import MAX_HEARD_S, MAX_MEDIA, MAX_MEDIA_PIXELS, MAX_PIXELS, GatewaySettings

if TYPE_CHECKING:
    from app.engine.request import Modality

CODE = "invalid_media"
AT_ONCE = 4  # requests; each may hold the limits below, decoded
FETCHING_AT_ONCE = 8  # requests; each may hold one file's limit of what it fetched
Media = Mapping[int, Mapping[int, Any]]  # message number -> part number -> picture or samples
SENSES: Mapping[str, Modality] = {"image_url": "image", "input_audio": "audio"}
NAMES: Mapping[str, str] = {"image": "pictures", "audio": "recordings"}


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Of one request."""

    max_parts: int
    max_pixels: int  # of one picture
    max_all_pixels: int
    max_recording_s: float  # of all recordings together


class Sensing(Protocol):
    """An engine's reader of prompts, as far as it says what it takes."""

    sampling_rate: int  # Hz, of recordings
    max_recording_s: float  # of one

    def why_not(self, sense: Modality) -> str:
        """Return why there can be no such part, in words that follow "the model takes no pictures: "; "": it can."""


class MediaIntake:
    """Takes in what chat messages carry."""

    def __init__(self, limits: MediaLimits, remote: RemoteMedia) -> None:
        self._limits = limits
        self._remote = remote
        self._places = asyncio.Semaphore(AT_ONCE)
        self._fetches = asyncio.Semaphore(FETCHING_AT_ONCE)

    @asynccontextmanager
    async def taken(
        self, messages: Sequence[ChatMessage], model: str, sensing: Sensing | None
    ) -> AsyncIterator[Media]:
        """Decode every picture and recording, and hold a place for as long as they are used.

        Raises `ApiError` 400 at the first part that the model does not take, that is too much or cannot be decoded.
        """
        parts = list(_media_of(messages))
        self._check(parts, model, sensing)
        if not parts:
            yield {}
            return
        assert sensing is not None
        fetched = await self._fetched(parts)
        async with self._places:
            yield await self._decoded(parts, fetched, sensing)

    def _check(
        self, parts: Sequence[tuple[int, int, ContentPart]], model: str, sensing: Sensing | None
    ) -> None:
        for number, (message, place, part) in enumerate(parts):
            param = _param(message, place, part)
            sense = SENSES[part.type]
            why = "it is a text model" if sensing is None else sensing.why_not(sense)
            if why:
                raise unsupported(param, f"the model `{model}` takes no {NAMES[sense]}: {why}")
            if number == self._limits.max_parts:
                raise invalid(param, f"a request holds at most {number} pictures and recordings here")

    async def _fetched(self, parts: Sequence[tuple[int, int, ContentPart]]) -> Mapping[str, bytes]:
        """Fetch what lies behind URLs, in the time and size of one file for all of a request.

        Slow hosts keep others from fetching, never from sending what they have.
        """
        wanted = [(part, _sent(part[2])) for part in parts if _is_remote(_sent(part[2]))]
        fetched: dict[str, bytes] = {}
        if not wanted:
            return fetched
        async with self._fetches:
            began, left = time.monotonic(), self._remote.max_bytes
            for part, url in wanted:
                if url in fetched:
                    continue
                left_s = max(0.0, self._remote.timeout_s - (time.monotonic() - began))
                with _refusing(_param(*part)):
                    fetched[url] = await replace(self._remote, max_bytes=left, timeout_s=left_s).fetch(url)
                left -= len(fetched[url])
        return fetched

    async def _decoded(
        self,
        parts: Sequence[tuple[int, int, ContentPart]],
        fetched: Mapping[str, bytes],
        sensing: Sensing,
    ) -> Media:
        decoded: dict[int, dict[int, Any]] = {}
        pixels, seconds = self._limits.max_all_pixels, self._limits.max_recording_s
        for message, place, part in parts:
            with _refusing(_param(message, place, part)):
                if part.image_url is not None:
                    picture = await self._picture(part.image_url.url, fetched, pixels)
                    pixels -= picture.width * picture.height
                    decoded.setdefault(message, {})[place] = picture
                elif part.input_audio is not None:
                    samples = await self._recording(part.input_audio.data, fetched, sensing, seconds)
                    seconds -= len(samples) / sensing.sampling_rate
                    decoded.setdefault(message, {})[place] = samples
        return decoded

    async def _picture(self, url: str, fetched: Mapping[str, bytes], left: int) -> Any:
        from app.media.picture_in import read_picture

        if left < 1:
            raise UnusableMediaError(
                f"the pictures have more than {self._limits.max_all_pixels} pixels together"
            )
        data = await _bytes_of(url, fetched)
        return await asyncio.to_thread(read_picture, data, max_pixels=min(left, self._limits.max_pixels))

    async def _recording(self, text: str, fetched: Mapping[str, bytes], sensing: Sensing, left: float) -> Any:
        from app.media.recording import decode_recording

        if left <= 0:
            raise UnusableMediaError(
                f"the recordings are longer than {self._limits.max_recording_s:g} s together"
            )
        data = await _bytes_of(text, fetched)
        stop = threading.Event()
        decode = partial(decode_recording, data, rate=sensing.sampling_rate, stop=stop)
        try:
            return await asyncio.to_thread(decode, max_s=min(left, sensing.max_recording_s))
        finally:
            stop.set()


def intake_of(settings: GatewaySettings) -> MediaIntake:
    """Make what takes media in with the limits of a gateway."""
    limits = MediaLimits(
        settings.max_media, settings.max_pixels, settings.max_media_pixels, settings.max_heard_s
    )
    return MediaIntake(limits, RemoteMedia(frozenset(settings.allow_remote_media), settings.max_body_bytes))


def own_intake() -> MediaIntake:
    """Make one for whoever runs the engine in their own process: the usual limits, and nothing is fetched."""
    limits = MediaLimits(MAX_MEDIA, MAX_PIXELS, MAX_MEDIA_PIXELS, MAX_HEARD_S)
    return MediaIntake(limits, RemoteMedia(frozenset()))


def _sent(part: ContentPart) -> str:
    if part.image_url is not None:
        return part.image_url.url
    return part.input_audio.data if part.input_audio is not None else ""


def _is_remote(sent: str) -> bool:
    return sent[:8].partition(":")[0].lower() in ("http", "https")


async def _bytes_of(sent: str, fetched: Mapping[str, bytes]) -> bytes:
    return fetched[sent] if _is_remote(sent) else await asyncio.to_thread(sent_bytes, sent)


def sent_bytes(sent: str) -> bytes:
    """Return what a data: URI (RFC 2397) or base64 alone holds. Raises UnusableMediaError."""
    text = sent
    if sent[:5].lower() == "data:":
        head, comma, text = sent.partition(",")
        if not comma:
            raise UnusableMediaError("a data: URI has a comma before what it holds")
        if not head.rstrip().lower().endswith(";base64"):
            return unquote_to_bytes(text)
        text = unquote(text) if "%" in text else text
    elif "://" in sent[:16]:
        raise UnusableMediaError("send a data: URI, base64, or an http(s) URL")
    try:
        return _base64(text)
    except (binascii.Error, ValueError):
        raise UnusableMediaError("this is neither a URL nor base64") from None


def _base64(text: str) -> bytes:
    """Decode either alphabet, with or without the padding at the end; spaces and line ends are passed over."""
    plain = "".join(text.split()).rstrip("=").translate(_URL_SAFE)
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


def _media_of(messages: Sequence[ChatMessage]) -> Iterator[tuple[int, int, ContentPart]]:
    for number, message in enumerate(messages):
        for place in message.media_places():
            yield number, place, (message.content or [])[place]


def _param(message: int, place: int, part: ContentPart) -> str:
    return f"messages.{message}.content.{place}.{part.type}"


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Turn what is wrong with a file into a refusal of the part that held it."""
    try:
        yield
    except UnusableMediaError as error:
        raise invalid(param, f"invalid '{param}': {error}", code=CODE) from None


_URL_SAFE = str.maketrans("-_", "+/")
