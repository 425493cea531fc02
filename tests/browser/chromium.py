"""Headless Chromium over its DevTools protocol: one tab, driven as a person does, and everything that it says.

Debian's `chromium`, or what CHROMIUM names. No other package than `websockets`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers; the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
START_S = 60.0
WAIT_S = 30.0  # machines are shared
POLL_S = 0.05
KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    "Home": (36, ""),
    " ": (32, " "),
}
SHIFT = 8


def find_chromium() -> str | None:
    """The browser's path; None where there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Tab:
    """One page. `errors` are exceptions, console errors and failed loads; `addresses` all that was asked for.

    `bodies` are what was sent, as far as it is text.
    """

    connection: ClientConnection
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def listen(self) -> None:
        """Take in what the browser says, until the connection ends."""
        async for text in self.connection:
            told = json.loads(text)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                said = details.get("exception", {}).get("description")
                self.errors.append(str(said or details["text"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.errors.append(
                    " ".join(str(one.get("value", one.get("description"))) for one in told["args"])
                )
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.addresses.append(told["request"]["url"])
                self.bodies.append(told["request"].get("postData", ""))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.connection.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(WAIT_S):
            told = await answer
        assert "error" not in told, told
        return dict(told["result"])

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        told = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def waits(self, script: str, *, within_s: float = WAIT_S) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(within_s):
                while not await self.run(f"Boolean({script})"):  # an element itself comes back as nothing
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"never true: {script}; the page says: {await self.text()}") from None

    async def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Load a page at this size and colour scheme."""
        await self.resize(width, height)
        await self.scheme(dark=dark)
        await self.send("Page.navigate", url=url)
        await self.waits("document.readyState === 'complete'")

    async def resize(self, width: int, height: int) -> None:
        narrow = width < 600
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if narrow else 1,
            mobile=narrow,
        )

    async def scheme(self, *, dark: bool, still: bool = False) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        features += [{"name": "prefers-reduced-motion", "value": "reduce"}] if still else []
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def write(self, text: str) -> None:
        """Type text into what has the focus."""
        for character in text:
            if character == "\n":
                await self.press("Enter", modifiers=SHIFT)
            else:
                await self.send("Input.dispatchKeyEvent", type="char", text=character)

    async def press(self, name: str, *, modifiers: int = 0) -> None:
        code, text = KEYS[name]
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def tab_to(self, selector: str, *, most: int = 60) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(most):
            if await self.run(f"document.activeElement.matches({selector!r})"):
                return
            await self.press("Tab")
        raise AssertionError(f"Tab never reaches {selector}")

    async def choose_files(self, selector: str, *paths: Path) -> None:
        """What the system's file dialog would give."""
        document = await self.send("DOM.getDocument")
        found = await self.send("DOM.querySelector", nodeId=document["root"]["nodeId"], selector=selector)
        await self.send("DOM.setFileInputFiles", nodeId=found["nodeId"], files=[str(path) for path in paths])

    async def text(self, selector: str = "body") -> str:
        """What is written there."""
        return str(await self.run(f"document.querySelector({selector!r})?.innerText ?? ''"))

    async def picture(self, path: Path) -> None:
        """A screenshot."""
        told = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))

    def outside(self, url: str) -> list[str]:
        """What was asked of anybody else than the page's own origin."""
        own = urlsplit(url).netloc
        return [
            one
            for one in self.addresses
            if urlsplit(one).scheme not in ("data", "blob", "chrome", "about") and urlsplit(one).netloc != own
        ]


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Tab]:
    """A browser with one empty tab and a profile of its own, gone at the end."""
    path = find_chromium()
    assert path is not None, "there is no Chromium here"
    profile = folder / "profile"
    process = await asyncio.create_subprocess_exec(
        path,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        url = await _address(profile / "DevToolsActivePort")
        async with connect(url, max_size=64 << 20) as connection:
            tab = Tab(connection)
            listening = asyncio.create_task(tab.listen())
            try:
                for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
                    await tab.send(f"{domain}.enable")
                yield tab
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        await process.wait()


async def _address(port_file: Path) -> str:
    """Where the first tab is driven, once the browser says where it listens."""
    import httpx

    async with asyncio.timeout(START_S):
        while not port_file.exists() or "\n" not in port_file.read_text():
            await asyncio.sleep(POLL_S)
        port = port_file.read_text().split("\n", maxsplit=1)[0]
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                pages = [
                    one
                    for one in (await http.get(f"http://127.0.0.1:{port}/json")).json()
                    if one["type"] == "page"
                ]
                if pages:
                    return str(pages[0]["webSocketDebuggerUrl"])
                await asyncio.sleep(POLL_S)
