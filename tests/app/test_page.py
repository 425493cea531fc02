"""The page as HTTP gives it: whole, closed to everybody else's resources, and open without a key."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.app.conftest import Serve
from tests.support.api_server import Served


class Found(HTMLParser):
    """What a document refers to, and what of it a policy against inline code would stop."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []
        self.ids: set[str] = set()
        self.named: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attributes}
        self.ids |= {told["id"]} if "id" in told else set()
        self.named += [told[name] for name in ("for", "aria-labelledby", "aria-controls") if name in told]
        self.files += [
            told[name] for name in ("src", "href") if name in told and not told[name].startswith("#")
        ]
        self.inline += [name for name in told if name.startswith("on") or name == "style"]
        self.inline += ["script"] if tag == "script" and "src" not in told else []


async def page(served: Served) -> Found:
    found = Found()
    found.feed((await served.http.get("/")).text)
    return found


async def test_the_page_allows_nothing_from_elsewhere(served: Served) -> None:
    response = await served.http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "x-request-id" in response.headers


async def test_every_file_it_names_is_here_and_nothing_is_inline(served: Served) -> None:
    found = await page(served)
    assert found.inline == []
    assert found.files
    waiting, seen = list(found.files), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        assert name.startswith("page/"), "relative, so that a proxy may put the page below a path"
        response = await served.http.get(f"/{name}")
        assert response.status_code == 200, name
        assert response.headers["content-security-policy"]
        if name.endswith(".js"):
            assert response.headers["content-type"] == "text/javascript; charset=utf-8"
            waiting += [f"page/{other}" for other in re.findall(r'from "\./([\w.]+)"', response.text)]
            assert "innerHTML" not in response.text
            assert "eval(" not in response.text
        addresses = re.findall(r"https?://[\w.]+", response.text)
        assert set(addresses) <= {"http://www.w3.org"}, "names of vocabularies are no requests"
    assert "page/markdown.js" in seen


async def test_labels_name_what_is_there(served: Served) -> None:
    found = await page(served)
    assert set(found.named) <= found.ids


async def test_it_is_open_where_the_api_needs_a_key(serve: Serve) -> None:
    async with serve(api_keys="secret") as served:
        assert (await served.http.get("/")).status_code == 200
        assert (await served.http.get("/page/main.js")).status_code == 200
        assert (await served.http.post("/")).status_code == 401
        assert (await served.http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("name", ["none.js", "..%2Fmain.py", "%2e%2e/settings.py", "index.html/x", ""])
async def test_only_the_pages_own_files_are_there(served: Served, name: str) -> None:
    response = await served.http.get(f"/page/{name}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_an_unchanged_file_is_not_sent_again(served: Served) -> None:
    first = await served.http.get("/page/page.css")
    again = await served.http.get("/page/page.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = await served.http.head("/")
    assert (head.status_code, head.content) == (200, b"")


async def test_a_foreign_host_gets_no_page(served: Served) -> None:
    assert (await served.http.get("/", headers={"host": "evil.example"})).status_code == 403
