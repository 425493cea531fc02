"""A sound file that somebody sent as samples of one channel. Waits in the caller's thread.

The file is decoded in a process of its own (`decoder_process`): whatever it does to ffmpeg, memory and time are
bounded, and this process goes on.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Final

from app.media.decoder_process import COUNT, HEADER, REFUSED, command, environment
from app.media.errors import MediaError, UnusableMediaError
from app.media.sound_in import UNREADABLE

if TYPE_CHECKING:
    import numpy as np

MAX_RECORDING_S: Final = 3600.0
DECODE_S: Final = 120.0  # an hour of the usual formats takes a few seconds
LOOK_S: Final = 0.05  # how often it is asked whether anybody still waits
LOUDEST: Final = 1.0


def decode_recording(
    data: bytes,
    *,
    rate: int,
    max_s: float = MAX_RECORDING_S,
    stop: threading.Event | None = None,
) -> np.ndarray:
    """Return the first sound in a file as float32 samples [length] within -1 and 1, mixed down, at `rate` Hz.

    Raises UnusableMediaError for whatever holds no sound, is damaged, longer than `max_s`, or takes too long; also when
    `stop` is set, by whoever no longer waits. Raises MediaError where the decoder cannot be started.
    """
    import numpy as np

    if not data:
        raise UnusableMediaError("the file is empty")
    with _decoder() as process, _ended_in_time(process, stop) as is_late:
        try:
            samples = _decode(process, data, rate, max_s)
        except (EOFError, BrokenPipeError):
            if is_late.is_set():
                raise UnusableMediaError("the recording takes too long to decode") from None
            if process.wait() > 0:  # not by a signal, such as those for too much memory and time
                raise MediaError("recordings cannot be decoded here: the decoder does not start") from None
            raise UnusableMediaError(UNREADABLE) from None
    if not len(samples):
        raise UnusableMediaError("the recording has no length")
    if not np.isfinite(samples).all():
        raise UnusableMediaError("the recording holds values that are no numbers")
    return np.clip(samples, -LOUDEST, LOUDEST, out=samples)


@contextlib.contextmanager
def _decoder() -> Iterator[subprocess.Popen[bytes]]:
    """Run the process; it is gone at the end."""
    process = subprocess.Popen(  # noqa: S603  # our own code
        command(),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what it never read
                pipe.close()


@contextlib.contextmanager
def _ended_in_time(
    process: subprocess.Popen[bytes], stop: threading.Event | None
) -> Iterator[threading.Event]:
    """End the process when nobody waits for it any more, or it takes too long; yields whether that happened."""
    is_over, is_late = threading.Event(), threading.Event()
    latest = time.monotonic() + DECODE_S

    def watch() -> None:
        while not is_over.wait(LOOK_S):
            if time.monotonic() > latest or (stop is not None and stop.is_set()):
                is_late.set()
                process.kill()
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield is_late
    finally:
        is_over.set()
        watching.join()


def _decode(process: subprocess.Popen[bytes], data: bytes, rate: int, max_s: float) -> np.ndarray:
    """Fill memory that the system hands out as it is written to, so that a short file takes little."""
    import numpy as np

    given, made = process.stdin, process.stdout
    assert given is not None
    assert made is not None
    given.write(HEADER.pack(len(data), rate))
    given.write(data)
    given.close()
    limit, length = int(max_s * rate), 0
    samples = np.empty(limit, dtype="<f4")
    while count := _count(made):
        if count == REFUSED:
            raise UnusableMediaError(made.read().decode())
        if length + count > limit:
            raise UnusableMediaError(f"the recording is longer than {max_s:g} seconds")
        _fill(made, samples[length : length + count].data.cast("B"))
        length += count
    return samples[:length]


def _count(made: IO[bytes]) -> int:
    """Return how many samples follow. Raises EOFError."""
    told = made.read(COUNT.size)
    if len(told) < COUNT.size:
        raise EOFError
    count: int = COUNT.unpack(told)[0]
    return count


def _fill(made: IO[bytes], view: memoryview) -> None:
    """Read as many bytes as there is room for. Raises EOFError."""
    filled = 0
    while filled < len(view):
        size = made.readinto(view[filled:])  # type: ignore[attr-defined]
        if not size:
            raise EOFError
        filled += size
