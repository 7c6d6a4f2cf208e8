"""A router's Inference service that answers from a script, on a real gRPC server and its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import grpc.aio
import pytest

from outrider.errors import InvalidRequest, NotFound, Overloaded
from outrider.rpc.server import serving
from outrider.rpc.status import translated
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc, types_pb2

WORDS = ["def ", "é", "", "(x)", ":\n"]


class ScriptedRouter(inference_pb2_grpc.InferenceServicer):
    """Answers WORDS, a token each. The prompt "endless" never ends; "slow" waits before its first chunk."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled_sessions: list[str] = []
        self.broken = threading.Event()  # a handler saw its call end early
        self.cancel_came = threading.Event()
        self.under_way = threading.Event()  # several chunks of a generation have been sent

    async def Generate(self, request, context):
        self.requests.append(request)
        async with translated(context):
            if request.text == "refused":
                raise InvalidRequest("prompt", "is refused")
            if request.text == "overloaded":
                raise Overloaded("all slots are taken", retry_after=0.5)
            if request.text == "cut":
                yield pb.GenerateResponse(started=pb.Started(session_id="s"))
                return
            try:
                async for event in self.script(request):
                    yield event
            except (asyncio.CancelledError, GeneratorExit):  # the latter when gRPC was cancelled in a write
                self.broken.set()
                raise

    async def script(self, request):
        session = f"session-{len(self.requests)}"
        yield pb.GenerateResponse(
            started=pb.Started(session_id=session, model="toy", seed=request.sampling.seed or 99, prompt_tokens=2)
        )
        if request.text == "slow":
            await asyncio.sleep(60)
        offset = 0
        count = 0
        while request.text == "endless" or count < len(WORDS):
            word = WORDS[count % len(WORDS)]
            offset += len(word)
            count += 1
            if count == 5:
                self.under_way.set()
            yield pb.GenerateResponse(
                chunk=pb.Chunk(
                    text=word,
                    token_ids=[count],
                    gaps=[count / 4],
                    next_position=2 + count,
                    text_offset=offset,
                )
            )
            await asyncio.sleep(0.001)
        usage = pb.Usage(
            prompt_tokens=2,
            completion_tokens=5,
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
        yield pb.GenerateResponse(finished=pb.Finished(reason=types_pb2.FINISH_REASON_LENGTH, usage=usage))

    async def Cancel(self, request, context):
        self.cancelled_sessions.append(request.session_id)
        self.cancel_came.set()
        return pb.CancelResponse()

    async def ListModels(self, request, context):
        async with translated(context):
            if self.requests:
                raise NotFound("no models any more")
            model = pb.Model(name="toy", context=64, vocabulary=9, tokenizer_digest=b"d", verifiers=1, drafters=2)
            return pb.ListModelsResponse(models=[model])

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        return ["outrider.v1.Inference"]


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    servicer = ScriptedRouter()
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving("127.0.0.1:0", servicer.register, drain_s=0) as address:
            servicer.address = address
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    yield servicer
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    assert not thread.is_alive()
    loop.close()
