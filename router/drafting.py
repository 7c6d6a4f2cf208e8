"""A session's drafters: attached in the background, replaced when they go missing, never waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio

from outrider.core.credit import Credit, Worth
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tickets import Permit, sign
from outrider.store.registry import Worker
from outrider.v1 import drafter_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from router.background import Background
from router.fleet import Fleet

ANSWER_S = 2.0  # a drafter that takes longer to answer is taken for dead
SHORT_S = 1.0  # how long drafters may be missing before something is done about it

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Post:
    """Where to draft."""

    session_id: str
    tenant: str
    epoch: int
    upstream: Worker
    tokenizer_digest: bytes


class Drafters:
    """The drafters of one session at one verifier. Nothing here blocks or fails the session."""

    def __init__(
        self,
        fleet: Fleet,
        background: Background,
        post: Post,
        wanted: int,
        ticket_key: Callable[[], Awaitable[bytes]],
    ) -> None:
        self._fleet = fleet
        self._background = background
        self._post = post
        self._wanted = wanted
        self._ticket_key = ticket_key
        self._attached: dict[str, Worker] = {}
        self._worth = Worth()
        self._declined: set[str] = set()  # worker ids of those that did not help
        self._short_since: float | None = None
        self._asked_again = False  # the last shortage ended with the same drafters, all of them answering
        self._work = background.spawn(self._fill())

    @property
    def names(self) -> tuple[str, ...]:
        """Worker ids of those that were asked and have not failed."""
        return tuple(self._attached)

    def observe(self, subscribed: int, owed: tuple[Credit, ...] = ()) -> None:
        """Takes the number of drafters that a step had, and what it owed to each where there were several.

        Sees to it when too few had subscribed for a while. One that never helps is let go, for other sessions to use.
        """
        useless = self._worth.observe(owed) if owed else None
        if useless in self._attached:
            log.info("drafter %s drafts nothing for session %s that others do not", useless, self._post.session_id)
            self._declined.add(useless)
            self._wanted -= 1
            self._background.spawn(self._detach(self._attached[useless]))
        now = time.monotonic()
        if subscribed >= self._wanted:
            self._short_since, self._asked_again = None, False
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= SHORT_S and self._work.done():
            self._short_since = now
            self._work = self._background.spawn(self._repair())

    def dismiss(self) -> None:
        """Detaches all, in the background."""
        self._wanted = 0
        self._background.spawn(self._leave())

    async def _leave(self) -> None:
        # An Attach on its way could overtake our Detach.
        await asyncio.wait([self._work])
        await asyncio.gather(*(self._detach(worker) for worker in [*self._attached.values()]))

    async def _fill(self) -> None:
        """Attaches the best choices until there are enough."""
        if len(self._attached) >= self._wanted:
            return
        for worker in await self._fleet.drafters(self._post.tokenizer_digest):
            if len(self._attached) >= self._wanted:
                return
            if worker.worker_id not in self._attached and worker.worker_id not in self._declined:
                await self._attach(worker)

    async def _repair(self) -> None:
        """Replaces whoever is missing: who does not answer, or else, since a count does not tell, the oldest."""
        before = [*self._attached.values()]
        for worker in before:
            await self._attach(worker)
        silent = len(self._attached) == len(before)  # all answer, and yet there are too few
        if silent and before and self._asked_again:
            self._fleet.suspect(before[0])
            await self._detach(before[0])
            silent = False
        self._asked_again = silent
        await self._fill()

    async def _attach(self, worker: Worker) -> None:
        """Attaches one, or drops it if it does not answer. Repeating it changes nothing at the drafter."""
        if worker.worker_id not in self._attached:
            # Counted from here on, so that `dismiss` detaches it even if it has yet to answer.
            self._attached[worker.worker_id] = worker
            self._fleet.take(worker)
        post = self._post
        permit = Permit(post.session_id, post.tenant, worker.worker_id, post.upstream.worker_id, post.epoch)
        try:
            request = drafter_pb2.AttachRequest(
                session_id=post.session_id,
                tenant=post.tenant,
                epoch=post.epoch,
                upstream=post.upstream.address,
                ticket=sign(await self._ticket_key(), permit),
            )
            await DrafterStub(self._fleet.channel(worker)).Attach(request, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            log.info("drafter %s is no use: %s", worker.worker_id, from_rpc_error(error))
            self._fleet.suspect(worker)
            self._fleet.release(self._attached.pop(worker.worker_id))

    async def _detach(self, worker: Worker) -> None:
        if self._attached.pop(worker.worker_id, None) is None:
            return
        request = drafter_pb2.DetachRequest(session_id=self._post.session_id, epoch=self._post.epoch)
        try:
            await DrafterStub(self._fleet.channel(worker)).Detach(request, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            log.debug("drafter %s did not answer Detach: %s", worker.worker_id, from_rpc_error(error))
        finally:
            self._fleet.release(worker)
