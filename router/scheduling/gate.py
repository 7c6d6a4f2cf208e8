"""Drafters that no router can reach: they dial this router, and are called on the stream that they have opened."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from outrider.errors import Forbidden, Overloaded, Unavailable
from outrider.rpc.status import error_from_pb
from outrider.store.api_keys import Readers, TextReaders
from outrider.store.registry import Worker
from outrider.wire import drafter as wire

MAX_DRAFTERS = 1024  # at one router's gate
MAX_CALLS = 256  # calls that one drafter has not answered


class GatedDrafter:
    """A drafter that has dialed: calls of its Drafter service, down its stream."""

    def __init__(self, worker: Worker, tenant: str, models: Sequence[str] = ()) -> None:
        """`tenant`: of its key; `models`: targets that the key is for; empty: all."""
        self.worker = worker
        self.tenant = tenant
        self.models = models
        self.gone = asyncio.Event()  # its stream has ended
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[wire.GateAnswer]] = {}
        self._down: asyncio.Queue[wire.GateDown] = asyncio.Queue(2 * MAX_CALLS)

    def is_for(self, model: str) -> bool:
        """Return whether its key is for a target."""
        return not self.models or model in self.models

    async def attach(self, request: wire.AttachRequest, timeout_s: float) -> wire.AttachResponse:
        """Attach a session. Raises what the drafter raises, and Unavailable if it does not answer in time."""
        return (await self._call(timeout_s, attach=request)).attached

    async def detach(self, request: wire.DetachRequest, timeout_s: float) -> None:
        """Detach a session. Raises as `attach`."""
        await self._call(timeout_s, detach=request)

    async def frames(self, router_id: str) -> AsyncIterator[wire.GateDown]:
        """Yield what is sent to the drafter."""
        yield wire.GateDown(welcome=wire.GateWelcome(router_id=router_id))
        while True:
            yield await self._down.get()

    def heard(self, sent_us: int, tokens_per_s: float) -> None:
        """Answer what a drafter has said of itself; not one that does not read its stream."""
        status = wire.GateStatus(sent_us=sent_us, tokens_per_ks=round(1000 * tokens_per_s))
        with suppress(asyncio.QueueFull):
            self._down.put_nowait(wire.GateDown(status=status))

    def take(self, answer: wire.GateAnswer) -> None:
        """Take the answer to a call; one that comes too late counts for nothing."""
        waiting = self._answers.get(answer.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _call(self, timeout_s: float, **request: Any) -> wire.GateAnswer:
        if len(self._answers) >= MAX_CALLS:
            raise Overloaded(f"drafter {self.worker.worker_id} has {MAX_CALLS} calls to answer")
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answered
        try:
            async with asyncio.timeout(timeout_s):
                await self._down.put(wire.GateDown(call=wire.GateCall(call=number, **request)))
                answer: wire.GateAnswer = await answered
        except TimeoutError:
            raise Unavailable(f"drafter {self.worker.worker_id} did not answer within {timeout_s:g} s") from None
        finally:
            del self._answers[number]
        if answer.WhichOneof("outcome") == "error":
            raise error_from_pb(answer.error)
        return answer


class Gate(dict[str, GatedDrafter]):
    """The drafters at this router's gate, by their ids."""

    def __init__(self, readers: TextReaders | None = None) -> None:
        """`readers`: what tenants have said of their texts' readers; None: drafters may read all texts."""
        super().__init__()
        self._readers = readers

    async def readers(self, drafters: Sequence[Worker], model: str, tenant: str | None) -> list[Worker]:
        """Return those of some drafters that may draft for a model, and read a tenant's texts; None: no tenant's."""
        drafters = [it for it in drafters if it.worker_id not in self or self[it.worker_id].is_for(model)]
        if tenant is None or self._readers is None:
            return drafters
        said = await self._readers.of(tenant)
        return [worker for worker in drafters if said == "any" or self._may_read(worker, tenant, said)]

    def _may_read(self, drafter: Worker, tenant: str, said: Readers) -> bool:
        gated = self.get(drafter.worker_id)
        return said == "cluster" if gated is None else gated.tenant == tenant

    @contextmanager
    def holding(self, drafter: GatedDrafter) -> Iterator[None]:
        """List a drafter while the body runs. Raises Overloaded, and Forbidden for an id that another one has.

        A drafter that dials again takes the place of its own stream, which may be one that is lost.
        """
        drafter_id = drafter.worker.worker_id
        present = self.get(drafter_id)
        if present is not None and present.tenant != drafter.tenant:
            raise Forbidden(f"drafter_id: {drafter_id} is another drafter's; start this one again")
        if present is None and len(self) >= MAX_DRAFTERS:
            raise Overloaded(f"{MAX_DRAFTERS} drafters have dialed this router; dial another one")
        self[drafter_id] = drafter
        try:
            yield
        finally:
            drafter.gone.set()
            if self.get(drafter_id) is drafter:
                del self[drafter_id]
