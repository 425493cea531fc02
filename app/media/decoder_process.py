"""The process that a sound file is decoded in: what a file makes ffmpeg do, it does to this process alone.

Indexes of a few kilobytes can claim gigabytes, and parsers of dozens of formats have faults. So memory and time are
bounded by the system, not by what headers say; secrets of the environment are not handed down.

Standard input: how many bytes of the file follow (8 bytes, little endian), the rate (4), the file. Standard output:
pieces, each a count (4 bytes) and as many float32 samples; a count of 0 ends them, REFUSED is followed by why.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Final

from app.media.errors import UnusableMediaError
from app.media.sound_in import UNREADABLE, sound_pieces

MEMORY_BYTES: Final = (
    384 << 20
)  # over what it takes to start and to hold the file; an hour of AAC needs 40 MB
CPU_S: Final = 120  # an hour of the usual formats takes a few seconds
MAX_FILES: Final = 16
REFUSED: Final = 0xFFFF_FFFF
HEADER: Final = struct.Struct("<QI")
COUNT: Final = struct.Struct("<I")
KEPT: Final = ("PATH", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


def command() -> list[str]:
    """The command line of this process, in any working folder."""
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.append({root!r}); from app.media.decoder_process import main; main()"
    return [sys.executable, "-P", "-c", start]


def environment() -> dict[str, str]:
    """What the process is told of ours: where its libraries are."""
    return {name: os.environ[name] for name in KEPT if name in os.environ} | {"OPENBLAS_NUM_THREADS": "1"}


def main() -> None:
    """Decode the file on standard input."""
    import av  # noqa: F401  # before memory is bounded: libraries are no part of what a file may take
    import numpy  # noqa: F401

    read, write = sys.stdin.buffer, sys.stdout.buffer
    size, rate = HEADER.unpack(read.read(HEADER.size))
    _bound(2 * size + MEMORY_BYTES)
    try:
        _write_pieces(io.BytesIO(read.read(size)), rate, write)
    except UnusableMediaError as error:
        write.write(COUNT.pack(REFUSED) + str(error).encode())
    except MemoryError:
        write.write(COUNT.pack(REFUSED) + UNREADABLE.encode())
    write.flush()


def _write_pieces(file: io.BytesIO, rate: int, write: BinaryIO) -> None:
    for piece in sound_pieces(file, rate):
        if len(piece):
            write.write(COUNT.pack(len(piece)) + piece.astype("<f4").tobytes())
    write.write(COUNT.pack(0))


def _bound(memory_bytes: int) -> None:
    """Let the system refuse what is too much, where it can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    wishes = {"RLIMIT_CPU": CPU_S, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": MAX_FILES}
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wishes["RLIMIT_AS"] = pages * resource.getpagesize() + memory_bytes
    for name, most in wishes.items():
        with contextlib.suppress(AttributeError, OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (most, most))
