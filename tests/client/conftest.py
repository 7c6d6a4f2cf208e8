"""A router's Inference service that answers from a script, on a real gRPC server in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import grpc
import grpc.aio
import pytest

from outrider.client import _stream
from outrider.errors import Busy, InvalidRequest, NotFound, OutriderError, Overloaded
from outrider.rpc.server import serving
from outrider.rpc.status import errors_as_status
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc, types_pb2

WORDS = ["def ", "é", "", "(x)", ":\n"]
PROMPT = 2  # tokens of every prompt


@dataclass(frozen=True)
class Fault:
    """How one call breaks off."""

    after: int  # events that get out before
    error: OutriderError | grpc.StatusCode | None = grpc.StatusCode.UNAVAILABLE  # None: it ends as if all were well
    logged: int = 0  # tokens that are durable by then, and have not been sent


@dataclass
class Answer:
    """One generation, as the log has it."""

    session: str
    generation: int
    start: int  # position of its first token
    request: pb.GenerateRequest
    forked_from: str = ""
    logged: int = 0  # tokens
    reason: int = 0

    def chunk(self, first: int, last: int, *, live: bool) -> pb.Chunk:
        """Its tokens from `first` up to `last`, counted from 0; only live ones have gaps."""
        words = [WORDS[number % len(WORDS)] for number in range(last)]
        asked = self.request.sampling
        return pb.Chunk(
            text="".join(words[first:]),
            token_ids=range(first + 1, last + 1),
            gaps=[(number + 1) / 4 for number in range(first, last)] if live else (),
            next_position=self.start + last,
            text_offset=len("".join(words)),
            logprobs=[
                pb.TokenLogprobs(
                    logprob=-number / 4,
                    top_ids=range(asked.logprobs),
                    top_logprobs=[-rank / 2 for rank in range(asked.logprobs)],
                )
                for number in range(first, last if asked.HasField("logprobs") else first)
            ],
        )


class ScriptedRouter(inference_pb2_grpc.InferenceServicer):
    """Answers WORDS, a token each. The prompt "endless" never ends; "slow" waits before its first chunk and "mute"
    before it starts. Several servers may be the same router."""

    def __init__(self) -> None:
        self.address = ""
        self.streams = 0  # of answers, that were refused
        self.faults: Iterator[Fault] = iter(())  # of the calls to come, in order
        self.answers: list[Answer] = []
        self.requests: list[pb.GenerateRequest] = []
        self.broke_off: list[bool] = []  # of the requests
        self.resumes: list[pb.ResumeRequest] = []
        self.cancelled_sessions: list[str] = []
        self.closed_sessions: list[str] = []
        self.broken = threading.Event()  # a handler saw its call end early
        self.cancel_came = threading.Event()
        self.under_way = threading.Event()  # several chunks of one call have been sent

    async def Generate(self, request, context):
        self.requests.append(request)
        async with errors_as_status(context):
            if request.text == "refused":
                raise InvalidRequest("prompt", "is refused")
            if request.text == "overloaded":
                raise Overloaded("all slots are taken", retry_after=0.5)
            fault = next(self.faults, None)
            answer = self.begin(request)
            events = self.events(answer, 0, 0, answer.forked_from)
            async for event in self.broken_off(answer, events, fault, context):
                yield event

    async def Resume(self, request, context):
        self.resumes.append(request)
        async with errors_as_status(context):
            latest = [answer for answer in self.answers if answer.session == request.session_id]
            if not latest or request.session_id in self.closed_sessions:
                raise NotFound(f"session {request.session_id} was not resumed in time")
            fault = next(self.faults, None)
            answer = latest[-1]
            known = max(request.next_position, answer.start) - answer.start
            events = self.events(answer, known, request.text_offset, forked_from="")
            async for event in self.broken_off(answer, events, fault, context):
                yield event

    async def Answers(self, requests, context):
        self.streams += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "as a router of an earlier version")

    def begin(self, request):
        request.ClearField("route")  # this router knows no stream of answers
        self.broke_off.append(request.broke_off)
        request.broke_off = False
        for answer in self.answers:
            if answer.request.idempotency_key == request.idempotency_key:
                assert answer.request == request
                return answer
        session = request.session_id or f"session-{len(self.requests)}"
        turns = [answer for answer in self.answers if answer.session == session]
        forked_from = ""
        if request.whole_history and turns:
            session, turns, forked_from = f"fork-{len(self.requests)}", [], session
        if turns and not turns[-1].reason:
            raise Busy("its latest generation has not ended")
        start = PROMPT + (turns[-1].start + turns[-1].logged if turns else 0)
        answer = Answer(session, len(turns) + 1, start, request, forked_from)
        self.answers.append(answer)
        return answer

    async def broken_off(self, answer, events, fault, context):
        sent = 0
        try:
            while True:
                if fault is not None and sent == fault.after:
                    answer.logged = min(answer.logged + fault.logged, len(WORDS))
                    await self.fail(fault, context)
                    return
                if (event := await anext(events, None)) is None:
                    return
                yield event
                sent += 1
                if sent == 6:
                    self.under_way.set()
        except (asyncio.CancelledError, GeneratorExit):  # the latter when gRPC was cancelled in a write
            self.broken.set()
            raise

    async def fail(self, fault, context):
        if isinstance(fault.error, grpc.StatusCode):
            await context.abort(fault.error, "broken on purpose")
        if fault.error is not None:
            raise fault.error

    async def events(self, answer, known, offset, forked_from):
        asked = answer.request
        if asked.text == "mute":
            self.under_way.set()
            await asyncio.sleep(60)
        yield pb.GenerateResponse(
            started=pb.Started(
                session_id=answer.session,
                generation=answer.generation,
                model="toy",
                seed=asked.sampling.seed or 99,
                prompt_tokens=answer.start,
                cached_tokens=answer.start - PROMPT,
                forked_from=forked_from,
            )
        )
        if asked.text == "slow":
            await asyncio.sleep(60)
        if answer.logged > known:
            missing = answer.chunk(known, answer.logged, live=False)
            assert len(missing.text) == missing.text_offset - offset
            yield pb.GenerateResponse(chunk=missing)
        while not answer.reason and (asked.text == "endless" or answer.logged < len(WORDS)):
            answer.logged += 1
            yield pb.GenerateResponse(chunk=answer.chunk(answer.logged - 1, answer.logged, live=True))
            await asyncio.sleep(0.001)
        answer.reason = answer.reason or types_pb2.FINISH_REASON_LENGTH
        usage = pb.Usage(
            prompt_tokens=answer.start,
            completion_tokens=answer.logged,
            steps=2,
            verified=8,
            accepted=3,
            reached_by_depth=[2, 1],
            tried_by_depth=[2, 2, 0],
            wire_bytes=77,
            first_token_us=1_000,
            total_us=5_000,
            decode_us=4_000,
        )
        yield pb.GenerateResponse(finished=pb.Finished(reason=answer.reason, usage=usage))

    async def Cancel(self, request, context):
        self.cancelled_sessions.append(request.session_id)
        for answer in self.answers:
            if answer.session == request.session_id:
                answer.reason = answer.reason or types_pb2.FINISH_REASON_CANCELLED
        self.cancel_came.set()
        return pb.CancelResponse()

    async def CreateSession(self, request, context):
        return pb.Session(session_id="empty", model=request.model or "toy")

    async def GetSession(self, request, context):
        async with errors_as_status(context):
            turns = [answer for answer in self.answers if answer.session == request.session_id]
            if not turns or request.session_id in self.closed_sessions:
                raise NotFound(f"no session {request.session_id}")
            return pb.Session(
                session_id=request.session_id,
                model="toy",
                length=turns[-1].start + turns[-1].logged,
                digest=2**63,
                generation=len(turns),
                running=not turns[-1].reason,
                reason=turns[-1].reason,
                answer_position=turns[-1].start,
                epoch=len(turns),
                verifier="v",
                drafters=["d"],
            )

    async def CloseSession(self, request, context):
        self.closed_sessions.append(request.session_id)
        return pb.CloseSessionResponse()

    async def ListModels(self, request, context):
        async with errors_as_status(context):
            if self.requests:
                raise NotFound("no models any more")
            model = pb.Model(name="toy", context=64, vocabulary=9, tokenizer_digest=b"d", verifiers=1, drafters=2)
            return pb.ListModelsResponse(models=[model])

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        return ["outrider.v1.Inference"]


@cache
def servers_loop() -> asyncio.AbstractEventLoop:
    """Where all scripted routers run. It is never closed: gRPC has one queue of events for all loops of a process, and
    whichever takes an event of one that was closed fails at it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextmanager
def served(router: ScriptedRouter, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """A server until the body ends; then it is gone at once, with all its calls. Yields its address."""
    addresses: list[str] = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(listen, router.register, drain_s=0) as address:
            addresses.append(address)
            ready.set()
            await stop.wait()

    serves = asyncio.run_coroutine_threadsafe(serve(), servers_loop())
    assert ready.wait(10)
    try:
        yield addresses[0]
    finally:
        servers_loop().call_soon_threadsafe(stop.set)
        serves.result(10)


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    scripted = ScriptedRouter()
    with served(scripted) as scripted.address:
        yield scripted


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the calls of a stream that breaks off."""
    monkeypatch.setattr(_stream, "FIRST_PAUSE_S", 0.001)
