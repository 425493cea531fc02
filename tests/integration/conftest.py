"""A real model, what stock transformers makes of it, and a swarm of real processes that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from app.engine.tokenizer import ChatTokenizer
from slicing.checkpoint import Checkpoint
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from tests.support.nursery import Nursery
from tests.support.processes import Process, Processes
from tests.support.tiny_tokenizer import write_tiny_tokenizer

MODEL = "smollm2"


@dataclass
class WholeModel:
    """The uncut model in this process, through transformers' own `generate`."""

    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    _model: Any = field(default=None, repr=False)

    @cache  # noqa: B019 - lives as long as the test session
    def greedy(self, text: str, num_tokens: int) -> str:
        """The text of a greedy answer to one user turn."""
        from transformers import AutoModelForCausalLM

        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self.checkpoint.folder, dtype=torch.float32)
        ids = torch.tensor([self.tokenizer.render([{"role": "user", "content": text}])])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
        return self.tokenizer.decode(out[0, ids.shape[1] :].tolist())

    def __hash__(self) -> int:
        return id(self)


@pytest.fixture(scope="session")
def whole() -> WholeModel:
    try:
        checkpoint = open_checkpoint(MODEL)
    except ModelError as error:
        pytest.skip(str(error))
    torch.set_num_threads(1)
    return WholeModel(checkpoint, ChatTokenizer.load(checkpoint.folder))


@dataclass
class ServedModel:
    """Two slices with two replicas each, and a gateway in front."""

    processes: Processes
    nodes: list[Process]
    gateway: Process


@pytest.fixture(scope="session")
def served(whole: WholeModel, nursery: Nursery) -> Iterator[ServedModel]:
    """One for all modules: they leave it as they found it, but for the chats that it remembers."""
    with Processes(nursery) as processes:
        nodes = processes.hosts(MODEL, "1:16", "16:30", "1:16", "16:30", flags=("--dtype", "float32"))
        yield ServedModel(processes, nodes, processes.serve(MODEL, nodes))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer of few words, for tiny models with random weights."""
    return ChatTokenizer.load(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))
