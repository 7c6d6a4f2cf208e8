"""The replay buffer: the newest training samples of a target, from which drafters are trained.

    outrider:{examples}:MODEL:TOKENIZER   stream: `e` -> a sample (outrider.core.session.training_samples)

Bounded in number and in age; no sample names its tenant. Losing the buffer costs only what could have been learned.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from outrider.core.session.training_samples import TrainingSample
from outrider.store.redis.client import Client, redis_errors

MAX_SAMPLES = 2048  # samples of one model, of 30 KB at most
KEPT_S = 24 * 3600  # how long a sample is kept

_KEY = "outrider:{examples}:"
_FIELD = b"e"

log = logging.getLogger(__name__)


class TrainingSampleStore:
    """The samples of one target. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client, model: str, tokenizer_digest: bytes, *, max_samples: int = MAX_SAMPLES) -> None:
        self._redis = redis
        self._key = f"{_KEY}{model}:{tokenizer_digest.hex()}"
        self._max_samples = max_samples

    async def add(self, samples: Sequence[TrainingSample]) -> None:
        """Add samples; the oldest ones are dropped."""
        added: Any = b"0-0"  # an id begins with the time of Redis' clock, in milliseconds
        with redis_errors(self._redis):
            for sample in samples:  # not as a pipeline: its errors quote the commands, and so texts
                added = await self._redis.xadd(
                    self._key, {_FIELD: sample.pack()}, maxlen=self._max_samples, approximate=True
                )
            oldest = max(0, int(added.partition(b"-")[0]) - KEPT_S * 1000)
            await self._redis.xtrim(self._key, minid=f"{oldest}-0", approximate=False)
            await self._redis.expire(self._key, KEPT_S)

    async def after(self, position: str, limit: int = 64, *, until: str = "+") -> tuple[list[TrainingSample], str]:
        """Return up to `limit` samples behind `position` and up to `until`, and the position behind them; the stream
        begins at "0".

        Entries that are no sample are skipped and logged.
        """
        with redis_errors(self._redis):
            entries: Any = await self._redis.xrange(self._key, min=f"({position}", max=until, count=limit)
        found = []
        for name, fields in entries:
            position = name.decode()
            try:
                found.append(TrainingSample.unpack(fields[_FIELD]))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("skipped an entry of %s: %s", self._key, error)
        return found, position

    async def end(self) -> str:
        """Return the position behind the last sample."""
        with redis_errors(self._redis):
            entries: Any = await self._redis.xrevrange(self._key, count=1)
        return entries[0][0].decode() if entries else "0"
