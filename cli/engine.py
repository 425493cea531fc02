"""The engine in this process as an `Answerer`: what `query --node` and its like run instead of asking a
gateway.

The one file of the asking commands that imports torch, and only once it is called.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from cli import show
from cli.answer import End, Piece, Question, Timings
from cli.failures import CommandError
from cli.options import parse_addresses, parse_local_layers, use_threads
from cli.runtime import heavy_imports, start_logging
from cli.survey import name_of
from cli.target import Target

if TYPE_CHECKING:
    from app.engine import request as engine_request
    from app.engine.drafts import DraftMode
    from app.engine.request import ModelStatus
    from app.engine.swarm import SwarmSettings
    from routing.types import NodeRecord
    from slicing.sampler import SamplingParams

ANSWER_THREADS = 1  # several of these run on one machine at once, beside its nodes


@asynccontextmanager
async def open_nodes(target: Target, model: str) -> AsyncIterator[Engine]:
    """Load the ends, link to the nodes, and check that together they serve every layer."""
    start_logging(logging.ERROR)  # what goes wrong is said once, by the command
    settings = settings_of(target, model)
    from app.engine.swarm import open_swarm

    async with open_swarm(settings) as swarm:
        status = swarm.engine.coverage()
        if not status.is_ready:
            reasons = [
                f"{name_of(address)}: {reason}" for address, reason in swarm.directory.last_errors.items()
            ]
            others = _other_models(swarm.directory.records(), swarm.checkpoint.digest)
            raise CommandError("; ".join([missing_text(status), *reasons, *others]))
        yield Engine(swarm.engine)


def makes_pictures(target: Target, model: str) -> bool:
    """Whether a model makes pictures, videos or sounds; looks at its files' names, or fetches its configuration.

    Brings torch in.
    """
    use_threads(target.threads or ANSWER_THREADS)
    with heavy_imports():
        from slicing.diffusion.source import is_pipeline
        from slicing.music import is_music

    return is_pipeline(model, may_fetch=True) or is_music(model)


def missing_text(status: ModelStatus) -> str:
    """Name the layers that nobody serves, or what else a route lacks."""
    if status.missing:
        return f"no node serves layers {show.ranges(status.missing)} of {status.num_layers}"
    return "no route: the first and last node must be started with --hold-ends"


def _other_models(records: Sequence[NodeRecord], digest: bytes) -> Iterator[str]:
    """Name what those nodes serve that have something else than our model."""
    for record in records:
        if record.offers and all(offer.model_digest != digest for offer in record.offers):
            held = ", ".join(f"{offer.model_name} {offer.spec}" for offer in record.offers)
            yield f"{name_of(record.address)} serves another model ({held}): give its --model, or other nodes"


def settings_of(target: Target, model: str) -> SwarmSettings:
    """What the engine is told; brings torch in. Raises usage errors for what cannot be read."""
    from cli.key_files import load_or_make
    from cli.membership import read_membership, read_token
    from routing.address_policy import Scope
    from routing.addresses import parse_address

    membership = read_membership(target.network, target.psk_file, target.tls)
    nodes = tuple(parse_address(text) for text in target.nodes)
    bootstraps = parse_addresses(target.bootstraps, "--bootstrap")
    threads = target.threads or ANSWER_THREADS
    use_threads(threads)  # before the import below brings torch in
    with heavy_imports():
        from app.engine.swarm import SwarmSettings

    return SwarmSettings(
        model=model,
        nodes=nodes,
        network_id=membership.network_id,
        ends=target.ends.value,
        local_layers=parse_local_layers(target.local_layers),
        wire=target.wire.value,
        psk=membership.psk,
        accepted_psks=membership.accepted_psks,
        threads=threads,
        weights=target.weights.value,
        runner=target.runner.value,
        per_block=target.per_block,
        bootstraps=bootstraps,
        scope=None if target.scope == "auto" else Scope(target.scope.value),
        identity=load_or_make(target.key) if target.key else None,
        token=read_token(target.token_file),
        tls=membership.tls,
    )


class Engine:
    """An `Answerer` over a chain of nodes."""

    def __init__(self, engine: engine_request.TextEngine) -> None:
        self._engine = engine

    @property
    def model(self) -> str:
        return self._engine.model_name

    async def answer(self, question: Question) -> AsyncGenerator[Piece | End, None]:
        """Yield the answer's pieces, then its `End`; raises what the engine raises."""
        from app.engine.request import Finished, TextDelta

        request = await self._request(question)
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                match event:
                    case TextDelta():
                        yield Piece(event.text, _timings(event.timings) if event.timings else None)
                    case Finished():
                        yield _end(event)

    async def _request(self, question: Question) -> engine_request.GenerationRequest:
        from app.engine.request import GenerationRequest

        tokenizer = self._engine.tokenizer
        prompt_ids, encoded = await self._prompt(question)
        room = self._engine.answer_room(len(prompt_ids))
        if room < 1:
            raise CommandError(
                f"the prompt has {len(prompt_ids)} tokens, but this model's maximum context length is "
                f"{self._engine.max_positions}"
            )
        return GenerationRequest(
            request_id=secrets.token_hex(8),
            model=self.model,
            prompt_ids=prompt_ids,
            sampling=self._sampling(question),
            max_tokens=min(question.max_tokens or room, room),
            stop_token_ids=frozenset() if question.ignore_eos else tokenizer.stop_token_ids,
            continues_text=question.raw_prompt is not None,
            draft=_draft(question.draft),
            encoded=encoded,
        )

    async def _prompt(
        self, question: Question
    ) -> tuple[tuple[int, ...], engine_request.EncodedPrompt | None]:
        """The prompt's token ids, and what encoders made of files that it carries."""
        from pydantic import TypeAdapter

        from app.api.errors import ApiError
        from app.api.generation import read_prompt
        from app.api.media_parts import own_intake
        from app.api.messages import Messages

        if question.raw_prompt is not None:
            return tuple(await asyncio.to_thread(self._engine.tokenizer.encode, question.raw_prompt)), None
        messages = TypeAdapter(Messages).validate_python(list(question.messages))
        try:
            return await read_prompt(messages, self._engine, own_intake())
        except ApiError as error:
            raise CommandError(error.message) from error

    def _sampling(self, question: Question) -> SamplingParams:
        """The question's own choices over the model's defaults; a seed of our own where none is given."""
        from slicing.sampler import SamplingParams

        defaults = self._engine.tokenizer.defaults
        params = SamplingParams(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            seed=secrets.randbits(63) if question.seed is None else question.seed,
        )
        return params if question.temperature is None else replace(params, temperature=question.temperature)


def _end(finished: engine_request.Finished) -> End:
    return End(
        finished.reason,
        _timings(finished.timings),
        finished.prompt_tokens,
        finished.completion_tokens,
        finished.replays,
        finished.fingerprint,
        finished.drafted,
        finished.accepted,
    )


def _draft(asked: str | None) -> DraftMode:
    modes: dict[str, DraftMode] = {"off": "off", "lookup": "lookup", "auto": "auto"}
    return modes[asked or "auto"]


def _timings(told: engine_request.Timings) -> Timings:
    return Timings(
        total_s=told.total_s,
        prefill_s=told.prefill_s,
        tokens=told.tokens,
        decode_s=told.decode_s,
        compute_s=told.compute_s,
        local_s=told.local_s,
        network_s=told.network_s,
        crypto_s=told.crypto_s,
        queue_s=told.queue_s,
    )
