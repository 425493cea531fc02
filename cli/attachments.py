"""Pictures and recordings that a question carries: files, as parts of a chat message."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from cli.failures import CommandError

MAX_FILE_BYTES: Final = 23 << 20  # a gateway takes 32 MiB of JSON, and base64 makes a third more of it

Kind = Literal["image", "audio"]


def with_attachments(
    prompt: str, images: Sequence[Path], recordings: Sequence[Path]
) -> str | list[dict[str, Any]]:
    """Return the content of a message: files before the words that are about them. Raises CommandError."""
    parts = [*(attached(file, "image") for file in images), *(attached(file, "audio") for file in recordings)]
    return [*parts, {"type": "text", "text": prompt}] if parts else prompt


def attached(file: Path, kind: Kind) -> dict[str, Any]:
    """Return a file as a part of a message. What it holds is looked at by whoever decodes it. Raises CommandError."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise CommandError(f"{file} is larger than {MAX_FILE_BYTES >> 20} MiB")
        text = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror or type(error).__name__}") from error
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": f"data:;base64,{text}"}}
    form = "mp3" if file.suffix.lower() == ".mp3" else "wav"
    return {"type": "input_audio", "input_audio": {"data": text, "format": form}}
