"""A text engine that answers to the point without a model: it reads its prompt, calls tools, and keeps to grammars.

Third-party suites ask whether tool calls and structured answers make sense; a tiny random model's never do. What it
says follows from the prompt alone. `Say: WORDS` is said as it is; a tool is called where the user names it, or a word
of its name; what came from a tool is told. Where a grammar holds the answer, each byte is one that the grammar allows.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from app.engine.request import (
    Admitted,
    GenerationEvent,
    GenerationRequest,
    ModelStatus,
    PrefillProgress,
)
from app.engine.tokenizer import ChatTokenizer
from routing.errors import NoRouteError
from slicing.token_scores import TokenScore
from tests.clients.json_writer import JsonWriter
from tests.clients.wishes import Wishes
from tests.support.local_engine import FINGERPRINT, answer_with, scripted_score

ANSWER = "Hello! This answer follows a script, so that you can rely on it."
PIECE_S = (
    0.12  # of each of the first tokens of a slow answer: longer than the fixture's keep-alive and heartbeat
)
NUM_SLOW = 4
BREAKS_AFTER = 12  # tokens
TEMPLATE = (
    r"{% if tools %}{{ '<|im_start|>system\nTools:' }}"
    r"{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    r"{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    r"{% for call in message.tool_calls or [] %}{{ '<tool_call>\n{\"name\": \"' + call.function.name }}"
    r"{{ '\", \"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    r"{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING_TEMPLATE = TEMPLATE + "{# <think></think> #}"  # by these marks a model that thinks aloud is known
THOUGHT = "<think>\nSomebody greets me.\n</think>\n\n"
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.S)


@dataclass
class ScriptedMind:
    """The engine. Of a text that begins with `Break` a node is lost, `Slowly` makes pauses, `Think` thinks aloud."""

    tokenizer: ChatTokenizer
    model_name: str = "fixture"
    max_positions: int = 8192
    vocab_size: int = 0
    num_open: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vocab_size = self.vocab_size or 400

    def answer_room(self, prompt_tokens: int) -> int:
        return self.max_positions - prompt_tokens

    def coverage(self) -> ModelStatus:
        return ModelStatus("ready", 30)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.num_open += 1
        try:
            yield Admitted(len(request.prompt_ids), FINGERPRINT)
            yield PrefillProgress(len(request.prompt_ids), len(request.prompt_ids))
            if request.scores_prompt:
                scores = tuple(scripted_score(one, request) for one in request.prompt_ids[1:])
                yield PrefillProgress(len(request.prompt_ids), len(request.prompt_ids), scores)
            async for event in answer_with(self.tokenizer, request, self._tokens(request)):
                yield event
        finally:
            self.num_open -= 1

    async def _tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenScore, None]:
        prompt = Prompt.read(self.tokenizer.decode_all(request.prompt_ids))
        said = self._held(request, prompt) if request.grammar is not None else self._free(request, prompt)
        for number, token_id in enumerate(said):
            await asyncio.sleep(PIECE_S if prompt.asks("Slowly") and number < NUM_SLOW else 0)
            if prompt.asks("Break") and number == BREAKS_AFTER:
                raise NoRouteError([(10, 20)], self.model_name)
            yield scripted_score(token_id, request)

    def _free(self, request: GenerationRequest, prompt: Prompt) -> Iterator[int]:
        calls = prompt.calls() if request.tools is not None else []
        text = prompt.words()
        if calls and request.tools is not None:
            text = request.tools.style.text_of(calls[: request.tools.most])
        yield from self.tokenizer.encode(text)
        yield min(self.tokenizer.stop_token_ids)

    def _held(self, request: GenerationRequest, prompt: Prompt) -> Iterator[int]:
        """Say what is wished as far as the grammar allows, else the shortest that it does."""
        assert request.grammar is not None
        calls = prompt.calls() if request.tools is not None else []
        if request.tools is not None and not calls and not prompt.is_answered and prompt.tools:
            calls = [prompt.call(prompt.tools[0], 0)]
        wanted = (
            request.tools.style.text_of(calls[: request.tools.most])
            if calls and request.tools
            else prompt.said
        )
        writer = JsonWriter(wanted or "", prompt.wishes)
        walk = request.grammar.walk()
        for _ in range(request.max_tokens):
            allowed = walk.masked(torch.zeros(self.vocab_size)) == 0
            token_id = self._next(writer, allowed, request.stop_token_ids)
            walk.take(token_id)
            writer.written += self.tokenizer.bytes_of(token_id)
            yield token_id

    def _next(self, writer: JsonWriter, allowed: torch.Tensor, stop_ids: frozenset[int]) -> int:
        ids = torch.nonzero(allowed).flatten().tolist()
        if len(ids) == 1:
            return int(ids[0])
        by_byte = {self.tokenizer.bytes_of(one): one for one in ids if one not in stop_ids}
        stops = [one for one in ids if one in stop_ids]
        if stops and writer.is_done:
            return int(stops[0])
        for byte in writer.next_bytes():
            if byte in by_byte:
                return int(by_byte[byte])
        return int(stops[0] if stops else ids[0])


@dataclass
class Prompt:
    """A prompt as the template wrote it, taken apart again."""

    turns: list[tuple[str, str]]
    tools: list[dict[str, Any]]

    @classmethod
    def read(cls, text: str) -> Prompt:
        turns = TURN.findall(text) or [("user", text)]  # a completion's prompt has no turns
        tools: list[dict[str, Any]] = []
        if turns and turns[0][0] == "system" and turns[0][1].startswith("Tools:"):
            tools = [json.loads(line)["function"] for line in turns.pop(0)[1].splitlines()[1:]]
        return cls([(role, said) for role, said in turns if (role, said) != ("assistant", "")], tools)

    @property
    def user(self) -> str:
        return next((said for role, said in reversed(self.turns) if role == "user"), "")

    @property
    def is_answered(self) -> bool:
        return bool(self.turns) and self.turns[-1][0] == "tool"

    @property
    def said(self) -> str:
        _, found, words = self.user.partition("Say: ")
        return words if found else ""

    @property
    def wishes(self) -> Wishes:
        return Wishes(self.user)

    def asks(self, word: str) -> bool:
        return self.user.startswith(word)

    def words(self) -> str:
        """What is said where no tool is called."""
        told: list[str] = []
        for role, said in reversed(self.turns):
            if role != "tool":
                break
            told.insert(0, said)
        if told:
            return f"The tools said: {'; '.join(told)}"
        return (THOUGHT if self.asks("Think") else "") + (self.said or ANSWER)

    def calls(self) -> list[tuple[str, str]]:
        """The calls that the user's text means: one for each place that it names, else one of each tool."""
        if self.is_answered:
            return []
        meant = [tool for tool in self.tools if self._means(tool["name"])]
        most = max(1, len(self.wishes.places)) if len(meant) == 1 else 1
        return [self.call(tool, number) for tool in meant for number in range(most)]

    def call(self, tool: dict[str, Any], number: int) -> tuple[str, str]:
        value = self.wishes.value(tool.get("parameters") or {}, number)
        return tool["name"], json.dumps(value, ensure_ascii=False)

    def _means(self, name: str) -> bool:
        text = self.user.lower()
        words = [word for word in re.split(r"[^a-z]+", name.lower()) if len(word) > 3]
        return name.lower() in text or any(re.search(rf"\b{word}\b", text) for word in words)
