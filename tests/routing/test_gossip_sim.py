"""Hundreds of peers in simulated time: what the network must reach (see the issue), with real records."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing.gossip import GossipFault
from tests.support.gossip_sim import SimPeer, Weather, World

KNOWN_WITHIN_S = 10.0
BAD_WEATHER = Weather(latency_s=(0.005, 0.4), loss=0.05, duplicates=0.05)  # reorders, too


def knows_of(world: World, peer: SimPeer) -> int:
    return sum(peer.node_id in other.gossip.announcements for other in world.peers.values())


def test_a_join_and_a_leave_are_known_to_300_peers_within_ten_seconds() -> None:
    world = World(7, BAD_WEATHER)
    world.populate(300)
    joined = world.start()
    assert world.run_until(lambda: knows_of(world, joined) == 301, KNOWN_WITHIN_S) < KNOWN_WITHIN_S
    assert world.run_until(lambda: world.is_agreed, KNOWN_WITHIN_S) < KNOWN_WITHIN_S
    world.leave(joined)
    assert world.run_until(lambda: knows_of(world, joined) == 0, KNOWN_WITHIN_S) < KNOWN_WITHIN_S
    assert world.is_agreed


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "num_peers"),
    [
        ("same", 100),
        pytest.param("same", 300, marks=pytest.mark.chaos),
        ("new", 300),
        ("new at one place", 100),
    ],
)
def test_twenty_restarts_in_sixty_seconds_leave_no_dead_node_routable(keys: str, num_peers: int) -> None:
    world = World(11)
    world.populate(num_peers)
    began, peer = world.now, world.start()
    for _ in range(19):
        world.run(world.rng.uniform(1.5, 3.5))
        world.kill(peer)
        world.run(world.rng.uniform(0.05, 1.0))
        peer = world.start(
            peer.identity if keys == "same" else None, peer.place if keys == "new at one place" else None
        )
    assert world.now - began < 80
    assert world.run_until(lambda: world.is_agreed, KNOWN_WITHIN_S) < KNOWN_WITHIN_S
    assert knows_of(world, peer) == num_peers + 1


def test_a_single_death_is_seen_everywhere_without_anybody_signing_it() -> None:
    world = World(13)
    peers = world.populate(150)
    world.kill(peers[0])
    assert world.run_until(lambda: world.is_agreed, KNOWN_WITHIN_S) < KNOWN_WITHIN_S


def test_a_partition_heals_and_news_of_both_sides_meet() -> None:
    world = World(17, refresh_s=30)  # who was silent for long is looked at when it signs again
    peers = world.populate(60)
    side_of = {peer.node_id: number % 2 for number, peer in enumerate(peers)}
    world.cut(lambda node_id: side_of.get(node_id, 0))
    world.run(40)
    one, other = peers[0], peers[1]
    assert not one.routable & {node_id for node_id, side in side_of.items() if side == 1}
    one.announce()
    other.announce()
    newcomers = [world.start(), world.start()]
    world.run(10)
    world.cut(lambda _: None)
    for peer in peers[:6]:  # what long-lived peers do now and then: dial somebody they once knew
        peer.dial(peers[peers.index(peer) + 7].node_id)
    assert world.run_until(lambda: world.is_agreed, 60) < 60
    assert all(knows_of(world, newcomer) == 62 for newcomer in newcomers)


def test_forged_hints_harm_nobody() -> None:
    world = World(19)
    peers = world.populate(100)
    for liar in peers[:5]:
        for victim in peers[50:]:
            liar._send(liar.gossip.tell_doubt(victim.node_id))
            liar.gossip.end_doubt(victim.node_id)
    for _ in range(20):
        world.run(0.5)
        assert world.is_agreed


def test_two_running_nodes_with_one_key_are_both_told_and_stop_nobody() -> None:
    world = World(23)
    peers = world.populate(60)
    twin = world.start(peers[0].identity)
    twin.announce()
    world.peers[twin.node_id] = peers[0]
    for target in peers[10:18]:
        world.link(twin, target)
    world.run(30)
    rivals = [peer.gossip.faults[GossipFault.TWO_NODES_ONE_KEY] for peer in (peers[0], twin)]
    assert max(rivals) > 0
    assert world.num_sent["Records"] < 20_000
    joined = world.start()
    assert world.run_until(lambda: knows_of(world, joined) >= 61, KNOWN_WITHIN_S) < KNOWN_WITHIN_S


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.floats(0, 0.2), st.floats(0, 0.2), st.data())
def test_any_weather_and_any_churn_ends_in_agreement(
    seed: int, loss: float, duplicates: float, data: st.DataObject
) -> None:
    world = World(seed, Weather((0.001, 0.5), loss, duplicates), degree=5)
    world.populate(20)
    for act in data.draw(st.lists(st.sampled_from(["start", "kill", "leave", "wait"]), max_size=12)):
        some = world.peers[world.rng.choice(sorted(world.peers))]
        {"start": world.start, "wait": lambda: None}.get(
            act, lambda some=some, act=act: (world.kill if act == "kill" else world.leave)(some)
        )()
        world.run(world.rng.uniform(0, 2))
    assert world.run_until(lambda: world.is_agreed, 90) < 90
