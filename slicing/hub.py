"""Models on a hub: small files whole, weights by byte range, so that a node fetches only its own layers.

Talks to the hub through huggingface_hub's own client, tokens and settings (HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE). Ranges land at their place in a sparse local file and stay; a shard that the hub's cache
holds whole is used as it is.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but exported without a stub
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)
from tqdm.auto import tqdm

from slicing.cache import cache_root, locked
from slicing.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, pick_indexed, read_config_map, read_index
from slicing.errors import ModelError
from slicing.hub_errors import explained
from slicing.progress import Progress, no_progress
from slicing.sparse_file import Range, SparseFile, merged, pieces
from slicing.tensor_file import LENGTH_BYTES, TensorRange, header_length, parse_header, read_tensor_ranges

SMALL_FILES = [
    "*.jinja",
    "[0-9]*_Dense/config.json",  # what follows a model that makes vectors, see `sentence_files`
    "[0-9]*_Dense/model.safetensors",
    "[0-9]*_Pooling/config.json",
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    INDEX_NAME,
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
]
PIECE_BYTES = 64 << 20  # noted as done one by one: what an interruption can cost
NUM_CONNECTIONS = 4
NUM_HEADERS_AT_ONCE = 8
NUM_ATTEMPTS = 5  # without a byte in between
FIRST_WAIT_S = 0.5  # doubled at every attempt: 7.5 s in all
TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class RangesIgnoredError(ModelError):
    """The server answers a range request with the whole file, which is not read."""


def open_hub(
    model: str,
    cache_dir: Path | None = None,
    progress: Progress = no_progress,
    *,
    may_fetch: bool = True,
) -> Checkpoint:
    """Open "org/name" or "org/name@revision": fetch its small files and its shards' headers, no weights.

    Without `may_fetch` the hub is never asked, now or later: what is not here yet is an error. Raises `ModelError`,
    its text saying what to do (a wrong name, a gate, no network).
    """
    repo, _, revision = model.partition("@")
    with explained(model):
        small_files = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=SMALL_FILES,
            local_files_only=not may_fetch,
            tqdm_class=reporting_bar(no_progress),
        )
    folder = Path(small_files)
    read_config_map(folder)
    index = folder / INDEX_NAME
    shard_of = read_index(index) if index.is_file() else None
    names = sorted(set(shard_of.values())) if shard_of is not None else [SINGLE_NAME]
    store = cache_root(cache_dir) / "hub" / repo.replace("/", "--")
    shards = HubShards(model, repo, folder, store, progress, may_fetch=may_fetch)
    with ThreadPoolExecutor(NUM_HEADERS_AT_ONCE) as pool:
        headers = dict(zip(names, pool.map(shards.open, names), strict=True))
    if shard_of is None:
        return Checkpoint(model, folder, headers[SINGLE_NAME], fetcher=shards)
    tensors: dict[str, TensorRange] = {}
    for shard, header in headers.items():
        wanted = {name for name, holder in shard_of.items() if holder == shard}
        tensors.update(pick_indexed(header, wanted, folder / shard))
    return Checkpoint(model, folder, tensors, fetcher=shards)


class HubShards:
    """The weight files of one model at one commit: fetched range by range into the cache."""

    def __init__(
        self,
        model: str,
        repo: str,
        folder: Path,
        store: Path,
        progress: Progress,
        *,
        may_fetch: bool = True,
        subfolder: str = "",
    ) -> None:
        self.model = model
        self.repo = repo
        self.commit = folder.name  # the hub cache names a snapshot by it, so the content never changes
        self.folder = folder / subfolder
        self.subfolder = subfolder or None
        self.store = store / self.commit / subfolder
        self.progress = progress
        self.may_fetch = may_fetch
        self.wait: Callable[[float], None] = time.sleep

    def open(self, shard: str) -> dict[str, TensorRange]:
        """Return the shard's tensors, fetching its header, or all of it when the server ignores ranges."""
        if (self.folder / shard).is_file():
            return read_tensor_ranges(self.folder / shard)
        file = SparseFile(self.store / shard)
        with explained(self.model):
            try:
                self._fetch_part(file, (0, LENGTH_BYTES))
                size = file.size() or 0
                length = header_length(file.read(0, LENGTH_BYTES), size, file.path)
                self._fetch_part(file, (LENGTH_BYTES, LENGTH_BYTES + length))
                return parse_header(file.read(LENGTH_BYTES, LENGTH_BYTES + length), size, file.path)
            except RangesIgnoredError:
                logger.warning("the server ignores byte ranges: fetching %s of %s whole", shard, self.model)
                bar = reporting_bar(self.progress)
                whole = hf_hub_download(
                    self.repo, shard, subfolder=self.subfolder, revision=self.commit, tqdm_class=bar
                )
                return read_tensor_ranges(Path(whole))

    def fetch(self, ranges: Iterable[TensorRange], progress: Progress) -> None:
        """Bring every byte of `ranges` that is not here yet into its local file. Raises `ModelError`."""
        wanted: dict[Path, list[Range]] = defaultdict(list)
        for tensor in ranges:
            if tensor.file.is_relative_to(self.store):
                wanted[tensor.file].append((tensor.begin, tensor.end))
        missing = {file: SparseFile(file).missing(parts) for file, parts in wanted.items()}
        total = sum(end - begin for parts in missing.values() for begin, end in parts)
        self._check_space(total)
        meter = _Meter(progress, total)
        for path, parts in missing.items():
            if parts:
                with explained(self.model), locked(path):
                    self._bring(SparseFile(path), parts, meter)

    def _fetch_part(self, file: SparseFile, part: Range) -> None:
        if file.missing([part]):  # else another process may hold the lock for as long as its layers take
            with locked(file.path):
                self._bring(file, [part])

    def _bring(self, file: SparseFile, wanted: list[Range], meter: _Meter | None = None) -> None:
        """Download what of `wanted` is missing, a few pieces at a time; the caller holds the file's lock."""
        missing = file.missing(wanted)
        if missing and not self.may_fetch:
            raise ModelError(f"{self.model} is not fully here; name it with --model, and it is fetched")
        noting = threading.Lock()

        def bring_piece(piece: Range) -> None:
            self._download(file, *piece, meter)
            with noting:
                file.add(*piece)

        if meter is not None:  # what another process has brought meanwhile
            meter.add(_num_bytes(merged(wanted)) - _num_bytes(missing))
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            for _ in pool.map(bring_piece, pieces(missing, PIECE_BYTES)):
                pass

    def _download(self, file: SparseFile, begin: int, end: int, meter: _Meter | None) -> None:
        """Write [begin, end) of the remote file into the local one, resuming after transient errors."""
        offset, failures = begin, 0
        while offset < end:
            try:
                for data in self._stream(file, offset, end):
                    with file.path.open("rb+") as stream:
                        os.pwrite(stream.fileno(), data, offset)
                    offset, failures = offset + len(data), 0
                    if meter is not None:
                        meter.add(len(data))
            except (httpx2.TransportError, HfHubHTTPError) as error:
                failures += 1
                if failures >= NUM_ATTEMPTS or not _is_transient(error):
                    raise
                self.wait(FIRST_WAIT_S * 2 ** (failures - 1))

    def _stream(self, file: SparseFile, begin: int, end: int) -> Iterator[bytes]:
        """Ask for [begin, end) and yield it as it comes; makes the local file once the size is known."""
        url = hf_hub_url(self.repo, file.path.name, subfolder=self.subfolder, revision=self.commit)
        headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise RangesIgnoredError(
                    f"the hub sends {file.path.name} whole only: download it as a folder"
                )
            first, last, size = _content_range(response.headers.get("Content-Range", ""), file.path)
            if (first, last) != (begin, end - 1):
                raise ModelError(
                    f"the hub sent bytes {first} to {last} of {file.path.name}, not what was asked"
                )
            file.create(size)
            left = end - begin
            for data in response.iter_raw():  # as it comes: what arrived before an error is kept
                yield data[:left]
                left -= len(data[:left])
            if left:
                raise httpx2.RemoteProtocolError("the answer ended early")

    def _check_space(self, total: int) -> None:
        self.store.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.store).free
        if total > free:
            raise ModelError(
                f"{self.model} needs {total >> 20} MiB more but {self.store} has {free >> 20} MiB left; "
                "set DIFFUSE_CACHE_DIR to a folder with more room"
            )


class _Meter:
    """Adds up what several threads download and tells it on."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress("download", self._done, self._total)


def _num_bytes(ranges: list[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def _content_range(text: str, file: Path) -> tuple[int, int, int]:
    """Parse "bytes 0-7/1234"."""
    try:
        unit, _, rest = text.partition(" ")
        span, _, size = rest.partition("/")
        first, _, last = span.partition("-")
        parsed = int(first), int(last), int(size)
    except ValueError:
        parsed, unit = (0, 0, 0), ""
    if unit != "bytes":
        raise ModelError(f"the hub's answer for {file.name} has no usable Content-Range: {text!r}")
    return parsed


def _is_transient(error: Exception) -> bool:
    return not isinstance(error, HfHubHTTPError) or error.response.status_code in TRANSIENT_STATUS


def reporting_bar(progress: Progress) -> type[Any]:
    """Return the progress-bar class that huggingface_hub wants: it draws nothing and tells `progress`."""

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._done = int(kwargs.get("initial") or 0)
            self._all = int(kwargs.get("total") or 0)
            super().__init__(*args, **kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            if self._all:
                progress("download", self._done, self._all)
            return None

    return ReportingBar
