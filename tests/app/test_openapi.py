"""The committed OpenAPI document says what the gateway does."""

from __future__ import annotations

from pathlib import Path

from app.openapi_document import document

COMMITTED = Path(__file__).parents[2] / "openapi" / "gateway.json"


def test_the_committed_document_is_the_one_the_gateway_serves() -> None:
    assert COMMITTED.read_text() == document(), "run `make openapi` and commit the result"
