"""Pictures and recordings behind http(s) URLs, fetched for a request: off unless hosts are allowed.

A URL must not become a way into the gateway's own network. Every hop is checked again: its scheme, its host against
the list, and every address that the name has; the connection then goes to an address that was checked, so a name that
answers differently the next time gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from app.api.public_address import IPAddress, is_public
from app.media.errors import UnusableMediaError

for _name in ("httpx", "httpcore"):  # below, they write down whole URLs
    logging.getLogger(_name).setLevel(logging.WARNING)

ANY: Final = "any"
MAX_HOPS: Final = 4
TIMEOUT_S: Final = 20.0  # for the whole of it, hops and names included
CONNECT_S: Final = 5.0
MAX_BYTES: Final = 32 << 20
MAX_URL: Final = 4096
PORTS: Final = {"http": 80, "https": 443}
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return every address of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


@dataclass(frozen=True, slots=True)
class RemoteMedia:
    """Fetches what lies behind URLs of the `allowed` hosts, or of all with `any`. Without hosts it refuses each."""

    allowed: frozenset[str]
    max_bytes: int = MAX_BYTES
    timeout_s: float = TIMEOUT_S
    resolve: Resolve = field(default=resolve, repr=False)
    is_public: Callable[[IPAddress], bool] = field(default=is_public, repr=False)

    async def fetch(self, url: str) -> bytes:
        """Return the bytes behind a URL. Raises UnusableMediaError, whose text quotes nothing of it but the host."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._follow(url)
        except TimeoutError:
            raise UnusableMediaError(f"it was not sent within {self.timeout_s:.2g} s") from None
        except httpx.HTTPError as error:
            raise UnusableMediaError(f"it cannot be fetched ({type(error).__name__})") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(MAX_HOPS):
            target = self._checked(url)
            found = await self._get(target, await self._address(target))
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise UnusableMediaError(f"it is behind more than {MAX_HOPS} redirections")

    def _checked(self, url: str) -> SplitResult:
        """Take a URL apart whose scheme and host are allowed."""
        if not self.allowed:
            raise UnusableMediaError("this gateway fetches nothing: send a data: URI")
        try:
            target = urlsplit(url) if len(url) <= MAX_URL and url.isprintable() else None
            is_fit = (
                target is not None and target.scheme in PORTS and bool(target.hostname) and _port(target) > 0
            )
        except ValueError:
            target, is_fit = None, False
        if target is None or not is_fit or "@" in target.netloc:
            raise UnusableMediaError("this is no plain http or https URL")
        host = str(target.hostname).rstrip(".")
        if ANY not in self.allowed and host not in self.allowed:
            raise UnusableMediaError("this gateway fetches nothing from that host")
        return target

    async def _address(self, target: SplitResult) -> IPAddress:
        """Return an address of the host, all of which are public."""
        try:
            found = await self.resolve(str(target.hostname), _port(target))
            addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found]
        except (OSError, ValueError):  # UnicodeError is one, for names that are none
            addresses = []
        if not addresses:
            raise UnusableMediaError("its host has no address")
        if not all(map(self.is_public, addresses)):
            raise UnusableMediaError("its host is not on the public internet")
        return addresses[0]

    async def _get(self, target: SplitResult, address: IPAddress) -> bytes | str:
        """Ask the host at one address: the body or, of a redirection, where to."""
        host = f"[{address}]" if address.version == 6 else str(address)
        pinned = target._replace(netloc=f"{host}:{_port(target)}", fragment="")
        headers = {"Host": target.netloc, "Accept-Encoding": "identity", "User-Agent": "diffuse"}
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_S)
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=timeout) as client,
            client.stream(
                "GET", pinned.geturl(), headers=headers, extensions={"sni_hostname": str(target.hostname)}
            ) as response,
        ):
            if response.status_code in REDIRECTS and (location := response.headers.get("location")):
                return str(location)
            if response.status_code != httpx.codes.OK:
                raise UnusableMediaError(f"its host answered {response.status_code}")
            return await self._read(response)

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the body as it was sent, no more than is allowed of it."""
        told = response.headers.get("content-length", "")
        body = bytearray()
        if told.isdecimal() and int(told) > self.max_bytes:
            raise self._too_large()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > self.max_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> UnusableMediaError:
        return UnusableMediaError(f"it is larger than {self.max_bytes} bytes")


def _port(target: SplitResult) -> int:
    return PORTS[target.scheme] if target.port is None else target.port
