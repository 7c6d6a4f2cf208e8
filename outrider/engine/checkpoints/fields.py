"""Reads fields of a config.json; errors name the file, the field and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from outrider.engine.checkpoints.model_config import MOST
from outrider.errors import CheckpointError


class ConfigFields(NamedTuple):
    """The fields of a config.json, or of an object in it. Methods raise CheckpointError."""

    path: Path
    values: dict[str, Any]

    def wrong(self, field: str, allowed: str) -> CheckpointError:
        """Return the error for a field that is not as it must be."""
        return CheckpointError(f"{self.path}: {field} is {self.values.get(field)!r:.80}, must be {allowed}")

    def count(self, field: str, default: int | None = None, most: int = MOST) -> int:
        """Return a positive integer; `default` where the field is absent or null."""
        value = self.values.get(field)
        if value is None and default is not None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(field, "a positive integer")
        if value > most:
            raise self.wrong(field, f"at most {most}")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """Return true or false; `default` where the field is absent."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def real(self, field: str, default: float) -> float:
        """Return a positive number; `default` where the field is absent or null."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong(field, "a positive number")
        return float(value)

    def within(self, field: str, key: str) -> dict[str, Any]:
        """Return the object that an object has under a key; empty where either is absent."""
        found = (self.values.get(field) or {}).get(key) or {}
        if not isinstance(found, dict):
            raise self.wrong(field, f"an object with an object {key}")
        return found

    def only(self, field: str, *allowed: Any) -> None:
        """Refuse a field that has another value than these; absent or null is the first of them."""
        if self.values.get(field) not in (None, *allowed):
            raise self.wrong(field, " or ".join(map(repr, allowed)))
