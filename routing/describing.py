"""What may be said of an error in a log: its type and where it came from.

Never its text, nor a line of source: either may quote a prompt, a key, or what a message held.
"""

from __future__ import annotations

import traceback

MAX_FRAMES = 8
MAX_CAUSES = 4  # causes, or members of a group


def describe(error: BaseException) -> str:
    """Return type and place of an error, and of what it came from."""
    parts = [_one(error)]
    if isinstance(error, BaseExceptionGroup):
        parts += [f"holds {_one(inner)}" for inner in error.exceptions[:MAX_CAUSES]]
    cause = _cause_of(error)
    while cause is not None and len(parts) <= MAX_CAUSES:
        parts.append(f"from {_one(cause)}")
        cause = _cause_of(cause)
    return "; ".join(parts)


def _one(error: BaseException) -> str:
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)[
        -MAX_FRAMES:
    ]
    places = " < ".join(
        f"{frame.name}:{frame.lineno} ({frame.filename.rpartition('/')[2]})" for frame in reversed(frames)
    )
    return f"{type(error).__name__} in {places or 'no frame'}"


def _cause_of(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__
