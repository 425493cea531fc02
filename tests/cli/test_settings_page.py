"""docs/settings.md says what the flags say."""

from __future__ import annotations

from pathlib import Path

from tools.settings_page import page

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_of_settings_is_that_of_the_flags() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make settings` and commit the result"
