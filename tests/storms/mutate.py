"""Requests made from valid ones by chance: other values, other shapes, other bytes, other heads. Seeded."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.storms.bodies import BODIES
from tests.storms.oddities import HEADERS, METHODS, NUMBERS, PATH_BITS, QUERIES, RAW_VALUES, SHAPES, TEXTS
from tests.storms.seeds import BOUNDARY, FORMS, HOST, PAGES, Part, form, page, posted
from tests.storms.wire import Sent


@dataclass
class Mutator:
    """Makes requests, one after another."""

    chance: random.Random

    def request(self) -> Sent:
        """A request that begins from a valid one; one in sixteen stays valid."""
        kind = self.chance.random()
        if kind < 0.62:
            sent = self._json()
        elif kind < 0.78:
            sent = self._form()
        else:
            sent = page(*self.chance.choice(PAGES))
            sent = self._elsewhere(sent) if self.chance.random() < 0.8 else sent
        if self.chance.random() < 0.15:
            sent = self._elsewhere(sent)
        return self._head(sent) if self.chance.random() < 0.25 else sent

    # Bodies -----------------------------------------------------------------------------------------------------

    def _json(self) -> Sent:
        path, seed = self.chance.choice(BODIES)
        if self.chance.random() < 0.06:
            path = self.chance.choice(BODIES)[0]  # of another route
        body = copy.deepcopy(seed)
        for _ in range(self.chance.choice((0, 1, 1, 1, 1, 2, 2, 3, 6))):
            self._mutate(body)
        sent = posted(path, body)
        fate = self.chance.random()
        if fate < 0.12:
            return replace(sent, body=self._spoilt(sent.body))
        return replace(sent, body=self._with_raw(body)) if fate < 0.24 else sent

    def _mutate(self, body: dict[str, Any]) -> None:
        holder, key = self.chance.choice(_places(body) or [({"": 1}, "")])
        match self.chance.randrange(8):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 0:
                holder.pop(key)
            case 1:
                holder[key] = [holder[key]] * self.chance.choice((1, 2, 40))
            case 2:
                holder[key] = {self.chance.choice(("type", "text", "content", "a")): holder[key]}
            case 3 if isinstance(holder, dict):
                holder[self.chance.choice((*_names(), *TEXTS[:20]))] = self.value()
            case 4:
                other, name = self.chance.choice(_places(self.chance.choice(BODIES)[1]))
                holder[key] = copy.deepcopy(other[name])
            case _:
                holder[key] = self.value()

    def value(self) -> Any:
        """Something that some field somewhere does not expect."""
        kinds: tuple[Sequence[Any], ...] = (TEXTS, NUMBERS, SHAPES)
        return copy.deepcopy(self.chance.choice(self.chance.choice(kinds)))

    def _with_raw(self, body: dict[str, Any]) -> bytes:
        """A text in the place of one value that is no JSON, or that `json.dumps` would not write."""
        body.setdefault("user", "")
        holder, key = self.chance.choice(_places(body))
        mark = "@@raw@@"
        holder[key] = mark
        return json.dumps(body).encode().replace(f'"{mark}"'.encode(), self.chance.choice(RAW_VALUES), 1)

    def _spoilt(self, raw: bytes) -> bytes:
        at = self.chance.randrange(len(raw) + 1)
        match self.chance.randrange(10):
            case 0:
                return raw[:at]
            case 1:
                return raw[:at] + self.chance.randbytes(self.chance.randint(1, 40)) + raw[at:]
            case 2:
                return raw[:at] + bytes([self.chance.randrange(256)]) + raw[at + 1 :]
            case 3:
                return raw.decode().encode(self.chance.choice(("utf-16", "utf-32", "utf-7")))
            case 4:
                return b"\xef\xbb\xbf" + raw
            case 5:
                return raw + self.chance.choice((b"}", b"\x00", b"{}", raw, b" " * 10_000))
            case 6:
                return gzip.compress(raw)
            case 7:
                return self.chance.randbytes(self.chance.choice((0, 1, 100, 10_000)))
            case 8:
                return self.chance.choice(RAW_VALUES)
            case _:
                return raw[at:] + raw[:at]

    def _form(self) -> Sent:
        path, parts = self.chance.choice(FORMS)
        made: list[Part] = list(parts)
        for _ in range(self.chance.choice((0, 1, 1, 2, 3))):
            at = self.chance.randrange(len(made)) if made else 0
            match self.chance.randrange(6):
                case 0 if made:
                    del made[at]
                case 1 if made:
                    made.append(made[at])
                case 2:
                    made.append((self._word(), None, self._content()))
                case 3 if made:
                    name, file_name, content = made[at]
                    made[at] = (
                        name,
                        file_name,
                        self._content() if file_name is None else self._file(content),
                    )
                case 4 if made:
                    made[at] = (self._word(), made[at][1], made[at][2])
                case _ if made:
                    made[at] = (
                        made[at][0],
                        self.chance.choice((None, b"", b"a\xff.wav", b"../a.mp3")),
                        made[at][2],
                    )
        sent = form(path, *made)
        if self.chance.random() < 0.25:
            sent = replace(sent, body=self._spoilt_form(sent.body))
        return sent

    def _word(self) -> bytes:
        names = (
            "model",
            "file",
            "prompt",
            "stream",
            "seed",
            "diffuse",
            "diffuse[pin][]",
            "a[b][c]",
            "[]",
            "file[]",
            "include[]",
        )
        return self.chance.choice((*names, *TEXTS[:30], *_names())).encode("utf-8")

    def _content(self) -> bytes:
        return self.chance.choice(
            (*(text.encode() for text in TEXTS), *RAW_VALUES, b"\xff\x00", b"3", b"0.5")
        )

    def _file(self, content: bytes) -> bytes:
        """A recording with a wrong head, a cut tail, or none at all."""
        at = self.chance.randrange(1, min(60, len(content)))
        match self.chance.randrange(4):
            case 0:
                return content[:at]
            case 1:
                return content[:at] + self.chance.randbytes(4) + content[at + 4 :]
            case 2:
                return self.chance.choice(
                    (b"", b"ID3", b"OggS" + content, b"fLaC", b"\x1aE\xdf\xa3", b"<html>")
                )
            case _:
                return self.chance.randbytes(2000)

    def _spoilt_form(self, raw: bytes) -> bytes:
        edges: tuple[Callable[[], bytes], ...] = (
            lambda: raw.replace(b"--" + BOUNDARY + b"--", b""),
            lambda: raw.replace(b"\r\n", b"\n"),
            lambda: raw.replace(b"form-data", self.chance.choice((b"attachment", b"", b"form-data; name=a"))),
            lambda: raw.replace(b"Content-Disposition", self.chance.choice((b"X", b"\xff", b"a" * 5000))),
            lambda: raw.replace(b"name=", self.chance.choice((b"name*=utf-8''", b"nam=", b'name="\\'))),
            lambda: raw * 40,
            lambda: self._spoilt(raw) if raw.isascii() else raw[: len(raw) // 2],
        )
        return self.chance.choice(edges)()

    # Heads ------------------------------------------------------------------------------------------------------

    def _elsewhere(self, sent: Sent) -> Sent:
        """Another method, path or query."""
        path, _, query = sent.target.partition(b"?")
        match self.chance.randrange(6):
            case 0:
                return replace(sent, method=self.chance.choice(METHODS))
            case 1:
                return replace(sent, target=path + self.chance.choice(PATH_BITS))
            case 2:
                return replace(sent, target=path + self.chance.choice(QUERIES))
            case 3:
                at = self.chance.randrange(len(path) + 1)
                return replace(sent, target=path[:at] + self.chance.choice(PATH_BITS) + path[at:])
            case 4:
                steps = path.split(b"/")
                steps[self.chance.randrange(len(steps))] = self.chance.choice(
                    (b"scripted", b"videos", b"content", b"a%2fb", b"%ff")
                )
                return replace(sent, target=b"/".join(steps) or b"/")
            case _:
                return replace(
                    sent, method=self.chance.choice(METHODS), target=path + (b"?" + query if query else b"")
                )

    def _head(self, sent: Sent) -> Sent:
        match self.chance.randrange(8):
            case 0:
                return sent.without_header(b"Content-Type")
            case 1:
                return replace(
                    sent, length=self.chance.choice((0, 1, len(sent.body) // 2, -1, 10**9, 10**40))
                )
            case 2:
                return replace(sent, headers=(HOST, *sent.headers))
            case 3:
                chosen = self.chance.sample(HEADERS, 6)
                return replace(sent, headers=(*sent.headers, *chosen))
            case _:
                return sent.with_header(*self.chance.choice(HEADERS))


def _names() -> list[str]:
    return sorted(
        {name for _, body in BODIES for name in body} | {"functions", "suffix", "conversation", "audio"}
    )


def _places(body: Any) -> list[tuple[Any, Any]]:
    """Every place of a value in a tree: what holds it, and under what."""
    found: list[tuple[Any, Any]] = []
    keys = body.keys() if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
    for key in list(keys)[:50]:
        found.append((body, key))
        found += _places(body[key])
    return found
