"""The page in a real browser, over a gateway whose engines make everything up."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.engine.tokenizer import ChatTokenizer
from tests.browser.chromium import Tab, chromium, find_chromium
from tests.browser.swarm import engines
from tests.support.api_server import Served, serve_engines
from tests.support.tiny_tokenizer import write_tiny_tokenizer

IDLE = "document.querySelector('#stop').hidden && !document.querySelector('[aria-busy]')"
NODES = "document.querySelectorAll('#route .node').length"


@dataclass
class Page:
    """A tab that shows the page of a gateway."""

    tab: Tab
    served: Served

    async def begins(self, *, hops: int = 3, **view: int | bool) -> None:
        """Load it, and wait until the route is there."""
        await self.tab.open(f"{self.served.url}/", **view)  # type: ignore[arg-type]
        await self.tab.waits(f"{NODES} === {hops}")

    async def asks(self, text: str) -> None:
        """Type into what has the focus, and send."""
        assert await self.tab.run("document.activeElement.id") == "prompt"
        await self.tab.write(text)
        await self.tab.press("Enter")

    async def takes(self, model: str) -> None:
        """Choose a model by its name, from the keyboard."""
        await self.tab.run("document.querySelector('#model').focus()")
        names = await self.tab.run("[...document.querySelector('#model').options].map((one) => one.value)")
        await self.tab.press("Home")
        for _ in range(names.index(model)):
            await self.tab.press("ArrowDown")
        await self.tab.waits(f"document.querySelector('#model').value === {model!r}")
        await self.tab.waits(f"document.querySelector('.pick[aria-pressed=true]')?.dataset.id === {model!r}")
        await self.tab.run("document.querySelector('#prompt').focus()")

    async def is_over(self) -> None:
        await self.tab.waits(IDLE)

    async def answer(self) -> str:
        """The text of the last answer."""
        return str(await self.tab.run("[...document.querySelectorAll('.answer')].at(-1).innerText"))

    async def shows(self, name: str) -> None:
        """Keep a picture for people to look at, where BROWSER_PICTURES says."""
        if folder := os.environ.get("BROWSER_PICTURES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            await self.tab.picture(Path(folder) / f"{name}.png")

    def is_clean(self) -> None:
        """Nothing went wrong in the browser, and nobody else was asked for anything."""
        assert self.tab.errors == []
        assert self.tab.outside(self.served.url) == []


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    if find_chromium() is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    async with chromium(tmp_path) as opened:
        yield opened


@pytest.fixture
async def page(tab: Tab, tokenizer: ChatTokenizer) -> AsyncIterator[Page]:
    async with serve_engines(*engines(tokenizer, pause_s=0.01)) as served:
        yield Page(tab, served)
