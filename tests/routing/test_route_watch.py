"""Hops that fall silent while somebody waits, on a clock that is set by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest

from routing.endpoint import STALE_AFTER_S
from routing.link import Link
from routing.opening import RouteKeys
from routing.route_watch import REACH_EVERY_S, Due, RouteWatch
from routing.types import NodeId, Route, SessionId, SliceSpec


class SilentLink:
    """A link whose peer does not answer."""

    peer_id = NodeId(bytes(32))
    is_closed = False
    silent_for_s = STALE_AFTER_S + 1


def test_another_way_to_a_silent_node_that_nobody_replaces_is_tried_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reached, troubles = [100.0], list[int](), list[Any]()
    monkeypatch.setattr("routing.route_watch.time.monotonic", lambda: now[0])
    watch = RouteWatch(
        Route(SliceSpec(0, 1)),
        RouteKeys(SessionId(bytes(16)), 1, NodeId(bytes(32)), b"", b""),
        [cast(Link, SilentLink())],
        measured=dict,
        may_do_without=lambda _: False,
        note=troubles.append,
        reach_again=reached.append,
    )
    for _ in range(3):
        watch.look(lambda: Due(0, (), is_anything=False))
    assert reached == [0]
    now[0] += REACH_EVERY_S
    watch.look(lambda: Due(0, (), is_anything=False))
    assert reached == [0, 0]
    assert troubles == []
