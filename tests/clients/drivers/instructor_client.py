"""instructor: a pydantic model from an answer, by a tool and by a schema."""

from __future__ import annotations

import instructor
import openai
import report
from pydantic import BaseModel
from report import MODEL, tried


class Person(BaseModel):
    name: str
    age: int


def client(mode: instructor.Mode = instructor.Mode.TOOLS, key: str = report.API_KEY):
    return instructor.from_openai(
        openai.OpenAI(base_url=report.BASE_URL, api_key=key, max_retries=0), mode=mode
    )


ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": report.PERSON}],
    "max_tokens": 300,
    "temperature": 0,
}


@tried("tools")
def _() -> None:
    report.is_person(client().create(response_model=Person, **ASKED).model_dump())


@tried("structured")
def _() -> None:
    made = client(instructor.Mode.JSON_SCHEMA).create(response_model=Person, **ASKED)
    report.is_person(made.model_dump())


@tried("streaming")
def _() -> None:
    pieces = list(client().create_partial(response_model=Person, **ASKED))
    assert len(pieces) > 1
    report.is_person(pieces[-1].model_dump())


@tried("usage")
def _() -> None:
    _, answer = client().create_with_completion(response_model=Person, **ASKED)
    assert answer.usage.total_tokens > 0


@tried("wrong key")
def _() -> None:
    if report.API_KEY == "none":
        raise report.Skipped("this gateway has no key")
    try:
        client(key="wrong").create(response_model=Person, max_retries=0, **ASKED)
    except Exception as error:
        assert "key" in str(error).lower(), str(error)
    else:
        raise AssertionError("no error")
