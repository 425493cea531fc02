"""Segments as subtitles: SubRip, which players know, and WebVTT, which browsers know (W3C, 2019)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

SUBRIP_TYPE: Final = "application/x-subrip; charset=utf-8"
WEBVTT_TYPE: Final = "text/vtt; charset=utf-8"


class Timed(Protocol):
    """Some words, and when they are said, in seconds."""

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...

    @property
    def text(self) -> str: ...


def subrip(segments: Iterable[Timed]) -> str:
    """Return a .srt file."""
    cues = (
        f"{number}\n{_time(one.start_s, ',')} --> {_time(one.end_s, ',')}\n{_line(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )
    return "".join(cues)


def webvtt(segments: Iterable[Timed]) -> str:
    """Return a .vtt file."""
    cues = (
        f"{_time(one.start_s, '.')} --> {_time(one.end_s, '.')}\n{_escaped(_line(one.text))}\n\n"
        for one in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{milliseconds:03}"


def _line(text: str) -> str:
    """One line that cannot be taken for the times of the next cue."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
