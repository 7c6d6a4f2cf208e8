"""Padded streams: messages of one size at equal intervals, whatever the steps commit, and the same text."""

from __future__ import annotations

import time
from typing import Any

import grpc.aio
import pytest

import outrider
from outrider.v1 import inference_pb2 as pb
from router.api.messages import PADDED_BYTES, pad
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import ANSWER, MODEL, SCRIPT, Rig, ask, running_router

INTERVAL_S = 0.02


@pytest.mark.parametrize("size", [131, 200, 2048, 3 * 2048])
def test_a_message_becomes_as_long_as_the_next_multiple(size: int) -> None:
    for length in range(3 * size // 2):
        message = pb.GenerateResponse(chunk=pb.Chunk(text="x" * length))
        before = message.ByteSize()
        pad(message, size)
        assert message.ByteSize() % size == 0
        assert before < message.ByteSize() <= before + size + 130


async def received(rig: Rig, request: pb.GenerateRequest) -> list[tuple[float, bytes]]:
    """The messages of a call as they are on the wire, and when they came."""
    async with grpc.aio.insecure_channel(rig.address) as channel:
        call: Any = channel.unary_stream(
            "/outrider.v1.Inference/Generate", request_serializer=pb.GenerateRequest.SerializeToString
        )(request)
        return [(time.monotonic(), message) async for message in call]


@pytest.mark.parametrize("logprobs", [None, 3])
async def test_steps_of_any_length_look_alike(redis_url: str, logprobs: int | None) -> None:
    terms: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
    sizes, texts = [], []
    for stride, pace_s in ((1, 0.001), (5, 0.03)):
        verifier = FakeVerifier(SCRIPT, stride=stride, pace_s=pace_s)
        async with (
            running_router(redis_url, pad_stream_s=INTERVAL_S) as rig,
            announced(verifier, rig.registry, MODEL.digest),
        ):
            messages = await received(rig, ask(max_tokens=len(SCRIPT), **terms))
        events = [pb.GenerateResponse.FromString(message) for _, message in messages]
        sizes.append({len(message) for _, message in messages})
        kinds = [kind for event in events if (kind := event.WhichOneof("event")) is not None]
        assert (kinds[0], {*kinds[1:-1]}, kinds[-1]) == ("started", {"chunk"}, "finished")
        texts.append("".join(event.chunk.text for event in events))
        tokens = [token for event in events for token in event.chunk.token_ids]
        assert tokens == SCRIPT
        assert sum(len(event.chunk.logprobs) for event in events) == (0 if logprobs is None else len(SCRIPT))
        times = [at for at, _ in messages]
        assert times[-1] - times[0] >= 0.5 * INTERVAL_S * (len(times) - 1)
    assert sizes[0] == sizes[1] == {PADDED_BYTES * (1 + (logprobs or 0))}
    assert texts == [ANSWER, ANSWER]


async def test_the_sdk_reads_it_as_any_stream(redis_url: str) -> None:
    async with (
        running_router(redis_url, pad_stream_s=INTERVAL_S) as rig,
        announced(FakeVerifier(SCRIPT, stride=3), rig.registry, MODEL.digest),
        outrider.AsyncClient(rig.address) as client,
    ):
        result = await client.generate("import os\n", max_tokens=len(SCRIPT))
        assert (result.text, list(result.token_ids)) == (ANSWER, SCRIPT)
        again = await client.generate("import os\n", session=result.session_id, max_tokens=8)
        assert list(again.token_ids) == SCRIPT[:8]
