"""The life of a server: what it binds, prints and does at its end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.errors import ConfigError
from outrider.rpc.channels import open_channel
from outrider.rpc.server import serving
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc
from tests.http2 import Http2Client

SERVICE = "outrider.v1.Inference"


class Slow(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = False

    async def Cancel(self, request, context):
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return pb.CancelResponse()

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        return [SERVICE]


async def test_health_follows_the_servers_life_and_running_calls_end_during_the_drain() -> None:
    servicer = Slow()
    server = serving("127.0.0.1:0", servicer.register, drain_s=5.0)
    address = await server.__aenter__()
    async with open_channel(address) as channel:
        vitals = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await vitals.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = vitals.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = inference_pb2_grpc.InferenceStub(channel).Cancel(pb.CancelRequest())
        await servicer.entered.wait()
        leaving = asyncio.ensure_future(server.__aexit__(None, None, None))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert not leaving.done()
        servicer.release.set()
        assert await call == pb.CancelResponse()
        await asyncio.wait_for(leaving, 2)
    assert not servicer.cancelled


async def test_a_watcher_that_does_not_read_does_not_delay_the_drain() -> None:
    server = serving("127.0.0.1:0", Slow().register, drain_s=0.05)
    address = await server.__aenter__()
    async with Http2Client(address, window=0) as watcher:
        watcher.call("/grpc.health.v1.Health/Watch", b"")
        dripping = asyncio.create_task(watcher.drip(0, 0.0))
        async with open_channel(address) as channel:
            for _ in range(3):  # the watcher's call was before these
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(20):
            await server.__aexit__(None, None, None)
        await dripping


async def test_a_call_that_outlives_the_drain_is_cancelled() -> None:
    servicer = Slow()
    async with serving("127.0.0.1:0", servicer.register, drain_s=0.05) as address:
        channel = open_channel(address)
        call = inference_pb2_grpc.InferenceStub(channel).Cancel(pb.CancelRequest())
        await servicer.entered.wait()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await channel.close()
    async with asyncio.timeout(5):  # the handler is on its way out
        while not servicer.cancelled:
            await asyncio.sleep(0.01)


async def test_reflection_lists_the_registered_services() -> None:
    async with (
        serving("127.0.0.1:0", Slow().register, drain_s=0) as address,
        open_channel(address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_port_zero_is_replaced_by_the_port_that_was_taken() -> None:
    async with serving("127.0.0.1:0", Slow().register, drain_s=0) as address:
        host, _, port = address.partition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_busy_port_is_refused_with_the_address_and_a_remedy(host: str) -> None:
    async with serving(f"{host}:0", Slow().register, drain_s=0) as address:
        for key, addresses in {"listen": (address, None), "health": ("127.0.0.1:0", address)}.items():
            with pytest.raises(ConfigError, match=rf"^{key}: cannot bind {address} \(Address already in use\).*port 0"):
                async with serving(addresses[0], Slow().register, probes=addresses[1]):
                    pass


@pytest.mark.parametrize("listen", ["127.0.0.1:70000", "192.0.2.1:7070", "no-such-host.invalid:7070"])
async def test_an_impossible_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot bind {listen}"):
        async with serving(listen, Slow().register):
            pass


async def test_a_port_can_be_bound_again_at_once() -> None:
    async with (
        serving("127.0.0.1:0", Slow().register, drain_s=0) as address,
        open_channel(address) as channel,
    ):
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    async with serving(address, Slow().register, drain_s=0) as again:
        assert again == address


async def test_a_frozen_peer_is_noticed_within_five_seconds() -> None:
    """A peer that accepts and then sends nothing: keepalive must end the call, not the operating system."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        begin = time.monotonic()
        async with open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = asyncio.ensure_future(stub.Cancel(pb.CancelRequest(), timeout=30))
            loop = asyncio.get_running_loop()
            peer, _ = await loop.sock_accept(listener)
            with peer:
                await loop.sock_sendall(peer, b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")  # empty SETTINGS
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - begin < 5.0
