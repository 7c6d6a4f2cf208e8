"""The replay buffer: the newest examples of what targets said, for whoever trains drafters for them.

    outrider:{examples}:MODEL:TOKENIZER   stream: `e` -> an example (outrider.core.examples)

Bounded in number and in age; nothing in it says whose a text was. Losing it costs what might have been learned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from outrider.core.examples import Example
from outrider.store.client import Client, translated

MOST = 2048  # examples of one model, of 30 KB at most
KEPT_S = 24 * 3600  # how long one is kept

_KEY = "outrider:{examples}:"
_FIELD = b"e"

log = logging.getLogger(__name__)


class Examples:
    """Those of one target. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client, model: str, tokenizer_digest: bytes, *, most: int = MOST) -> None:
        self._redis = redis
        self._key = f"{_KEY}{model}:{tokenizer_digest.hex()}"
        self._most = most

    async def add(self, examples: Sequence[Example]) -> None:
        """Adds some; the oldest make room."""
        oldest = f"{int((time.time() - KEPT_S) * 1000)}-0"
        with translated(self._redis):
            for example in examples:  # not as a pipeline, whose errors quote the commands, and so texts
                await self._redis.xadd(self._key, {_FIELD: example.pack()}, maxlen=self._most, approximate=True)
            await self._redis.xtrim(self._key, minid=oldest, approximate=False)
            await self._redis.expire(self._key, KEPT_S)

    async def after(self, place: str, most: int = 64, *, until: str = "+") -> tuple[list[Example], str]:
        """The next examples behind a place and up to another one, and the place behind them; "0" is where the stream
        begins.

        What is no example is skipped and logged.
        """
        with translated(self._redis):
            entries: Any = await self._redis.xrange(self._key, min=f"({place}", max=until, count=most)
        found = []
        for name, fields in entries:
            place = name.decode()
            try:
                found.append(Example.unpack(fields[_FIELD]))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("skipped an entry of %s: %s", self._key, error)
        return found, place

    async def end(self) -> str:
        """The place behind the last one that there is."""
        with translated(self._redis):
            entries: Any = await self._redis.xrevrange(self._key, count=1)
        return entries[0][0].decode() if entries else "0"
