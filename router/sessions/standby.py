"""A second verifier that keeps a session's KV, so that a failure of the first one costs little prefill."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import grpc.aio

from outrider.core.session.contract import Adapter
from outrider.errors import OutriderError
from outrider.rpc.status import from_rpc_error
from outrider.store.registry import Worker
from outrider.wire import verifier as wire
from outrider.wire.types import adapter_to_pb
from router.requests.served_models import ServedModel
from router.scheduling.workers import matching_verifiers
from router.sessions.context import DecodeResources

MIN_MISSING_TOKENS, MIN_MISSING_SHARE = (
    64,
    1 / 16,
)  # the standby reads on once this many tokens, and this share of the text, are missing there
RETRY_S = 1.0  # pause after a verifier failed to read
WARM_TIMEOUT_S = 30.0  # timeout of one Warm call

log = logging.getLogger(__name__)


class Standby:
    """The standby of one session. It reads durable tokens in the background and never blocks or fails the session."""

    def __init__(
        self, resources: DecodeResources, model: ServedModel, tenant: str, adapter: Adapter | None = None
    ) -> None:
        self.holder = ""  # worker id of the verifier that has the KV; "": none yet
        self._worker_pool = resources.worker_pool
        self._background = resources.background
        self._model = model
        self._tenant = tenant
        self._adapter = adapter
        self._read_tokens = 0  # tokens that the standby has read
        self._retry_at = 0.0
        self._serving: Worker  # the verifier that decodes the session
        self._work: asyncio.Task[None] | None = None

    def follow(self, tokens: Sequence[int], serving: Worker) -> None:
        """Inform the standby that the session has `tokens`, a list that grows with it, and is decoded by `serving`."""
        self._serving = serving
        moved, gone = serving.worker_id == self.holder, not self._worker_pool.is_listed(self.holder)
        if moved or gone:
            self.holder, self._read_tokens = "", 0
        if not self._behind(tokens) or time.monotonic() < self._retry_at:
            return
        if (self._work is None or self._work.done()) and self._has_other_verifier(serving):
            self._work = self._background.spawn(self._catch_up(tokens))

    def _behind(self, tokens: Sequence[int]) -> bool:
        return len(tokens) - self._read_tokens >= max(MIN_MISSING_TOKENS, len(tokens) * MIN_MISSING_SHARE)

    async def _catch_up(self, tokens: Sequence[int]) -> None:
        """Let the standby read until little is missing: the session may have grown meanwhile, or wait for its client
        now."""
        while self._behind(tokens):
            self._retry_at = time.monotonic() + RETRY_S
            try:
                worker = self._choose(await matching_verifiers(self._worker_pool, self._model), self._serving)
                if worker is None:
                    return
                await self._warm(worker, tuple(tokens))
            except (OutriderError, grpc.aio.AioRpcError) as error:
                self.holder, self._read_tokens = "", 0
                known = error if isinstance(error, OutriderError) else from_rpc_error(error)
                log.debug("no other verifier keeps a session's KV: %s", known)
                return

    async def _warm(self, worker: Worker, tokens: tuple[int, ...]) -> None:
        model = self._model
        request = wire.WarmRequest(
            model=model.name,
            tokenizer_digest=model.digest,
            tokens=tokens,
            tenant=self._tenant,
            adapter=adapter_to_pb(self._adapter),
        )
        await wire.VerifierStub(self._worker_pool.channels.to(worker)).Warm(request, timeout=WARM_TIMEOUT_S)
        self.holder, self._read_tokens, self._retry_at = worker.worker_id, len(tokens), 0.0

    def _has_other_verifier(self, serving: Worker) -> bool:
        """Return whether another verifier of the model is listed. One that has just started is used at once."""
        return any(
            worker.role == "verifier" and worker.model == self._model.name and self._is_eligible(worker, serving)
            for worker in self._worker_pool.listed
        )

    def _is_eligible(self, worker: Worker, serving: Worker) -> bool:
        """Return whether a verifier may go on with the session's text."""
        other = worker.worker_id != serving.worker_id and worker.origin == serving.origin
        return other and not self._worker_pool.suspected(worker)

    def _choose(self, workers: Sequence[Worker], serving: Worker) -> Worker | None:
        """Return the verifier that has the KV already, else the least loaded; None if there is no other verifier."""
        others = [worker for worker in workers if self._is_eligible(worker, serving)]
        return next((worker for worker in others if worker.worker_id == self.holder), others[0] if others else None)
