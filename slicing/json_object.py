"""Reads the small JSON files that lie beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slicing.errors import ModelError


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelError`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: it is not valid JSON; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is damaged: it holds no JSON object; fetch it again")
    return value
