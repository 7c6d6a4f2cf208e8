"""What vLLM is told of drafters: `--additional-config '{"outrider": {"drafters": ["10.0.0.5:7072"]}}'`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outrider.rpc.tls import Tls
from outrider.upstream.remote_drafts import UpstreamSettings


class Settings(BaseModel):
    """The keys, and what holds where one is left out. Raises ValueError for other keys and values."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    drafters: list[str] = []  # "HOST:PORT" of each
    redis: str | None = None  # URL of a Redis in which drafters announce themselves
    shared_noise: bool = False  # whether requests with a temperature draw by shared noise, where they do not say
    wait_ms: NonNegativeFloat | None = None  # the longest that a step waits for drafts; None: as long as it pays
    ahead: NonNegativeInt = 4  # levels that are drafted beyond `num_speculative_tokens`, while vLLM verifies
    width: PositiveInt = 2  # tokens that are drafted for each place
    each: PositiveInt = 1  # drafters of a request
    idle_s: PositiveFloat = 60.0  # a request that no step has for so long is put aside: its end may not be known
    adaptive: bool = True  # draft only as far as measured times show that it pays
    listen: str = "127.0.0.1:0"  # where drafters connect to
    advertise: str | None = None  # the address as drafters know it
    metrics: str | None = None  # "HOST:PORT" at which Prometheus reads figures of drafts
    ca: str | None = None  # files of certificates, of the role upstream
    cert: str | None = None
    key: str | None = None

    @classmethod
    def read(cls, additional_config: Any) -> Settings:
        """Return the settings within vLLM's."""
        return cls.model_validate(additional_config.get("outrider", {}))

    def upstream(self, model: Path, vocabulary: int, depth: int) -> UpstreamSettings:
        """Return the settings of an upstream that serves this model, `depth` drafts at most in a step."""
        files = [Path(it) for it in (self.ca, self.cert, self.key) if it is not None]
        if len(files) not in (0, 3):
            raise ValueError("additional_config.outrider needs ca, cert and key together")
        both = {field.name for field in fields(UpstreamSettings)} & self.model_fields_set
        return UpstreamSettings(
            model=model,
            vocabulary=vocabulary,
            depth=depth,
            tls=Tls.read(*files) if files else None,
            **{"drafters": self.drafters} | {name: getattr(self, name) for name in both},
        )
