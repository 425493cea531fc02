"""Commands that ask a gateway by https: what they trust, and what they say where they do not."""

from __future__ import annotations

import asyncio
import contextlib
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api import secured_connection
from routing.tls_files import TlsFiles
from tests.cli.conftest import Diffuse, FakeGateway
from tests.support.certificates import Authority


@contextlib.contextmanager
def over_tls(gateway: FakeGateway, files: TlsFiles) -> Iterator[str]:
    """The URL of a port that speaks TLS and passes on to the gateway."""
    assert files.cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    plain_port = int(gateway.url.split(":")[2].split("/")[0])
    ready, told = threading.Event(), list[int]()
    loop = asyncio.new_event_loop()
    ends = asyncio.Event()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_connection("127.0.0.1", plain_port)
        await asyncio.gather(_pump(reader, far), _pump(near, writer))

    async def run() -> None:
        server = await asyncio.start_server(join, "127.0.0.1", 0, ssl=context)
        told.append(server.sockets[0].getsockname()[1])
        ready.set()
        await ends.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait(5)
    try:
        yield f"https://127.0.0.1:{told[0]}"
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while content := await reader.read(65536):
            writer.write(content)
    writer.close()


def test_a_ca_of_ones_own_is_named(diffuse: Diffuse, gateway: FakeGateway, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    gateway.says("Hello")
    with over_tls(gateway, ca.files("gateway")) as url:
        result = diffuse("query", "--prompt", "Hi", "--url", url, "--tls-ca", str(ca.path))
        assert (result.exit_code, result.stdout) == (0, "Hello\n"), result.stderr
        assert diffuse("models", "--url", url, "--tls-ca", str(ca.path)).exit_code == 0
        unknown = diffuse("query", "--prompt", "Hi", "--url", url)
    assert unknown.exit_code == 1
    assert "who signed its certificate is not trusted here: give that CA with --tls-ca" in unknown.stderr


@pytest.mark.parametrize("is_expired", [False, True])
def test_a_certificate_of_another_name_or_time_is_called_so(
    diffuse: Diffuse, gateway: FakeGateway, tmp_path: Path, is_expired: bool
) -> None:
    ca = Authority(tmp_path)
    files = ca.expired("gateway") if is_expired else ca.files("gateway")
    with over_tls(gateway, files) as url:
        place = url if is_expired else url.replace("127.0.0.1", "localhost")
        result = diffuse("query", "--prompt", "Hi", "--url", place, "--tls-ca", str(ca.path))
    words = "its certificate has expired" if is_expired else "its certificate is for another name"
    assert words in result.stderr


def test_a_ca_file_that_will_not_do_is_named(diffuse: Diffuse, gateway: FakeGateway, tmp_path: Path) -> None:
    result = diffuse(
        "query", "--prompt", "Hi", "--url", "https://127.0.0.1:9", "--tls-ca", str(tmp_path / "no")
    )
    assert result.exit_code == 1
    assert "--tls-ca" in result.stderr
    assert "No such file" in result.stderr


def test_doctor_says_how_long_our_certificate_is_good(diffuse: Diffuse, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    files = ca.expired("doctor")
    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(ca.path))
    assert "has expired on" in diffuse("doctor", "--port", "0", *flags).stdout
    ca.files("doctor")
    assert "more days" in diffuse("doctor", "--port", "0", *flags).stdout


def test_doctor_knows_a_gateway_that_serves_https(diffuse: Diffuse) -> None:
    class Reply(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(secured_connection._PLAIN_REPLY)

    with socketserver.TCPServer(("127.0.0.1", 0), Reply) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        told = diffuse("doctor", "--port", str(server.server_address[1])).stdout
        thread.join()
    assert "a gateway serves HTTPS there" in told
