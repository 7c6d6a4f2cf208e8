"""What flows share: the two gateways, and what is asked."""

import os
from collections.abc import Callable
from typing import Any

import pytest

MODEL = "target"
QUESTION = "What is the weather in Bern?"
TOKENS = 24
CITIES = ("Bern", "Ulm")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": [*CITIES]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
URLS = [f"http://{os.environ[which]}" for which in ("DRAFTED", "PLAIN")]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most clients want one, whatever it is."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "unused")


@pytest.fixture
def same() -> Callable[[Callable[[str], Any]], Any]:
    """What a flow returns, by a gateway's URL, when it is the same with drafters and without."""

    def asked(flow: Callable[[str], Any]) -> Any:
        drafted, plain = map(flow, URLS)
        assert drafted == plain
        return drafted

    return asked
