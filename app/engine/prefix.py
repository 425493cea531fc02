"""What this gateway knows of answers that nodes, and its own ends, still hold: so that what begins alike goes on there.

Tokens are named in blocks of sixteen by a chain of keyed hashes. The key is made of a secret of this gateway (or of a
fleet of them), the model, and whose API key asks: another key's prompts have other names, so nothing can be found out
about them, and nodes see names only. Belongs to the event loop. Knows tokens; neither links nor tensors.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.engine.ends import Ends
from routing.prefix import NAME_SIZE
from routing.sealing import MAX_PREFIXES
from routing.types import Buffer, NodeId, Prefix, Route, SliceSpec, WireDtype
from routing.wire import MAX_HASHES
from slicing.kept_caches import BLOCK, Fork, Kept, KeptCaches

BUDGET_BYTES = (
    256 << 20
)  # of this gateway's own ends; a layer or two of them are small beside what nodes hold
MAX_KEPT = 1024
TTL_S = 840.0  # a minute less than nodes keep it (node.prefix_store)
MAX_ALIKE = 8  # answers that share a block are looked at, the newest: many may share a long system prompt
MAX_MISSES = 2  # of an answer that nodes should hold and did not: then they are not asked for it again
MIN_ASKED = 64  # positions: nodes are not asked for less, since that takes a round trip before the first step
MIN_GUESSED = (
    256  # positions: what another gateway of the fleet may have left is worth a round trip from here on
)
GUESSED_PARTS = 8  # of a prompt: how much of it may be held is asked for in eighths


@dataclass(slots=True)
class PrefixCounts:
    """Plain numbers that only grow, but for the gauges at the top."""

    num_kept: int = 0  # gauge
    size_bytes: int = 0  # gauge: of our own ends
    hits: int = 0  # answers that began with something
    tokens: int = 0  # that were not computed again
    misses: int = 0  # answers of which nodes were asked for something they did not hold
    evicted: int = 0


@dataclass(slots=True)
class _Holders:
    """Who holds the layers of a kept answer."""

    nodes: Mapping[NodeId, SliceSpec]
    misses: int = 0


@dataclass(frozen=True, slots=True)
class Beginnings:
    """How the answers of one model name their beginnings."""

    key: bytes = field(repr=False)  # 32 B

    def for_tenant(self, tenant: bytes) -> BlockNames:
        """Names that differ from those of every other tenant."""
        return BlockNames(hashlib.blake2b(tenant, key=self.key, person=b"diffuse-tenant/1").digest()[:32])

    def tag(self, tenant: bytes) -> bytes:
        """Eight bytes that tell tenants apart, for nodes that are fair between them."""
        return hashlib.blake2b(tenant, key=self.key, digest_size=8, person=b"diffuse-fair/1").digest()


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names blocks of tokens, with the key of one tenant and model."""

    key: bytes = field(repr=False)

    def chain(
        self, token_ids: Sequence[int], num_blocks: int, extras: Sequence[tuple[int, bytes]] = ()
    ) -> list[bytes]:
        """One hash per full block, each over all tokens up to its end.

        `extras` are digests of what is no token (a picture, a recording), by the position where it is put in.
        """
        packed = np.asarray(token_ids[: num_blocks * BLOCK], dtype="<u4").tobytes()
        size, last, hashes = BLOCK * 4, b"", []
        for number in range(num_blocks):
            block = packed[number * size : (number + 1) * size]
            put_in = b"".join(digest for at, digest in extras if at // BLOCK == number)
            made = hashlib.blake2b(last + block + put_in, key=self.key, digest_size=NAME_SIZE)
            last = made.digest()
            hashes.append(last)
        return hashes

    def name(self, link: bytes, context: bytes) -> bytes:
        """What a route of this context is told of a block."""
        return hashlib.blake2b(link + context, key=self.key, digest_size=NAME_SIZE).digest()


class PrefixCache:
    """Answers of one model that ended, as far as they can be gone on from.

    `has_ends`: own layers hold a part of each answer; only what both they and the nodes hold can be used. `guesses`:
    other gateways use the same secret, so nodes may hold what this one never asked.
    """

    def __init__(
        self,
        secret: bytes,
        model_digest: bytes,
        *,
        has_ends: bool,
        guesses: bool = False,
        budget_bytes: int = BUDGET_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PrefixCounts()
        key = hashlib.blake2b(model_digest, key=secret[:64], digest_size=32, person=b"diffuse-prefix/1")
        self.beginnings = Beginnings(key.digest())
        self._guesses = guesses and not has_ends
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._kept = KeptCaches()

    def begin(
        self,
        prompt_ids: Sequence[int],
        tenant: bytes,
        new_ends: Callable[[], Ends],
        *,
        digests: Sequence[tuple[int, bytes]] = (),
    ) -> AnswerBeginning:
        """What may be held of a prompt. `new_ends` are fresh ones, for rows that must be made again.

        `digests` name what was put in beside its tokens, see `BlockNames.chain`.
        """
        self.counts.evicted += self._kept.sweep(self._clock(), TTL_S)
        names = self.beginnings.for_tenant(tenant)
        return AnswerBeginning(self, names, prompt_ids, new_ends, digests)

    def keep(self, kept: Kept) -> None:
        """Note an answer that nodes keep."""
        self._kept.add(kept)
        while len(self._kept) > MAX_KEPT or self._kept.size_bytes > self._budget_bytes:
            self.forget(next(iter(self._kept)))
        self._count()

    def matches(self, links: Sequence[bytes]) -> dict[Kept, int]:
        """Answers that began like this one, with how many positions they share; the most first."""
        found: dict[Kept, int] = {}
        for number in range(len(links), 0, -1):
            for kept in reversed(self._kept.with_hash(links[number - 1])[-MAX_ALIKE:]):
                found.setdefault(kept, number * BLOCK)
        return found

    def note_use(self, kept: Kept) -> None:
        """It is of use: keep it for longer."""
        if kept in self._kept:
            self._kept.note_use(kept, self._clock())

    def forget(self, kept: Kept) -> None:
        """Nodes do not hold it any more, or there is no room."""
        if kept in self._kept:
            self._kept.let_go(kept)
            self.counts.evicted += 1
        self._count()

    def close(self) -> None:
        """Free what is kept."""
        self._kept.clear()
        self._count()

    @property
    def guesses(self) -> bool:
        """Whether nodes may hold what this gateway does not know of."""
        return self._guesses

    def new_kept(
        self, context: bytes, links: Sequence[bytes], ends: Ends, nodes: Mapping[NodeId, SliceSpec]
    ) -> Kept:
        """An answer as it is kept; its caches are those of its ends, which it takes over."""
        caches = ends.release()
        size_bytes = sum(cache.size_bytes for cache in caches)
        return Kept(context, caches, tuple(links), size_bytes, self._clock(), note=_Holders(nodes))

    def _count(self) -> None:
        self.counts.num_kept, self.counts.size_bytes = len(self._kept), self._kept.size_bytes


class AnswerBeginning:
    """One answer's tokens by name, for its chain (`routing.prefix.Beginning`), and what it leaves when it ends."""

    def __init__(
        self,
        cache: PrefixCache,
        names: BlockNames,
        prompt_ids: Sequence[int],
        new_ends: Callable[[], Ends],
        digests: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        self._cache = cache
        self._names = names
        self._prompt_ids = prompt_ids
        self._token_ids = list(prompt_ids)  # the answer's behind them, once it ends
        self._new_ends = new_ends
        self._digests = digests
        num_blocks = (len(prompt_ids) - 1) // BLOCK  # a token is left to compute
        self._links = names.chain(prompt_ids, num_blocks, digests)
        self._matches = cache.matches(self._links)
        self._forks: dict[int, Fork] = {}  # by length: what our own ends may go on from
        self._refill: Ends | None = None
        self._refilled = 0
        self._kept_links: list[bytes] = []
        self._context = b""

    # What the chain asks --------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return len(self._prompt_ids)

    @property
    def num_held(self) -> int:
        return next(iter(self._matches.values()), 0)

    @property
    def holders(self) -> Mapping[NodeId, SliceSpec]:
        return next((kept.note.nodes for kept in self._matches), {})

    def candidates(self, context: bytes) -> Sequence[Prefix]:
        self._give_up()
        lengths: list[int] = []
        for kept, length in self._matches.items():
            is_worth_it = length >= MIN_ASKED and length not in self._forks
            if is_worth_it and kept.group == context and kept.can_fork(length):
                self._forks[length] = kept.fork(length)
                lengths.append(length)
        if self._cache.guesses and len(self._links) * BLOCK >= MIN_GUESSED:
            lengths += self._guessed()
        chosen = sorted(set(lengths), reverse=True)[:MAX_PREFIXES]
        return [
            Prefix(length, self._names.name(self._links[length // BLOCK - 1], context)) for length in chosen
        ]

    def note_held(self, context: bytes, num_held: int) -> None:
        self._cache.counts.hits += num_held > 0
        self._cache.counts.tokens += num_held
        self._cache.counts.misses += not num_held
        for kept, length in self._matches.items():
            if kept.group == context and length > num_held:
                kept.note.misses += 1
                if kept.note.misses >= MAX_MISSES or length == kept.length:
                    self._cache.forget(kept)
            elif kept.group == context and length == num_held:
                kept.note.misses = 0
                self._cache.note_use(kept)

    async def rows(self, start: int, end: int, wire: WireDtype) -> Buffer:
        if self._refill is None:
            self._refill = self._new_ends()
        if self._refilled < start:
            between = self._prompt_ids[self._refilled : start]
            await self._refill.open_rows(between, self._refilled, wire)
        self._refilled = end
        return await self._refill.open_rows(self._prompt_ids[start:end], start, wire)

    def names(self, context: bytes, num_positions: int) -> Sequence[bytes]:
        num_blocks = min(num_positions, len(self._token_ids) - 1) // BLOCK  # the last token was never fed
        num_blocks = min(num_blocks, MAX_HASHES)
        self._context, self._kept_links = (
            context,
            self._names.chain(self._token_ids, num_blocks, self._digests),
        )
        return [self._names.name(link, context) for link in self._kept_links]

    # What the answer says -------------------------------------------------------------------------------------

    async def take(self, ends: Ends, num_held: int) -> None:
        """Let our own ends go on from where the nodes do."""
        fork = self._forks.pop(num_held, None)
        self._give_up()
        if fork is not None:
            await ends.begin(fork, num_held)

    def note_answer(self, token_ids: Sequence[int]) -> None:
        """The answer ended well, with these tokens."""
        self._token_ids.extend(token_ids)

    async def close(self, ends: Ends, route: Route | None, *, is_kept: bool) -> None:
        """End with the answer: keep what its ends hold, where nodes keep their part. The ends are closed after it."""
        self._give_up()
        if is_kept and self._kept_links and route is not None:
            nodes = {hop.address.node_id: hop.spec for hop in route.hops}
            self._cache.keep(self._cache.new_kept(self._context, self._kept_links, ends, nodes))
        if self._refill is not None:
            await self._refill.close()

    def _guessed(self) -> list[int]:
        blocks = len(self._links)
        return [blocks * part // GUESSED_PARTS * BLOCK for part in range(1, GUESSED_PARTS + 1)]

    def _give_up(self) -> None:
        for fork in self._forks.values():
            fork.give_up()
        self._forks.clear()
