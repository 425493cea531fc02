"""Fetching for a request: only from hosts that are allowed, never from our own network, bounded in size and time."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.api.errors import ApiError
from app.api.media_parts import AT_ONCE, FETCHING_AT_ONCE, MediaIntake, MediaLimits
from app.api.messages import ChatMessage
from app.api.public_address import is_public
from app.api.remote_media import MAX_HOPS, RemoteMedia
from app.media.errors import UnusableMediaError
from tests.app.test_picture_in import encoded, half_red

PICTURE = b"\x89PNG and so on"


@dataclass
class Host:
    """A web server on loopback that stands for one on the internet. `pages`: path -> the whole answer."""

    port: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)  # of requests
    pause_s: float = 0.0  # before each byte of a body

    def url(self, path: str = "/a.png", name: str = "pictures.example") -> str:
        return f"http://{name}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        answer = self.pages.get(head.split()[1], b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        try:
            start, end, body = answer.partition(b"\r\n\r\n")
            writer.write(start + end)
            if not self.pause_s:
                writer.write(body)
            for byte in body if self.pause_s else b"":
                await writer.drain()
                await asyncio.sleep(self.pause_s)
                writer.write(bytes([byte]))
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def host() -> AsyncIterator[Host]:
    made = Host()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def moved(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def names(**addresses: str) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    """What the resolver would say; a name may have several, and asking again may give another answer."""
    asked: dict[str, int] = {}

    async def resolve(name: str, port: int) -> Sequence[str]:
        answers = addresses[name.partition(".")[0]].split("|")
        asked[name] = asked.get(name, -1) + 1
        return answers[min(asked[name], len(answers) - 1)].split(",")

    return resolve


def loopback_as_internet(*others: str) -> Callable[[Any], bool]:
    """The address where the test's server is counts as public; nothing else that is not."""
    return lambda address: str(address) == "127.0.0.1" or is_public(address)


def remote(*allowed: str, **options: Any) -> RemoteMedia:
    options.setdefault("resolve", names(pictures="127.0.0.1"))
    options.setdefault("is_public", loopback_as_internet())
    return RemoteMedia(frozenset(allowed), **options)


async def refusal(fetching: RemoteMedia, url: str) -> str:
    with pytest.raises(UnusableMediaError) as caught:
        await fetching.fetch(url)
    return str(caught.value)


async def test_an_allowed_host_is_asked_by_its_own_name() -> None:
    async with host() as there:
        there.pages["/a.png"] = ok(PICTURE)
        assert await remote("pictures.example").fetch(there.url()) == PICTURE
        assert f"Host: pictures.example:{there.port}" in there.heads[0]


async def test_nothing_is_fetched_unless_hosts_are_allowed() -> None:
    async with host() as there:
        assert "fetches nothing" in await refusal(remote(), there.url())
        assert "from that host" in await refusal(remote("other.example"), there.url())
        assert there.heads == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://pictures.example/a",
        "file:///etc/passwd",
        "gopher://pictures.example/",
        "http://",
        "http:///a.png",
        "http://user:secret@pictures.example/a.png",
        "http://pictures.example@127.0.0.1/",
        "http://pictures.example:99999/",
        "http://pictures.example:0/",
        "http://[::1/",
        "http://pictures.example/" + "a" * 5000,
        "http://pictures.example/\r\nX: y",
    ],
)
async def test_odd_urls_are_refused_and_not_quoted(url: str) -> None:
    text = await refusal(remote("any"), url)
    assert "secret" not in text
    assert "passwd" not in text


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.0.0.1",
        "172.16.5.5",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "192.0.2.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "fec0::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)
async def test_names_of_our_own_network_are_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    own = remote("any", resolve=names(pictures=address), is_public=is_public)
    assert "not on the public internet" in await refusal(own, "http://pictures.example/a.png")


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


async def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    own = remote("any", resolve=names(pictures="93.184.216.34,10.0.0.1"), is_public=is_public)
    assert "public internet" in await refusal(own, "http://pictures.example/a.png")


@pytest.mark.parametrize("host_name", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f000001"])
async def test_loopback_is_refused_however_it_is_written(host_name: str) -> None:
    async with host() as there:
        fetching = RemoteMedia(frozenset({"any"}))  # with the real resolver
        await refusal(fetching, f"http://{host_name}:{there.port}/a.png")
        assert there.heads == []


async def test_a_redirection_to_loopback_is_refused_where_it_points() -> None:
    async with host() as there:
        there.pages["/a.png"] = moved(f"http://inside.example:{there.port}/secret")
        there.pages["/secret"] = ok(b"the secret")
        own = remote("any", resolve=names(pictures="127.0.0.1", inside="127.0.0.2"))
        assert "public internet" in await refusal(own, there.url())
        assert len(there.heads) == 1


async def test_a_redirection_to_a_host_that_is_not_allowed_is_refused() -> None:
    async with host() as there:
        there.pages["/a.png"] = moved("http://other.example/b.png")
        assert "from that host" in await refusal(remote("pictures.example"), there.url())


async def test_redirections_within_allowed_hosts_are_followed_but_not_for_ever() -> None:
    async with host() as there:
        there.pages["/a.png"] = moved("/b.png")
        there.pages["/b.png"] = ok(PICTURE)
        assert await remote("pictures.example").fetch(there.url()) == PICTURE
        there.pages["/b.png"] = moved("/a.png")
        assert "redirections" in await refusal(remote("pictures.example"), there.url())
        assert len(there.heads) == 2 + MAX_HOPS


async def test_a_name_that_changes_its_address_gains_nothing() -> None:
    """The connection goes to the address that was checked: the name is asked once for each hop."""
    async with host() as there:
        there.pages["/a.png"] = ok(PICTURE)
        own = remote("pictures.example", resolve=names(pictures="127.0.0.1|10.0.0.1"))
        assert await own.fetch(there.url()) == PICTURE


@pytest.mark.parametrize("told", [True, False])
async def test_what_is_too_large_is_not_read_to_its_end(told: bool) -> None:
    async with host() as there:
        body = bytes(1 << 20)
        there.pages["/a.png"] = ok(body, *([f"Content-Length: {len(body)}"] if told else []))
        assert "larger than 1000 bytes" in await refusal(
            remote("pictures.example", max_bytes=1000), there.url()
        )


async def test_who_sends_a_byte_now_and_then_is_left() -> None:
    async with host() as there:
        there.pages["/a.png"] = ok(bytes(1000))
        there.pause_s = 0.05
        text = await refusal(remote("pictures.example", timeout_s=0.3), there.url())
        assert "within 0.3 s" in text


async def test_an_answer_that_is_no_file_is_told_by_its_number() -> None:
    async with host() as there:
        assert "answered 404" in await refusal(remote("pictures.example"), there.url("/none"))


async def test_nobody_there_is_told_without_the_address() -> None:
    text = await refusal(remote("pictures.example"), "http://pictures.example:1/a.png")
    assert "cannot be fetched" in text
    assert "127.0.0.1" not in text


async def test_a_name_without_address_is_refused() -> None:
    async def nowhere(name: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    assert "no address" in await refusal(remote("any", resolve=nowhere), "http://pictures.example/a")


class Eyes:
    """What an engine says of itself that takes pictures."""

    sampling_rate = 16_000
    max_recording_s = 30.0

    def why_not(self, sense: str) -> str:
        return ""


def shown(*urls: str) -> list[ChatMessage]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [ChatMessage.model_validate({"role": "user", "content": parts})]


def intake_from(fetching: RemoteMedia) -> MediaIntake:
    return MediaIntake(MediaLimits(16, 1 << 20, 1 << 20, 30.0), fetching)


async def test_slow_hosts_hold_nobody_up_who_sends_a_picture() -> None:
    async with host() as there:
        there.pages["/slow"] = ok(bytes(1000))
        there.pause_s = 1.0
        intake = intake_from(remote("pictures.example", timeout_s=30.0))

        async def look(url: str) -> Any:
            async with intake.taken(shown(url), "model", Eyes()) as media:
                return media[0][0].size

        slow = [
            asyncio.create_task(look(there.url("/slow"))) for _ in range(max(AT_ONCE, FETCHING_AT_ONCE) + 1)
        ]
        while len(there.heads) < AT_ONCE:
            await asyncio.sleep(0.01)
        sent = "data:image/png;base64," + base64.b64encode(encoded(half_red(), "PNG")).decode()
        assert await asyncio.wait_for(look(sent), 10.0) == (40, 20)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_all_urls_of_a_request_share_one_time_and_one_size() -> None:
    async with host() as there:
        picture = encoded(half_red(), "PNG")
        for number in range(8):
            there.pages[f"/{number}"] = ok(picture)
        urls = [there.url(f"/{number}") for number in range(8)]
        small = intake_from(remote("pictures.example", max_bytes=3 * len(picture)))
        with pytest.raises(ApiError, match="larger than") as caught:
            async with small.taken(shown(*urls), "model", Eyes()):
                pass
        assert caught.value.param == "messages.0.content.3.image_url"
        there.pause_s = 0.3 / len(picture)
        hasty = intake_from(remote("pictures.example", timeout_s=1.0))
        began = time.monotonic()
        with pytest.raises(ApiError, match="not sent within"):
            async with hasty.taken(shown(*urls), "model", Eyes()):
                pass
        assert time.monotonic() - began < 2.0


async def test_the_same_url_twice_is_fetched_once() -> None:
    async with host() as there:
        there.pages["/a.png"] = ok(encoded(half_red(), "PNG"))
        intake = intake_from(remote("pictures.example"))
        async with intake.taken(shown(there.url(), there.url()), "model", Eyes()) as media:
            assert [media[0][place].size for place in (0, 1)] == [(40, 20)] * 2
        assert len(there.heads) == 1


async def test_what_is_fetched_reaches_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with host() as there:
        there.pages["/a.png?key=hush"] = ok(PICTURE)
        assert await remote("pictures.example").fetch(there.url("/a.png?key=hush")) == PICTURE
    assert "hush" not in caplog.text
    assert "a.png" not in caplog.text
