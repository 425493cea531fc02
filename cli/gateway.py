"""A gateway as a client sees it: the models it lists, and answers read from its event stream.

Speaks the OpenAI chat API over httpx, and nothing else: no torch, no node is ever dialled from here.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx

from cli.answer import End, Piece, Question, Timings
from cli.drawing import EMBEDDINGS, SUFFIXES, TRANSCRIPTS
from cli.failures import CommandError
from routing.tls_files import check_ca

DEFAULT_URL: Final = "http://127.0.0.1:8000/v1"
CONNECT_TIMEOUT_S: Final = 5.0
_SHARES: Final = ("compute_s", "local_s", "network_s", "crypto_s", "queue_s")  # in the order of Timings
READ_TIMEOUT_S: Final = 120.0  # a gateway that is alive sends a comment line every 10 s


class GatewayError(CommandError):
    """The gateway cannot be reached, or refused or failed the request."""


def base_url(url: str) -> str:
    """Complete what people type: `localhost:8000` means `http://localhost:8000/v1`."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"--url {url}: give it as http://HOST:PORT/v1")
    return full.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


@asynccontextmanager
async def open_gateway(
    url: str, *, api_key: str | None = None, tls_ca: Path | None = None, model: str | None = None
) -> AsyncIterator[Gateway]:
    """Connect to a gateway and settle which of its models is meant (the first one unless named).

    An https one is verified by `tls_ca`, or by what the system trusts. Raises SettingsError for such a file.
    """
    base = base_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    trust_env = not _is_loopback(base)  # a proxy in the environment can't reach our own machine
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=timeout, trust_env=trust_env, verify=_trusted(base, tls_ca)
    ) as client:
        gateway = Gateway(client, base, model or "")
        if model is None:
            gateway.model = await gateway.first_model()
        yield gateway


def _trusted(url: str, tls_ca: Path | None) -> ssl.SSLContext | bool:
    if tls_ca is None or urlsplit(url).scheme != "https":
        return True
    check_ca(tls_ca)
    return ssl.create_default_context(cafile=tls_ca)


class Gateway:
    """An `Answerer` over HTTP."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str) -> None:
        self._client = client
        self.url = url
        self.model = model
        self.unserved: list[dict[str, Any]] = []  # what nodes announce besides, as the last list said
        self.date: str | None = None  # the Date header of the last reply, for comparing clocks

    async def first_model(self) -> str:
        """The name of the first model listed."""
        listed = await self.list_models()
        if not listed:
            raise GatewayError(f"the gateway at {self.url} lists no model yet: is it still loading?")
        return str(listed[0]["id"])

    async def list_models(self) -> list[dict[str, Any]]:
        """Every entry of `/v1/models`."""
        reply = await self._get("models")
        self.unserved = _objects(reply.get("unserved"))
        return _objects(reply.get("data"))

    async def output_of(self, model: str, *, wants_drawing: bool) -> str:
        """What a model makes: text, image, video, audio or embeddings; text where the gateway does not say.

        Raises GatewayError for that when a drawing is wanted, which only a gateway that knows the model can make.
        """
        try:
            return _output(await self._get(f"models/{quote(model, safe='')}"))
        except GatewayError:
            if wants_drawing:
                raise
            return "text"  # what is wrong, the question itself will show

    async def first_that(self, *, draws: bool, hears: bool = False) -> tuple[str, str]:
        """The first model listed that draws, writes recordings down, or makes text, and what it makes.

        The first of all where none does.
        """
        first = await self.first_model()
        listed = {str(card["id"]): _output(card) for card in await self.list_models()}
        wanted = SUFFIXES if draws else (TRANSCRIPTS if hears else "text",)
        fitting = (name for name, output in listed.items() if output in wanted)
        name = next(fitting, first)
        return name, listed.get(name, "text")

    async def events(
        self, path: str, body: dict[str, Any] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream that a POST opens, or a GET without a body. Raises GatewayError."""
        async with aclosing(self._events("GET" if body is None else "POST", path, json=body)) as events:
            async for event in events:
                yield event

    async def upload(
        self, path: str, fields: dict[str, str], file: tuple[str, bytes]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send a form with a file (its name, its content), and yield the events that come back. Raises GatewayError."""
        async with aclosing(self._events("POST", path, data=fields, files={"file": file})) as events:
            async for event in events:
                yield event

    async def _events(self, method: str, path: str, **options: Any) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with self._client.stream(method, path, **options) as response:
                await self._check(response)
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (payload := line[5:].strip()) not in ("", "[DONE]"):
                        yield _event(payload)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON object and return the one that comes back. Raises GatewayError."""
        response = await self._request("POST", path, json=body)
        return _decode(response.text)

    async def fetch(self, path: str) -> bytes:
        """Return a file. Raises GatewayError."""
        return (await self._request("GET", path)).content

    async def delete(self, path: str) -> None:
        """Let go of something. Raises GatewayError."""
        await self._request("DELETE", path)

    async def answer(self, question: Question) -> AsyncGenerator[Piece | End, None]:
        """Stream one chat completion; raises `GatewayError` on refusal, in-band error or a cut stream."""
        reading = _Reading()
        try:
            async with self._client.stream("POST", "chat/completions", json=self._body(question)) as response:
                await self._check(response)
                async for line in response.aiter_lines():
                    for piece in reading.read(line):
                        yield piece
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        yield reading.end()

    def _body(self, question: Question) -> dict[str, Any]:
        if question.raw_prompt is not None:
            raise CommandError("--raw needs --node: a gateway's chat API always applies the chat template")
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings_per_token": True,
        }
        optional = {
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "ignore_eos": question.ignore_eos or None,
            "diffuse": {"draft": question.draft} if question.draft else None,
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._client.get(path)
            self.date = response.headers.get("date")
            await self._check(response)
            reply = response.json()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except ValueError:
            raise self._no_gateway() from None
        if not isinstance(reply, dict):
            raise self._no_gateway()
        return reply

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = await self._client.request(method, path, **options)
            await self._check(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return response

    async def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        await response.aread()
        message = (
            _message_of(response) or f"HTTP {response.status_code} from {self.url}; is it a Diffuse gateway?"
        )
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += " (give the key with --api-key or DIFFUSE_API_KEY)"
        raise GatewayError(message)

    def _unreachable(self, error: httpx.HTTPError) -> GatewayError:
        if (text := _tls_trouble(str(error))) is not None:
            return GatewayError(f"no link to the gateway at {self.url}: {text}")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return GatewayError(
                f"no gateway answers at {self.url}{_reason(error)}: start one with `diffuse up`, name another "
                "with --url, or run the engine here with --node"
            )
        return GatewayError(f"the gateway at {self.url} went away: {error or type(error).__name__}")

    def _no_gateway(self) -> GatewayError:
        return GatewayError(f"{self.url} does not answer like a gateway; check --url")


class _Reading:
    """The state of one event stream: what has come so far, and when."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first_s: float | None = None
        self._pieces = 0
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._replays = 0
        self._fingerprint = ""

    def read(self, line: str) -> list[Piece]:
        """Take one line; comments, other fields and the end mark say nothing."""
        if not line.startswith("data:") or (payload := line[5:].strip()) in ("", "[DONE]"):
            return []
        chunk = _event(payload)
        self._note(chunk)
        return [Piece(text, self._so_far()) for text in self._texts(chunk)]

    def end(self) -> End:
        """What to say once the stream is over; a stream without a finish reason was cut."""
        if self._finish_reason is None:
            raise GatewayError("the gateway's answer was cut short")
        completion = int(self._usage.get("completion_tokens", self._pieces))
        details = self._usage.get("completion_tokens_details") or {}
        accepted = int(details.get("accepted_prediction_tokens") or 0)
        return End(
            self._finish_reason,
            self._final(completion),
            prompt_tokens=int(self._usage.get("prompt_tokens", 0)),
            completion_tokens=completion,
            replays=self._replays,
            fingerprint=self._fingerprint,
            drafted=accepted + int(details.get("rejected_prediction_tokens") or 0),
            accepted=accepted,
        )

    def _note(self, chunk: dict[str, Any]) -> None:
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        if isinstance(timings := chunk.get("timings"), dict):
            self._timings = timings
        self._replays = int(chunk.get("replays") or self._replays)
        self._fingerprint = chunk.get("system_fingerprint") or self._fingerprint

    def _texts(self, chunk: dict[str, Any]) -> list[str]:
        texts = []
        for choice in chunk.get("choices") or []:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if text := (choice.get("delta") or {}).get("content"):
                self._pieces += 1
                self._first_s = self._first_s or time.perf_counter() - self._began
                texts.append(text)
        return texts

    def _so_far(self) -> Timings:
        return self._final(self._pieces)

    def _final(self, tokens: int) -> Timings:
        """The gateway's own numbers where it gives them, else what we could see from here."""
        total_s = time.perf_counter() - self._began
        told = self._timings
        prefill_s = told.get("prefill_s", self._first_s or total_s)
        decode_s = told.get("decode_s", max(total_s - prefill_s, 0.0))
        return Timings(total_s, prefill_s, told.get("tokens", tokens), decode_s, *map(told.get, _SHARES))


def _objects(entries: Any) -> list[dict[str, Any]]:
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _reason(error: httpx.HTTPError) -> str:
    """What the system says of a failed connection, where it says more than that it failed."""
    text = str(error).strip()
    return f" ({text})" if text and text != "All connection attempts failed" else ""


def _tls_trouble(text: str) -> str | None:
    """What OpenSSL's words for a failed handshake mean to whoever typed --url."""
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text or "PACKET_LENGTH" in text:
        return "it speaks no TLS: write http://"
    if "Hostname mismatch" in text or "IP address mismatch" in text:
        return "its certificate is for another name: call it by a name that stands in the certificate"
    if "certificate has expired" in text:
        return "its certificate has expired"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "who signed its certificate is not trusted here: give that CA with --tls-ca"
    return None


def _output(card: dict[str, Any]) -> str:
    try:
        output = str(card["architecture"]["output_modalities"][0])
    except (KeyError, IndexError, TypeError):
        return "text"
    if output == "text" and card["architecture"].get("input_modalities") == ["audio"]:
        return TRANSCRIPTS
    return output if output in SUFFIXES or output == EMBEDDINGS else "text"


def _event(payload: str) -> dict[str, Any]:
    """Read one event of an answer; one that is an error, and no job that has failed, is raised."""
    event = _decode(payload)
    if (error := event.get("error")) is not None and "status" not in event:
        raise GatewayError(text_of(error) or "the gateway failed without saying why")
    return event


def _decode(payload: str) -> dict[str, Any]:
    try:
        chunk = json.loads(payload)
    except ValueError:
        raise GatewayError("the gateway sent an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise GatewayError("the gateway sent an event that is not an object")
    return chunk


def _message_of(response: httpx.Response) -> str | None:
    try:
        reply = response.json()
    except ValueError:
        return None
    return text_of(reply.get("error")) if isinstance(reply, dict) else None


def text_of(error: Any) -> str | None:
    """What an error of an answer says, however it is written."""
    if isinstance(error, dict):
        message = error.get("message")
        return str(message) if message else None
    return str(error) if error else None


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
