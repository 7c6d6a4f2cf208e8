"""What a request may be: refused before it costs anything."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from outrider.v1 import inference_pb2 as pb
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, ask, collect, drain, running_router

MOST = 4096  # bytes


@pytest.mark.parametrize(
    "large",
    [
        pb.GenerateRequest(text="x" * MOST),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * MOST)),
        pb.GenerateRequest(messages=[pb.Message(role="user", content="x")] * MOST),
        pb.GenerateRequest(text="x", sampling=pb.Sampling(stop=["x" * MOST])),
        pb.GenerateRequest(text="x", idempotency_key="x" * MOST),
    ],
    ids=["text", "token ids", "messages", "stops", "key"],
)
async def test_a_request_above_its_limit_is_refused_by_that_name(redis_url: str, large: pb.GenerateRequest) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with (
        running_router(redis_url, max_request_bytes=MOST) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="max_request_bytes") as caught:
            await drain(rig.stub.Generate(large))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await collect(rig.stub.Generate(ask("x" * 40, max_tokens=1)))
    assert len(verifier.starts) == 1
