"""`python -m app.openapi_document`: the gateway's OpenAPI document, as committed under openapi/."""

from __future__ import annotations

import json
import sys

from app.engine.shelf import Shelf
from app.main import create_app
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings


def document() -> str:
    """The document as text: sorted, so that a diff shows what changed."""
    app = create_app(GatewaySettings(), Shelf({}), GatewayMetrics())
    return json.dumps(app.openapi(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
