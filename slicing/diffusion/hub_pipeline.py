"""Pipelines on a hub: a node fetches configurations and its own blocks' bytes, a gateway everything but the blocks.

Talks to the hub through `slicing.hub`, with its cache, its resuming and its errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from slicing.cache import cache_root
from slicing.checkpoint import pick_indexed, read_index
from slicing.diffusion.pipeline_index import (
    INDEX_NAME,
    Component,
    is_transformer,
    pipeline_class,
    read_pipeline_index,
)
from slicing.diffusion.source import PipelineSource, checked_transformers, open_transformer
from slicing.diffusion.tensor_table import INDEX_NAME as TENSOR_INDEX_NAME
from slicing.diffusion.tensor_table import SINGLE_NAME, TensorTable
from slicing.errors import ModelError
from slicing.hub import HubShards, reporting_bar
from slicing.hub_errors import explained
from slicing.progress import Progress, no_progress
from slicing.tensor_file import TensorRange

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
NUM_HEADERS_AT_ONCE = 8
TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # of a component: settings and tokenizers


def is_hub_pipeline(model: str, *, may_fetch: bool = True) -> bool:
    """Whether a hub id is a pipeline's; the hub is asked only where nothing of it is known here."""
    if not HUB_ID.fullmatch(model):
        return False
    repo, _, revision = model.partition("@")
    here = {
        name: isinstance(try_to_load_from_cache(repo, name, revision=revision or None), str)
        for name in (INDEX_NAME, "config.json")
    }
    if here[INDEX_NAME] or here["config.json"] or not may_fetch:
        return here[INDEX_NAME]
    with explained(model):
        try:
            hf_hub_download(repo, INDEX_NAME, revision=revision or None)
        except LocalEntryNotFoundError:
            raise  # nobody was asked
        except EntryNotFoundError:
            return False
    return True


def open_hub_pipeline(
    model: str, cache_dir: Path | None, progress: Progress, *, may_fetch: bool = True
) -> PipelineSource:
    """Open "org/name[@revision]": fetch its transformers' configurations and headers, no weights.

    Raises `ModelError`.
    """
    if not HUB_ID.fullmatch(model):
        raise ModelError(f"there is no model {model!r}: name a pipeline's folder or a hub id like org/name")
    repo, _, revision = model.partition("@")
    folder = _snapshot(
        model, revision or None, [INDEX_NAME, "transformer*/*.json", "vae/config.json"], may_fetch=may_fetch
    )
    index = read_pipeline_index(folder)
    pipeline_class(index)
    store = cache_root(cache_dir) / "hub" / repo.replace("/", "--")
    parts = []
    for component in checked_transformers(index):
        shards = HubShards(
            model, repo, folder, store, progress, may_fetch=may_fetch, subfolder=component.name
        )
        parts.append(open_transformer(index, component, _open_table(folder / component.name, shards)))

    def fetch_outside(telling: Progress) -> None:
        others = [part for name, part in index.components.items() if not is_transformer(name)]
        patterns = [f"{part.name}/{pattern}" for part in others for pattern in TEXT_FILES]
        _snapshot(model, folder.name, [INDEX_NAME, *patterns], may_fetch=may_fetch)
        weights = [name for part in others for name in _weight_files(folder, part)]
        _snapshot(model, folder.name, [INDEX_NAME, *weights], may_fetch=may_fetch, progress=telling)

    return PipelineSource(model, index, parts, fetch_outside=fetch_outside)


def _open_table(folder: Path, shards: HubShards) -> TensorTable:
    index = folder / TENSOR_INDEX_NAME
    if not index.is_file():
        return TensorTable(folder, shards.open(SINGLE_NAME), fetcher=shards)
    shard_of = read_index(index)
    names = sorted(set(shard_of.values()))
    with ThreadPoolExecutor(NUM_HEADERS_AT_ONCE) as pool:
        headers = dict(zip(names, pool.map(shards.open, names), strict=True))
    tensors: dict[str, TensorRange] = {}
    for shard, header in headers.items():
        wanted = {name for name, holder in shard_of.items() if holder == shard}
        tensors.update(pick_indexed(header, wanted, folder / shard))
    return TensorTable(folder, tensors, fetcher=shards)


def _weight_files(folder: Path, part: Component) -> list[str]:
    """Patterns of a component's weights: what its index names, else the usual single file; never a variant's."""
    for stem in ("model", "diffusion_pytorch_model"):
        index = folder / part.name / f"{stem}.safetensors.index.json"
        if index.is_file():
            return [f"{part.name}/{shard}" for shard in sorted(set(read_index(index).values()))]
    return [f"{part.name}/model.safetensors", f"{part.name}/{SINGLE_NAME}"]


def _snapshot(
    model: str,
    revision: str | None,
    patterns: Sequence[str],
    *,
    may_fetch: bool,
    progress: Progress = no_progress,
) -> Path:
    with explained(model):
        return Path(
            snapshot_download(
                model.partition("@")[0],
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=not may_fetch,
                tqdm_class=reporting_bar(progress),
            )
        )
