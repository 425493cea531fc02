"""What a model's own files say about sampling and about where an answer ends.

Precedence for a request: its own fields, then `generation_config.json`, then neutral values (temperature 1,
the rest off). `do_sample` is not honoured: a request without a temperature samples, as OpenAI clients expect.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values for requests that name none, and the ids that end an answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> GenerationDefaults:
        """Read `generation_config.json` and `config.json`; what is missing or senseless counts as absent."""
        generation = _read_object(folder / "generation_config.json")
        config = _read_object(folder / "config.json")
        return cls(
            temperature=_number(generation, "temperature", 1.0, low=0.0, high=2.0),
            top_p=_number(generation, "top_p", 1.0, low=0.01, high=1.0),
            top_k=int(_number(generation, "top_k", 0, low=0, high=2**31)),
            min_p=_number(generation, "min_p", 0.0, low=0.0, high=1.0),
            repetition_penalty=_number(generation, "repetition_penalty", 1.0, low=0.01, high=10.0),
            stop_token_ids=_ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id")),
        )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _number(source: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value = source.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return value if low <= value <= high else default


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool))
