"""The calls that generate on this router: those that wait for admission, and those whose generations run. `Cancel` ends
both, and the router's end moves both to another router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

from outrider.errors import Cancelled, Moved, Superseded
from outrider.limits.fair_turns import LoopTurns
from outrider.store.tenant_storage import generation_bytes
from outrider.telemetry.logs import session_context
from outrider.wire import inference as wire
from router.api.answer_streams import AnswerWriter
from router.api.messages import event_to_pb
from router.counters.request_metrics import RequestMetrics
from router.scheduling.admission import SHUTTING_DOWN, AdmissionSlot
from router.sessions.context import RouterContext
from router.sessions.generation import OwnedGeneration
from router.sessions.outbox import Event, Outbox, StartedEvent
from router.sessions.response import ResponsePart
from router.sessions.takeover import OpenedGeneration, Takeovers

ResultT = TypeVar("ResultT")


class PendingRequest:
    """One Generate call until its generation runs. `cancelled`: the generation is to end as soon as it runs. `settled`
    is set when the generation runs or the call has ended."""

    def __init__(self) -> None:
        self.cancelled = False
        self.settled = asyncio.Event()
        self._limit: asyncio.Timeout | None = None  # while the call waits

    async def wait_for(self, work: Awaitable[ResultT]) -> ResultT:
        """Return the result of `work`. Raises Cancelled, and gives `work` up, when the call is cancelled meanwhile."""
        try:
            async with asyncio.timeout(None) as self._limit:
                return await work
        except TimeoutError:
            if not self.cancelled:
                raise
            raise Cancelled("the generation was cancelled while it waited for a slot") from None
        finally:
            self._limit = None

    def cancel(self) -> None:
        """End the wait now, or the generation once it runs."""
        self.cancelled = True
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())


class PendingRequests:
    """All pending requests of a router, by tenant and session; "" stands for a request without a session."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], list[PendingRequest]] = {}

    @contextmanager
    def register(self, tenant: str, session_id: str) -> Iterator[PendingRequest]:
        """Register one more request until it is settled or the body has ended."""
        pending = PendingRequest()
        calls = self._calls.setdefault((tenant, session_id), [])
        calls.append(pending)
        try:
            yield pending
        finally:
            pending.settled.set()
            calls.remove(pending)
            if not calls:
                self._calls.pop((tenant, session_id), None)

    async def cancel(self, tenant: str, session_id: str) -> None:
        """Cancel the pending requests of a session; return when all of them are settled."""
        calls = [*self._calls.get((tenant, session_id), ())] if session_id else []
        for pending in calls:
            pending.cancel()
        for pending in calls:
            await pending.settled.wait()


class RunningCalls:
    """The Generate and Resume calls of a router."""

    def __init__(self, router: RouterContext, takeovers: Takeovers) -> None:
        self.running: dict[str, OwnedGeneration] = {}  # by session id
        self.pending = PendingRequests()
        self._router = router
        self._takeovers = takeovers
        self._spawn = router.decoding.background.spawn
        self._draining = False
        self._outboxes: set[Outbox] = set()
        self._active = 0  # number of calls
        self._idle = asyncio.Event()  # set while there are no calls
        self._idle.set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call for as long as the body runs: `drained` waits for it."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[Outbox]:
        """Yield the outbox of a call. At the end of the body the client has been sent everything, or does not read."""
        outbox = Outbox(self._router.decoding.config.window)
        self._outboxes.add(outbox)
        try:
            async with outbox:
                if self._draining:
                    outbox.cut_short(Moved(SHUTTING_DOWN))
                yield outbox
        finally:
            self._outboxes.discard(outbox)

    async def run(
        self,
        opened: OpenedGeneration,
        slot: AdmissionSlot | None,
        outbox: Outbox,
        writer: AnswerWriter,
        metrics: RequestMetrics,
        pending: PendingRequest | None = None,
    ) -> None:
        """Run an opened generation to its end, in place of one of its session that runs here under an older epoch.

        Raises Superseded if that one has a newer epoch, and as `OwnedGeneration.run`.
        """
        before = self.running.get(opened.record.session_id)
        if opened.token_log is not None and before is not None:
            if before.epoch > opened.token_log.epoch:  # the earlier call here has taken it over meanwhile
                raise Superseded(f"session {before.session_id} was taken over under epoch {before.epoch}; do not retry")
            before.supersede(opened.token_log.epoch)
        outbox.begin(
            partial(_send, self._router.turns, writer, opened),
            *opened.client,
            partial(_send_now, writer, opened),
        )
        generation = OwnedGeneration(self._router, self._takeovers, opened, slot, outbox)
        metrics.on_started(generation)
        if self._draining:
            generation.move()
        if opened.token_log is not None:
            self.running[generation.session_id] = generation
        if pending is not None:
            pending.settled.set()
            if pending.cancelled:
                generation.stop()
        try:
            with session_context(generation.session_id):
                await generation.run()
            metrics.on_finished(generation)
        finally:
            if self.running.get(generation.session_id) is generation:
                del self.running[generation.session_id]
            self._settle_storage(opened, discarded=generation.discarded)

    def _settle_storage(self, opened: OpenedGeneration, *, discarded: bool) -> None:
        """Count what an ended generation has written, instead of all that it might have."""
        storage, response = self._router.store.storage, opened.response
        if opened.token_log is None or not storage.bounded:
            return
        record, answer = opened.record, 0 if discarded else response.position - response.start
        size = generation_bytes(response.start - opened.logged, opened.turn, answer)
        self._spawn(storage.settle(record.tenant, record.session_id, record.generation, size))

    async def cancel(self, tenant: str, session_id: str, *, discard: bool = False) -> None:
        """Cancel the generation of a tenant's session, if it runs here or is about to. `discard`: drop the tokens of
        its response."""
        await self.pending.cancel(tenant, session_id)
        generation = self.running.get(session_id)
        if generation is not None and generation.tenant == tenant:
            await generation.cancel(discard=discard)

    def begin_drain(self) -> None:
        """End running and new calls with Moved, so that clients resume at another router."""
        self._draining = True
        self._router.admission.close()
        for generation in self.running.values():
            generation.move()
        for outbox in self._outboxes:
            outbox.cut_short(Moved(SHUTTING_DOWN))

    async def drained(self) -> None:
        """Return once no Generate or Resume call runs any more."""
        await self._idle.wait()


async def _send(turns: LoopTurns, writer: AnswerWriter, opened: OpenedGeneration, event: Event) -> None:
    """Send an event. The message of tokens from the log is made in a turn of the tenant, which ends before it is
    written: a client that does not read holds no turn."""
    if isinstance(event, ResponsePart) and event.replayed:
        message = await turns.run(opened.record.tenant, _message, opened, event)
    else:
        message = _message(opened, event)
    await writer.write(message)


def _send_now(writer: AnswerWriter, opened: OpenedGeneration, event: Event) -> bool:
    """Send new tokens, if the client's stream of answers takes them at once. Return whether it did."""
    lane = writer.lane
    if lane is None or not lane.ready or not isinstance(event, ResponsePart) or event.replayed:
        return False
    lane.put(_message(opened, event))
    return True


def _message(opened: OpenedGeneration, event: Event) -> wire.GenerateResponse:
    message = event_to_pb(event, opened.turn.contract, opened.model.token_text)
    if isinstance(event, StartedEvent):
        message.started.prompt_token_ids.extend(opened.returned_prompt)
    return message
