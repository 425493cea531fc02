"""Songs from a model whose decoder layers live elsewhere: the text's states first, then one step per frame.

An engine with the face of `app.engine.diffusion.request.DiffusionEngine`. Text encoder and codec run here; leaves
routes and replays to the chain, tensors to the ends, and what a frame's tokens are to `song.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from app.engine.at_home import run_at_home
from app.engine.coverage import route_request
from app.engine.diffusion.request import (
    Decoding,
    DiffusionDefaults,
    DiffusionEvent,
    DiffusionRequest,
    DiffusionTimings,
    Loading,
    Made,
    StackUse,
    Started,
    StepDone,
)
from app.engine.ends import Due, remote_sampling
from app.engine.fingerprint import fingerprint
from app.engine.frames import Frames, LocalFrames, RemoteFrames
from app.engine.memory_steps import send_memory
from app.engine.request import ModelStatus, RequestError
from app.engine.routes import Routes
from app.engine.song import Song
from app.engine.song_plan import SongPlan, default_guidance, max_seconds, plan_song
from routing.chain import Chain
from routing.errors import ErrorCode, NoRouteError, WorkError
from routing.opening import ChainOptions
from routing.recorded import RecordedStep
from routing.types import Buffer, Route, Want
from slicing.diffusion.kinds import Kind
from slicing.music import MusicHome
from slicing.streams import StreamSampler

if TYPE_CHECKING:
    from app.engine.opened import Opened

Result = TypeVar("Result")


def new_engine(opened: Opened) -> MusicEngine:
    """The engine of an opened music model."""
    return MusicEngine(opened)


@dataclass(slots=True)
class _Progress:
    """One song under way: where it stands and where its time went."""

    plan: SongPlan = field(repr=False)
    song: Song = field(repr=False)
    frames: Frames = field(repr=False)
    began: float
    deadline_s: float | None
    steps_at: float = 0.0
    codec_at: float = 0.0

    @property
    def time_left_s(self) -> float | None:
        """Of the request's deadline."""
        return (
            None
            if self.deadline_s is None
            else max(0.0, self.deadline_s - (time.perf_counter() - self.began))
        )

    @property
    def num_steps(self) -> int:
        """Steps of the whole song, if no stream ends it before."""
        return self.song.num_places - 1


class MusicEngine:
    """Makes songs over a chain of nodes; `opened.ends` is None in the thin mode."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.home, MusicHome)
        self._opened = opened
        self._home = opened.home
        self._facts = opened.found.facts
        self._middle = opened.found.middle
        self._is_thin = opened.ends is None
        self._tenants = opened.prefixes.beginnings if opened.prefixes is not None else None
        self._routes = Routes(
            opened.switchboard,
            route_request(self._facts, self._middle, is_thin=self._is_thin, excluded=opened.excluded),
        )
        self.num_running = 0  # songs

    @property
    def model_name(self) -> str:
        return self._facts.name

    @property
    def created(self) -> int:
        return self._opened.found.created

    @property
    def kind(self) -> Kind:
        return Kind.AUDIO

    @property
    def defaults(self) -> DiffusionDefaults:
        form = self._home.form
        longest = max_seconds(self._home, self._facts.max_positions)
        return DiffusionDefaults(
            width=None,
            height=None,
            steps=0,
            guidance_scale=default_guidance(self._home),
            size_step=1,
            max_text=form.max_text,
            seconds=min(form.default_frames / form.frame_rate, longest),
            max_seconds=longest,
            rate=form.rate,
            takes_negative=False,
            draws_tokens=True,
        )

    def coverage(self) -> ModelStatus:
        return self._routes.coverage()

    def check(self, request: DiffusionRequest) -> None:
        """See `DiffusionEngine.check`."""
        self._plan(request)

    async def generate(self, request: DiffusionRequest) -> AsyncGenerator[DiffusionEvent, None]:
        """Yield `Loading`, `Started`, a step for each frame, `Decoding`, then `Made`; see `DiffusionEngine`."""
        began = time.perf_counter()
        plan = self._plan(request)
        asked = self._routes.asked(request.route)
        song = Song(self._home.form, plan.num_frames)
        progress = _Progress(plan, song, self._new_frames(plan, song, request), began, request.deadline_s)
        chain: Chain | None = None
        self.num_running += 1
        try:
            yield Loading()
            memory = await self._at_home(
                progress, lambda: self._home.encode(plan.token_ids, branches=plan.branches)
            )
            chain = await self._opened.switchboard.open_chain(
                asked, self._chain_options(plan, song, request), deadline_s=progress.time_left_s
            )
            await progress.frames.add_memory(memory)
            await send_memory(chain, memory, branches=plan.branches, deadline_s=progress.time_left_s)
            progress.steps_at = time.perf_counter()
            yield self._started(progress, chain)
            async with aclosing(self._steps(progress, chain)) as steps:
                async for step in steps:
                    yield step
            progress.codec_at = time.perf_counter()
            yield Decoding()
            samples = await self._at_home(progress, lambda: self._home.decode(song.codes()))
            yield Made(
                Kind.AUDIO,
                _timings(progress, chain),
                request.seed,
                samples=samples,
                rate=self._home.form.rate,
                stacks=(self._stack(chain.route),),
                route=self._routes.taken(chain.route),
                replays=chain.replays,
                fingerprint=self._fingerprint(chain.route),
            )
        except NoRouteError as error:
            raise self._routes.blamed(error, request.route) from None
        except WorkError as error:
            raise _no_room(error, song) from None
        finally:
            self.num_running -= 1
            if chain is not None:
                await chain.close()
            await progress.frames.close()

    async def _steps(self, progress: _Progress, chain: Chain) -> AsyncGenerator[StepDone, None]:
        """A turn: send a frame, tell of the one before, wait, draw. Ends with the song."""
        song, frames = progress.song, progress.frames
        payload = await frames.open_first(song.first, chain.first_wire)
        took_s, step_at = 0.0, time.perf_counter()
        while payload:
            sent = await self._send(progress, chain, payload)
            if song.num_drawn:
                yield StepDone(song.num_drawn, progress.num_steps, took_s)
            answer = await chain.answer(sent, deadline_s=progress.time_left_s)
            payload = await frames.draw(
                answer, self._due(song, chain.route), sent.wire_back, chain.first_wire
            )
            if progress.time_left_s == 0.0:
                raise WorkError(ErrorCode.DEADLINE, "the answer took longer than its deadline")
            now = time.perf_counter()
            took_s, step_at = now - step_at, now
        yield StepDone(song.num_drawn, progress.num_steps, took_s)

    async def _send(self, progress: _Progress, chain: Chain, payload: Buffer) -> RecordedStep:
        return await chain.send(
            payload,
            position=progress.song.num_drawn,
            rows=progress.plan.branches,
            want=Want.LAST,
            deadline_s=progress.time_left_s,
        )

    def _due(self, song: Song, route: Route | None) -> Due:
        hops = route.hops if route else ()
        return Due(
            song.num_drawn + 1,
            num_stages=max(2, len(hops)),
            route=tuple(hop.address.node_id for hop in hops) or None,
        )

    async def _at_home(self, progress: _Progress, work: Callable[[], Result]) -> Result:
        """Run an encoder or the codec. Raises WorkError DEADLINE."""
        return await run_at_home(self._opened.encoding, work, deadline_s=progress.time_left_s)

    # Pieces ---------------------------------------------------------------------------------------------------

    def _plan(self, request: DiffusionRequest) -> SongPlan:
        return plan_song(self._home, request, max_places=self._facts.max_positions)

    def _new_frames(self, plan: SongPlan, song: Song, request: DiffusionRequest) -> Frames:
        form, ends = self._home.form, self._opened.ends
        if ends is None:
            return RemoteFrames(form.vocab_size, form.num_streams, song.feed, branches=plan.branches)
        sampler = StreamSampler(
            plan.sampling, form.vocab_size, num_streams=form.num_streams, branches=plan.branches
        )
        return LocalFrames(ends, sampler, song.feed, branches=plan.branches, tenant=request.tenant)

    def _chain_options(self, plan: SongPlan, song: Song, request: DiffusionRequest) -> ChainOptions:
        return ChainOptions(
            max_positions=song.num_places,
            wire=self._opened.settings.wire_dtype,
            hidden_size=self._facts.hidden_size,
            takes_token_ids=self._is_thin,
            runs_closing=self._is_thin,
            sampling=remote_sampling(plan.sampling, ()) if self._is_thin else None,
            trace=not self._is_thin,  # it would be most of an answer that is a few ids
            tenant=self._tenants.tag(request.tenant) if self._tenants else b"",
            room=song.num_places,
            branches=plan.branches,
            streams=self._home.form.num_streams,
            memory_rows=plan.memory_rows,
        )

    def _started(self, progress: _Progress, chain: Chain) -> Started:
        return Started(
            (self._stack(chain.route),),
            progress.num_steps,
            text_tokens=len(progress.plan.token_ids),
            picture_tokens=progress.song.num_frames * self._home.form.num_streams,
        )

    def _stack(self, route: Route | None) -> StackUse:
        return StackUse("decoder", self._middle.start, self._middle.end, (self._routes.taken(route),))

    def _fingerprint(self, route: Route | None) -> str:
        runner = None if self._opened.ends is None else self._opened.ends.runner
        return fingerprint(self._facts.digest, runner, self._opened.settings.wire_dtype, route)


def _no_room(error: WorkError, song: Song) -> Exception:
    """Name the length where nodes can never hold so much."""
    if error.code is not ErrorCode.NO_ROOM:
        return error
    text = (
        f"a song of {song.num_frames} frames takes {song.num_places} positions, the nodes of this model have room "
        f"for {error.room}: please ask for a shorter one"
    )
    return RequestError("seconds", "context_length_exceeded", text)


def _timings(progress: _Progress, chain: Chain) -> DiffusionTimings:
    now, times = time.perf_counter(), chain.times
    return DiffusionTimings(
        total_s=now - progress.began,
        encode_s=progress.steps_at - progress.began,
        steps_s=progress.codec_at - progress.steps_at,
        decode_s=now - progress.codec_at,
        steps=progress.song.num_drawn,
        compute_s=times.compute_s,
        network_s=times.network_s,
        crypto_s=times.crypto_s,
        queue_s=times.queue_s,
    )
