"""A hostile message takes a small multiple of its bytes; what would take more is refused unparsed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.rpc.server import serving
from outrider.store.registry import Worker
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import verifier_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from router.sessions.verifier_link import VerifierLink
from tests.e2e.mini_router import ticket
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import decoding, described, hello_to
from tests.e2e.protocol.stream_probe import new_name
from tests.e2e.protocol.upstreams import refused_by

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 2**20
GROWTH = 128 * MIB  # bytes that a server may take for a message of 16 MiB: that is received in several copies, too
DRAFT, DECODE = "/outrider.v1.TreeSink/Draft", "/outrider.v1.Verifier/Decode"


def number(value: int) -> bytes:
    """A variable-length number."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + number(rest) if rest else bytes([low])


def field(numbered: int, content: bytes) -> bytes:
    """A field with a length."""
    return number(numbered << 3 | 2) + number(len(content)) + content


LARGEST, LARGEST_REQUEST = 16 * MIB - 64, 6 * MIB - 64  # bytes of a message, and of one to a server; without its header


def many(unit: bytes, size: int = LARGEST) -> bytes:
    return unit * (size // len(unit))


EMPTY_DELTAS = many(field(6, b""), LARGEST_REQUEST)
FRAMES = {  # of a drafter
    "empty deltas": EMPTY_DELTAS,
    "subscriptions and deltas in turn": many(field(2, b"") + field(4, b""), LARGEST_REQUEST),
    "empty distributions": field(4, many(field(11, b""), LARGEST_REQUEST)),
    "judgements": field(4, field(13, many(b"\1", LARGEST_REQUEST))),
    "tokens": field(4, field(7, many(b"\1", LARGEST_REQUEST))),
    "long deltas": many(field(6, field(7, many(b"\1", 1024))), LARGEST_REQUEST),
    "a flood of small ones": many(field(6, b""), 2**16),
}
COMMITS = many(field(7, b""))  # of a verifier
ANSWERS = {  # of an upstream
    "empty commits": many(field(7, b"")),
    "commits and ends in turn": many(field(3, b"") + field(4, b"")),
}
REQUESTS = {  # of a router
    "empty changes of plans": many(field(6, b""), LARGEST_REQUEST),
    "empty names in a trace": field(1, many(field(14, b""), LARGEST_REQUEST)),
    "empty biases": field(1, field(8, many(field(14, b""), LARGEST_REQUEST))),
}


def serialized(frame: Any) -> bytes:
    return frame if isinstance(frame, bytes) else frame.SerializeToString()


class Peak:
    """The most memory that a process has held since this was made, beyond what it held then."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        (self._proc / "clear_refs").write_text("5", encoding="ascii")
        self._before = self._most()

    @property
    def growth(self) -> int:
        return self._most() - self._before

    def _most(self) -> int:
        (line,) = [line for line in (self._proc / "status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024


@asynccontextmanager
async def drafting(address: str, verifier: str) -> AsyncIterator[Any]:
    """A drafter's stream whose frames may be bytes, and what it is sent; it has sent its Hello."""
    async with open_channel(address) as channel:
        call = channel.stream_stream(DRAFT, serialized, pb.DraftDown.FromString)(None)
        await call.write(pb.DraftUp(hello=await hello_to(verifier, "hostile")))
        await received(call, "welcome")
        try:
            yield call
        finally:
            call.cancel()


async def received(call: Any, kind: str) -> Any:
    async with asyncio.timeout(20):
        while (frame := await call.read()).WhichOneof("frame") != kind:
            pass
        return frame


async def end_of(call: Any) -> grpc.StatusCode:
    """How a stream ends, which follows all that was sent."""
    async with asyncio.timeout(20):
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()


@pytest.mark.parametrize("server", ["verifier-0", "drafter-0"])
async def test_frames_of_a_drafter_that_no_ticket_admits_are_not_parsed(
    cluster: LocalCluster, verifier: str, server: str
) -> None:
    process = cluster.processes[server]
    peak = Peak(process.pid)
    async with drafting(process.address, verifier) as call:
        await call.write(EMPTY_DELTAS)
        assert await end_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert "before a ticket admits the drafter" in await call.details()
    assert peak.growth < GROWTH


@pytest.mark.parametrize("hello", [True, False])
async def test_a_drafter_has_16_kib_before_its_first_ticket(verifier: str, hello: bool) -> None:
    long = "x" * 2**14
    async with open_channel(verifier) as channel:
        call = channel.stream_stream(DRAFT, serialized, pb.DraftDown.FromString)(None)
        first = await hello_to(verifier, long if hello else "hostile")
        await call.write(pb.DraftUp(hello=first))
        if not hello:
            await call.write(pb.DraftUp(subscribe=pb.Subscribe(session_id=long)))
        assert await end_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert "must have at most 16384 before a ticket admits the drafter" in await call.details()


@pytest.mark.parametrize("name", FRAMES)
async def test_a_frame_of_a_drafter_takes_a_small_multiple_of_its_bytes(
    cluster: LocalCluster, verifier: str, text: Text, name: str
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=8) as router,
        drafting(verifier, verifier) as call,
    ):
        signed = await ticket(verifier, router.session, "hostile", 1)
        await call.write(
            pb.DraftUp(subscribe=pb.Subscribe(session_id=router.session, epoch=1, attachment=1, ticket=signed))
        )
        await received(call, "snapshot")
        peak = Peak(cluster.processes["verifier-0"].pid)
        refused = (await described(verifier)).refused_frames
        await call.write(FRAMES[name])
        await call.done_writing()
        assert await end_of(call) in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.OK,
        )
        assert (await described(verifier)).refused_frames > refused
        assert peak.growth < GROWTH
        await router.generated(8)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_message_of_a_router_takes_a_small_multiple_of_its_bytes(
    cluster: LocalCluster, verifier: str, name: str
) -> None:
    peak = Peak(cluster.processes["verifier-0"].pid)
    async with open_channel(verifier) as channel:
        call = channel.stream_stream(DECODE)(None)
        await call.write(REQUESTS[name])
        assert await end_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 65536 fields" in await call.details()
    assert peak.growth < GROWTH


async def test_an_attach_has_64_kib(cluster: LocalCluster, drafter: str) -> None:
    async with open_channel(drafter) as channel:
        stub = DrafterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Attach(pb.AttachRequest(session_id="s", upstream="127.0.0.1:1", ticket=bytes(2**16)))
        await stub.Detach(pb.DetachRequest(session_id="s", epoch=1))


def raw(method: str, handle: Any) -> Callable[[grpc.aio.Server], list[str]]:
    """Registers a method whose handler takes and gives bytes."""
    _, service, name = method.split("/")
    handlers = {name: grpc.stream_stream_rpc_method_handler(handle)}

    def register(server: grpc.aio.Server) -> list[str]:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        return []

    return register


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_frame_of_an_upstream_takes_a_small_multiple_of_its_bytes(
    cluster: LocalCluster, drafter: str, name: str
) -> None:
    """The drafter counts it, and begins its stream anew."""
    streams = 0
    again = asyncio.Event()

    async def draft(requests: AsyncIterator[bytes], context: Any) -> None:
        nonlocal streams
        streams += 1
        if streams == 1:
            await context.write(ANSWERS[name])
        else:
            again.set()
        async for _ in requests:
            pass

    async with serving("127.0.0.1:0", raw(DRAFT, draft), drain_s=0) as upstream, open_channel(drafter) as channel:
        stub, session = DrafterStub(channel), new_name()
        refused = await refused_by(stub)
        peak = Peak(cluster.processes["drafter-0"].pid)
        await stub.Attach(pb.AttachRequest(session_id=session, epoch=1, upstream=upstream))
        async with asyncio.timeout(20):
            await again.wait()
        assert await refused_by(stub) == refused + 1
        assert peak.growth < GROWTH
        await stub.Detach(pb.DetachRequest(session_id=session, epoch=1))


async def test_an_answer_of_a_verifier_takes_its_router_a_small_multiple_of_its_bytes() -> None:
    async def decode(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(requests)
        await context.write(COMMITS)
        async for _ in requests:
            pass

    async with (
        serving("127.0.0.1:0", raw(DECODE, decode), drain_s=0) as address,
        open_channel(address) as channel,
    ):
        worker = Worker("verifier-1", "verifier", address, "target", b"digest", 4096, 64, 1, 0, 0)
        link, peak = VerifierLink(worker, channel, lease_s=10.0), Peak(os.getpid())
        failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        link.begin(failed.set_result, verifier_pb2.DecodeStart())
        async with asyncio.timeout(20):
            error = await failed
        await link.close()
    assert "no message of this protocol" in str(error)
    assert peak.growth < GROWTH
