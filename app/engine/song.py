"""The tokens of one song as they are drawn: what the delay pattern puts in their place, and when the song is over.

Pure; knows neither nodes nor tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from routing.errors import ErrorCode, WorkError
from slicing.delay_pattern import FREE, Ids, build_pattern, undo_pattern
from slicing.music import SongForm


class Song:
    """One song of `num_frames` frames; place 0 is given, the others are drawn in order."""

    def __init__(self, form: SongForm, num_frames: int) -> None:
        self.num_frames = num_frames
        self.num_places = form.places_in(num_frames)
        self.num_drawn = 0  # places
        self._form = form
        self._pattern = build_pattern(
            form.num_streams, self.num_places, pad_id=form.pad_id, channels=form.channels
        )
        self._ids = np.full((form.num_streams, self.num_places), form.pad_id, dtype=np.int64)
        self._has_ended = [False] * form.num_streams

    @property
    def first(self) -> tuple[int, ...]:
        """What is fed at place 0."""
        return (self._form.pad_id,) * self._form.num_streams

    def feed(self, place: int, drawn: Sequence[int]) -> tuple[int, ...] | None:
        """Take what was drawn for a place; what is fed there, None where the song is over.

        As in stock `generate`, a stream that drew an id which ends it is padded from then on, and the song ends once
        all of them have.
        """
        assert place == self.num_drawn + 1, "places are drawn in order"
        pad_id = self._form.pad_id
        ids = [pad_id if over else token_id for over, token_id in zip(self._has_ended, drawn, strict=True)]
        self._has_ended = [
            over or token_id in self._form.eos_ids
            for over, token_id in zip(self._has_ended, ids, strict=True)
        ]
        self._ids[:, place] = ids
        self.num_drawn = place
        if place + 1 == self.num_places or all(self._has_ended):
            return None
        fixed = self._pattern[:, place]
        fed: list[int] = np.where(fixed == FREE, self._ids[:, place], fixed).tolist()
        return tuple(fed)

    def codes(self) -> Ids:
        """The codes of the frames that were drawn. [streams, frames] Raises WorkError where there are none."""
        codes = undo_pattern(self._ids[:, : self.num_drawn + 1], self._pattern, self._form.pad_id)
        if not codes.shape[1]:
            raise WorkError(ErrorCode.COMPUTE, "the model ended the song before its first frame")
        return codes[:, : self.num_frames]
