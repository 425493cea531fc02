"""What one session holds at a node for patches: kept keys and values, and what was found to be right for them.

A session is one guidance branch of one picture over one stack, so nothing here can mix with another's. Patches of a
step come in order and each once; whatever breaks that order makes the next pass a whole one. Knows nothing of the
wire, of other nodes or of the noise scheduler's steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from slicing.diffusion.arguments import Layout, find_layouts
from slicing.diffusion.attention_watch import Watch
from slicing.diffusion.calls import Pass
from slicing.diffusion.kept import KeptKeys, KeysDiffer, StaleKeys
from slicing.diffusion.patches import Cut, Mode, PatchesRefused
from slicing.diffusion.replay import Agreed, Verdict, drop_text_sites, replay_check

MAX_EXTRAPOLATE = (
    1.0  # 0.5 is what was measured to help; beyond the whole last change it is a guess about nothing
)


class Blocks(Protocol):
    """What runs a pass: a `BlockRange`."""

    def run(
        self,
        made: Pass,
        *,
        start: int,
        end: int,
        keeper: Watch | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[torch.Tensor]:
        """Run blocks [start, end), in global numbers, and return the streams behind them."""


@dataclass(eq=False)
class _Held:
    """What the whole pass before left behind, and how far the patches after it are."""

    kept: KeptKeys
    cut: Cut
    plan_digest: bytes
    range: tuple[int, int]
    whole: list[torch.Size]
    dtype: torch.dtype
    layouts: list[Layout]
    agreed: Agreed | None = None
    was_compared: bool = False
    next_index: int = 0
    text: torch.Tensor | None = None

    def is_for(self, other: _Held) -> bool:
        mine = (self.cut, self.plan_digest, self.range, self.whole, self.dtype, self.kept.extrapolates)
        return mine == (
            other.cut,
            other.plan_digest,
            other.range,
            other.whole,
            other.dtype,
            other.kept.extrapolates,
        )


class PatchState:
    """Runs the passes of one session, whole or as patches.

    `limit_bytes` is the memory set aside for keys and values; None is no limit. Not for two threads at once.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._held: _Held | None = None
        self._refused: tuple[Cut, Verdict] | None = None

    @property
    def size_bytes(self) -> int:
        """Keys and values held now."""
        return self._held.kept.size_bytes if self._held else 0

    def run(
        self,
        blocks: Blocks,
        made: Pass,
        start: int,
        end: int,
        *,
        mode: Mode,
        cut: Cut | None = None,
        extrapolate: float = 0.0,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> tuple[list[torch.Tensor], Verdict | None]:
        """Run blocks [start, end) and return the streams behind them, and a verdict where one was reached.

        WHOLE: all tokens; what is kept is let go. WHOLE_KEEP: all tokens, `cut` says how patches will be cut (its index
        does not matter); the first such pass is checked and brings the verdict. PATCH: the picture's stream holds
        the rows of `cut` only, all slots are whole; with a text stream, the patches after the first bring
        it empty ([B, 0, width]) and get it back so. `extrapolate` moves stale keys on by that share of their last
        change, and must be the same in the whole passes, since they keep more for it.

        Raises `StaleKeys` where a patch needs what is not held, or is not computed as the replayed one was (make that
        pass whole), and `PatchesRefused` for numbers that make no sense.
        """
        if not (math.isfinite(extrapolate) and 0 <= extrapolate <= MAX_EXTRAPOLATE):
            raise PatchesRefused(f"extrapolate is {extrapolate}; it must be between 0 and {MAX_EXTRAPOLATE}")

        def run_pass(part: Pass, watch: Watch | None = None) -> list[torch.Tensor]:
            return blocks.run(part, start=start, end=end, keeper=watch, is_cancelled=is_cancelled)

        with torch.no_grad():
            if mode is Mode.WHOLE:
                self.close()
                return run_pass(made), None
            if cut is None:
                raise PatchesRefused("a pass for patches says how they are cut")
            try:
                if mode is Mode.PATCH:
                    return self._run_patch(run_pass, made, (start, end), cut, extrapolate), None
                return self._run_and_keep(run_pass, made, (start, end), cut, extrapolate)
            except BaseException as error:
                self.close()  # half of a pass may be written
                if isinstance(error, KeysDiffer):
                    raise StaleKeys(f"a patch cannot be used: {error}; this pass must be whole") from error
                raise

    def close(self) -> None:
        """Let go of everything. The next pass of this session must be whole."""
        if self._held is not None:
            self._held.kept.close()
            self._held = None

    def _run_and_keep(
        self,
        run: Callable[..., list[torch.Tensor]],
        made: Pass,
        blocks: tuple[int, int],
        cut: Cut,
        extrapolate: float,
    ) -> tuple[list[torch.Tensor], Verdict | None]:
        if self._refused is not None and self._refused[0] == cut.at(0):
            return run(made), self._refused[
                1
            ]  # once is enough: the check costs a patch for each way that it tries
        try:
            held = self._hold(made, blocks, cut.at(0), bool(extrapolate))
        except PatchesRefused as error:
            return run(made), self._refuse(cut, str(error))
        last = cut.at(cut.of - 1)  # a wrong cut of positions or masks could go unseen in the first patch
        patch = Pass(made.plan, held.layouts[0].take(made.streams, last), made.slots)
        recording = held.kept.record()
        answer = run(made, recording)
        held.next_index = 0
        if recording.failure is not None:
            return answer, self._refuse(cut, recording.why_not())
        if held.agreed is None:
            verdict, held.agreed = replay_check(run, patch, answer, held.kept, last, held.layouts)
            return answer, verdict if verdict.allowed else self._refuse(cut, verdict.reason)
        if not held.was_compared and recording.unchanged < held.kept.sites:
            held.was_compared = True  # else it was the same pass twice, which tells nothing
            if recording.unchanged:
                held.agreed = drop_text_sites(run, patch, answer, held.kept, last, held.agreed)
        return answer, None

    def _refuse(self, cut: Cut, reason: str) -> Verdict:
        self.close()
        self._refused = cut.at(0), Verdict(False, reason)
        return self._refused[1]

    def _hold(self, made: Pass, blocks: tuple[int, int], cut: Cut, extrapolates: bool) -> _Held:
        """What is held if it fits this pass, else a fresh start."""
        layouts = find_layouts(made.streams, cut)
        kept = KeptKeys(layouts[0].lengths, extrapolate=extrapolates, limit_bytes=self._limit_bytes)
        shapes = [stream.shape for stream in made.streams]
        fresh = _Held(kept, cut, made.plan.digest, blocks, shapes, made.streams[0].dtype, layouts)
        if self._held is None or not self._held.is_for(fresh):
            self.close()
            self._held = fresh
        return self._held

    def _run_patch(
        self,
        run: Callable[..., list[torch.Tensor]],
        made: Pass,
        blocks: tuple[int, int],
        cut: Cut,
        extrapolate: float,
    ) -> list[torch.Tensor]:
        held = self._held
        if held is None or held.agreed is None:
            raise StaleKeys("no keys and values are kept here: this pass must be whole")
        if (held.cut, held.plan_digest, held.range) != (cut.at(0), made.plan.digest, blocks):
            raise StaleKeys("keys and values are kept of another kind of pass: this one must be whole")
        if cut.index != held.next_index:
            raise StaleKeys(
                f"patch {cut.index} came where patch {held.next_index} was due: this pass must be whole"
            )
        if bool(extrapolate) != held.kept.extrapolates:
            raise StaleKeys("whole passes must ask for extrapolation if patches do: this pass must be whole")
        if cut.index == 0:
            held.kept.begin_step()
        streams = _with_text(made.streams, held, cut)
        rows = held.agreed.layout.rows(cut, keeps_text=cut.index > 0)
        part = Pass(made.plan, streams, held.agreed.slots(made, rows))
        answer = run(part, held.kept.patch(rows, extrapolate))
        held.kept.finish_patch(rows)
        held.next_index = (cut.index + 1) % cut.of
        if (text := held.agreed.layout.text) is not None and cut.index > 0:
            answer[text] = answer[text][:, :0]
        return answer


def _with_text(streams: list[torch.Tensor], held: _Held, cut: Cut) -> list[torch.Tensor]:
    """The streams of a patch as the blocks take them: text comes with patch 0, and later patches borrow it."""
    assert held.agreed is not None
    layout = held.agreed.layout
    wanted = list(held.whole)
    batch, _, width = wanted[layout.picture]
    wanted[layout.picture] = torch.Size((batch, len(cut.rows()), width))
    if layout.text is not None and cut.index > 0:
        wanted[layout.text] = torch.Size((wanted[layout.text][0], 0, wanted[layout.text][2]))
    if [stream.shape for stream in streams] != wanted or any(
        stream.dtype != held.dtype for stream in streams
    ):
        raise PatchesRefused("a patch's streams have another shape or type than its rows of the whole pass")
    if layout.text is None:
        return streams
    if cut.index == 0:
        held.text = streams[layout.text].clone()
    assert held.text is not None
    return [held.text.clone() if number == layout.text else stream for number, stream in enumerate(streams)]
