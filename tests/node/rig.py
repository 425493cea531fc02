"""A small swarm in one process: node servers, a scripted gateway, and a route between them.

The endpoints are the in-memory ones, or the real ones over loopback, as the test likes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from node.budget import MemoryBudget
from node.held_slice import SPOKEN_DTYPES, HeldSlice
from node.scheduler import Scheduler
from node.server import NodeServer
from node.settings import NodeSettings
from node.slice_table import SliceTable
from node.stats import NodeStats
from routing import wire
from routing.endpoint import Endpoint
from routing.errors import RemoteError
from routing.identity import Identity
from routing.types import (
    Answer,
    Attach,
    Cancel,
    Capabilities,
    Failure,
    HopEntry,
    Message,
    NodeAddress,
    NodeId,
    Open,
    Resumed,
    SessionId,
    SliceOffer,
    SliceSpec,
    Step,
    StepFlag,
    Want,
    WireDtype,
)
from slicing.model_kind import shape_of
from slicing.runner import Parts, PlainRunner
from tests.node.fake_runner import CACHE_BYTES_PER_POSITION, HIDDEN_SIZE, NUM_LAYERS, FakeRunner
from tests.support.fake_link import FakeEndpoint, FakeNetwork

if TYPE_CHECKING:
    from node.tracing import NodeTraces

NETWORK_ID = bytes(32)
DIGEST = b"d" * 32
TIMEOUT_S = 20.0
Wanted = TypeVar("Wanted", bound=Message)
MakeEndpoint = Callable[..., Any]


def node_settings(**changes: Any) -> NodeSettings:
    """Settings of a node that a test changes some of; it loads models plain, for kernels take long to compile."""
    plain = {"model": "fake", "network_id": NETWORK_ID, "runner": "plain"}
    return NodeSettings.model_validate(plain | changes)


def fake_offer(
    spec: SliceSpec, *, has_opening: bool = False, has_closing: bool = False, keeps: bool = False
) -> SliceOffer:
    return SliceOffer(
        "fake",
        DIGEST,
        NUM_LAYERS,
        HIDDEN_SIZE,
        spec,
        WireDtype.FLOAT32,
        "fake/fp32",
        has_opening,
        has_closing,
        confirms=keeps,
        keeps=keeps,
    )


@dataclass
class Node:
    """One node of the rig, with everything a test may want to look at."""

    identity: Identity
    runner: Any
    server: NodeServer
    budget: MemoryBudget
    stats: NodeStats
    seal_key: wire.SealKey
    endpoint: Any
    address: NodeAddress
    now: list[float]  # the server's clock
    slices: SliceTable

    @property
    def node_id(self) -> NodeId:
        return self.identity.node_id


class Gateway:
    """The gateway's end of links: what arrives waits in `inbox`."""

    def __init__(self) -> None:
        self.identity = Identity.generate()
        self.inbox: asyncio.Queue[tuple[Any, Message]] = asyncio.Queue()
        self.losses: asyncio.Queue[RemoteError | None] = asyncio.Queue()
        self.endpoint: Any = None

    def on_link_up(self, link: Any) -> None:
        pass

    def on_message(self, link: Any, message: Message) -> None:
        self.inbox.put_nowait((link, message))

    def on_link_closed(self, link: Any, error: RemoteError | None) -> None:
        self.losses.put_nowait(error)

    async def receive(self, kind: type[Wanted]) -> Wanted:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(TIMEOUT_S):
            _, message = await self.inbox.get()
        assert isinstance(message, kind), message
        return message


@dataclass
class Script:
    """One session as a gateway plays it. Payloads are float32 rows unless the route embeds."""

    gateway: Gateway
    hops: Sequence[tuple[Node, int, int]]
    gateway_id: NodeId
    changes: dict[str, Any] = field(default_factory=dict)  # of every entry
    entry_changes: dict[int, dict[str, Any]] = field(default_factory=dict)  # by hop
    opens: bool = False
    closes: bool = False
    sampling: dict[str, Any] | None = None
    session_id: SessionId = field(default_factory=lambda: SessionId(secrets.token_bytes(16)))
    route_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    answer_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    epoch: int = 1
    first: Any = None  # the link to the first hop

    def entry(self, hop: int) -> HopEntry:
        _, start, end = self.hops[hop]
        is_last = hop == len(self.hops) - 1
        opens, closes = self.opens and hop == 0, self.closes and is_last
        entry = HopEntry(
            route_key=self.route_key,
            hop=hop,
            num_hops=len(self.hops),
            gateway_id=self.gateway_id,
            model_digest=DIGEST,
            start=start,
            end=end,
            wire_in=WireDtype.INT32 if opens else WireDtype.FLOAT32,
            wire_out=WireDtype.FLOAT32,
            max_positions=200,
            idle_timeout_s=60,
            next_hop=None if is_last else self.hops[hop + 1][0].address,
            answer_key=self.answer_key if is_last else b"",
            run_opening=opens,
            run_closing=closes,
            sampling=self.sampling if closes else None,
        )
        return replace(entry, **self.changes | self.entry_changes.get(hop, {}))

    def opening(self, hop: int = 0) -> Open:
        entries = tuple(
            wire.seal_entry(
                self.entry(index), node.seal_key.public, wire.entry_aad(self.session_id, self.epoch, index)
            )
            for index, (node, _, _) in enumerate(self.hops)
        )
        return Open(self.session_id, self.epoch, hop, entries)

    async def open(self) -> None:
        """Dial the first hop and send the Open; nothing is waited for."""
        self.first = await self.gateway.endpoint.dial(self.hops[0][0].address)
        await self.first.send(self.opening())

    async def reopen(self, *hops: tuple[Node, int, int], answered: int = 0) -> Resumed:
        """Re-route, over other hops where some are given, and wait for what the first one says it has."""
        self.hops, self.epoch = hops or self.hops, self.epoch + 1
        self.changes |= {"resumes": True, "answered": answered}
        await self.open()
        return await self.gateway.receive(Resumed)

    def step(self, number: int, position: int, rows: Any, **fields: Any) -> Step:
        """A step over `rows`: [n, hidden] numbers, or n token ids (of all streams) where the route embeds.

        `places` are their rotary positions [axes, n].
        """
        payload = np.asarray(rows, dtype="<i4" if self.opens else "<f4")
        places = np.asarray(fields.pop("places", ()), dtype="<i4")
        flags = fields.pop("flags", StepFlag.NONE) | (StepFlag.TOKEN_IDS if self.opens else StepFlag.NONE)
        return Step(
            self.session_id,
            self.epoch,
            number,
            position,
            len(payload),
            payload.tobytes() + places.tobytes(),
            flags=flags,
            **fields,
        )

    def memory(self, number: int, rows: Any, **fields: Any) -> Step:
        """A step of memory over `rows` [n, hidden]."""
        payload = np.asarray(rows, dtype="<f4")
        flags = StepFlag.MEMORY | fields.pop("flags", StepFlag.NONE)
        fields = {
            "position": 0,
            "want": Want.NONE,
            "rows": len(payload),
            "payload": payload.tobytes(),
        } | fields
        return Step(self.session_id, self.epoch, number, flags=flags, **fields)

    async def remember(self, number: int, rows: Any, **fields: Any) -> None:
        """Send a step of memory."""
        await self.first.send(self.memory(number, rows, **fields))

    async def send(self, number: int, position: int, rows: Any, **fields: Any) -> None:
        await self.first.send(self.step(number, position, rows, **fields))

    async def run(self, number: int, position: int, rows: Any, **fields: Any) -> Answer:
        """Send a step and wait for its answer."""
        await self.send(number, position, rows, **fields)
        answer = await self.gateway.receive(Answer)
        assert (answer.session_id, answer.epoch, answer.step) == (self.session_id, self.epoch, number)
        return answer

    async def failure(self) -> Failure:
        return await self.gateway.receive(Failure)

    def cancel(self) -> Cancel:
        proof = wire.proof(self.route_key, b"cancel", self.session_id, self.epoch)
        return Cancel(self.session_id, self.epoch, proof)

    def attach(self) -> Attach:
        proof = wire.proof(self.route_key, b"attach", self.session_id, self.epoch)
        return Attach(self.session_id, self.epoch, proof)


class Rig:
    """Nodes and a gateway that can reach them."""

    def __init__(self, tasks: asyncio.TaskGroup, make_endpoint: MakeEndpoint, network: FakeNetwork) -> None:
        self.network = network
        self.gateway = Gateway()
        self.nodes: list[Node] = []
        self.traces: NodeTraces | None = None  # of all nodes that are added from then on
        self.takes_memory = False  # whether the fake nodes' model looks at an encoder's states
        self._tasks = tasks
        self._make_endpoint = make_endpoint
        self._schedulers: list[Scheduler] = []
        self.gateway.endpoint = make_endpoint(self.gateway.identity, NETWORK_ID, Capabilities, self.gateway)

    async def add_node(
        self,
        runner: Any,
        offer: SliceOffer,
        *,
        cache_bytes_per_position: int = CACHE_BYTES_PER_POSITION,
        kv_budget_bytes: int = 1 << 30,
        **settings: Any,
    ) -> Node:
        identity, stats, seal_key, now = Identity.generate(), NodeStats(), wire.SealKey.generate(), [1000.0]
        scheduler = Scheduler()
        self._schedulers.append(scheduler)
        budget = MemoryBudget(kv_budget_bytes, stats)
        slices = SliceTable((HeldSlice(runner, offer, cache_bytes_per_position),))
        server = NodeServer(
            slices,
            seal_key,
            node_settings(**settings),
            scheduler=scheduler,
            budget=budget,
            stats=stats,
            tasks=self._tasks,
            clock=lambda: now[0],
            traces=self.traces,
        )
        capabilities = Capabilities(dtypes=SPOKEN_DTYPES, seal_key=seal_key.public)
        endpoint = self._make_endpoint(identity, NETWORK_ID, lambda: capabilities, server)
        server.connect(endpoint)
        host, port = await endpoint.listen("127.0.0.1", 0)
        address = NodeAddress(identity.node_id, host, port)
        node = Node(identity, runner, server, budget, stats, seal_key, endpoint, address, now, slices)
        self.nodes.append(node)
        return node

    async def add_fake_node(
        self,
        start: int = 0,
        end: int = NUM_LAYERS,
        *,
        keeps: bool = False,
        runner: FakeRunner | None = None,
        **settings: Any,
    ) -> Node:
        """With `keeps`, one whose sessions' keys and values others can go on with, and that says so."""
        ends = {"has_opening": start == 0, "has_closing": end == NUM_LAYERS}
        offer = fake_offer(SliceSpec(start, end), keeps=keeps, **ends)
        runner = runner or FakeRunner(max_works=4 if keeps else 1, takes_memory=self.takes_memory)
        return await self.add_node(runner, offer, **settings)

    def script(self, *hops: tuple[Node, int, int], **fields: Any) -> Script:
        """A session of the gateway over these hops."""
        gateway_id = fields.pop("gateway_id", self.gateway.identity.node_id)
        return Script(self.gateway, hops, gateway_id, **fields)

    async def close(self) -> None:
        for node in self.nodes:
            if isinstance(node.runner, FakeRunner):
                node.runner.release()
            node.server.close()
            await node.endpoint.close()
        await self.gateway.endpoint.close()
        for scheduler in self._schedulers:
            await scheduler.close()


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group in a task of its own: pytest enters and leaves fixtures in different ones."""
    opened: asyncio.Future[asyncio.TaskGroup] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        async with asyncio.TaskGroup() as tasks:
            opened.set_result(tasks)
            await leave.wait()

    holder = asyncio.create_task(hold())
    try:
        yield await opened
    finally:
        leave.set()
        await holder


@asynccontextmanager
async def loopback_rig() -> AsyncIterator[Rig]:
    """A rig with real endpoints on loopback."""
    async with task_group() as tasks:
        rig = Rig(tasks, Endpoint, FakeNetwork())
        try:
            yield rig
        finally:
            await rig.close()


@asynccontextmanager
async def fake_rig() -> AsyncIterator[Rig]:
    """A rig over in-memory links."""
    network = FakeNetwork()

    def make_endpoint(*arguments: Any) -> FakeEndpoint:
        return FakeEndpoint(*arguments, network=network)

    async with task_group() as tasks:
        rig = Rig(tasks, make_endpoint, network)
        try:
            yield rig
        finally:
            await rig.close()


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that other tasks or threads bring about."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.001)


def rows_of(answer: Answer, hidden_size: int = HIDDEN_SIZE) -> np.ndarray[Any, Any]:
    """[rows, hidden] of an answer that holds float32 hidden states."""
    return np.frombuffer(answer.payload, dtype="<f4").reshape(-1, hidden_size)


async def add_real_node(rig: Rig, model: PreTrainedModel, start: int, end: int) -> Node:
    """A node with a plain runner over layers of a real model, and the ends that are beside them."""
    num_layers = shape_of(model.config).num_layers
    parts = Parts(((start, end),), opening=start == 0, closing=end == num_layers)
    runner = PlainRunner.from_model(model, parts)
    offer = SliceOffer(
        "tiny",
        DIGEST,
        num_layers,
        runner.hidden_size,
        SliceSpec(start, end),
        WireDtype.FLOAT32,
        runner.form,
        has_opening=parts.opening,
        has_closing=parts.closing,
    )
    return await rig.add_node(runner, offer, cache_bytes_per_position=runner.cache_bytes_per_position)
