"""The token log of a session that this router owns: all tokens in memory, durable as far as `append` has returned."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from outrider.core.session.contract import Plan
from outrider.core.session.protocol import UNKNOWN_ORIGIN, Origin
from outrider.errors import Conflict, NotFound, Unavailable
from outrider.rpc.backoff import Backoff
from outrider.store.sessions import OwnedSession, SessionRecord, Sessions

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 0.5  # backoff while Redis is away
MAX_RESTORES = 4  # restores during one write

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class TokenLog:
    """Writes one generation's tokens under our epoch.

    While Redis is away a write waits and tries again, so the generation pauses when the verifier has reached the end of
    its window. If Redis comes back with less than it had, the missing tokens are restored first, under a higher epoch.
    Methods raise Superseded once another owner has the session.
    """

    def __init__(
        self, sessions: Sessions, owned: OwnedSession, record: SessionRecord, tokens: Sequence[int], logprobs: bytes
    ) -> None:
        self.tokens = list(tokens)  # all durable tokens of the session
        self.logprobs = bytearray(logprobs)  # of the generation's response
        self.record = record
        self._sessions = sessions
        self._owned = owned
        self._renewed = time.monotonic()

    @property
    def epoch(self) -> int:
        """The epoch under which this router owns the session."""
        return self._owned.epoch

    @property
    def origin(self) -> Origin | None:
        """What the generation's text depends on; None while no token of it is durable."""
        turn = self.record.turn
        begun = turn is not None and len(self.tokens) > turn.answer_position
        return self.record.origin or (UNKNOWN_ORIGIN if begun else None)

    @property
    def idle_s(self) -> float:
        """Seconds since the lease was last renewed."""
        return time.monotonic() - self._renewed

    async def append(
        self,
        tokens: Sequence[int],
        digest: int,
        *,
        logprobs: bytes,
        plan: Plan,
        verifier: str,
        origin: Origin,
        drafters: tuple[str, ...],
    ) -> None:
        """Make the next tokens durable and store the other arguments in the session's record. `digest` is over the
        session with these tokens; `origin` that of the verifier."""
        start, before = len(self.tokens), self.record
        if (plan, verifier, origin, drafters) != (before.plan, before.verifier, before.origin, before.drafters):
            self.record = replace(before, plan=plan, verifier=verifier, origin=origin, drafters=drafters)

        async def write() -> int:
            return await self._owned.append(
                start,
                tokens,
                digest,
                logprobs=logprobs,
                plan=None if plan is before.plan else plan,
                verifier=None if verifier == before.verifier else verifier,
                origin=None if origin == before.origin else origin,
                drafters=None if drafters == before.drafters else drafters,
            )

        await self._retry_until_durable(write)
        self.tokens += tokens
        self.logprobs += logprobs

    async def renew(self) -> None:
        """Renew the lease."""
        await self._retry_until_durable(self._owned.renew)

    async def reacquire(self) -> None:
        """Raise our epoch, which fences a lost verifier. Restores what Redis may have lost."""
        await self._retry_until_durable(lambda: self._owned.restore(self.record, self.tokens, bytes(self.logprobs)))

    async def finish(self, reason: str, usage: str, *, discard: bool = False) -> None:
        """Write the log's last entry. `discard`: drop the response's tokens."""
        turn = self.record.turn
        kept = self.tokens[: turn.answer_position] if discard and turn is not None else None
        await self._retry_until_durable(lambda: self._owned.finish(reason, usage, kept))

    async def release(self, usage: str) -> None:
        """Give the session up; its generation can be resumed."""
        await self._retry_until_durable(lambda: self._owned.release(usage))

    async def _retry_until_durable(self, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Repeat `write` until it succeeds, with a backoff while Redis is away and a restore if Redis lost tokens."""
        backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
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
                if not backoff.attempts:
                    log.warning("session %s pauses: %s", self.record.session_id, error)
                await backoff.wait()
            except (Conflict, NotFound) as error:
                if lost is not None or restored == MAX_RESTORES:  # Redis holds another text, not a part of ours
                    raise
                lost = error
            else:
                self._renewed = time.monotonic()
                return result
