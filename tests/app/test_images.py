"""Pictures over HTTP, mostly through the official client: whole, streamed, refused, and left."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import openai
import pytest
from PIL import Image

from app.engine.diffusion.request import DiffusionEvent, DiffusionRequest
from app.engine.request import ModelStatus
from app.openapi import ImageAnswer, ImageEvent
from routing.errors import NoRouteError, TooLargeError
from tests.support.api_server import Served, serve_engines, settles
from tests.support.fake_pictures import FINGERPRINT, FakePictures, fake_videos
from tests.support.local_engine import ScriptedEngine

PATH = "/v1/images/generations"
BODY: dict[str, Any] = {"model": "painter", "prompt": "a red circle", "seed": 7}


@pytest.fixture
def painter() -> FakePictures:
    return FakePictures()


@pytest.fixture
async def served(painter: FakePictures, scripted: ScriptedEngine) -> AsyncIterator[Served]:
    async with serve_engines(scripted, painter, fake_videos()) as running:
        yield running


def picture_of(b64: str | None) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64 or "")))


async def post(served: Served, **changes: Any) -> Any:
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
    return await served.http.post(PATH, json=body)


async def test_a_picture_comes_as_png_with_its_seed_and_usage(client: openai.AsyncOpenAI) -> None:
    answer = await client.images.generate(model="painter", prompt="a red circle", extra_body={"seed": 7})
    assert answer.data is not None
    picture = picture_of(answer.data[0].b64_json)
    assert (picture.format, picture.size, picture.getpixel((0, 0))) == ("PNG", (64, 48), (7, 200, 40))
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 12, 17)
    assert (answer.size, answer.output_format) == ("64x48", "png")
    assert answer.model_extra is not None
    assert (answer.model_extra["seed"], answer.model_extra["system_fingerprint"]) == (7, FINGERPRINT)
    assert answer.model_extra["route"][1] == {"node": "4e5f6a7b", "layers": [4, 8], "path": "relayed"}


async def test_several_pictures_are_the_single_ones_of_the_following_seeds(served: Served) -> None:
    together = (await post(served, n=3)).json()["data"]
    alone = [(await post(served, seed=7 + index)).json()["data"][0] for index in range(3)]
    assert together == alone
    assert len({one["b64_json"] for one in alone}) == 3


async def test_what_is_asked_reaches_the_engine(served: Served, painter: FakePictures) -> None:
    asked = {"size": "32x16", "steps": 9, "guidance_scale": 2, "negative_prompt": "blue", "patches": 2}
    asked |= {"warmup": 3, "extrapolate": True, "wire": "int8-delta", "scheduler": {"shift": 4.0}}
    answer = await post(served, **asked, diffuse={"max_hops": 2}, output_format="webp")
    assert picture_of(answer.json()["data"][0]["b64_json"]).size == (32, 16)
    made = painter.requests[0]
    assert (made.width, made.height, made.steps, made.guidance_scale) == (32, 16, 9, 2)
    assert (made.negative_prompt, made.patches, made.warmup, made.extrapolate) == ("blue", 2, 3, True)
    assert (made.wire, made.scheduler, made.route.max_hops) == ("int8-delta", {"shift": 4.0}, 2)


async def test_without_a_seed_one_is_drawn_and_told(served: Served) -> None:
    first, second = [(await post(served, seed=None)).json() for _ in range(2)]
    assert first["seed"] != second["seed"]
    assert (await post(served, seed=first["seed"])).json()["data"] == first["data"]


@pytest.mark.parametrize(("quality", "steps"), [(None, 4), ("auto", 4), ("low", 2), ("medium", 4), ("hd", 8)])
async def test_quality_is_a_share_of_the_models_steps(
    served: Served, painter: FakePictures, quality: str | None, steps: int
) -> None:
    await post(served, quality=quality)
    assert painter.requests[0].steps == steps


async def test_jpeg_and_webp_shrink_with_their_compression(served: Served) -> None:
    for form in ("jpeg", "webp"):
        sizes = []
        for compression in (100, 10):
            item = (await post(served, output_format=form, output_compression=compression)).json()["data"][0]
            assert picture_of(item["b64_json"]).format == form.upper()
            sizes.append(len(item["b64_json"]))
        assert sizes[1] <= sizes[0]


async def test_a_stream_holds_previews_and_the_same_picture(
    client: openai.AsyncOpenAI, served: Served
) -> None:
    stream = await client.images.generate(
        model="painter", prompt="a red circle", extra_body={"seed": 7}, stream=True, partial_images=3
    )
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [getattr(event, "partial_image_index", None) for event in events] == [0, 1, 2, None]
    assert events[-1].b64_json == (await post(served)).json()["data"][0]["b64_json"]
    assert events[-1].usage.total_tokens == 17


async def test_every_event_is_as_described_and_named(served: Served) -> None:
    options = {"include_progress": True}
    text = (await post(served, stream=True, partial_images=1, patches=2, stream_options=options)).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    for name, data in blocks:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert ImageEvent.model_validate_json(data[6:]).model_dump(mode="json", exclude_none=True) == event
    progress = [json.loads(data[6:]) for name, data in blocks if name.endswith("progress")]
    assert [one["step"] for one in progress if "seconds" in one] == [1, 2, 3, 4]
    assert [one["patches"] for one in progress if "patches" in one] == [
        "its blocks are of two streams: steps run whole"
    ]


async def test_an_answer_is_as_described(served: Served) -> None:
    body = (await post(served)).text
    assert ImageAnswer.model_validate_json(body).model_dump_json(exclude_none=True) == body


async def test_a_url_is_built_from_what_the_client_used_and_ends(painter: FakePictures) -> None:
    async with serve_engines(painter, pictures_lifetime_s=0.3, api_keys=("k" * 20,)) as served:
        headers = {"x-forwarded-proto": "https", "x-forwarded-host": "pictures.example, inner"}
        headers |= {"x-forwarded-prefix": "/ai", "authorization": "Bearer " + "k" * 20}
        answer = await served.http.post(PATH, json={**BODY, "response_format": "url"}, headers=headers)
        url = answer.json()["data"][0]["url"]
        assert url.startswith("https://pictures.example/ai/v1/images/content/")
        path = url.removeprefix("https://pictures.example/ai")
        fetched = await served.http.get(path)
        assert (fetched.headers["content-type"], fetched.content[:4]) == ("image/png", b"\x89PNG")
        await asyncio.sleep(0.35)
        assert (await served.http.get(path)).status_code == 404


async def test_a_url_has_the_name_and_port_that_the_client_used(painter: FakePictures) -> None:
    async with serve_engines(painter, allowed_hosts="pictures.lan") as served:
        for host in ("pictures.lan:8080", "localhost:99", "[::1]:8000"):
            asked = {**BODY, "response_format": "url"}
            url = (await served.http.post(PATH, json=asked, headers={"host": host})).json()["data"][0]["url"]
            assert url.startswith(f"http://{host}/v1/images/content/")
            answer = await served.http.get(url.removeprefix(f"http://{host}"), headers={"host": host})
            assert answer.content[:4] == b"\x89PNG"


async def test_pictures_under_urls_stay_within_their_bytes(painter: FakePictures) -> None:
    async with serve_engines(painter, pictures_bytes=400) as served:
        answers = [await post(served, response_format="url", seed=seed) for seed in range(3)]
        paths = [one.json()["data"][0]["url"].removeprefix(served.url) for one in answers]
        assert [(await served.http.get(path)).status_code for path in paths] == [404, 200, 200]


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": "  "}, "prompt", "empty"),
        ({"size": "70x48"}, "size", "multiples of 16"),
        ({"size": "big"}, "size", "WIDTHxHEIGHT"),
        ({"size": "99999x99999"}, "size", "pixels"),
        ({"steps": 0}, "steps", "greater than or equal to 1"),
        ({"steps": "4"}, "steps", "integer"),
        ({"guidance_scale": -1}, "guidance_scale", "greater than or equal to 0"),
        ({"n": 11}, "n", "less than or equal to 10"),
        ({"n": 0}, "n", "greater"),
        ({"patches": 3}, "patches", "2 stages"),
        ({"seed": 2**63}, "seed", "less"),
        ({"seed": -1}, "seed", "greater"),
        ({"width": 64, "height": 64}, "width", "called size"),
        ({"cfg_scale": 7}, "cfg_scale", "called guidance_scale"),
        ({"num_images_per_prompt": 2}, "num_images_per_prompt", "called n"),
        ({"num_frames": 9}, "num_frames", "no frames"),
        ({"output_format": "gif"}, "output_format", "png"),
        ({"output_compression": 50}, "output_compression", "png keeps every bit"),
        ({"partial_images": 2}, "partial_images", "needs stream"),
        ({"partial_images": 4, "stream": True}, "partial_images", "less"),
        ({"background": "transparent"}, "background", "opaque"),
        ({"response_format": "url", "stream": True}, "response_format", "stream"),
        ({"image": "x"}, "image", "not supported"),
        ({"scheduler": {"shift": [1]}}, "scheduler.shift", "number"),
        ({"wire": "int4"}, "wire", "int8-delta"),
        ({"diffuse": {"fast": True}}, "diffuse.fast", "extra"),
        ({"diffuse": {"draft": "auto"}}, "diffuse.draft", "text"),
    ],
)
async def test_bad_input_is_refused_by_name(
    served: Served, painter: FakePictures, changes: dict[str, Any], param: str, says: str
) -> None:
    answer = await post(served, **changes)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says.lower() in error["message"].lower()
    assert not painter.requests


async def test_guidance_that_is_no_number_is_refused(served: Served) -> None:
    body = json.dumps({**BODY, "guidance_scale": float("nan")})
    answer = await served.http.post(PATH, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("model", ["scripted", "filmer"])
async def test_a_model_of_another_kind_is_refused(served: Served, model: str) -> None:
    answer = await post(served, model=model)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_a_picture_model_does_not_chat(served: Served) -> None:
    answer = await served.ask(model="painter")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert "/v1/images/generations" in error["message"]


async def test_without_a_model_the_first_that_makes_pictures_is_asked(served: Served) -> None:
    assert (await post(served, model=None)).json()["model"] == "painter"


async def test_the_alias_and_paths_without_v1_are_there(served: Served) -> None:
    for path in ("/v1/images", "/images", "/images/generations/"):
        assert (await served.http.post(path, json=BODY)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/images/edits", "/v1/images/variations"])
async def test_what_begins_from_a_picture_is_an_enveloped_404(served: Served, path: str) -> None:
    answer = await served.http.post(path, content=b"anything")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_leaving_frees_every_picture_at_once(
    served: Served, painter: FakePictures, is_stream: bool
) -> None:
    painter.before_step = lambda number: asyncio.Event().wait() if number == 2 else None
    for _ in range(10):
        writer = await served.begin(PATH, {**BODY, "n": 2, "stream": is_stream})
        await settles(lambda: painter.num_open == 2)
        writer.close()
        await settles(lambda: painter.num_open == 0 and served.gateway.num_running == 0)
    assert served.metric("diffuse_requests_aborted_total", endpoint=PATH) == 10


class Latents:
    """What an engine holds while it makes a picture."""


class HoldingPictures(FakePictures):
    """Notes what it holds for each picture."""

    held: weakref.WeakSet[Latents]

    async def generate(self, request: DiffusionRequest) -> AsyncGenerator[DiffusionEvent, None]:
        latents = Latents()
        self.held.add(latents)
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event


async def test_of_fifty_pictures_that_nobody_waited_for_nothing_is_kept() -> None:
    painter = HoldingPictures()
    painter.held = weakref.WeakSet()
    painter.before_step = lambda number: asyncio.Event().wait() if number == 2 else None
    async with serve_engines(painter) as served:
        for number in range(50):
            asked = {**BODY, "stream": bool(number % 2), "partial_images": number % 2}
            writer = await served.begin(PATH, asked)
            await settles(lambda: painter.num_open == 1)
            assert len(painter.held) >= 1
            writer.close()
            await settles(lambda: painter.num_open == 0 and served.gateway.num_running == 0)
        gc.collect()
        assert not painter.held


async def test_a_failure_on_the_way_ends_a_stream_with_an_error(
    client: openai.AsyncOpenAI, painter: FakePictures
) -> None:
    def lose(number: int) -> None:
        if number == 3:
            raise NoRouteError(((2, 4),), "painter", ())

    painter.before_step = lose
    stream = await client.images.generate(model="painter", prompt="a circle", stream=True, partial_images=1)
    with pytest.raises(openai.APIError, match="2:4"):
        async for _ in stream:
            pass


async def test_a_pass_that_is_too_large_is_the_callers_mistake(served: Served, painter: FakePictures) -> None:
    def refuse(number: int) -> None:
        raise TooLargeError("a pass of 2 B is larger than 1 B")

    painter.before_step = refuse
    answer = await post(served)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "size")
    assert "2 B" in error["message"]


async def test_no_route_is_a_503_with_the_layers(served: Served, painter: FakePictures) -> None:
    painter.status = ModelStatus("partial", 8, missing=((2, 4),))
    answer = await post(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_route")
    assert "retry-after" in answer.headers


async def test_a_silent_stream_says_that_it_lives(painter: FakePictures) -> None:
    painter.before_step = lambda number: asyncio.sleep(0.2) if number == 1 else None
    async with serve_engines(painter, keepalive_s=0.05) as served:
        text = (await post(served, stream=True)).text
    assert text.count(": keep-alive") >= 2
    assert text.count("event: ") == 1


async def test_steps_verdicts_and_passes_are_counted(served: Served) -> None:
    await post(served, patches=2)
    assert served.metric("diffuse_denoising_steps_total", model="painter") == 4
    assert served.metric("diffuse_step_seconds_count", model="painter") == 4
    assert served.metric("diffuse_stage_busy_share_count", model="painter", stage="1") == 4
    assert served.metric("diffuse_patch_verdicts_total", model="painter", verdict="refused") == 1
    assert served.metric("diffuse_passes_total", model="painter", form="whole") == 8
    assert served.metric("diffuse_answers_total", model="painter", endpoint=PATH, finish_reason="stop") == 1


async def test_lists_say_what_a_model_makes(served: Served) -> None:
    cards = {card["id"]: card for card in (await served.http.get("/v1/models")).json()["data"]}
    made = {name: card["architecture"]["output_modalities"] for name, card in cards.items()}
    assert made == {"scripted": ["text"], "painter": ["image"], "filmer": ["video"]}
