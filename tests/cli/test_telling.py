"""What a service prints about itself, for people and for a supervisor."""

from __future__ import annotations

import json

import pytest

from cli.options import Events
from cli.telling import Teller

FIRST, SECOND = ({"model": "tiny", "layers": layers} for layers in ("0:4", "4:8"))


def told(capsys: pytest.CaptureFixture[str], teller: Teller, *events: dict[str, object]) -> str:
    for event in events:
        teller.tell(event)
    return capsys.readouterr().out


def progress(done: int) -> dict[str, object]:
    return {"event": "progress", "stage": "load", "done_bytes": done, "total_bytes": 1000}


def test_a_supervisor_gets_every_event_as_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(
        capsys, Teller(Events.JSON), progress(1), progress(2), {"event": "ready", "n": 1}
    ).splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["progress", "progress", "ready"]


def test_people_get_a_line_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, Teller(Events.TEXT), *(progress(done) for done in range(0, 1001, 10))).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "load 1.0 kB of 1.0 kB"


def test_a_node_prints_its_address_ready_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"{'ab' * 32}@10.0.0.1:7001"
    assert f"--node {address}\n" in told(
        capsys, Teller(Events.TEXT), {"event": "ready", "address": address, "layers": "0:10"}
    )


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "ready", "role": "sentinel", "address": "ID@H:1", "bound": "H:1"}, "ID@H:1"),
        ({"event": "ready", "address": "", "layers": "0:4"}, "serves layers 0:4; no way in is proved yet"),
        ({"event": "reachable", "address": "ID@H:1"}, "others reach it at ID@H:1"),
        ({"event": "placing", "slices": [FIRST]}, "loads layers 0:4 of tiny, where it helps most"),
        (
            {"event": "moving", "slices": [FIRST, SECOND], "from": [FIRST]},
            "loads layers 0:4 of tiny, layers 4:8 of tiny beside layers 0:4 of tiny",
        ),
        ({"event": "moved", "slices": [SECOND]}, "serves layers 4:8 of tiny now"),
        ({"event": "moved", "slices": []}, "serves nothing now"),
        (
            {"event": "load_failed", "model": "tiny", "layers": "4:8", "code": "x", "text": "no room"},
            "layers 4:8 of tiny could not be loaded: no room",
        ),
        ({"event": "draining", "num_sessions": 0, "limit_s": 30.0}, "leaves the swarm"),
        (
            {"event": "draining", "num_sessions": 1, "limit_s": 30.0},
            "leaves: 1 session may end within 30 s; Ctrl+C again ends at once",
        ),
    ],
)
def test_a_member_tells_what_it_does(
    event: dict[str, object], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, Teller(Events.TEXT), event) == line + "\n"


def test_a_gateway_tells_its_public_address(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "ready", "url": "http://0.0.0.0:8000/v1"}
    for form in Events:
        assert "http://ai.home:80/v1" in told(capsys, Teller(form, "ai.home:80"), event)
        assert "http://0.0.0.0:8000/v1" in told(capsys, Teller(form), event)
