"""MusicGen's delay pattern: each codebook stands one place behind the one before it.

Pure functions over token ids [streams, places]; they know no model. Of two channels, streams 2k and 2k + 1 are
codebook k of the left and the right one, and stand side by side (Copet et al. 2023, Simple and Controllable Music
Generation, section 2.1).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

FREE: Final = -1  # a place whose token is drawn


def build_pattern(num_streams: int, num_places: int, *, pad_id: int, channels: int = 1) -> Ids:
    """What stands where before anything is drawn: `pad_id` or FREE. [streams, places]

    Places in too small a number for every codebook to be drawn once beside all others are all free.
    """
    depth = num_streams // channels
    if num_places < 2 * depth - 1:
        return np.full((num_streams, num_places), FREE, dtype=np.int64)
    delay = np.arange(num_streams)[:, None] // channels
    place = np.arange(num_places)[None, :]
    is_free = (place > delay) & (place <= delay + num_places - depth)
    return np.where(is_free, FREE, pad_id).astype(np.int64)


def apply_pattern(ids: Ids, pattern: Ids) -> Ids:
    """Put what must stand there over what was drawn. [streams, places so far]"""
    fixed = pattern[:, : ids.shape[1]]
    return np.where(fixed == FREE, ids, fixed)


def undo_pattern(ids: Ids, pattern: Ids, pad_id: int) -> Ids:
    """The codes of each frame, of as many frames as every stream has. [streams, frames]"""
    streams = [stream[stream != pad_id] for stream in apply_pattern(ids, pattern)]
    num_frames = min(len(stream) for stream in streams)
    return np.stack([stream[:num_frames] for stream in streams])


def places_of(num_frames: int, num_streams: int, channels: int = 1) -> int:
    """Places that so many frames take, the first one (which is given) included."""
    depth = num_streams // channels
    return max(num_frames + depth, 2 * depth - 1)


def frames_of(num_places: int, num_streams: int, channels: int = 1) -> int:
    """Frames that come out of so many places."""
    depth = num_streams // channels
    return num_places - (depth if num_places >= 2 * depth - 1 else 1)
