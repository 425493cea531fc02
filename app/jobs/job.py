"""A video job as it is kept: what was asked, how far it is, and how it ended. Knows no disk and no HTTP."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

JobStatus = Literal["queued", "in_progress", "completed", "failed"]
STATUSES = get_args(JobStatus)
INTERRUPTED = "interrupted"  # the gateway ended while it ran


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed, in the words of an error answer."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """One video to make. Times are Unix seconds; `owner` is a digest of the key that asked, "" where none was."""

    id: str
    owner: str
    model: str
    prompt: str = field(repr=False)
    size: str  # "832x480"
    seconds: str
    created: float = field(default_factory=time.time)
    status: JobStatus = "queued"
    progress: int = 0  # percent
    completed: float | None = None
    expires: float | None = None
    error: JobError | None = None
    seed: int = 0
    steps: int = 0

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")

    def failed(self, code: str, message: str, lifetime_s: float) -> Job:
        """Return the job as it is once it has failed."""
        now = time.time()
        error = JobError(code, message)
        return replace(self, status="failed", error=error, completed=now, expires=now + lifetime_s)

    def done(self, seconds: str, lifetime_s: float) -> Job:
        """Return the job as it is once its video is kept."""
        now = time.time()
        return replace(
            self, status="completed", progress=100, seconds=seconds, completed=now, expires=now + lifetime_s
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Job:
        """Read what `to_json` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        known = {one.name for one in fields(cls)}
        values = {name: value for name, value in told.items() if name in known}
        if values["status"] not in STATUSES or not isinstance(values["id"], str):
            raise ValueError("not a job")
        error = values.get("error")
        values["error"] = JobError(str(error["code"]), str(error["message"])) if error else None
        values["created"] = float(values["created"])
        return cls(**values)


def length_text(seconds: float) -> str:
    """A length as OpenAI writes it: a text, digits only where it is whole."""
    return str(int(seconds)) if seconds == int(seconds) else f"{seconds:.3f}".rstrip("0")


def new_id() -> str:
    return f"video_{secrets.token_hex(12)}"
