"""What every row is asked, and how that and the answer cross a pipe."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from outrider.cli.samples import Sample


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation. It goes on after an end of text: every row says exactly `max_tokens`."""

    prompt: tuple[int, ...]
    temperature: float  # 0 is greedy
    seed: int
    max_tokens: int

    def to_json(self, **more: int) -> str:
        """One line; `more` are fields for one row alone."""
        return json.dumps(asdict(self) | more)

    @classmethod
    def from_json(cls, line: str | bytes) -> Ask:
        """The same again."""
        values = json.loads(line)
        return cls(tuple(values.pop("prompt")), **values)


def sample_to_json(sample: Sample) -> str:
    """One line."""
    return json.dumps(asdict(sample))


def sample_from_json(line: str | bytes) -> Sample:
    """The same again."""
    values: dict[str, Any] = json.loads(line)
    for name in ("tokens", "arrivals", "reached_by_depth", "tried_by_depth"):
        values[name] = tuple(values[name])
    return Sample(**values)
