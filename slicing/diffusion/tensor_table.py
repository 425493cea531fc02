"""Where the tensors of one transformer lie, and how they are read: by name, whole files never.

Opens a component's folder; the hub's is in `hub_pipeline`. Pickled weights are never opened. Safe from several threads.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from slicing.checkpoint import Fetcher, describe_tensor, read_index, read_shards
from slicing.errors import ModelError
from slicing.progress import Progress
from slicing.tensor_file import TensorRange, read_tensor_ranges
from slicing.tensor_reader import TensorReader

SINGLE_NAME = "diffusion_pytorch_model.safetensors"
INDEX_NAME = SINGLE_NAME + ".index.json"


class TensorTable:
    """The tensors of one component. `absent` maps those whose shard is not there to that shard's name."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorRange],
        *,
        absent: Mapping[str, str] | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.folder = folder
        self.tensors = tensors
        self.absent = absent or {}
        self._fetcher = fetcher
        self._reader = TensorReader()
        self._lock = threading.Lock()

    @property
    def bytes_requested(self) -> int:
        """How many bytes of tensors have been read so far (headers apart)."""
        return self._reader.bytes_requested

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the component, here or not."""
        return frozenset(self.tensors) | frozenset(self.absent)

    def fetch(self, names: Iterable[str], progress: Progress) -> None:
        """Make sure that the named tensors can be read. Raises `ModelError`."""
        names = list(names)
        if lost := sorted(name for name in names if name in self.absent):
            raise self.missing_shard(lost)
        if self._fetcher is not None:
            self._fetcher.fetch([self.tensors[name] for name in names], progress)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor as `dtype`, straight into memory of its own, which torch aligns."""
        tensor = self.tensors[name]
        out = torch.empty(tensor.shape, dtype=dtype)
        with self._lock:
            self._reader.read_into(tensor, out)
        return out

    def describe(self, name: str) -> bytes:
        """A line that says a tensor's name, stored type and shape."""
        return describe_tensor(name, self.tensors[name])

    def digest(self) -> bytes:
        """SHA-256 over every tensor's description. Raises `ModelError` when a shard is missing."""
        if self.absent:
            raise self.missing_shard(sorted(self.absent))
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(self.describe(name) + b"\n")
        return digest.digest()

    def missing_shard(self, names: list[str]) -> ModelError:
        """Build the error that names the shard files holding `names` and how to mend the folder."""
        shards = sorted({self.absent[name] for name in names})
        return ModelError(
            f"{self.folder} lacks {', '.join(shards)} (which holds {names[0]}); copy it there, "
            "or name the model by its hub id, which fetches only what is needed"
        )

    def close(self) -> None:
        """Close the files that reading opened; the next read opens them again."""
        with self._lock:
            self._reader.close()


def open_table(folder: Path) -> TensorTable:
    """Open a component's folder: an index and its shards, or a single safetensors file. Raises `ModelError`."""
    index = folder / INDEX_NAME
    if index.is_file():
        tensors, absent = read_shards(folder, read_index(index))
        return TensorTable(folder, tensors, absent=absent)
    if (folder / SINGLE_NAME).is_file():
        return TensorTable(folder, read_tensor_ranges(folder / SINGLE_NAME))
    raise ModelError(f"{folder} {_why_unusable(folder)}")


def _why_unusable(folder: Path) -> str:
    if others := sorted(file.name for file in folder.glob("*.safetensors*")):
        return f"holds {others[0]} but no {SINGLE_NAME}; save the pipeline anew, without a variant"
    if pickles := sorted(
        file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{suffix}")
    ):
        return (
            f"holds only pickled weights ({pickles[0]}), which can run code when they are read; "
            "use a safetensors copy of the model"
        )
    return "holds no weights"
