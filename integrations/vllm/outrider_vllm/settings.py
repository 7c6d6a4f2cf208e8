"""What vLLM is told of drafters: `--additional-config '{"outrider": {"drafters": ["10.0.0.5:7072"]}}'`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outrider.rpc.tls import Tls
from outrider.upstream.remote_drafts import UpstreamSettings

NAME = "outrider"  # of the settings within vLLM's


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys, and what holds where one is left out."""

    drafters: tuple[str, ...] = ()  # "HOST:PORT" of each
    shared_noise: bool = False  # whether requests with a temperature draw by shared noise, where they do not say
    wait_ms: float = 0.0  # the longest that a step waits for drafts
    ahead: int = 4  # levels that are drafted beyond `num_speculative_tokens`, while vLLM verifies
    width: int = 2  # tokens that are drafted for each place
    each: int = 1  # drafters of a request
    adaptive: bool = True  # draft only as far as measured times show that it pays
    listen: str = "127.0.0.1:0"  # where drafters connect to
    advertise: str | None = None  # the address as drafters know it
    ca: str | None = None  # files of certificates, of the role upstream
    cert: str | None = None
    key: str | None = None

    @classmethod
    def read(cls, additional_config: Any) -> Settings:
        """Return the settings within vLLM's. Raises ValueError, which names the key."""
        given = additional_config.get(NAME, {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise ValueError(f"additional_config.{NAME} must be an object")
        known = {field.name: field.type for field in fields(cls)}
        for key, value in given.items():
            if key not in known:
                raise ValueError(f"additional_config.{NAME}.{key} is unknown; there are {', '.join(known)}")
            if not _fits(value, known[key]):
                raise ValueError(f"additional_config.{NAME}.{key} is {value!r}, must be {_said(known[key])}")
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})

    def upstream(self, model: Path, vocabulary: int, depth: int) -> UpstreamSettings:
        """Return the settings of an upstream that serves this model, `depth` drafts at most in a step."""
        tls = Tls.read(Path(self.ca), Path(self.cert), Path(self.key)) if self.ca and self.cert and self.key else None
        return UpstreamSettings(
            self.drafters, model, vocabulary, depth, self.ahead, self.width, self.wait_ms, self.each,
            self.adaptive, listen=self.listen, advertise=self.advertise, tls=tls,
        )  # fmt: skip


def _fits(value: Any, kind: Any) -> bool:
    if kind == "tuple[str, ...]":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "float"):
        return isinstance(value, int if kind == "int" else (int, float)) and not isinstance(value, bool) and value >= 0
    return isinstance(value, str)


def _said(kind: Any) -> str:
    return {
        "tuple[str, ...]": 'a list of "HOST:PORT"',
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
    }.get(kind, "a text")
