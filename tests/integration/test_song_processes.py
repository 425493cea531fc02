"""Songs as users make them: nodes and a gateway in processes of their own, real links, the API and the command line."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.media.sound import encode_sound
from tests.integration.songs import NUM_LAYERS, PROMPT, TinyMusic
from tests.support.nursery import Nursery
from tests.support.processes import Process, Processes, describe
from tests.support.tiny_sound import DEPTH, FRAME_RATE, RATE

pytestmark = [pytest.mark.processes, pytest.mark.long]
NUM_FRAMES = 40
LONG_FRAMES = 400
BODY: dict[str, Any] = {
    "model": "song",
    "input": PROMPT,
    "response_format": "wav",
    "duration": NUM_FRAMES / FRAME_RATE,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def music(tmp_path_factory: pytest.TempPathFactory) -> TinyMusic:
    folder = tmp_path_factory.mktemp("song") / "song"
    return TinyMusic.build(folder, max_position_embeddings=512)


@pytest.fixture(scope="module")
def processes(nursery: Nursery) -> Iterator[Processes]:
    with Processes(nursery) as running:
        yield running


@pytest.fixture(scope="module")
def nodes(processes: Processes, music: TinyMusic) -> list[Process]:
    """Two slices, the last of them twice."""
    last = f"2:{NUM_LAYERS}"
    return processes.hosts(
        music.checkpoint.name, "0:2", last, last, flags=("--dtype", "float32", "--hold-ends")
    )


@pytest.fixture(scope="module")
def gateway(processes: Processes, music: TinyMusic, nodes: list[Process]) -> Process:
    return processes.serve(music.checkpoint.name, nodes)


@pytest.fixture(scope="module")
def thin(processes: Processes, music: TinyMusic, nodes: list[Process]) -> Process:
    return processes.serve(music.checkpoint.name, nodes, "--ends", "remote")


def post(gateway: Process, **changes: Any) -> httpx.Response:
    url = f"{gateway.ready['url']}/audio/speech"
    return httpx.post(url, json=BODY | changes, timeout=60, trust_env=False)


def test_the_api_gives_the_song_of_the_whole_model(gateway: Process, thin: Process, music: TinyMusic) -> None:
    expected = encode_sound(music.greedy(NUM_FRAMES), RATE, "wav")
    for asked in (gateway, thin):
        answer = post(asked)
        assert answer.status_code == 200, answer.text
        assert answer.content == expected
        assert answer.headers["transfer-encoding"] == "chunked"


def test_a_seed_is_a_song_in_both_placements(gateway: Process, thin: Process) -> None:
    drawn = [
        post(asked, temperature=1, top_k=20, seed=seed).content
        for asked in (gateway, thin)
        for seed in (1, 2)
    ]
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_models_say_that_it_makes_sound_and_only_sound_is_asked_of_it(gateway: Process) -> None:
    url = str(gateway.ready["url"])
    (card,) = httpx.get(f"{url}/models", trust_env=False).json()["data"]
    assert card["architecture"]["output_modalities"] == ["audio"]
    chat = {"model": "song", "messages": [{"role": "user", "content": "hello"}]}
    error = httpx.post(f"{url}/chat/completions", json=chat, trust_env=False).json()["error"]
    assert (error["param"], "/v1/audio/speech" in error["message"]) == ("model", True)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"duration": 31}, "duration"),
        ({"duration": None, "seconds": 31}, "seconds"),
        ({"input": "la " * 100}, "input"),
        ({"guidance_scale": 101}, "guidance_scale"),
        ({"top_p": 2}, "top_p"),
        ({"steps": 5}, "steps"),
        ({"negative_prompt": "noise"}, "negative_prompt"),
    ],
)
def test_what_the_model_cannot_make_is_a_400_that_names_the_field(
    gateway: Process, changes: dict[str, Any], param: str
) -> None:
    answer = post(gateway, **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "la la" not in answer.text


def test_a_song_is_written_beside_the_user(
    processes: Processes, gateway: Process, nodes: list[Process], music: TinyMusic, tmp_path: Path
) -> None:
    expected = encode_sound(music.greedy(NUM_FRAMES), RATE, "wav")
    asked = ["query", "-p", PROMPT, "--temperature", "0", "--seconds", str(NUM_FRAMES / FRAME_RATE)]
    url = str(gateway.ready["url"]).removesuffix("/v1")
    of_gateway = [*asked, "--url", url, "--model", "song", "--out", str(tmp_path / "song.wav")]
    addresses = [part for node in nodes for part in ("--node", node.address)]
    of_nodes = [*asked, *addresses, "--model", music.checkpoint.name, "--out", str(tmp_path / "own.wav")]
    for arguments in (of_gateway, of_nodes):
        done = processes.run(*arguments)
        assert done.returncode == 0, done.stderr
        assert f"{NUM_FRAMES + 3} steps" in done.stderr
        assert Path(done.stdout.strip()).read_bytes() == expected


def test_a_node_killed_mid_song_changes_nothing(
    gateway: Process, nodes: list[Process], music: TinyMusic
) -> None:
    body = BODY | {"stream_format": "sse", "stream_options": {"include_progress": True}}
    body |= {"duration": LONG_FRAMES / FRAME_RATE}
    url = f"{gateway.ready['url']}/audio/speech"
    sound, num_steps = b"", 0
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as answer:
        for line in answer.iter_lines():
            event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
            match event.get("type"):
                case "speech.audio.progress":
                    num_steps += 1
                    if num_steps == 9:
                        used_node(nodes).kill()
                case "speech.audio.delta":
                    sound += base64.b64decode(event["audio"])
                case "speech.audio.done":
                    usage = event["usage"]
    assert sound == encode_sound(music.greedy(LONG_FRAMES), RATE, "wav")
    assert usage["input_tokens"] == len(PROMPT) + 1
    assert usage["output_tokens"] == LONG_FRAMES * DEPTH


def used_node(nodes: list[Process]) -> Process:
    """The one of the two that hold the last layers which has the song's session."""
    loads = [description.load for description in asyncio.run(describe(nodes[1:]))]
    assert sorted(loads) == [0, 1]
    return nodes[1 + loads.index(1)]
