"""API keys: hashed in a file that may change, each with its models, and what is refused to whom."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from app.keys import ApiKey, KeyRing, digest_of
from app.keys_file import KeysFile, read_keys
from app.settings import GatewaySettings
from routing.errors import SettingsError
from tests.app.conftest import Serve
from tests.support.api_server import PATH, QUESTION, Served
from tests.support.fake_embeddings import FakeEmbeddings
from tests.support.fake_pictures import FakePictures
from tests.support.fake_scribe import FakeScribe
from tests.support.local_engine import ScriptedEngine

ANNA, BERT = "sk-anna", "sk-bert"


def entry(name: str, key: str, *lines: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"', *lines, ""])


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, entry("anna", ANNA), entry("bert", BERT))
    return path


def write(path: Path, *entries: str, mode: int = 0o600, age_s: float = 10.0) -> None:
    """Write a version that has been still for a while."""
    path.write_text("\n".join(entries))
    path.chmod(mode)
    written_at = time.time() - age_s
    os.utime(path, (written_at, written_at))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status_of(served: Served, key: str) -> int:
    return (await served.http.get("/v1/models", headers=bearer(key))).status_code


# The ring ---------------------------------------------------------------------------------------------------


def test_a_key_is_found_by_its_digest_and_by_nothing_else() -> None:
    ring = KeyRing([ApiKey(digest_of("one"), "first"), ApiKey(digest_of("two"), "second")])
    found = ring.find(digest_of("two"))
    assert found is not None
    assert found.name == "second"
    for other in (b"", digest_of(""), digest_of("three"), digest_of("two")[:-1], b"\0" * 32):
        assert ring.find(other) is None


def test_without_keys_nobody_needs_one_and_with_an_empty_file_nobody_gets_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write(path, "")
    assert not KeyRing().is_required
    empty = KeyRing(source=KeysFile(path))
    assert empty.is_required
    assert empty.find(digest_of("")) is None


def test_a_key_without_limits_has_those_of_every_key() -> None:
    anyone = ApiKey(requests_per_minute=7, max_concurrent=3)
    own = ApiKey(digest_of("own"), requests_per_minute=100)
    ring = KeyRing([own, ApiKey(digest_of("plain"))], anyone=anyone)
    limits = [ring.find(digest_of(key)) for key in ("own", "plain")]
    assert [(key.requests_per_minute, key.max_concurrent) for key in limits if key] == [(100, 3), (7, 3)]


def test_an_expired_key_opens_no_more() -> None:
    now = [999.0]
    ring = KeyRing([ApiKey(digest_of("key"), expires_s=1000.0)], now=lambda: now[0])
    assert ring.find(digest_of("key"))
    now[0] = 1000.0
    assert ring.find(digest_of("key")) is None


def test_a_key_is_not_shown_by_its_repr() -> None:
    assert digest_of(ANNA).hex() not in repr(ApiKey(digest_of(ANNA), "anna"))


# The file ---------------------------------------------------------------------------------------------------


def test_an_entry_says_models_limits_and_an_end(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    lines = ['models = ["a", "b/c"]', "requests_per_minute = 60", "max_concurrent = 4"]
    write(path, entry("anna", ANNA, *lines, "expires = 2030-01-01T00:00:00Z"), entry("bert", BERT))
    anna, bert = read_keys(path)
    assert anna == ApiKey(digest_of(ANNA), "anna", frozenset({"a", "b/c"}), 60, 4, 1893456000.0)
    assert bert == ApiKey(digest_of(BERT), "bert")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[keys]", "is no TOML"),
        ("\xff", "is no TOML"),
        (entry("anna", ANNA, 'model = ["a"]'), "keys.0.model"),
        (entry("anna", ANNA, "models = []"), "keys.0.models"),
        (entry("anna", ANNA, "requests_per_minute = 0"), "keys.0.requests_per_minute"),
        (entry("anna", ANNA, 'expires = "soon"'), "keys.0.expires"),
        ('[[keys]]\nname = "anna"\nsha256 = "sk-anna"\n', "a SHA-256 hash has 64 hex digits"),
        ('[[keys]]\nname = "anna"\n', "keys.0.sha256"),
        ("[[key]]\n", "key: "),
        (entry("anna", ANNA) + entry("anna", BERT), "two keys of one name"),
        (entry("anna", ANNA) + entry("bert", ANNA), "two keys of one sha256"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_shows_no_key(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(content.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(SettingsError) as refused:
        read_keys(path)
    assert said in str(refused.value)
    assert ANNA not in str(refused.value)
    assert digest_of(ANNA).hex() not in str(refused.value)


def test_a_group_may_read_the_file(keys_file: Path) -> None:
    keys_file.chmod(0o440)
    assert len(read_keys(keys_file)) == 2


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_change_is_refused_with_the_cure(keys_file: Path, mode: int) -> None:
    keys_file.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        KeysFile(keys_file)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read the keys file"):
        KeysFile(tmp_path / "none.toml")


def test_a_file_counts_as_a_key_where_others_can_connect(keys_file: Path) -> None:
    assert GatewaySettings(host="0.0.0.0", keys_file=keys_file).keys_file == keys_file
    with pytest.raises(ValueError, match="can be reached by others"):
        GatewaySettings(host="0.0.0.0")


# Changes while it runs --------------------------------------------------------------------------------------


def followed(path: Path) -> tuple[KeysFile, list[float]]:
    clock = [0.0]
    return KeysFile(path, clock=lambda: clock[0]), clock


def names_in(source: KeysFile, clock: list[float]) -> list[str]:
    clock[0] += 1.0
    return [key.name for key in source.current()]


def test_a_removed_entry_is_gone_at_the_next_look_and_a_new_one_is_there(keys_file: Path) -> None:
    source, clock = followed(keys_file)
    assert names_in(source, clock) == ["anna", "bert"]
    write(keys_file, entry("bert", BERT), age_s=9)
    assert names_in(source, clock) == ["bert"]
    write(keys_file, entry("bert", BERT), entry("carl", "sk-carl"), age_s=8)
    assert names_in(source, clock) == ["bert", "carl"]


def test_a_file_that_is_being_written_is_not_read_yet(keys_file: Path) -> None:
    source, clock = followed(keys_file)
    write(keys_file, "", age_s=0)
    assert names_in(source, clock) == ["anna", "bert"]


@pytest.mark.parametrize("content", ["[[keys]", entry("anna", ANNA, "limit = 3")])
def test_a_broken_version_keeps_the_keys_from_before_and_is_told_once(
    keys_file: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    source, clock = followed(keys_file)
    write(keys_file, content, age_s=9)
    for _ in range(5):
        assert names_in(source, clock) == ["anna", "bert"]
    assert len(caplog.records) == 1
    assert "stay in use" in caplog.text
    write(keys_file, entry("anna", ANNA), age_s=8)
    assert names_in(source, clock) == ["anna"]


def test_a_file_that_went_away_or_became_public_keeps_the_keys_from_before(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, clock = followed(keys_file)
    keys_file.unlink()
    assert names_in(source, clock) == names_in(source, clock) == ["anna", "bert"]
    write(keys_file, entry("carl", "sk-carl"), mode=0o644, age_s=9)
    assert names_in(source, clock) == ["anna", "bert"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


async def test_a_running_gateway_takes_a_revoked_key_no_more(serve: Serve, keys_file: Path) -> None:
    async with serve(keys_file=keys_file, api_keys="plain") as served:
        assert [await status_of(served, key) for key in (ANNA, BERT, "plain")] == [200, 200, 200]
        write(keys_file, entry("bert", BERT), age_s=9)
        served.gateway.keys._source._looked_at -= 10  # type: ignore[union-attr] # it is time for a look
        assert [await status_of(served, key) for key in (ANNA, BERT, "plain")] == [401, 200, 200]


async def test_the_last_key_that_is_revoked_leaves_the_gateway_closed(serve: Serve, keys_file: Path) -> None:
    async with serve(keys_file=keys_file) as served:
        write(keys_file, "", age_s=9)
        served.gateway.keys._source._looked_at -= 10  # type: ignore[union-attr]
        assert await status_of(served, ANNA) == 401
        assert (await served.ask()).status_code == 401


# Models -----------------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
NAMING: list[tuple[str, dict[str, Any]]] = [
    (PATH, CHAT),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/embeddings", {"input": "hello"}),
    ("/v1/images/generations", {"prompt": "a fox"}),
    ("/v1/images", {"prompt": "a fox"}),
    ("/v1/videos", {"prompt": "a fox"}),
    ("/v1/audio/speech", {"input": "a bell"}),
    ("/tokenize", {"prompt": "hello"}),
    ("/tokenize", CHAT),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/chat/completions/input_tokens", CHAT),
]


@pytest.fixture
def limited(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, entry("anna", ANNA, 'models = ["scripted"]'), entry("bert", BERT))
    return path


def is_not_allowed(response: Any) -> bool:
    error = response.json()["error"]
    return (response.status_code, error["code"], error["param"]) == (403, "model_not_allowed", "model")


@pytest.mark.parametrize(("path", "body"), NAMING, ids=[path for path, _ in NAMING])
async def test_a_model_that_a_key_may_not_use_is_refused_everywhere(
    serve: Serve, limited: Path, scripted: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    async with serve(
        scripted, FakePictures(), FakeEmbeddings(scripted.tokenizer), keys_file=limited
    ) as served:
        for model in ("painter", "nothing-like-it"):
            response = await served.http.post(path, json=body | {"model": model}, headers=bearer(ANNA))
            assert is_not_allowed(response), (model, response.text)
            assert "`scripted`" in response.json()["error"]["message"]


async def test_transcriptions_and_pages_refuse_it_too(
    serve: Serve, limited: Path, scripted: ScriptedEngine
) -> None:
    async with serve(scripted, FakeScribe(scripted.tokenizer), keys_file=limited) as served:
        name = FakeScribe.model_name
        form = {"data": {"model": name}, "files": {"file": ("a.wav", b"RIFF")}}
        for task in ("transcriptions", "translations"):
            response = await served.http.post(f"/v1/audio/{task}", **form, headers=bearer(ANNA))
            assert is_not_allowed(response), response.text
        for page in (f"/v1/models/{name}", f"/v1/route?model={name}"):
            assert is_not_allowed(await served.http.get(page, headers=bearer(ANNA)))


async def test_a_key_is_shown_its_models_alone_and_may_use_them(
    serve: Serve, limited: Path, scripted: ScriptedEngine
) -> None:
    async with serve(FakePictures(), scripted, keys_file=limited) as served:
        shown = [(await served.http.get("/v1/models", headers=bearer(key))).json() for key in (ANNA, BERT)]
        answer = await served.http.post(PATH, json=QUESTION, headers=bearer(ANNA))
        route = await served.http.get("/v1/route", headers=bearer(ANNA))
        none = await served.http.post("/v1/images", json={"prompt": "a fox"}, headers=bearer(ANNA))
        free = await served.http.post(PATH, json=QUESTION | {"model": "gpt"}, headers=bearer(BERT))
    assert [[model["id"] for model in page["data"]] for page in shown] == [
        ["scripted"],
        ["painter", "scripted"],
    ]
    assert answer.status_code == 200
    assert route.json()["model"] == "scripted"
    assert none.json()["error"]["code"] == "model_not_found"
    assert "painter" not in none.text
    assert free.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("allowed", ["scripted", "gpt-4o-mini"])
async def test_a_model_is_allowed_under_all_its_names(serve: Serve, tmp_path: Path, allowed: str) -> None:
    path = tmp_path / "keys.toml"
    write(path, entry("anna", ANNA, f'models = ["{allowed}"]'))
    async with serve(keys_file=path, model_aliases="gpt-4o-mini=scripted") as served:
        for model in ("scripted", "gpt-4o-mini"):
            answer = await served.http.post(PATH, json=QUESTION | {"model": model}, headers=bearer(ANNA))
            assert answer.status_code == 200, answer.text
