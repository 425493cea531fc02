"""How prompts are named, and what a gateway believes of what is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.engine import prefix
from app.engine.prefix import AnswerBeginning, PrefixCache
from routing.types import Hop, NodeAddress, NodeId, Route, SliceOffer, SliceSpec, WireDtype
from tests.slicing.test_kept_caches import Slots

SECRET, DIGEST, CONTEXT = b"s" * 32, b"d" * 32, b"c" * 32
PROMPT = tuple(range(100))


@dataclass
class FakeEnds:
    """Ends of which one cache is here."""

    length: int = 0
    begun: list[int] = field(default_factory=list)
    opened: list[tuple[int, int]] = field(default_factory=list)

    async def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> bytes:
        self.opened.append((position, position + len(token_ids)))
        return bytes(token_ids)

    async def begin(self, fork: Any, num_positions: int) -> None:
        (made,) = fork.make(num_positions)
        self.begun.append(made.length)

    def release(self) -> tuple[Slots, ...]:
        return (Slots(self.length),)

    async def close(self) -> None:
        pass


def cache(**settings: Any) -> PrefixCache:
    return PrefixCache(SECRET, DIGEST, **{"has_ends": True} | settings)


def begin(cache: PrefixCache, ids: Sequence[int] = PROMPT, tenant: bytes = b"") -> AnswerBeginning:
    return cache.begin(ids, tenant, FakeEnds)  # type: ignore[arg-type]


def route() -> Route:
    offer = SliceOffer("m", DIGEST, 4, 8, SliceSpec(0, 4), WireDtype.FLOAT32, "fake")
    address = NodeAddress(NodeId(b"n" * 32), "host", 1)
    return Route(SliceSpec(0, 4), (Hop(address, offer, offer.spec, b""),))


async def keep(
    cache: PrefixCache, ids: Sequence[int], answer: Sequence[int], context: bytes = CONTEXT
) -> None:
    """An answer that ended well and is kept."""
    begun = begin(cache, ids)
    begun.note_answer(answer)
    begun.names(context, len(ids) + len(answer) - 1)
    ends = FakeEnds(len(ids) + len(answer) - 1)
    await begun.close(ends, route(), is_kept=True)  # type: ignore[arg-type]


def lengths(begun: AnswerBeginning, context: bytes = CONTEXT) -> list[int]:
    return [named.length for named in begun.candidates(context)]


async def test_the_next_turn_asks_for_all_full_blocks() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 30)
    begun = begin(one, (*PROMPT, *(7,) * 30, *range(50)))
    assert lengths(begun) == [128]
    assert (begun.num_held, dict(begun.holders)) == (128, {NodeId(b"n" * 32): SliceSpec(0, 4)})


async def test_the_last_token_of_an_answer_was_never_fed() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 28)  # 128 tokens: the last block lacks one
    assert lengths(begin(one, (*PROMPT, *(7,) * 60))) == [112]


async def test_one_token_of_the_prompt_is_always_left() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 30)
    assert lengths(begin(one, PROMPT[:96])) == [80]
    assert lengths(begin(one, PROMPT[:97])) == [96]


async def test_another_route_asks_for_nothing() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 30)
    assert lengths(begin(one), b"x" * 32) == []


def test_names_differ_by_tenant_secret_model_context_and_tokens() -> None:
    def names(
        secret: bytes = SECRET, model: bytes = DIGEST, tenant: bytes = b"", **changes: Any
    ) -> set[bytes]:
        made = PrefixCache(secret, model, has_ends=True)
        context, ids = changes.get("context", CONTEXT), changes.get("ids", PROMPT)
        return set(begin(made, ids, tenant).names(context, 96))

    all_names = [
        names(),
        names(secret=b"t" * 32),
        names(model=b"e" * 32),
        names(tenant=b"key"),
        names(context=b"x" * 32),
        names(ids=(9, *PROMPT[1:])),
    ]
    assert [len(each) for each in all_names] == [6] * 6
    assert len(set.union(*all_names)) == 36


def test_pictures_are_part_of_what_a_block_is_named_for() -> None:
    block_names = cache().beginnings.for_tenant(b"")
    plain = block_names.chain(PROMPT, 4)
    other = block_names.chain(PROMPT, 4, extras=[(20, b"a picture")])
    assert [a == b for a, b in zip(plain, other, strict=True)] == [True, False, False, False]


async def test_our_own_ends_go_on_from_where_the_nodes_do() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 30)
    begun, ends = begin(one, (*PROMPT, 7, 8, 9)), FakeEnds()
    assert lengths(begun) == [96]
    await begun.take(ends, 96)  # type: ignore[arg-type]
    assert ends.begun == [96]
    await begin(one).take(ends, 0)  # type: ignore[arg-type]
    assert ends.begun == [96]


async def test_what_nodes_do_not_hold_any_more_is_forgotten() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 30)
    begun = begin(one, (*PROMPT, *(7,) * 40))
    assert lengths(begun) == [128]
    begun.note_held(CONTEXT, 0)
    assert lengths(begin(one, (*PROMPT, *(7,) * 40))) == []
    assert (one.counts.hits, one.counts.misses, one.counts.num_kept) == (0, 1, 0)


async def test_a_place_that_nodes_cannot_go_back_to_costs_no_more_than_two_tries() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 30)
    for expected in ([64], [64], []):
        begun = begin(one, (*PROMPT[:70], *range(200, 240)))
        assert lengths(begun) == expected
        begun.note_held(CONTEXT, 0)


async def test_rows_of_a_beginning_are_made_again_from_the_first() -> None:
    begun, ends = begin(cache()), FakeEnds()
    begun._new_ends = lambda: ends  # type: ignore[assignment,return-value]
    assert await begun.rows(32, 48, WireDtype.FLOAT32) == bytes(PROMPT[32:48])
    assert await begun.rows(48, 64, WireDtype.FLOAT32) == bytes(PROMPT[48:64])
    assert ends.opened == [(0, 32), (32, 48), (48, 64)]


async def test_bytes_and_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = cache(budget_bytes=24)  # three of eight bytes
    for number in range(5):
        await keep(one, (number, *PROMPT), (7,))
    assert (one.counts.num_kept, one.counts.size_bytes, one.counts.evicted) == (3, 24, 2)
    monkeypatch.setattr(prefix, "MAX_KEPT", 2)
    await keep(one, (9, *PROMPT), (7,))
    assert one.counts.num_kept == 2


async def test_a_fleet_asks_for_what_others_may_have_left() -> None:
    one = cache(guesses=True, has_ends=False)
    ids = tuple(range(1000))
    assert lengths(begin(one, ids)) == [992, 864, 736, 608, 496, 368, 240, 112]
    assert lengths(begin(one, ids[:200])) == []
    assert (
        lengths(begin(cache(guesses=True), ids)) == []
    )  # with layers of its own, it holds nothing of theirs


async def test_nodes_are_not_asked_for_a_few_tokens() -> None:
    one = cache()
    await keep(one, PROMPT, (7,) * 30)
    assert lengths(begin(one, (*PROMPT[:60], *range(200, 240)))) == []
