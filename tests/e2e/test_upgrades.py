"""Verifiers of two versions of the protocol, and one with other weights: a text goes on where it stays the same, or not
at all."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.core.session.protocol import PROTOCOL
from outrider.rpc.channels import open_channel
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceStub
from tests.altered import altered
from tests.e2e.conftest import MODELS
from tests.router.rig import drain

pytestmark = pytest.mark.timeout(120)

MODEL = MODELS / "drafter"  # small, so that the test is quick


def verifier(model: Path = MODEL) -> tuple[str, ...]:
    return ("verifier", "--model", str(model), "--name", "target", "--dtype", "float32", "--heartbeat-s", "0.2")


def asked(max_tokens: int = 40, session: str = "") -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, seed=3, temperature=0.8, ignore_eos=True)
    return pb.GenerateRequest(text="def add(a, b):\n", sampling=sampling, session_id=session)


def tokens(events: list[pb.GenerateResponse]) -> list[int]:
    return [token for event in events for token in event.chunk.token_ids]


async def problem(call: Any, events: list[pb.GenerateResponse] | None = None) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call, events)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    """The model with one weight that differs."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "other"))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 0x40]))
    return folder


async def test_a_text_continues_only_at_equal_verifiers_while_versions_and_weights_are_mixed(
    redis_server: EmbeddedRedis, other_weights: Path
) -> None:
    redis = redis_server.url
    async with (
        altered(redis, "router", "--model", f"target={MODEL}", "--failover-wait-s", "0.5") as router,
        open_channel(router.address) as channel,
    ):
        stub = InferenceStub(channel)
        async with altered(redis, *verifier()) as dying:
            await _listed(stub)
            first = [await drain(stub.Generate(asked())) for _ in range(2)]
            undisturbed, session = (events[0].started.session_id for events in first)
            whole = tokens(await drain(stub.Generate(asked(600, undisturbed))))
            async with altered(redis, *verifier(), version=PROTOCOL + 1), altered(redis, *verifier(other_weights)):
                while (model := await _listed(stub)).verifiers < 2 or not model.misfits:
                    await asyncio.sleep(0.05)
                assert f"speaks protocol {PROTOCOL + 1}" in model.misfits[0]
                call = stub.Generate(asked(600, session))  # goes to the verifier that has the session's KV
                begun = [await call.read() for _ in range(4)]
                await dying.kill()
                await problem(call, begun)  # names the dead one, which is still listed
                resumed = pb.ResumeRequest(
                    session_id=session, next_position=max(event.chunk.next_position for event in begun)
                )
                await asyncio.sleep(1.0)  # until the dead one is listed no more
                assert f"the generation began under protocol {PROTOCOL} and weights" in await problem(
                    stub.Resume(resumed)
                )
                assert tokens(await drain(stub.Generate(asked()))) != tokens(first[0])  # by the other weights
                async with altered(redis, *verifier()):
                    while (await _listed(stub)).verifiers < 2:
                        await asyncio.sleep(0.05)
                    assert tokens(begun) + tokens(await drain(stub.Resume(resumed))) == whole


async def _listed(stub: InferenceStub) -> pb.Model:
    """The model, as soon as a verifier serves it."""
    while not (models := (await stub.ListModels(pb.ListModelsRequest())).models):
        await asyncio.sleep(0.05)
    return models[0]
