"""A model on disk: its configuration, its tokenizer's folder, and where each of its tensors lies.

Weights are read by name, range by range, into memory that the caller made. It does not know which tensors a
slice needs (see `weights`), nor where the files came from (see `model_source`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from slicing.errors import ModelError
from slicing.json_object import read_json_object
from slicing.model_kind import headless_class
from slicing.progress import Progress
from slicing.sentence_files import makes_vectors
from slicing.tensor_file import DTYPES, TensorRange, read_tensor_ranges
from slicing.tensor_reader import Hasher, TensorReader

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Written by whoever saved the files, or a choice of the loading side: they do not change what is computed.
# (The stored dtype is in the digest through the tensors' own dtypes.)
UNDIGESTED_KEYS = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "torchscript",
    }
    | {"_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"}
)
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Fetcher(Protocol):
    """Brings tensor ranges that are not on this machine yet to their place in the local file."""

    def fetch(self, ranges: Iterable[TensorRange], progress: Progress) -> None:
        """Return once every byte of `ranges` can be read from its file. Raises `ModelError`."""


class Checkpoint:
    """An openable model: configuration, tokenizer files, and an index of tensors that are read one by one.

    `absent` maps the names of tensors whose shard file is not there to that file's name: they are an error
    only for a slice that needs them.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        tensors: Mapping[str, TensorRange],
        *,
        absent: Mapping[str, str] | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self.tensors = tensors
        self.absent = absent or {}
        self._fetcher = fetcher
        self._reader = TensorReader()
        self._config_map = read_config_map(folder)
        self.config = _build_config(folder, self._config_map)
        if not tensors and not self.absent:
            raise ModelError(f"{folder} holds no tensors")

    @property
    def public_name(self) -> str:
        """What peers and clients are told: a model given by path goes by its last part, not by where it lies here."""
        is_path = Path(self.name).expanduser().exists()
        return Path(self.name).expanduser().resolve().name.removesuffix(".gguf") if is_path else self.name

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that most of the checkpoint's bytes are stored in."""
        return prevailing_dtype(self.tensors.values())

    @property
    def bytes_requested(self) -> int:
        """How many bytes of tensors have been read so far (headers apart)."""
        return self._reader.bytes_requested

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 (32 bytes) over the configuration and every tensor's name, dtype and shape.

        It is the same for a hub id, a local folder and any sharding. Left out of the configuration, at
        every depth: `UNDIGESTED_KEYS`. Raises `ModelError` when a shard is missing: the whole model has to
        be known.
        """
        if self.absent:
            raise self.missing_shard(sorted(self.absent), f"the digest of {self.name} covers every shard")
        digest = hashlib.sha256(b"diffuse-model-1\n")
        digest.update(json.dumps(_digested(self._config_map), sort_keys=True, ensure_ascii=True).encode())
        for name in sorted(self.tensors):
            digest.update(b"\n" + describe_tensor(name, self.tensors[name]))
        return digest.digest()

    def missing_shard(self, names: list[str], reason: str) -> ModelError:
        """Build the error that names the shard files holding `names` and how to mend the folder."""
        shards = sorted({self.absent[name] for name in names})
        return ModelError(
            f"{self.folder} lacks {', '.join(shards)} ({reason}, e.g. {names[0]}); copy it there, "
            "or name the model by its hub id, which fetches only what is needed"
        )

    def fetch(self, names: Iterable[str], progress: Progress) -> None:
        """Make sure that the named tensors can be read. Raises `ModelError`."""
        if self._fetcher is not None:
            self._fetcher.fetch([self.tensors[name] for name in names], progress)

    def start_hash(self, name: str) -> hashlib._Hash:
        """Return a SHA-256 that has taken in the tensor's name, dtype and shape; `read_into` adds more."""
        return hashlib.sha256(describe_tensor(name, self.tensors[name]) + b"\n")

    def read_into(self, name: str, out: torch.Tensor, hasher: Hasher | None = None) -> None:
        """Read one tensor into `out`; see `TensorReader.read_into`."""
        self._reader.read_into(self.tensors[name], out, hasher)

    def close(self) -> None:
        """Close the files that reading opened; the next read opens them again."""
        self._reader.close()


def open_folder(folder: Path, name: str | None = None) -> Checkpoint:
    """Open a local safetensors folder (an index and its shards, or a single file). Raises `ModelError`."""
    index = folder / INDEX_NAME
    read_config_map(folder)
    if index.is_file():
        tensors, absent = read_shards(folder, read_index(index))
        return Checkpoint(name or str(folder), folder, tensors, absent=absent)
    files = (
        [folder / SINGLE_NAME] if (folder / SINGLE_NAME).is_file() else sorted(folder.glob("*.safetensors"))
    )
    if not files:
        raise _no_safetensors(folder)
    if len(files) > 1:
        raise ModelError(
            f"{folder} holds {len(files)} safetensors files but no {INDEX_NAME}; copy the index there too"
        )
    return Checkpoint(name or str(folder), folder, read_tensor_ranges(files[0]))


def read_shards(folder: Path, shard_of: Mapping[str, str]) -> tuple[dict[str, TensorRange], dict[str, str]]:
    """Where an index's tensors lie, and of those whose shard is not in the folder that shard's name.

    Raises `ModelError`.
    """
    tensors: dict[str, TensorRange] = {}
    absent: dict[str, str] = {}
    for shard in sorted(set(shard_of.values())):
        wanted = {tensor for tensor, holder in shard_of.items() if holder == shard}
        if not (folder / shard).is_file():
            absent.update(dict.fromkeys(wanted, shard))
            continue
        tensors.update(pick_indexed(read_tensor_ranges(folder / shard), wanted, folder / shard))
    return tensors, absent


def pick_indexed(held: Mapping[str, TensorRange], wanted: set[str], file: Path) -> dict[str, TensorRange]:
    """Keep the tensors of a shard that the index places there; raises `ModelError` when one is not in it."""
    if lost := sorted(wanted - held.keys()):
        raise ModelError(f"{file} does not hold {lost[0]}, though the index says so; fetch the folder again")
    return {name: held[name] for name in wanted}


def read_index(index: Path) -> dict[str, str]:
    """Read an index file: tensor name -> shard file name. Raises `ModelError` on all but plain file names."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is damaged: it holds no weight_map; fetch it again")
    for shard in set(map(str, weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index} names {shard!r}, which is not a safetensors file of its own folder")
    return {str(name): str(shard) for name, shard in weight_map.items()}


def read_config_map(folder: Path) -> dict[str, Any]:
    """Read config.json and refuse what this project cannot run: quantised weights, unknown or remote code."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} holds no config.json; name a model folder, a .gguf file or a hub id")
    config = read_json_object(file)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelError(
            f"{folder} holds weights quantised with {method}, which is not supported yet; "
            "use the same model in bfloat16, float16 or float32"
        )
    if config.get("model_type") not in CONFIG_MAPPING:
        code = " and brings its own code, which is never run" if "auto_map" in config else ""
        raise ModelError(
            f"{folder} has the model type {config.get('model_type')!r}, unknown to transformers{code}"
        )
    return config


def _build_config(folder: Path, config_map: Mapping[str, Any]) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the config classes raise whatever their checks raise
        kind, first = config_map.get("model_type"), next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"transformers refuses {folder / 'config.json'} ({kind}): {first}") from error
    if makes_vectors(folder):  # many name the class with a head that they were trained from
        config.architectures = [headless_class(config)]
    return config


def _no_safetensors(folder: Path) -> ModelError:
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))]
    if pickles:
        return ModelError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when they are read; "
            "use a safetensors copy of the model"
        )
    return ModelError(f"{folder} holds no *.safetensors and no *.gguf file")


def _digested(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _digested(item) for key, item in value.items() if key not in UNDIGESTED_KEYS}
    return [_digested(item) for item in value] if isinstance(value, list) else value


def prevailing_dtype(tensors: Iterable[TensorRange]) -> torch.dtype:
    """The floating-point type that most bytes of these are stored in; float32 where there is none."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] += tensor.size_bytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def describe_tensor(name: str, tensor: TensorRange) -> bytes:
    """A line that says a tensor's name, stored type and shape: what digests and hashes begin with."""
    return f"{name}\t{_DTYPE_NAMES[tensor.dtype]}\t{','.join(map(str, tensor.shape))}".encode()
