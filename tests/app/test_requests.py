"""What a gateway remembers of its last requests, and who may ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app import records as module
from app.api.requests import RequestReport, report_of
from app.engine.hop_uses import hop_uses
from app.engine.request import Finished, HopUse, RouteHop
from app.records import EndedAnswer, Records
from routing.hop_times import HopTimes
from routing.types import Answer, Hop, HopTrace, NodeId, SessionId, SliceSpec
from tests.app.conftest import ANSWER, Serve
from tests.app.fake_network import node, offer
from tests.support.api_server import Served, chunks_of
from tests.support.fake_embeddings import FakeEmbeddings
from tests.support.fake_pictures import FakePictures
from tests.support.local_engine import ScriptedEngine

USE = HopUse(RouteHop("0a1b2c3d", 0, 30), 7, 0.5, 0.1, 0.01, 0.25)


@pytest.fixture
def told(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted engine also says what its one hop did."""
    plain = scripted.generate

    async def generate(request: Any) -> Any:
        async for event in plain(request):
            yield replace(event, hops=(USE,), route=(USE.hop,)) if isinstance(event, Finished) else event

    monkeypatch.setattr(scripted, "generate", generate)


@pytest.mark.usefixtures("told")
async def test_a_request_is_found_by_its_id_and_by_its_answers(served: Served) -> None:
    response = await served.ask(n=2)
    by_request = await served.http.get(f"/v1/requests/{response.headers['x-request-id']}")
    by_answer = await served.http.get(f"/requests/{response.json()['id']}")
    assert by_request.json() == by_answer.json()
    report = by_request.json()
    assert RequestReport.model_validate_json(by_request.text).model_dump(mode="json") == report
    assert (report["status"], report["model"], report["endpoint"]) == (
        "finished",
        "scripted",
        "/v1/chat/completions",
    )
    assert report["took_s"] > 0
    first, second = report["answers"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["finish_reason"], first["completion_tokens"]) == (
        "stop",
        response.json()["usage"]["completion_tokens"] // 2,
    )
    assert first["timings"]["compute_s"] == 0.002
    assert first["hops"] == [
        {
            "node": "0a1b2c3d",
            "layers": [0, 30],
            "path": "direct",
            "steps": 7,
            "compute_s": 0.5,
            "network_s": 0.25,
            "crypto_s": 0.01,
            "queue_s": 0.1,
        }
    ]


async def test_streams_are_remembered_too(served: Served) -> None:
    chunks = chunks_of(await served.stream())
    report = (await served.http.get(f"/v1/requests/{chunks[0]['id']}")).json()
    assert (report["status"], len(report["answers"])) == ("finished", 1)


async def test_nothing_that_was_said_is_kept(served: Served) -> None:
    response = await served.ask(messages=[{"role": "user", "content": "secretive prompt"}])
    text = (await served.http.get(f"/v1/requests/{response.json()['id']}")).text
    assert "secretive" not in text
    assert ANSWER.split()[0] not in text
    assert "secretive" not in repr(await served.gateway.records.find(response.json()["id"], b""))


async def test_another_key_finds_nothing(serve: Serve) -> None:
    async with serve(api_keys="one,two") as served:
        mine, others = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        ask = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
        response = await served.http.post("/v1/chat/completions", json=ask, headers=mine)
        path = f"/v1/requests/{response.json()['id']}"
        assert (await served.http.get(path, headers=mine)).status_code == 200
        refused = await served.http.get(path, headers=others)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert (await served.http.get(path)).status_code == 401


async def test_a_failure_is_told_with_its_code(served: Served, scripted: ScriptedEngine) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise RuntimeError("a secret of ours")

    scripted.before_token = fail
    response = await served.ask()
    assert response.status_code == 500
    report = (await served.http.get(f"/v1/requests/{response.headers['x-request-id']}")).json()
    assert (report["status"], report["error"], report["answers"]) == ("failed", "internal_error", [])


async def test_one_that_was_refused_at_the_door_has_no_record(served: Served) -> None:
    response = await served.ask(messages=[])
    assert response.status_code == 400
    found = await served.http.get(f"/v1/requests/{response.headers['x-request-id']}")
    assert found.status_code == 404


async def test_every_kind_of_answer_has_one(serve: Serve, scripted: ScriptedEngine) -> None:
    painter, librarian = FakePictures(), FakeEmbeddings(scripted.tokenizer)
    async with serve(painter, librarian) as served:  # type: ignore[arg-type]
        for path, body in (
            ("/v1/images/generations", {"model": "painter", "prompt": "a circle"}),
            ("/v1/embeddings", {"model": "librarian", "input": "hello"}),
        ):
            response = await served.http.post(path, json=body)
            assert "server-timing" in response.headers
            report = (await served.http.get(f"/v1/requests/{response.headers['x-request-id']}")).json()
            assert (report["status"], report["endpoint"]) == ("finished", path)
            (answer,) = report["answers"]
            assert answer["timings"]["total_s"] > 0


async def test_only_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORDS", 3)
    records = Records()
    for number in range(5):
        records.begin(f"r{number}", answer_id=f"a{number}", tenant=b"t", model="m", endpoint="/e").end(
            "finished"
        )
    await records.close()
    found = [await records.find(f"a{number}", b"t") is not None for number in range(5)]
    assert found == [False, False, True, True, True]


async def test_of_two_requests_of_one_id_the_later_is_found() -> None:
    records = Records()
    begun = [
        records.begin("mine", answer_id=answer_id, tenant=tenant, model="m", endpoint="/e")
        for answer_id, tenant in (("a1", b"t"), ("a2", b"t"), ("a3", b"u"))
    ]
    for _ in range(2):  # while they run, and once they are kept
        for tenant, answer_id in ((b"t", "a2"), (b"u", "a3")):
            found = await records.find("mine", tenant)
            assert found is not None
            assert found.answer_id == answer_id
        for record in begun:
            record.end("finished")
        await records.close()
    assert await records.find("a1", b"t") is None


async def test_a_record_is_the_same_once_it_is_kept() -> None:
    records = Records()
    record = records.begin("r", answer_id="a", tenant=b"t", model="m", endpoint="/e")
    record.answers[1] = EndedAnswer("stop", 3, 4, {"total_s": 1.5}, 2, (USE.hop,), (USE,))
    told = report_of(record).model_copy(update={"status": "finished", "took_s": None})
    record.end("finished")
    await records.close()
    kept = await records.find("a", b"t")
    assert kept is not None
    assert kept is not record
    assert report_of(kept).model_copy(update={"took_s": None}) == told


# Hops -------------------------------------------------------------------------------------------------------------


class Line:
    """A link as far as this looks at it."""

    def __init__(self, rtt_ms: float, *, is_relayed: bool = False) -> None:
        self.rtt_ms = rtt_ms
        self.is_relayed = is_relayed


def hop(number: int, start: int, end: int) -> Hop:
    return Hop(node(number).address, offer(bytes(32), 0, 9, num_layers=9), SliceSpec(start, end), bytes(32))


def answered(*traces: tuple[int, int, int]) -> Answer:
    told = tuple(HopTrace(*trace) for trace in traces)
    return Answer(SessionId(bytes(16)), 0, 1, 0, 1, b"", traces=told)


def test_the_networks_time_is_laid_on_the_legs() -> None:
    times = HopTimes()
    hops = [hop(1, 0, 3), hop(2, 3, 9)]
    for _ in range(10):
        times.add(hops, answered((2000, 100, 10), (4000, 200, 20)), took_s=1.0)
    links: dict[NodeId, Any] = {
        hops[0].address.node_id: Line(10.0),
        hops[1].address.node_id: Line(30.0, is_relayed=True),
    }
    first, second = hop_uses(times, 5.0, links)
    assert (first.steps, first.compute_s, first.queue_s) == (10, pytest.approx(0.02), pytest.approx(0.001))
    assert (second.hop.start, second.hop.end, second.hop.is_relayed) == (3, 9, True)
    assert first.network_s == pytest.approx(5.0 * 10 / 50), "ours to the first, of three legs"
    assert first.network_s + second.network_s == pytest.approx(5.0)


def test_a_hop_that_claims_more_than_was_waited_is_cut() -> None:
    times = HopTimes()
    times.add([hop(1, 0, 9)], answered((10**9, 0, 0)), took_s=0.5)
    (time,) = times.by_node.values()
    assert time.compute_s == pytest.approx(0.5)


def test_hops_of_a_lost_route_are_still_told() -> None:
    times = HopTimes()
    times.add([hop(1, 0, 9)], answered((1000, 0, 0)), took_s=1.0)
    times.add([hop(2, 0, 9)], answered((1000, 0, 0)), took_s=1.0)
    nobody: dict[NodeId, Any] = dict.fromkeys(times.by_node)
    assert [use.hop.node for use in hop_uses(times, 0.4, nobody)] == ["00000001", "00000002"]
    assert sum(use.network_s for use in hop_uses(times, 0.4, nobody)) == pytest.approx(0.4)
    assert hop_uses(HopTimes(), 0.0, {}) == ()
