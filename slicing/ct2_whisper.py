"""Whisper as CTranslate2 stores it, turned once into a cached folder that the stock classes load.

Writes what `WhisperForConditionalGeneration`, its tokenizer and its feature extractor read: float32 weights under the
stock names, and the JSON files beside them. What CTranslate2 stacks (queries, keys and values) is taken apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

from slicing.cache import cache_root, made_once
from slicing.ct2 import CT2File
from slicing.errors import ModelError
from slicing.json_object import read_json_object
from slicing.progress import Progress, no_progress
from slicing.tensor_file import write_tensors

FORMAT: Final = "1"  # of the converted folder: raised when the conversion changes what it writes
SPECIFICATION: Final = "WhisperSpec"
HEAD_BYTES: Final = 1 << 16  # of the file that go into its key, with its size
GELU: Final = 3  # CTranslate2's number of the only activation that Whisper has
FIRST_MULTILINGUAL_VOCAB: Final = 51_865  # English-only models have one token less
TIMESTAMP_STEP_S: Final = 0.02
NUM_TIMESTAMPS: Final = 1501  # 0 to 30 s
END, START, BEFORE, NO_TIMESTAMPS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|startofprev|>",
    "<|notimestamps|>",
)
TASKS: Final = ("transcribe", "translate")
FIRST_TIMESTAMP_LIMIT: Final = (
    50  # the first timestamp is within a second, as in the published configurations
)


def converted_folder(folder: Path, cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """Return the safetensors folder made from a CTranslate2 folder, converting it on the first call.

    Raises `ModelError`. Its name depends on the file's size and first bytes and on the version of transformers.
    """
    target = cache_root(cache_dir) / "ct2" / f"{folder.parent.name}-{_key(folder / 'model.bin')}"
    return made_once(target, lambda partial: convert(folder, partial, progress))


def convert(folder: Path, target: Path, progress: Progress = no_progress) -> None:
    """Write the model of the CTranslate2 `folder` into the new folder `target`. Raises `ModelError`."""
    file = CT2File(folder / "model.bin")
    if file.specification != SPECIFICATION:
        raise ModelError(f"{file.path} holds a {file.specification}; only Whisper is read from this format")
    tokens = _tokenizer(folder)
    config = _config(file, _ids(tokens))
    target.mkdir(parents=True)
    _write_weights(file, config, target / "model.safetensors", progress)
    _write_json(
        target / "config.json", config.to_dict() | {"architectures": ["WhisperForConditionalGeneration"]}
    )
    _write_json(target / "tokenizer.json", tokens)
    _write_json(target / "tokenizer_config.json", _tokenizer_config(config))
    generation = _generation_config(read_json_object(folder / "config.json"), config, _ids(tokens))
    generation.save_pretrained(target)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(target)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a stock tensor comes from: part `part` of `parts` of a variable's rows."""

    name: str
    part: int = 0
    parts: int = 1


def _key(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        size = file.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    label = f"{FORMAT} {version('transformers')} {size} "
    return hashlib.sha256(label.encode() + head).hexdigest()[:16]


def _config(file: CT2File, ids: dict[str, int]) -> WhisperConfig:
    vocab_size, width = file.shape("decoder/embeddings/weight")
    if int(file.read("decoder/activation")) != GELU:
        raise ModelError(f"{file.path} has another activation than Whisper's")
    layers = {side: _num_layers(file, side) for side in ("encoder", "decoder")}
    heads = {side: int(file.read(f"{side}/num_heads")) for side in ("encoder", "decoder")}
    return WhisperConfig(
        vocab_size=vocab_size,
        num_mel_bins=file.shape("encoder/conv1/weight")[1],
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=heads["encoder"],
        decoder_attention_heads=heads["decoder"],
        encoder_ffn_dim=file.shape("encoder/layer_0/ffn/linear_0/weight")[0],
        decoder_ffn_dim=file.shape("decoder/layer_0/ffn/linear_0/weight")[0],
        max_source_positions=file.shape("encoder/position_encodings/encodings")[0],
        max_target_positions=file.shape("decoder/position_encodings/encodings")[0],
        pad_token_id=ids[END],
        bos_token_id=ids[END],
        eos_token_id=ids[END],
        decoder_start_token_id=ids[START],
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dtype="float32",
    )


def _num_layers(file: CT2File, side: str) -> int:
    return len(
        {
            name.split("/")[1]
            for name in file.variables
            if name.startswith(f"{side}/layer_") and "/ffn/" in name
        }
    )


def _write_weights(file: CT2File, config: WhisperConfig, target: Path, progress: Progress) -> None:
    sources = dict(_sources(config))
    shapes = {name: _shape(file, source) for name, source in sources.items()}
    _check_dropped(file, config)
    total = sum(torch.float32.itemsize * torch.Size(shape).numel() for shape in shapes.values())
    done = 0
    for size in write_tensors(
        target, shapes, ((name, _read(file, source)) for name, source in sources.items())
    ):
        done += size
        progress("convert", done, total)


def _sources(config: WhisperConfig) -> Iterator[tuple[str, _Source]]:
    """Yield each stock tensor's name and where it lies; the head is tied to the embedding."""
    for conv in ("conv1", "conv2"):
        yield f"model.encoder.{conv}.weight", _Source(f"encoder/{conv}/weight")
        yield f"model.encoder.{conv}.bias", _Source(f"encoder/{conv}/bias")
    yield "model.decoder.embed_tokens.weight", _Source("decoder/embeddings/weight")
    for side, num_layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        yield f"model.{side}.embed_positions.weight", _Source(f"{side}/position_encodings/encodings")
        yield from _norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for number in range(num_layers):
            yield from _layer(
                f"model.{side}.layers.{number}", f"{side}/layer_{number}", is_decoder=side == "decoder"
            )


def _layer(ours: str, theirs: str, *, is_decoder: bool) -> Iterator[tuple[str, _Source]]:
    own = f"{theirs}/self_attention"
    yield from _norm(f"{ours}.self_attn_layer_norm", f"{own}/layer_norm")
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        yield from _linear(f"{ours}.self_attn.{name}", f"{own}/linear_0", part, 3)
    yield from _linear(f"{ours}.self_attn.out_proj", f"{own}/linear_1")
    if is_decoder:
        cross = f"{theirs}/attention"
        yield from _norm(f"{ours}.encoder_attn_layer_norm", f"{cross}/layer_norm")
        yield from _linear(f"{ours}.encoder_attn.q_proj", f"{cross}/linear_0")
        for part, name in enumerate(("k_proj", "v_proj")):
            yield from _linear(f"{ours}.encoder_attn.{name}", f"{cross}/linear_1", part, 2)
        yield from _linear(f"{ours}.encoder_attn.out_proj", f"{cross}/linear_2")
    yield from _norm(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
    for part, name in enumerate(("fc1", "fc2")):
        yield from _linear(f"{ours}.{name}", f"{theirs}/ffn/linear_{part}")


def _norm(ours: str, theirs: str) -> Iterator[tuple[str, _Source]]:
    yield f"{ours}.weight", _Source(f"{theirs}/gamma")
    yield f"{ours}.bias", _Source(f"{theirs}/beta")


def _linear(ours: str, theirs: str, part: int = 0, parts: int = 1) -> Iterator[tuple[str, _Source]]:
    yield f"{ours}.weight", _Source(f"{theirs}/weight", part, parts)
    if not ours.endswith(".k_proj"):  # the stock class has none, see `_check_dropped`
        yield f"{ours}.bias", _Source(f"{theirs}/bias", part, parts)


def _check_dropped(file: CT2File, config: WhisperConfig) -> None:
    """The keys' biases, which the stock class lacks, are zeros: nothing is lost with them."""
    for side, num_layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for number in range(num_layers):
            keys = [_Source(f"{side}/layer_{number}/self_attention/linear_0/bias", 1, 3)]
            keys += (
                [_Source(f"{side}/layer_{number}/attention/linear_1/bias", 0, 2)] if side == "decoder" else []
            )
            if any(_read(file, source).any() for source in keys):
                raise ModelError(f"{file.path} has a bias of keys, which no Whisper has")


def _shape(file: CT2File, source: _Source) -> tuple[int, ...]:
    rows, *rest = file.shape(source.name)
    if rows % source.parts:
        raise ModelError(f"{file.path}: {source.name} cannot be taken apart")
    return (rows // source.parts, *rest)


def _read(file: CT2File, source: _Source) -> torch.Tensor:
    values = file.read(source.name)
    if not values.is_floating_point():
        raise ModelError(
            f"{file.path} holds quantised weights ({source.name}); use a float16 or float32 conversion"
        )
    return values.chunk(source.parts)[source.part]


def _tokenizer(folder: Path) -> dict[str, Any]:
    """The tokenizer with the timestamps that CTranslate2 leaves out of it."""
    tokens = read_json_object(folder / "tokenizer.json")
    added = tokens.get("added_tokens")
    if not isinstance(added, list) or not added or any(not isinstance(one, dict) for one in added):
        raise ModelError(
            f"{folder / 'tokenizer.json'} is damaged: it names no special tokens; fetch it again"
        )
    for name in (END, START, BEFORE, NO_TIMESTAMPS):
        if name not in _ids(tokens):
            raise ModelError(f"{folder / 'tokenizer.json'} names no {name}: it is of no Whisper")
    first = _ids(tokens)[NO_TIMESTAMPS] + 1
    if all(one.get("id") != first for one in added):
        stamps = [f"<|{number * TIMESTAMP_STEP_S:.2f}|>" for number in range(NUM_TIMESTAMPS)]
        plain = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": False,
        }
        added += [{"id": first + number, "content": stamp} | plain for number, stamp in enumerate(stamps)]
    return tokens


def _ids(tokens: dict[str, Any]) -> dict[str, int]:
    return {str(one.get("content")): int(one.get("id", -1)) for one in tokens["added_tokens"]}


def _tokenizer_config(config: WhisperConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "WhisperTokenizer",
        "model_max_length": config.max_target_positions,
        "clean_up_tokenization_spaces": False,
    } | {f"{name}_token": END for name in ("bos", "eos", "unk", "pad")}


def _generation_config(
    stated: dict[str, Any], config: WhisperConfig, ids: dict[str, int]
) -> GenerationConfig:
    """What Whisper's own algorithm goes by. `stated` is CTranslate2's configuration."""
    is_multilingual = config.vocab_size >= FIRST_MULTILINGUAL_VOCAB
    known: dict[str, Any] = {
        "eos_token_id": ids[END],
        "bos_token_id": ids[END],
        "pad_token_id": ids[END],
        "decoder_start_token_id": ids[START],
        "prev_sot_token_id": ids[BEFORE],
        "no_timestamps_token_id": ids[NO_TIMESTAMPS],
        "max_initial_timestamp_index": FIRST_TIMESTAMP_LIMIT,
        "max_length": config.max_target_positions,
        "suppress_tokens": _numbers(stated.get("suppress_ids")),
        "begin_suppress_tokens": _numbers(stated.get("suppress_ids_begin")),
        "is_multilingual": is_multilingual,
        "return_timestamps": False,
    }
    if is_multilingual:
        between = range(ids[START] + 1, ids[f"<|{TASKS[1]}|>"])
        known["lang_to_id"] = {name: number for name, number in ids.items() if number in between}
        known["task_to_id"] = {task: ids[f"<|{task}|>"] for task in TASKS}
    return GenerationConfig(**known)


def _numbers(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ModelError("the model's configuration names no suppressed tokens")
    return value


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
