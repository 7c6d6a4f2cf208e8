"""The drafters that are attached to one session: they are sent Attach and Detach, and what keeps them from drafting."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.rpc.tracing import client_span
from outrider.store.registry import Worker
from outrider.wire import drafter as wire
from outrider.wire.tickets import Permit, TicketSigner
from router.drafters.obstacles import Obstacles
from router.scheduling.placement import DrafterPlacement
from router.scheduling.workers import WorkerPool

RPC_TIMEOUT_S = 2.0  # timeout of a call to a drafter; a slower one counts as dead

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftAssignment:
    """The session to draft for, and where."""

    session_id: str
    tenant: str
    epoch: int
    upstream: Worker  # the verifier
    tokenizer_digest: bytes
    greedy: bool
    single: bool  # whether its rule allows one drafter only, and no tiers
    previous: tuple[str, ...] = ()  # worker ids of the last drafters, which have the text already


class AttachedDrafters(dict[str, DrafterPlacement]):
    """The drafters that an Attach was sent to and that have not failed, by worker id."""

    def __init__(self, assignment: DraftAssignment, worker_pool: WorkerPool, ticket_signer: TicketSigner) -> None:
        super().__init__()
        self.obstacles = Obstacles(assignment.upstream)
        self._assignment = assignment
        self._worker_pool = worker_pool
        self._ticket_signer = ticket_signer

    async def attach(self, placed: DrafterPlacement) -> bool:
        """Attach one drafter; drop it and return False if it does not answer. Repeating an Attach changes nothing at
        the drafter."""
        worker = placed.drafter
        if worker.worker_id not in self:
            self._worker_pool.add_session(worker)
        # Counted from here on, so that `detach_all` detaches it even if it has not answered yet.
        self[worker.worker_id] = placed
        assignment = self._assignment
        permit = Permit(
            assignment.session_id, assignment.tenant, worker.worker_id, placed.upstream.worker_id, assignment.epoch
        )
        try:
            request = wire.AttachRequest(
                session_id=assignment.session_id,
                tenant=assignment.tenant,
                epoch=assignment.epoch,
                upstream=placed.upstream.address,
                upstream_id=placed.upstream.worker_id,
                ticket=self._ticket_signer.sign(permit),
            )
            with client_span("outrider.v1.Drafter/Attach"):
                answer = await self._worker_pool.channels.drafter(worker).attach(request, RPC_TIMEOUT_S)
            self.obstacles.on_attached(placed, answer, self)
            return True
        except OutriderError as known:
            log.info("drafter %s cannot be attached: %s", worker.worker_id, known)
            self._worker_pool.on_failure(worker, known)
            self.obstacles.on_failed(placed, known)
            if self.pop(worker.worker_id, None) is not None:
                self._worker_pool.remove_session(worker)
            return False

    async def detach(self, worker: Worker, why: str = "") -> None:
        """Detach one drafter, if it is attached. `why`: for people, where the session goes on without it."""
        if self.pop(worker.worker_id, None) is None:
            return
        self.obstacles.forget(worker)
        request = wire.DetachRequest(session_id=self._assignment.session_id, epoch=self._assignment.epoch, why=why)
        try:
            await self._worker_pool.channels.drafter(worker).detach(request, RPC_TIMEOUT_S)
        except OutriderError as error:
            log.debug("drafter %s did not answer Detach: %s", worker.worker_id, error)
        finally:
            self._worker_pool.remove_session(worker)
