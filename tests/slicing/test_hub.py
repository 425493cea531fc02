"""Fetching from a hub, against a stub on loopback: only the bytes of the slice, once, and through faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from slicing.checkpoint import open_folder
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from slicing.sparse_file import SparseFile, merged, pieces, subtract
from slicing.weights import layer_number, load_parameters
from tests.support.http_stub import HubStub
from tests.support.tiny_models import hollow, saved, tiny_model

REPO = "org/tiny"


@pytest.fixture
def model() -> torch.nn.Module:
    """A llama whose layers weigh 400 KB each, so that headers are small beside them."""
    return tiny_model("llama", hidden_size=128, intermediate_size=160, vocab_size=300)


@pytest.fixture
def hub(model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    folder = saved(model, tmp_path / "remote", max_shard_size="600KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "big.onnx").write_bytes(b"x" * 100)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("slicing.hub.FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("DIFFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubStub(REPO, folder) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield stub
    huggingface_hub.close_session()


def load_layer(model: torch.nn.Module, layer: int, name: str = REPO, **more: object) -> torch.nn.Module:
    target = hollow(model)
    load_parameters(open_checkpoint(name), target, lambda key: layer_number(key) == layer, **more)
    state = target.state_dict()
    filled = {key for key, tensor in state.items() if not tensor.is_meta}
    assert filled == {key for key in state if layer_number(key) == layer}
    assert all(torch.equal(state[key], model.state_dict()[key]) for key in filled)
    return target


def layer_bytes(model: torch.nn.Module, layer: int) -> int:
    return sum(tensor.nbytes for name, tensor in model.state_dict().items() if layer_number(name) == layer)


def test_a_slice_costs_its_own_bytes(hub: HubStub, model: torch.nn.Module) -> None:
    load_layer(model, 1)
    assert hub.weight_bytes <= 1.05 * layer_bytes(model, 1)
    assert not any("big.onnx" in request for request in hub.requests)


def test_the_same_slice_is_fetched_once_and_another_adds_to_it(hub: HubStub, model: torch.nn.Module) -> None:
    load_layer(model, 1)
    sent = hub.weight_bytes
    load_layer(model, 1)
    assert hub.weight_bytes == sent
    load_layer(model, 2)
    assert hub.weight_bytes - sent == layer_bytes(model, 2)


def test_hub_and_folder_have_one_digest_and_the_same_layer_hashes(
    hub: HubStub, model: torch.nn.Module
) -> None:
    remote, local = open_checkpoint(f"{REPO}@main"), open_folder(hub.folder)
    assert remote.digest == local.digest
    assert (remote.folder / "tokenizer.json").is_file()
    hashes = [load_parameters(ck, hollow(model), lambda key: True).layer_hashes for ck in (remote, local)]
    assert hashes[0] == hashes[1]


def test_opening_reads_headers_only(hub: HubStub) -> None:
    checkpoint = open_checkpoint(REPO)
    headers = sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little") for file in hub.folder.glob("*.safetensors")
    )
    assert hub.weight_bytes == headers
    assert checkpoint.tensors.keys() == open_folder(hub.folder).tensors.keys()


def test_a_single_file_repository_needs_no_index(hub: HubStub, model: torch.nn.Module) -> None:
    for file in hub.folder.glob("model*"):
        file.unlink()
    saved(model, hub.folder)
    assert not (hub.folder / "model.safetensors.index.json").exists()
    load_layer(model, 0)


def test_transient_errors_are_retried(hub: HubStub, model: torch.nn.Module) -> None:
    open_checkpoint(REPO)
    hub.failures = [503, 429, 500]
    load_layer(model, 1)
    assert not hub.failures


def test_a_broken_answer_is_resumed_where_it_ended(hub: HubStub, model: torch.nn.Module) -> None:
    open_checkpoint(REPO)
    before = hub.weight_bytes
    hub.cut_after, hub.num_cuts = 10_000, 3
    load_layer(model, 1)
    assert hub.num_cuts == 0
    assert hub.weight_bytes - before == layer_bytes(model, 1)


def test_a_hub_that_stays_broken_is_named(hub: HubStub, model: torch.nn.Module) -> None:
    open_checkpoint(REPO)
    hub.failures = [503] * 100
    with pytest.raises(ModelError, match=rf"the hub at {hub.url} fails for {REPO}: .*503"):
        load_layer(model, 1)


def test_what_came_before_a_failure_is_kept(
    hub: HubStub, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slicing.hub.PIECE_BYTES", 50_000)
    monkeypatch.setattr("slicing.hub.NUM_CONNECTIONS", 1)
    open_checkpoint(REPO)
    headers = hub.weight_bytes

    class StoppedError(Exception):
        pass

    def stop_half_way(stage: str, done: int, total: int) -> None:
        if stage == "download" and done > total / 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        load_layer(model, 1, progress=stop_half_way)
    load_layer(model, 1)
    assert hub.weight_bytes - headers <= layer_bytes(model, 1) + 2 * 50_000


def test_a_server_without_ranges_sends_the_shard_whole_once(
    hub: HubStub, model: torch.nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    hub.ignores_ranges = True
    told: list[tuple[str, int, int]] = []
    open_checkpoint(REPO, progress=lambda *args: told.append(args))
    assert {stage for stage, done, total in told if done == total} == {"download"}
    load_layer(model, 1)
    load_layer(model, 2)
    shards = {file.name for file in hub.folder.glob("*.safetensors")}
    wholes = {name: hub.requests[f"HEAD {name}"] for name in shards}
    assert set(wholes.values()) == {1}
    assert "ignores byte ranges" in caplog.text


def test_a_shard_that_the_hub_cache_holds_whole_is_used(hub: HubStub, model: torch.nn.Module) -> None:
    huggingface_hub.snapshot_download(REPO, allow_patterns=["*.safetensors"])
    sent = hub.weight_bytes
    load_layer(model, 1)
    assert hub.weight_bytes == sent


def test_offline_works_with_what_is_here_and_says_what_is_not(
    hub: HubStub, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
            open_checkpoint(REPO)
    load_layer(model, 1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load_layer(model, 1)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        load_layer(model, 2)


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        ((403, "GatedRepo"), "is gated: accept its terms at .*/org/tiny, then set HF_TOKEN"),
        ((401, "RepoNotFound"), "has no model org/tiny; check the name, and set HF_TOKEN"),
        ((418, ""), "fails for org/tiny|cannot reach"),
    ],
)
def test_a_refusal_says_what_to_do(hub: HubStub, gate: tuple[int, str], text: str) -> None:
    hub.gate = gate
    with pytest.raises(ModelError, match=text):
        open_checkpoint(REPO)


def test_unknown_names_and_revisions_are_told_apart(hub: HubStub) -> None:
    with pytest.raises(ModelError, match="has no model org/other"):
        open_checkpoint("org/other")
    with pytest.raises(ModelError, match="not this revision"):
        open_checkpoint(f"{REPO}@v9")


def test_no_network_is_told(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"cannot reach the hub at http://127\.0\.0\.1:1"):
        open_checkpoint(REPO)


def test_a_repository_of_pickles_is_refused(hub: HubStub) -> None:
    for file in hub.folder.glob("model*"):
        file.unlink()
    (hub.folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"holds no model\.safetensors.*pickled weights are refused"):
        open_checkpoint(REPO)


def test_the_token_goes_to_the_hub(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    open_checkpoint(REPO)
    assert hub.tokens == {"Bearer hf_secret"}


def test_progress_tells_the_bytes(hub: HubStub, model: torch.nn.Module) -> None:
    told: list[tuple[str, int, int]] = []
    load_layer(model, 1, progress=lambda *args: told.append(args))
    downloads = [(done, total) for stage, done, total in told if stage == "download"]
    assert downloads[-1] == (layer_bytes(model, 1),) * 2
    assert downloads == sorted(downloads)


def test_slices_loaded_at_once_do_not_disturb_each_other(hub: HubStub, model: torch.nn.Module) -> None:
    failures: list[BaseException] = []

    def load(layer: int) -> None:
        try:
            load_layer(model, layer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(layer % 3,)) for layer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert hub.weight_bytes <= 1.05 * sum(layer_bytes(model, layer) for layer in range(3))


def test_a_damaged_note_means_fetching_again(hub: HubStub, model: torch.nn.Module, tmp_path: Path) -> None:
    load_layer(model, 1)
    for note in (tmp_path / "cache").rglob("*.ranges.json"):
        note.write_text("{")
    load_layer(model, 1)


@pytest.mark.parametrize(
    ("ranges", "held", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 3), (5, 7)], [(0, 2), (3, 5), (7, 10)]),
        ([(5, 9)], [(0, 6), (8, 20)], [(6, 8)]),
        ([(0, 3), (8, 9)], [(3, 8)], [(0, 3), (8, 9)]),
    ],
)
def test_ranges_are_subtracted(
    ranges: list[tuple[int, int]], held: list[tuple[int, int]], left: object
) -> None:
    assert subtract(ranges, held) == left


def test_ranges_are_merged_and_cut() -> None:
    assert merged([(5, 9), (0, 2), (2, 4), (3, 4), (7, 7)]) == [(0, 4), (5, 9)]
    assert pieces([(0, 5), (7, 8)], 2) == [(0, 2), (2, 4), (4, 5), (7, 8)]


def test_a_sparse_file_forgets_when_the_file_is_gone(tmp_path: Path) -> None:
    file = SparseFile(tmp_path / "a" / "x.safetensors")
    file.create(100)
    file.add(10, 20)
    assert file.size() == 100
    assert file.missing([(5, 15)]) == [(5, 10)]
    file.path.unlink()
    assert file.size() is None
    assert file.missing([(5, 15)]) == [(5, 15)]
