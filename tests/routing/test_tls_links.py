"""Links under TLS: who is let in, what the others are told, and that the rest is as without it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from routing.admission import Limits
from routing.errors import ErrorCode, SecurityError
from routing.tls import Contexts, Tls, guest_tls, member_tls
from routing.tls_files import TlsFiles
from routing.types import NodeAddress
from tests.routing.peers import Rig, cancelled, open_rig, step
from tests.support.certificates import Authority

WITHOUT_TLS = "start it with --tls-ca"


@pytest.fixture(autouse=True)
def hears_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "routing")


def unchecked(files: TlsFiles) -> Tls:
    """TLS of a member that does not look at its own certificate first."""
    return Tls(files, lambda _: contexts_of(files))


def contexts_of(files: TlsFiles) -> Contexts:
    dial = ssl.create_default_context(cafile=str(files.ca))
    dial.check_hostname = False
    accept = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    accept.verify_mode = ssl.CERT_REQUIRED
    if files.cert is not None and files.key is not None:
        dial.load_cert_chain(files.cert, files.key)
        accept.load_cert_chain(files.cert, files.key)
    return Contexts(accept, dial)


async def refusal(
    rig: Rig, dialler: Tls | None, acceptor: Tls | None, caplog: pytest.LogCaptureFixture
) -> tuple[SecurityError, str]:
    """What the dialler is told of a link that does not come about, and what the acceptor logs."""
    there, here = await rig.peer(tls=acceptor), await rig.peer(tls=dialler)
    with pytest.raises(SecurityError) as caught:
        await here.endpoint.dial(there.address)
    assert caught.value.code is ErrorCode.TLS
    async with asyncio.timeout(5):
        while not (logged := [it for it in caplog.messages if it.startswith("no link with 127.0.0.1: ")]):
            await asyncio.sleep(0.01)
    assert there.endpoint.counters.handshakes_failed["TLS"] == 1
    assert here.endpoint.counters.handshakes_failed["TLS"] == 1
    return caught.value, logged[0]


async def test_a_link_under_tls_is_one_like_any_other(rig: Rig, ca: Authority) -> None:
    here = await rig.peer(tls=member_tls(ca.files("here")))
    there = await rig.peer(tls=member_tls(ca.files("there")))
    link = await here.endpoint.dial(there.address)
    await link.send(step(b"x" * 300_000))
    (message,) = await there.inbox.receive()
    assert message == step(b"x" * 300_000)
    assert await link.ping() > 0
    (back,) = there.endpoint.links
    assert back.peer_id == here.endpoint.node_id


async def test_nothing_but_tls_is_on_the_wire(rig: Rig, ca: Authority) -> None:
    there = await rig.peer(tls=member_tls(ca.files("there")))
    guest = guest_tls(ca.files("guest"))
    heard: list[bytes] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_connection(there.address.host, there.address.port)
        await asyncio.gather(_pump(reader, far, heard), _pump(near, writer, heard))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    here = await rig.peer(tls=guest)
    link = await here.endpoint.dial(replace(there.address, port=port))
    await link.ping()
    await here.endpoint.close()
    server.close()
    await asyncio.sleep(0)
    whole = b"".join(heard)
    assert b"HTTP" not in whole
    assert b"websocket" not in whole


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: list[bytes]) -> None:
    while content := await reader.read(65536):
        heard.append(content)
        writer.write(content)
    writer.close()


async def test_the_id_is_proved_inside_whatever_the_certificate_says(rig: Rig, ca: Authority) -> None:
    here, there = await rig.peer(tls=member_tls(ca.files("a"))), await rig.peer(tls=member_tls(ca.files("b")))
    stranger = NodeAddress(here.endpoint.node_id, there.address.host, there.address.port)
    dialler = await rig.peer(tls=member_tls(ca.files("c")))
    with pytest.raises(SecurityError, match=r"ID_MISMATCH|HANDSHAKE"):
        await dialler.endpoint.dial(stranger)


async def test_a_guest_without_a_certificate_is_refused_in_words(
    rig: Rig, ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    told, logged = await refusal(rig, guest_tls(TlsFiles(ca=ca.path)), member_tls(ca.files("there")), caplog)
    assert "it asks for a certificate: give --tls-cert and --tls-key" in told.text
    assert "it showed no certificate" in logged


async def test_one_without_a_ca_asks_nobody_for_a_certificate(rig: Rig, ca: Authority) -> None:
    there = await rig.peer(tls=member_tls(replace(ca.files("there"), ca=None)))
    here = await rig.peer(tls=guest_tls(TlsFiles(ca=ca.path)))
    assert await (await here.endpoint.dial(there.address)).ping() > 0


async def test_a_member_of_another_ca_is_refused_by_whoever_dials_it(
    rig: Rig, ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path, "other")
    told, logged = await refusal(rig, member_tls(ca.files("here")), member_tls(other.files("there")), caplog)
    assert "its certificate is of another CA than our --tls-ca" in told.text
    assert "it does not accept our certificate, which is of another CA" in logged


async def test_a_member_of_another_ca_is_refused_by_whom_it_dials(
    rig: Rig, ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strange = replace(Authority(tmp_path, "other").files("here"), ca=ca.path)
    told, logged = await refusal(rig, unchecked(strange), member_tls(ca.files("there")), caplog)
    assert "it does not accept our certificate" in told.text
    assert "its certificate is of another CA than our --tls-ca" in logged


async def test_a_certificate_that_has_expired_is_refused_on_either_side(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_rig() as rig:
        told, logged = await refusal(
            rig, unchecked(ca.expired("here")), member_tls(ca.files("there")), caplog
        )
        assert "does not accept our certificate, which has expired" in told.text
        assert "its certificate has expired: renew it there" in logged
    caplog.clear()
    async with open_rig() as rig:
        told, logged = await refusal(
            rig, member_tls(ca.files("here")), unchecked(ca.expired("there")), caplog
        )
        assert "its certificate has expired: renew it there" in told.text
        assert "does not accept our certificate, which has expired" in logged


async def test_a_plain_dialler_at_a_port_of_tls_is_told_so(
    rig: Rig, ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    told, logged = await refusal(rig, None, member_tls(ca.files("there")), caplog)
    assert "it speaks TLS only: give --tls-ca" in told.text
    assert WITHOUT_TLS in logged


async def test_a_dialler_with_tls_at_a_plain_port_is_told_so(
    rig: Rig, ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    told, logged = await refusal(rig, member_tls(ca.files("here")), None, caplog)
    assert "it speaks without TLS: start it with --tls-cert and --tls-key" in told.text
    assert "it dials with TLS, which this member does not speak" in logged


async def test_a_tls_port_that_answers_with_an_alert_is_known_for_one(rig: Rig) -> None:
    async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(bytes.fromhex("15030300020246"))
        writer.close()

    server = await asyncio.start_server(alert, "127.0.0.1", 0)
    here = await rig.peer()
    place = NodeAddress(here.endpoint.node_id, "127.0.0.1", server.sockets[0].getsockname()[1])
    other = await rig.peer()
    with pytest.raises(SecurityError, match="it speaks TLS only"):
        await other.endpoint.dial(place)
    server.close()


async def test_a_port_that_hangs_up_on_tls_is_named(rig: Rig, ca: Authority) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    here = await rig.peer(tls=member_tls(ca.files("here")))
    place = NodeAddress((await rig.peer()).endpoint.node_id, "127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(SecurityError, match="it may be started without --tls-cert"):
        await here.endpoint.dial(place)
    server.close()


async def test_a_node_is_reached_through_its_sentinel_under_tls(rig: Rig, ca: Authority) -> None:
    sentinel = await rig.sentinel(tls=member_tls(ca.files("sentinel")))
    hidden = await rig.hidden(sentinel, tls=member_tls(ca.files("hidden")))
    here = await rig.peer(tls=guest_tls(ca.files("gateway")))
    link = await here.endpoint.dial(hidden.address)
    assert link.is_relayed
    await link.send(step(b"y" * 200_000))
    assert await hidden.inbox.receive() == [step(b"y" * 200_000)]


async def test_a_renewed_certificate_is_shown_from_the_next_link_on(rig: Rig, ca: Authority) -> None:
    tls = member_tls(ca.files("there"))
    assert tls is not None
    there = await rig.peer(tls=tls)
    before = await _serial(there.address)
    watching = asyncio.create_task(tls.watch(0.02, 0.02))
    here = await rig.peer(tls=member_tls(ca.files("here")))
    link = await here.endpoint.dial(there.address)
    ca.files("there")
    async with asyncio.timeout(5):
        while await _serial(there.address) == before:
            await asyncio.sleep(0.02)
    assert await link.ping() > 0  # what was open goes on
    await cancelled(watching)


async def _serial(address: NodeAddress) -> bytes | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return found
    finally:
        writer.close()


async def test_whoever_dawdles_in_the_tls_handshake_is_cut_and_counted(rig: Rig, ca: Authority) -> None:
    there = await rig.peer(
        tls=member_tls(ca.files("there")), limits=Limits(handshake_timeout_s=0.3, max_half_open=3)
    )
    opened = [await asyncio.open_connection(there.address.host, there.address.port) for _ in range(3)]
    await asyncio.sleep(0.05)
    refused, writer = await asyncio.open_connection(there.address.host, there.address.port)
    assert await refused.read() == b""  # the places are taken, before a handshake begins
    writer.close()
    _, writer = opened[0]
    writer.write(bytes.fromhex("16030100"))  # a beginning
    async with asyncio.timeout(2):
        for reader, writer in opened:
            assert await reader.read() == b""
            writer.close()
    here = await rig.peer(tls=member_tls(ca.files("here")))
    assert await (await here.endpoint.dial(there.address)).ping() > 0


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"z" * 3000, b"SSH-2.0\r\n"],
)
async def test_garbage_is_one_line_in_the_log_and_no_traceback(
    rig: Rig, ca: Authority, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    there = await rig.peer(tls=member_tls(ca.files("there")))
    caplog.set_level(logging.INFO, "routing")
    for _ in range(3):
        reader, writer = await asyncio.open_connection(there.address.host, there.address.port)
        writer.write(garbage)
        writer.write_eof()
        await reader.read()
        writer.close()
    assert not [record for record in caplog.records if record.exc_info]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1  # of one party, once a minute


async def test_what_leaves_together_leaves_in_one_write_and_one_record(rig: Rig, ca: Authority) -> None:
    here, there = await rig.peer(tls=member_tls(ca.files("a"))), await rig.peer(tls=member_tls(ca.files("b")))
    link = await here.endpoint.dial(there.address)
    await link.ping()
    secured: Any = getattr(link._carrier.websocket, "_transport")  # noqa: B009 - of this kind of socket alone
    transport, writes = secured._transport, list[bytes]()

    class Counting:
        def write(self, sealed: bytes) -> None:
            writes.append(sealed)
            transport.write(sealed)

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

    secured._transport = Counting()
    for number in range(1, 9):
        link.post(step(number=number))
    await there.inbox.receive(8)
    assert len(writes) == 1
    assert int.from_bytes(writes[0][3:5]) + 5 == len(writes[0])  # one record


def test_links_under_tls_run_on_uvloop(ca: Authority) -> None:
    async def over_both() -> None:
        async with open_rig() as rig:
            sentinel = await rig.sentinel(tls=member_tls(ca.files("sentinel")))
            hidden = await rig.hidden(sentinel, tls=member_tls(ca.files("hidden")))
            here = await rig.peer(tls=guest_tls(ca.files("gateway")))
            link = await here.endpoint.dial(hidden.address)
            await link.send(step(b"z" * 500_000))
            assert await hidden.inbox.receive() == [step(b"z" * 500_000)]
            plain = await rig.peer()
            with pytest.raises(SecurityError, match="it speaks TLS only"):
                await plain.endpoint.dial(sentinel.address)
            strange = await rig.peer(tls=guest_tls(TlsFiles(ca=ca.path)))
            with pytest.raises(SecurityError, match="it asks for a certificate"):
                await strange.endpoint.dial(sentinel.address)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(over_both())


async def test_what_went_wrong_on_another_connection_does_not_end_this_one(rig: Rig, ca: Authority) -> None:
    here, there = await rig.peer(tls=member_tls(ca.files("a"))), await rig.peer(tls=member_tls(ca.files("b")))
    link = await here.endpoint.dial(there.address)
    for _ in range(5):
        _leave_an_error(ca)
        assert await link.ping() > 0
    assert not here.inbox.ends


def _leave_an_error(ca: Authority) -> None:
    """Shut a connection down whose peer has sent an alert: OpenSSL keeps that for whoever asks next."""
    accept = contexts_of(ca.files("c")).accept
    assert accept is not None
    dial = ssl.create_default_context(cafile=str(ca.path))
    dial.check_hostname = False
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = dial.wrap_bio(back, there), accept.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLError):  # in the end: no certificate was shown
                end.do_handshake()
    client.unwrap()
