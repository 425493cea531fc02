"""Whatever is sent, to whatever route: a success or a short refusal in an envelope, soon, and nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator

import pytest
from prometheus_client.samples import Sample

from tests.storms.every_kind import EveryKind, every_kind
from tests.storms.judge import faults
from tests.storms.mutate import Mutator
from tests.storms.wire import Sent, exchange

SAMPLE = 300  # of every run of the tests
STORM = 10_000
ROUNDS = 20  # of the storm: each a gateway and a seed of its own, so that workers share them
AT_ONCE = 8


async def wrong_of(kinds: EveryKind, sent: Sent) -> list[str]:
    try:
        came = await exchange(kinds.served.port, sent)
    except TimeoutError:
        return ["no end"]
    except Exception as error:  # an answer that no client could read either
        return [f"unreadable: {error!r}"]
    return [f"{came.status}: {fault}" for fault in faults(sent, came)]


async def hit(seed: int, count: int) -> list[str]:
    """Send so many requests, some at once; what was wrong with their answers."""
    mutator, wrong = Mutator(random.Random(seed)), []
    todo = iter(range(count))

    async def sender(kinds: EveryKind) -> None:
        for number in todo:
            sent = mutator.request()
            told = await wrong_of(kinds, sent)
            if told:
                shown = f"{sent} {sent.body[:1500]!r}"
                wrong.append(f"seed {seed}, about request {number}: {told} for {shown[:3500]}")

    async with every_kind() as kinds:
        with errors_logged(wrong):
            await asyncio.gather(*(sender(kinds) for _ in range(AT_ONCE)))
            await kinds.is_at_rest()
        samples = [one for family in kinds.served.metrics.errors.collect() for one in family.samples]
    return wrong + [f"{one}" for one in samples if _is_internal(one)]


def _is_internal(sample: Sample) -> bool:
    is_count = sample.name.endswith("_total")
    return is_count and sample.labels["code"] == "internal_error" and sample.value > 0


@contextlib.contextmanager
def errors_logged(wrong: list[str]) -> Iterator[None]:
    """Whatever is logged as an error is one: nobody's request makes us fail."""

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            wrong.append(f"{record.name} logged {record.getMessage()[:500]}: {record.exc_info}")

    listening = Listening(logging.ERROR)
    logging.getLogger().addHandler(listening)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(listening)


async def test_a_sample_of_mutated_requests_is_answered_or_refused() -> None:
    assert await hit(0, SAMPLE) == []


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(1, ROUNDS + 1))
async def test_ten_thousand_mutated_requests_are_answered_or_refused(seed: int) -> None:
    assert await hit(seed, STORM // ROUNDS) == []
