"""What a user's text says about values: `age is 36`, `city: 'Rome'`, a place after `in`, the numbers in their order."""

from __future__ import annotations

import re
from typing import Any

PLACE = re.compile(r"\b[Ii]n ((?:[A-Z][\w]+)(?: [A-Z]\w+)*(?:, [A-Z]{2})?)")
NUMBER = re.compile(r"(?<![\w.])-?\d+")
QUOTED = re.compile(r"['\"]([^'\"]+)['\"]")


class Wishes:
    """Values for fields by their name, else by their kind and turn."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.places: list[str] = PLACE.findall(text)
        self.quoted: list[str] = QUOTED.findall(text)
        self.numbers: list[str] = NUMBER.findall(text)
        self._numbers_taken = 0

    def string(self, key: str, number: int = 0) -> str:
        """The text for a field; `number` is which of several calls it is for."""
        if found := re.search(rf"\b{re.escape(key)}\b\W+(?:is |of )?['\"]?([\w ]*\w)", self._text):
            return found.group(1)
        if self.places:
            return self.places[min(number, len(self.places) - 1)]
        if self.quoted and not re.search(rf"['\"]{re.escape(key)}['\"]", self._text):
            return self.quoted[0]
        return f"some {key}"

    def number(self, key: str) -> str:
        """The number for a field: the one behind its name, else the next that was not taken."""
        if found := re.search(rf"\b{re.escape(key)}\b\W+(?:is |of )?(-?\d+)", self._text):
            return found.group(1)
        if self._numbers_taken < len(self.numbers):
            self._numbers_taken += 1
            return self.numbers[self._numbers_taken - 1]
        return "1"

    def value(self, schema: dict[str, Any], number: int = 0, key: str = "value") -> Any:
        """A value of a JSON schema, what it does not require left out."""
        for part in schema.get("anyOf", ()):
            if part.get("type") != "null":
                return self.value(part, number, key)
        if "enum" in schema:
            named = [one for one in schema["enum"] if str(one) in self._text]
            return (named or schema["enum"])[0]
        match schema.get("type", "object" if "properties" in schema else "string"):
            case "object":
                required = schema.get("required", ())
                fields = schema.get("properties", {}).items()
                return {name: self.value(part, number, name) for name, part in fields if name in required}
            case "array":
                return [self.value(schema.get("items", {}), number, key)]
            case "integer":
                return int(self.number(key))
            case "number":
                return float(self.number(key))
            case "boolean":
                return True
            case _:
                return self.string(key, number)
