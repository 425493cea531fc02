"""Small models that make vectors, of several stock classes, with random weights, and the folders that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

from tests.support.tiny_tokenizer import write_tiny_tokenizer

NUM_LAYERS = 4
VOCAB_SIZE = 320
HIDDEN_SIZE = 32
MAX_POSITIONS = 66
NOISE = 0.1  # added to every weight: what starts at 0 or 1 must count as well

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),  # counts positions from behind the padding
    "distilbert": ("DistilBertModel", {"dim": 32, "hidden_dim": 48, "n_layers": NUM_LAYERS, "n_heads": 4}),
    "modernbert": ("ModernBertModel", {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}),
    "mpnet": ("MPNetModel", {}),  # its layers share a bias that only the first of them makes
    "qwen3": ("Qwen3Model", _GROUPED),
    "gemma3_text": ("Gemma3TextModel", _GROUPED | {"use_bidirectional_attention": True}),
}


def tiny_encoder(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build the stock class in float32 without a head."""
    name, settings = FAMILIES[family]
    config = AutoConfig.for_model(family, **_SIZES | settings | changes)
    config.architectures = [name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * NOISE)
    return model


def save_encoder(model: PreTrainedModel, folder: Path, pooling: str | None = None, **settings: Any) -> Path:
    """Save a model with a tokenizer and, where `pooling` is named, what sentence-transformers writes beside it.

    `settings` are put into its config.json.
    """
    write_tiny_tokenizer(folder)
    model.save_pretrained(folder)
    if settings:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    if pooling is not None:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [
            {"idx": number, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder
