"""How long a text may be where positions are looked up in a table that keeps its first rows for padding.

RoBERTa and its kin count positions from the padding token's number on, so that a table of 514 rows takes 512 tokens,
which no configuration says.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from slicing.model_kind import shape_of
from slicing.stacks import build_weightless


def usable_positions(config: PretrainedConfig) -> int:
    """Return the most tokens of a text. Raises `CannotCut` where transformers builds no such model."""
    model, limit = build_weightless(config, torch.float32), shape_of(config).max_positions
    words = model.get_input_embeddings()
    tables = [
        module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words
    ]
    padded = [
        table.num_embeddings - table.padding_idx - 1
        for table in tables
        if table.num_embeddings == limit and table.padding_idx is not None
    ]
    return min(padded, default=limit)
