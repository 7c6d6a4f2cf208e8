"""Sessions that end in every way, in one process with their router; prints the bytes in use after each batch of them.

Run with PYTHONMALLOC=malloc: then malloc counts Python's objects, too, and neither fragments nor free lists nor arenas
blur what is counted.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from contextlib import suppress

import grpc.aio

from outrider.errors import NotFound
from outrider.rpc.status import from_rpc_error
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.v1 import inference_pb2 as pb
from router.sessions import maintenance
from tests.router.fakes import FakeDrafter, FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, drain, running_router

AT_ONCE = 8
WAYS = {
    "ended": range(4, 7),
    "all": range(7),
}  # of sessions to end: by their contracts, or broken off and cancelled, too
SETTLE_S, LOOKS = 0.9, 3


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    ]


def in_use() -> int:
    """Bytes that malloc has handed out, in all of its arenas."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Heap
    heap = read()
    return int(heap.used + heap.hblkhd)


async def one(rig: Rig, way: int) -> None:
    """A session that ends in one of several ways."""
    call = rig.stub.Generate(ask(max_tokens=3), timeout=60)
    started = await call.read()
    assert isinstance(started, pb.GenerateResponse)
    session_id = started.started.session_id
    with suppress(asyncio.CancelledError):  # how a call that was cancelled from here ends
        match way:
            case 0:
                call.cancel()
            case 1:
                call.cancel()
                await drain(rig.stub.Resume(pb.ResumeRequest(session_id=session_id)))
            case 2:
                await rig.stub.Cancel(pb.CancelRequest(session_id=session_id))
            case 3:
                await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
            case 4:
                await drain(call)
                again = ask(max_tokens=2)
                again.session_id = session_id
                call = rig.stub.Generate(again)
        await drain(call)


async def batch(rig: Rig, verifier: FakeVerifier, drafter: FakeDrafter, count: int, ways: range) -> int:
    """Run `count` sessions in these ways, some at once. Return the bytes in use once nothing is left of them."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def gated(number: int) -> None:
        async with gate:
            try:
                await one(rig, ways[number % len(ways)])
            except grpc.aio.AioRpcError as error:
                if not isinstance(from_rpc_error(error), NotFound):  # of resuming what had ended
                    raise

    await asyncio.gather(*map(gated, range(count)))
    for book in (verifier.starts, verifier.plans, verifier.durable, verifier.acknowledged, drafter.attached):
        book.clear()  # the fakes' own
    for _ in range(LOOKS):  # calls in the background end, timers expire, and rubbish refers to more rubbish
        await asyncio.sleep(SETTLE_S / LOOKS)
        gc.collect()
    sys._clear_type_cache()  # holds up to 4,096 names of attributes, each as often as C code spells it anew
    return in_use()


async def main(ways: range, count: int, batches: int) -> None:
    """Prints the bytes in use after each batch."""
    maintenance.SWEEP_S, maintenance.SWEEP_PAUSE_S = 0.2, 0.0
    verifier, drafter = FakeVerifier(SCRIPT), FakeDrafter()
    with EmbeddedRedis() as redis:
        async with (
            running_router(redis.url, session_ttl_s=60, max_sessions=64) as rig,
            announced(verifier, rig.registry, MODEL.digest) as first,
            announced(drafter, rig.registry, MODEL.digest) as second,
        ):
            for _ in range(batches):
                for worker in (first, second):
                    await rig.registry.announce(worker, ttl_s=120)
                print(await batch(rig, verifier, drafter, count, ways), flush=True)


if __name__ == "__main__":
    asyncio.run(main(WAYS[sys.argv[1]], *map(int, sys.argv[2:])))
