"""The special tokens of a Whisper and what may follow what, as the model's own files name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.models.whisper.tokenization_whisper import LANGUAGES

from app.engine.speech import Task
from slicing.errors import ModelError
from slicing.json_object import read_json_object
from slicing.logits_rule import WhisperRule

ENGLISH = "en"


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Token ids. `languages` and `tasks` are empty where the model knows English only."""

    start: int
    end: int
    before: int | None  # what was said before follows it; None: the model cannot be told
    no_timestamps: int
    suppressed: tuple[int, ...] = field(repr=False)
    suppressed_first: tuple[int, ...]
    first_limit: int | None  # of the first timestamp, in steps
    languages: Mapping[str, int] = field(repr=False)  # by code
    tasks: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> SpeechTokens:
        """Read a model folder's generation_config.json. Raises ModelError where it says too little."""
        file = folder / "generation_config.json"
        stated = read_json_object(file)
        try:
            languages = {
                name.strip("<|>"): int(number) for name, number in _map(stated, "lang_to_id").items()
            }
            return cls(
                start=int(stated["decoder_start_token_id"]),
                end=int(_first(stated["eos_token_id"])),
                before=_optional(stated.get("prev_sot_token_id")),
                no_timestamps=int(stated["no_timestamps_token_id"]),
                suppressed=_ids(stated.get("suppress_tokens")),
                suppressed_first=_ids(stated.get("begin_suppress_tokens")),
                first_limit=_optional(stated.get("max_initial_timestamp_index")),
                languages=languages,
                tasks={name: int(number) for name, number in _map(stated, "task_to_id").items()},
            )
        except KeyError as error:
            raise ModelError(
                f"{file} names no {error.args[0]}: it is too old, or of no speech model"
            ) from None
        except (TypeError, ValueError):
            raise ModelError(f"{file} is damaged: it names something that is no token id") from None

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    def language_names(self) -> dict[str, str]:
        """The languages that are understood, by code."""
        return {code: LANGUAGES.get(code, code) for code in self.languages or (ENGLISH,)}

    def language_of(self, token_id: int) -> str:
        """The code of a language's token."""
        return next((code for code, number in self.languages.items() if number == token_id), ENGLISH)

    def rule(self, language: str | None, task: Task, *, has_times: bool = True) -> WhisperRule:
        """What an answer may be: it begins with language and task, and with saying that it has no times."""
        return WhisperRule(
            self.end,
            self.suppressed,
            self.suppressed_first,
            self.first_timestamp if has_times else None,
            self.first_limit if has_times else None,
            (*self._told(language, task), *(() if has_times else (_only(self.no_timestamps),))),
        )

    def _told(self, language: str | None, task: Task) -> tuple[tuple[int, int], ...]:
        """Language and task, where the model knows several."""
        if not self.languages:
            return ()
        ids = self.languages.values()
        spoken = (min(ids), max(ids) + 1) if language is None else _only(self.languages[language])
        return spoken, _only(self.tasks[task])


def _only(token_id: int) -> tuple[int, int]:
    return token_id, token_id + 1


def _map(stated: dict[str, Any], name: str) -> dict[str, Any]:
    value = stated.get(name) if stated.get("is_multilingual", True) else None
    return value if isinstance(value, dict) else {}


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in value or ())


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)
