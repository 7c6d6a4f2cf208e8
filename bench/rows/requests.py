"""The requests to rows, and the JSON of requests and answers for pipes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from outrider.cli.performance.samples import Sample


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request for one generation. It continues after an end of text: every row generates exactly `max_tokens`."""

    prompt: tuple[int, ...]
    temperature: float  # 0 is greedy
    seed: int
    max_tokens: int

    def to_json(self, **more: int) -> str:
        """Return the request as one line of JSON; `more` are fields for a particular row."""
        return json.dumps(asdict(self) | more)

    @classmethod
    def from_json(cls, line: str | bytes) -> BenchRequest:
        """Return the request of a line from `to_json`."""
        values = json.loads(line)
        return cls(tuple(values.pop("prompt")), **values)


def sample_to_json(sample: Sample) -> str:
    """Return a sample as one line of JSON."""
    return json.dumps(asdict(sample))


def sample_from_json(line: str | bytes) -> Sample:
    """Return the sample of a line from `sample_to_json`."""
    values: dict[str, Any] = json.loads(line)
    for name in ("tokens", "arrivals", "reached_by_depth", "tried_by_depth"):
        values[name] = tuple(values[name])
    return Sample(**values)
