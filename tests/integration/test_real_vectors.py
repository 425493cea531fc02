"""The real MiniLM over node processes: what transformers makes of it whole, asked through the official client."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from slicing.errors import ModelError
from slicing.packaged_models import packaged_folder
from tests.support.nursery import Nursery
from tests.support.processes import Process, Processes, client_of

pytestmark = [pytest.mark.real, pytest.mark.processes]
MODEL = "all-minilm-l6-v2"
CLOSE = 1e-5
TEXTS = [
    "A man is eating food.",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "naïve café, 東京 and \N{GRINNING FACE}",
    " ",
    "a",
]


@pytest.fixture(scope="module")
def folder() -> Any:
    try:
        return packaged_folder(MODEL)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def processes(nursery: Nursery) -> Iterator[Processes]:
    with Processes(nursery) as made:
        yield made


@pytest.fixture(scope="module")
def nodes(processes: Processes, folder: Any) -> list[Process]:
    return processes.hosts(MODEL, "1:4", "4:6", "1:4")


@pytest.fixture(scope="module")
def gateway(processes: Processes, nodes: list[Process]) -> Process:
    return processes.serve(MODEL, nodes)


@cache
def _whole(folder: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def embed(text: str) -> Any:
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            return torch.nn.functional.normalize(states.mean(dim=0), dim=0).numpy()

    return embed


def _create(gateway: Process, given: Any, **options: Any) -> Any:
    with client_of(gateway) as client:
        return client.embeddings.create(model=MODEL, input=given, **options)


def _vectors(answer: Any) -> Any:
    return np.asarray([one.embedding for one in answer.data], dtype=np.float32)


def test_vectors_equal_those_of_the_model_run_whole(gateway: Process, folder: Any) -> None:
    answer = _create(gateway, TEXTS)
    made, expected = _vectors(answer), np.stack([_whole(folder)(text) for text in TEXTS])
    np.testing.assert_allclose(made, expected, atol=CLOSE, rtol=0)
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-6)


def test_both_encodings_hold_the_same_numbers(gateway: Process) -> None:
    numbers = _create(gateway, TEXTS[0], encoding_format="float")
    coded = _create(gateway, TEXTS[0], encoding_format="base64").data[0].embedding
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), _vectors(numbers)[0])


def test_texts_that_mean_alike_are_near_each_other(gateway: Process) -> None:
    texts = ["The cat sits outside", "A feline rests in the garden", "Stock prices fell sharply today"]
    cat, feline, stocks = _vectors(_create(gateway, texts))
    assert cat @ feline > 0.4 > cat @ stocks


@pytest.mark.parametrize(
    ("texts", "param"), [("word " * 300, "input"), (["a", "word " * 300], "input.1"), (["a", ""], "input.1")]
)
def test_what_it_was_not_trained_for_is_refused(gateway: Process, texts: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _create(gateway, texts)
    assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match="not trained for fewer dimensions"):
        _create(gateway, "a", dimensions=128)


def test_it_chats_with_nobody(gateway: Process) -> None:
    with client_of(gateway) as client, pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])


def test_without_weights_here_the_vectors_are_the_same(
    processes: Processes, gateway: Process, folder: Any
) -> None:
    thin = processes.hosts(MODEL, "0:3", "3:6", flags=("--hold-ends",))
    other = processes.serve(MODEL, thin, "--ends", "remote")
    made = _vectors(_create(other, TEXTS))
    np.testing.assert_array_equal(made, _vectors(_create(gateway, TEXTS)))


def test_the_command_prints_a_vector(processes: Processes, gateway: Process, folder: Any) -> None:
    done = processes.run("query", "--url", gateway.ready["url"], "--model", MODEL, "--prompt", "a")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"[{_whole(folder)('a')[0]:.6f}, ")
    assert "384 dimensions of 3 tokens" in done.stderr


def test_a_node_killed_in_the_middle_changes_nothing(gateway: Process, nodes: list[Process]) -> None:
    texts = [f"sentence number {number} of many" for number in range(150)]
    took: list[Any] = []
    with client_of(gateway) as client:
        expected = client.embeddings.create(model=MODEL, input=texts)
        used = expected.model_extra["route"][0]["node"]
        asking = threading.Thread(
            target=lambda: took.append(client.embeddings.create(model=MODEL, input=texts, timeout=120))
        )
        asking.start()
        time.sleep(0.5)
        next(node for node in nodes if node.address.startswith(used)).kill()
        asking.join(120)
    np.testing.assert_array_equal(_vectors(took[0]), _vectors(expected))
    assert took[0].model_extra["replays"] >= 1
