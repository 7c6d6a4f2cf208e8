"""A second verifier that has a session's KV, so that little is to be read when the first one dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import grpc.aio

from outrider.errors import OutriderError
from outrider.rpc.status import from_rpc_error
from outrider.store.registry import Worker
from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from router.models import ServedModel
from router.opening import Cluster, suitable

LEAST, SHARE = 64, 1 / 16  # tokens, and share of the text, that may be missing there before it reads on
RETRY_S = 1.0  # after a verifier did not read it
ANSWER_S = 30.0  # a verifier that takes longer to read has other things to do

log = logging.getLogger(__name__)


class Standby:
    """One session's. It reads in the background what is durable; nothing here blocks or fails the session."""

    def __init__(self, cluster: Cluster, model: ServedModel, tenant: str) -> None:
        self.holder = ""  # worker id of who has the KV; "": nobody yet
        self._cluster = cluster
        self._model = model
        self._tenant = tenant
        self._read = 0  # tokens that it has read
        self._again_at = 0.0
        self._serving: Worker  # where the session is
        self._work: asyncio.Task[None] | None = None

    def follow(self, tokens: Sequence[int], serving: Worker) -> None:
        """The session has these tokens, which grow with it, on that verifier."""
        self._serving = serving
        moved, gone = serving.worker_id == self.holder, not self._cluster.fleet.lists(self.holder)
        if moved or gone:
            self.holder, self._read = "", 0
        if not self._behind(tokens) or time.monotonic() < self._again_at:
            return
        if (self._work is None or self._work.done()) and self._somebody_else(serving):
            self._work = self._cluster.background.spawn(self._catch_up(tokens))

    def _behind(self, tokens: Sequence[int]) -> bool:
        return len(tokens) - self._read >= max(LEAST, len(tokens) * SHARE)

    async def _catch_up(self, tokens: Sequence[int]) -> None:
        """Has it read until little is missing: the session may have gone on meanwhile, or wait for its client now."""
        while self._behind(tokens):
            self._again_at = time.monotonic() + RETRY_S
            try:
                worker = self._chosen(await suitable(self._cluster, self._model), self._serving)
                if worker is None:
                    return
                await self._read_on(worker, tuple(tokens))
            except (OutriderError, grpc.aio.AioRpcError) as error:
                self.holder, self._read = "", 0
                known = error if isinstance(error, OutriderError) else from_rpc_error(error)
                log.debug("no other verifier keeps a session's KV: %s", known)
                return

    async def _read_on(self, worker: Worker, tokens: tuple[int, ...]) -> None:
        model = self._model
        request = verifier_pb2.WarmRequest(
            model=model.name, tokenizer_digest=model.digest, tokens=tokens, tenant=self._tenant
        )
        await VerifierStub(self._cluster.fleet.channel(worker)).Warm(request, timeout=ANSWER_S)
        self.holder, self._read, self._again_at = worker.worker_id, len(tokens), 0.0

    def _somebody_else(self, serving: Worker) -> bool:
        """Whether another verifier of the model is listed: one that has just started is asked at once."""
        return any(
            it.role == "verifier" and it.model == self._model.name and self._may_read(it, serving)
            for it in self._cluster.fleet.listed
        )

    def _may_read(self, worker: Worker, serving: Worker) -> bool:
        return worker.worker_id != serving.worker_id and not self._cluster.fleet.suspected(worker)

    def _chosen(self, workers: Sequence[Worker], serving: Worker) -> Worker | None:
        """Who has it already, else the least loaded; None where nobody else is there."""
        others = [it for it in workers if self._may_read(it, serving)]
        return next((it for it in others if it.worker_id == self.holder), others[0] if others else None)
