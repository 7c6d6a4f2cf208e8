"""A live session's log as its owner holds it: all of it in memory, and durable as far as `append` has returned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from outrider.core.contract import Plan
from outrider.errors import Conflict, NotFound, Unavailable
from outrider.store.sessions import OwnedSession, SessionRecord, Sessions

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 0.5  # between attempts while Redis is away

MOST_RESTORED = 4  # times that one write has to wait for what Redis lost

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class Ledger:
    """Writes one generation's tokens under our epoch.

    While Redis is away a write waits and tries again, so the generation pauses when the verifier has run as far ahead
    as its window allows. When Redis comes back with less than it had, what is missing is put back under a higher
    epoch first. Methods raise Superseded once somebody else owns the session.
    """

    def __init__(
        self, sessions: Sessions, owned: OwnedSession, record: SessionRecord, tokens: Sequence[int], logprobs: bytes
    ) -> None:
        self.tokens = list(tokens)  # all of the session that are durable
        self.logprobs = bytearray(logprobs)  # of the generation's answer
        self.record = record
        self._sessions = sessions
        self._owned = owned
        self._renewed = time.monotonic()

    @property
    def epoch(self) -> int:
        """Ours."""
        return self._owned.epoch

    @property
    def idle_s(self) -> float:
        """Since the lease was last renewed."""
        return time.monotonic() - self._renewed

    async def append(
        self,
        tokens: Sequence[int],
        digest: int,
        *,
        logprobs: bytes,
        plan: Plan,
        verifier: str,
        drafters: tuple[str, ...],
    ) -> None:
        """Makes the next tokens durable; `digest` is over the session with them. The rest is put on record."""
        start, before = len(self.tokens), self.record
        if (plan, verifier, drafters) != (before.plan, before.verifier, before.drafters):
            self.record = replace(before, plan=plan, verifier=verifier, drafters=drafters)

        async def write() -> int:
            return await self._owned.append(
                start,
                tokens,
                digest,
                logprobs=logprobs,
                plan=None if plan is before.plan else plan,
                verifier=None if verifier == before.verifier else verifier,
                drafters=None if drafters == before.drafters else drafters,
            )

        await self._insist(write)
        self.tokens += tokens
        self.logprobs += logprobs

    async def renew(self) -> None:
        """Says that the owner is alive."""
        await self._insist(self._owned.renew)

    async def reacquire(self) -> None:
        """Raises our epoch, so that a verifier we lost touch with is fenced. Puts back what Redis may have lost."""
        await self._insist(lambda: self._owned.restore(self.record, self.tokens, bytes(self.logprobs)))

    async def finish(self, reason: str, usage: str) -> None:
        """Writes the log's last entry."""
        await self._insist(lambda: self._owned.finish(reason, usage))

    async def release(self, usage: str) -> None:
        """Gives the session up; its generation can be resumed."""
        await self._insist(lambda: self._owned.release(usage))

    async def _insist(self, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        pause = FIRST_RETRY_S
        lost: Exception | None = None
        restored = 0
        while True:
            try:
                if lost is not None:
                    log.warning("session %s is restored: %s", self.record.session_id, lost)
                    await self._owned.restore(self.record, self.tokens, bytes(self.logprobs))
                    lost, restored = None, restored + 1
                result = await write()
            except Unavailable as error:
                if pause == FIRST_RETRY_S:
                    log.warning("session %s pauses: %s", self.record.session_id, error)
                await asyncio.sleep(pause)
                pause = min(LAST_RETRY_S, 2 * pause)
            except (Conflict, NotFound) as error:
                if lost is not None or restored == MOST_RESTORED:  # Redis holds another text, not less of ours
                    raise
                lost = error
            else:
                self._renewed = time.monotonic()
                return result
