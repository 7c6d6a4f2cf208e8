"""Small stand-ins for the router's neighbours, on real gRPC: they use the wire protocol and compute nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

import grpc.aio

from outrider.core.session.decoding import SCORED_AHEAD
from outrider.core.session.digest import extend
from outrider.errors import Moved, NotFound, OutriderError, Overloaded, Unavailable
from outrider.rpc.server import serving
from outrider.rpc.status import error_to_pb, errors_as_status
from outrider.store.registry import Registry, Role, Worker
from outrider.v1 import drafter_pb2, types_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import DrafterServicer, add_DrafterServicer_to_server
from outrider.v1.verifier_pb2_grpc import VerifierServicer, add_VerifierServicer_to_server

CONTEXT = 64


class FakeStream:
    """A router's Decode stream, and the generations on it, by handle."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.generations: dict[int, asyncio.Task[None]] = {}
        self.sessions: dict[int, str] = {}
        self._context = context
        self._writing = asyncio.Lock()

    def begin(self, start: verifier_pb2.DecodeStart, work: Coroutine[Any, Any, None]) -> None:
        self.sessions[start.handle] = start.session_id
        self.generations[start.handle] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._forget(start.handle))

    def _forget(self, handle: int) -> None:
        del self.generations[handle], self.sessions[handle]

    async def send(self, **fields: Any) -> None:
        """Send a message whole: gRPC goes on with a write whose generation was cancelled, and takes one at a time."""
        await asyncio.shield(self._write(verifier_pb2.DecodeResponse(**fields)))

    async def _write(self, response: verifier_pb2.DecodeResponse) -> None:
        async with self._writing:
            await self._context.write(response)

    async def fail(self, start: verifier_pb2.DecodeStart, error: OutriderError) -> None:
        await self.send(ended=[verifier_pb2.DecodeEnded(handle=start.handle, error=error_to_pb(error))])


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
        self.most = 0  # most sessions that were open at once
        self.drafters = 0  # drafters that reports count
        self.verified = 4  # nodes of each step, in reports
        self.elapsed_us = 0  # of each step, in reports; 0: not measured
        self.rates = 0, 0  # of the verifier without and with drafting, in reports; drafters rest if there are any
        self.resting = False  # whether drafters are not wanted
        self.starts: list[verifier_pb2.DecodeStart] = []
        self.plans: list[types_pb2.Plan] = []
        self.durable: dict[str, int] = {}  # session id -> position
        self.acknowledged: list[int] = []  # durable positions of all sessions, as routers sent them
        self.steps = 0
        self.open = 0
        self.silent = False  # no heartbeats
        self.moves_after: int | None = None  # tokens; then it goes down in order
        self.scores_until: int | None = None  # position of a prompt at which it goes down instead of scoring it further
        self.dies_of = -1  # number of committed tokens at which an answer fails, and kills whoever it is sent to then
        self.scores = True  # whether it knows prompts' log-probabilities; an older one does not
        self.dies_at_the_end = False  # before it sends the end of the generation
        self.heartbeats = 0  # heartbeats that routers sent
        self.adapters: list[str] = []  # folders of the adapters that these were read with
        self.folders: set[str] = set()  # the folders that hold adapters
        self.warmed: list[tuple[str, int]] = []  # tenants, and tokens that were read for a session that may come
        self.reading: Callable[[], None] = lambda: None  # happens while they are read

    async def Decode(
        self, requests: AsyncIterator[verifier_pb2.DecodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with errors_as_status(context):
            stream = FakeStream(context)
            beating = asyncio.create_task(self._beat(stream))
            try:
                async for request in requests:
                    self._receive(request, stream)
            finally:
                for task in (beating, *stream.generations.values()):
                    task.cancel()

    async def _beat(self, stream: FakeStream) -> None:
        while True:
            await asyncio.sleep(0.3)
            if not self.silent:
                await stream.send(heartbeat=types_pb2.Heartbeat())

    def _receive(self, request: verifier_pb2.DecodeRequest, stream: FakeStream) -> None:
        if not request.ByteSize():
            self.heartbeats += 1
        if request.HasField("start"):
            if len(request.start.tokens) - request.start.answer_position == self.dies_of:
                self.starts.append(request.start)
                raise Unavailable("killed by what it was sent")
            stream.begin(request.start, self._serve(request.start, stream))
        for handle, durable in zip(request.acknowledged, request.durable, strict=True):
            if handle in stream.sessions:
                self.durable[stream.sessions[handle]] = durable
            self.acknowledged.append(durable)
        self.plans += [change.plan for change in request.plans]
        for handle in request.cancelled:
            if handle in stream.generations:
                stream.generations[handle].cancel()

    async def _serve(self, start: verifier_pb2.DecodeStart, stream: FakeStream) -> None:
        if self.full or self.open == self.slots:
            return await stream.fail(start, Overloaded("all slots are in use"))
        self.starts.append(start)
        self.open += 1
        self.most = max(self.most, self.open)
        scored = start.scored if self.scores else 0
        self.durable[start.session_id] = min(scored or len(start.tokens), len(start.tokens))
        try:
            await stream.send(started=[verifier_pb2.DecodeStarted(handle=start.handle, resting=self.resting)])
            if start.scored and self.scores:
                await self._score(start, stream)
            await self.run_script(start, stream)
        except OutriderError as error:
            await stream.fail(start, error)
        finally:
            self.open -= 1
        return None

    async def Warm(
        self, request: verifier_pb2.WarmRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_pb2.WarmResponse:
        self.warmed.append((request.tenant, len(request.tokens)))
        self.adapters.append(request.adapter.folder)
        self.reading()
        return verifier_pb2.WarmResponse(cached=len(request.tokens))

    async def ReadAdapter(
        self, request: verifier_pb2.ReadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_pb2.ReadAdapterResponse:
        async with errors_as_status(context):
            if request.folder not in self.folders:
                raise NotFound(f"adapter {request.folder!r} is not here")
            digest = blake2b(request.folder.encode(), digest_size=16).digest()
            return verifier_pb2.ReadAdapterResponse(digest=digest, rank=4, parameters=100)

    async def _score(self, start: verifier_pb2.DecodeStart, stream: FakeStream) -> None:
        """Send log-probabilities of the prompt: of each token minus its position, which is also its rank."""
        position, end = start.scored, start.answer_position
        while position < end:
            await self.rest()
            if self.scores_until is not None and position >= self.scores_until:
                raise Moved("this verifier is going down")
            stride = min(self.stride, end - position)
            if position + stride > self.durable[start.session_id] + SCORED_AHEAD:
                await asyncio.sleep(0.001)
                continue
            ranks = range(position, position + stride)
            rest = bytes(8 * start.contract.prompt_logprobs)
            logprobs = b"".join(struct.pack("<f", -rank) + rest for rank in ranks)
            scores = verifier_pb2.PromptScores(
                handle=start.handle, epoch=start.epoch, position=position, logprobs=logprobs, ranks=ranks
            )
            await stream.send(scores=[scores])
            position += stride

    async def run_script(self, start: verifier_pb2.DecodeStart, stream: FakeStream) -> None:
        committed, stopped = len(start.tokens) - start.answer_position, False
        digest = start.digest
        while committed < start.contract.max_tokens and not stopped:
            await self.rest()
            if self.moves_after is not None and committed >= self.moves_after:
                raise Moved("this verifier is going down")
            if committed == self.dies_of:
                raise Unavailable("this answer fails")
            stride = min(self.stride, start.contract.max_tokens - committed)
            if start.answer_position + committed + stride > self.durable[start.session_id] + start.window:
                await asyncio.sleep(0.001)
                continue
            tokens: list[int] = []
            while len(tokens) < stride and not stopped:
                tokens.append(self.script[(committed + len(tokens)) % len(self.script)])
                stopped = tokens[-1] in start.contract.stop_ids
            digest = extend(digest, tokens)
            commit = verifier_pb2.DecodeCommit(
                handle=start.handle,
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
                    resting=self.resting or any(self.rates),
                    plain_rate=self.rates[0],
                    drafted_rate=self.rates[1],
                ),
            )
            await stream.send(commits=[commit])
            committed += len(tokens)
            self.steps += 1
        if self.dies_at_the_end:
            raise Unavailable("dead")
        reason = types_pb2.FINISH_REASON_STOP if stopped else types_pb2.FINISH_REASON_LENGTH
        await stream.send(ended=[verifier_pb2.DecodeEnded(handle=start.handle, reason=reason)])

    async def rest(self) -> None:
        """Until the next step."""
        await asyncio.sleep(self.pace_s)


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
        self.let_go: list[str] = []  # why it was detached from sessions that go on
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
        self.let_go += filter(None, [request.why])
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
    vocabulary: int = 4096,
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
            vocabulary=vocabulary,
            context=CONTEXT,
            slots=8,
            sessions=sessions,
            parameters=1,
            draining=draining,
            **more,
        )
        await registry.announce(worker, ttl_s=60)
        yield worker
