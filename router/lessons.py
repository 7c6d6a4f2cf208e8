"""What this router's sessions learn for one another, and for those of other routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from outrider.core.goodput import Lessons
from outrider.errors import OutriderError
from router.models import ServedModel

SHARE_S = 5.0  # between two times that it is shared

Share = Callable[[str, Lessons], Awaitable[None]]

log = logging.getLogger(__name__)


class Lessonbook:
    """One entry for each model, the models of its drafters, and how hot its texts are."""

    def __init__(self, share: Share, drafting: Callable[[bytes], Sequence[str]]) -> None:
        """`drafting`: the names of the models that draft for a tokenizer now."""
        self._share = share
        self._drafting = drafting
        self._entries: dict[str, Lessons] = {}
        self._opened = asyncio.Event()  # an entry that others may know something of

    def of(self, model: ServedModel, heat: str) -> Lessons:
        """The entry for sessions of a model. A new one has read what others know within some milliseconds."""
        name = f"{model.name}:{'+'.join(self._drafting(model.digest))}:{heat}"
        if name not in self._entries:
            self._entries[name] = Lessons()
            self._opened.set()
        return self._entries[name]

    async def keep(self) -> None:
        """Shares all of it with other routers, now and then. Until cancelled."""
        while True:
            for name, lessons in [*self._entries.items()]:
                try:
                    await self._share(name, lessons)
                except OutriderError as error:
                    log.debug("%s", error)  # the next time
            with suppress(TimeoutError):
                async with asyncio.timeout(SHARE_S):
                    await self._opened.wait()
            self._opened.clear()
