"""Small stand-ins for the router's neighbours, on real gRPC: they use the wire protocol and compute nothing."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from outrider.core.session.digest import extend
from outrider.errors import Overloaded, Unavailable
from outrider.rpc.server import serving
from outrider.rpc.status import errors_as_status
from outrider.store.registry import Registry, Role, Worker
from outrider.v1 import drafter_pb2, types_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import DrafterServicer, add_DrafterServicer_to_server
from outrider.v1.verifier_pb2_grpc import VerifierServicer, add_VerifierServicer_to_server

CONTEXT = 64
HALF_CLOSE_S = 5.0


class FakeVerifier(VerifierServicer):
    """Commits `script` over and over, `stride` tokens a step, one step every `pace_s` seconds, within the window.

    Its token at a position depends on nothing but the position in the answer, as with a real verifier.
    """

    def __init__(self, script: list[int], *, pace_s: float = 0.0, stride: int = 1) -> None:
        self.script = script
        self.pace_s = pace_s
        self.stride = stride
        self.full = False
        self.slots: int | None = None  # sessions at once; None: all that come
        self.most = 0  # that were open at once
        self.drafters = 0  # that reports count
        self.verified = 4  # nodes of each step, in reports
        self.elapsed_us = 0  # of each step, in reports; 0: not measured
        self.rates = 0, 0  # of the verifier without and with drafting, in reports; drafters rest if there are any
        self.starts: list[verifier_pb2.DecodeStart] = []
        self.plans: list[types_pb2.Plan] = []
        self.durable: dict[str, int] = {}  # session id -> position
        self.acknowledged: list[int] = []  # durable positions of all sessions, as routers sent them
        self.steps = 0
        self.open = 0
        self.silent = False  # no heartbeats
        self.moves_after: int | None = None  # tokens; then it goes down in order
        self.dies_at_the_end = False  # before it sends the end of the generation
        self.heartbeats = 0  # that routers sent
        self.warmed: list[tuple[str, int]] = []  # tenants, and tokens that were read for a session that may come
        self.reading: Callable[[], None] = lambda: None  # happens while they are read

    async def Decode(
        self, requests: AsyncIterator[verifier_pb2.DecodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with errors_as_status(context):
            first = await anext(requests, None)
            if first is None:  # the call was broken off before its first message
                return
            if self.full or self.open == self.slots:
                raise Overloaded("all slots are in use")
            start = first.start
            self.starts.append(start)
            self.open += 1
            self.most = max(self.most, self.open)
            self.durable[start.session_id] = len(start.tokens)
            listener = asyncio.create_task(self._listen(start.session_id, requests))
            try:
                try:
                    await context.write(verifier_pb2.DecodeResponse(started=verifier_pb2.DecodeStarted()))
                    await self._run_script(start, context)
                finally:
                    self.open -= 1
                await asyncio.wait({listener}, timeout=HALF_CLOSE_S)  # the router closes its side first
            finally:
                listener.cancel()

    async def Warm(
        self, request: verifier_pb2.WarmRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_pb2.WarmResponse:
        self.warmed.append((request.tenant, len(request.tokens)))
        self.reading()
        return verifier_pb2.WarmResponse(cached=len(request.tokens))

    async def _listen(self, session_id: str, requests: AsyncIterator[verifier_pb2.DecodeRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("command") == "durable":
                self.durable[session_id] = request.durable
                self.acknowledged.append(request.durable)
            elif request.WhichOneof("command") == "heartbeat":
                self.heartbeats += 1
            else:
                self.plans.append(request.plan)

    async def _run_script(self, start: verifier_pb2.DecodeStart, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        committed, stopped = len(start.tokens) - start.answer_position, False
        digest, sent_at = start.digest, time.monotonic()
        while committed < start.contract.max_tokens and not stopped:
            await self._rest(context)
            if self.moves_after is not None and committed >= self.moves_after:
                await context.write(verifier_pb2.DecodeResponse(moved=verifier_pb2.DecodeMoved()))
                await asyncio.sleep(60)  # the router closes its side
            if start.answer_position + committed >= self.durable[start.session_id] + start.window:
                await asyncio.sleep(0.001)
                if not self.silent and time.monotonic() - sent_at > 0.3:
                    await context.write(verifier_pb2.DecodeResponse(heartbeat=types_pb2.Heartbeat()))
                    sent_at = time.monotonic()
                continue
            tokens: list[int] = []
            while len(tokens) < self.stride and committed + len(tokens) < start.contract.max_tokens and not stopped:
                tokens.append(self.script[(committed + len(tokens)) % len(self.script)])
                stopped = tokens[-1] in start.contract.stop_ids
            digest = extend(digest, tokens)
            commit = verifier_pb2.DecodeCommit(
                epoch=start.epoch,
                position=start.answer_position + committed,
                tokens=tokens,
                gaps=[0.5] * len(tokens),
                digest=digest,
                logprobs=b"".join(_entry(start, committed + index) for index in range(len(tokens))),
                report=types_pb2.StepReport(
                    verified=self.verified,
                    accepted=len(tokens) - 1,
                    verified_depth=self.verified,
                    wire_bytes=10,
                    drafters=self.drafters,
                    elapsed_us=self.elapsed_us,
                    resting=any(self.rates),
                    plain_rate=self.rates[0],
                    drafted_rate=self.rates[1],
                ),
            )
            await context.write(verifier_pb2.DecodeResponse(commit=commit))
            committed, sent_at = committed + len(tokens), time.monotonic()
            self.steps += 1
        if self.dies_at_the_end:
            raise Unavailable("dead")
        reason = types_pb2.FINISH_REASON_STOP if stopped else types_pb2.FINISH_REASON_LENGTH
        await context.write(verifier_pb2.DecodeResponse(finished=verifier_pb2.DecodeFinished(reason=reason)))

    async def _rest(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Until the next step, alive."""
        left = self.pace_s
        while left > 0.3:
            await asyncio.sleep(0.3)
            left -= 0.3
            if not self.silent:
                await context.write(verifier_pb2.DecodeResponse(heartbeat=types_pb2.Heartbeat()))
        await asyncio.sleep(max(0.0, left))


def _entry(start: verifier_pb2.DecodeStart, index: int) -> bytes:
    """Log-probabilities of the answer's token, where they are wanted: minus its index, and nothing of others."""
    contract = start.contract
    return struct.pack("<f", -index) + bytes(8 * contract.logprobs) if contract.HasField("logprobs") else b""


class FakeDrafter(DrafterServicer):
    """Remembers whom it drafts for."""

    def __init__(self, *, frozen: bool = False) -> None:
        self.frozen = frozen
        self.attached: set[str] = set()
        self.asked = 0
        self.answer = drafter_pb2.AttachResponse()

    async def Attach(
        self, request: drafter_pb2.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> drafter_pb2.AttachResponse:
        self.asked += 1
        if self.frozen:
            await asyncio.sleep(60)
        self.attached.add(request.session_id)
        return self.answer

    async def Detach(
        self, request: drafter_pb2.DetachRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> drafter_pb2.DetachResponse:
        self.attached.discard(request.session_id)
        return drafter_pb2.DetachResponse()


@asynccontextmanager
async def announced(
    fake: FakeVerifier | FakeDrafter,
    registry: Registry,
    tokenizer_digest: bytes,
    *,
    model: str = "target",
    sessions: int = 0,
    draining: bool = False,
    drain_s: float = 0.0,
    **more: Any,
) -> AsyncIterator[Worker]:
    """Serves a fake on a free port and lists it in the registry; `more`: fields of its entry."""
    role: Role = "verifier" if isinstance(fake, FakeVerifier) else "drafter"

    def register(server: grpc.aio.Server) -> list[str]:
        if isinstance(fake, FakeVerifier):
            add_VerifierServicer_to_server(fake, server)
        else:
            add_DrafterServicer_to_server(fake, server)
        return []

    async with serving("127.0.0.1:0", register, drain_s=drain_s) as address:
        worker = Worker(
            worker_id=f"{role}-{address.rpartition(':')[2]}",
            role=role,
            address=address,
            model=model,
            tokenizer_digest=tokenizer_digest,
            vocabulary=4096,
            context=CONTEXT,
            slots=8,
            sessions=sessions,
            parameters=1,
            draining=draining,
            **more,
        )
        await registry.announce(worker, ttl_s=60)
        yield worker
