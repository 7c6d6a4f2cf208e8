"""Services in the test's own process, so that what they log, leak or let slip can be seen; the wire is real."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.config import DrafterConfig, VerifierConfig
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.v1 import verifier_pb2
from outrider.wire.codec import contract_to_pb, plan_to_pb

VOCABULARY = 131
PROMPT = [5, 6, 7, 8]

Run = Callable[..., Coroutine[Any, Any, None]]


@asynccontextmanager
async def serving(run: Run, config: Any, redis_url: str) -> AsyncIterator[str]:
    """A service's `run` while the body runs; gives its address."""
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run(config, redis_url, announce=bound.set_result))
    await asyncio.wait([task, bound], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield await bound if not task.done() else task.result()  # type: ignore[misc]
    finally:
        task.cancel()
        await asyncio.wait([task])


def verifier_config(checkpoint: Path) -> VerifierConfig:
    return VerifierConfig(
        model=checkpoint, name="tiny", dtype="float32", slots=4, max_nodes=16, drain_s=0.2, listen="127.0.0.1:0"
    )


def drafter_config(checkpoint: Path) -> DrafterConfig:
    return DrafterConfig(model=checkpoint, name="tiny", dtype="float32", slots=4, drain_s=0.2, listen="127.0.0.1:0")


def start(checkpoint: Path, session: str = "s", **changes: Any) -> verifier_pb2.DecodeStart:
    """A good start of a generation that soon waits at its window."""
    fields: dict[str, Any] = {
        "session_id": session,
        "epoch": 1,
        "model": "tiny",
        "tokenizer_digest": read_tokenizer_digest(checkpoint),
        "tokens": PROMPT,
        "digest": extend(EMPTY, PROMPT),
        "answer_position": len(PROMPT),
        "contract": contract_to_pb(Contract(seed=1, max_tokens=100, temperature=1.0)),
        "plan": plan_to_pb(Plan(version=1, depth=4, nodes=8)),
        "window": 2,
        "lease_ms": 60_000,
        "handle": 1,
    }
    return verifier_pb2.DecodeStart(**(fields | changes))


class Faults(logging.Handler):
    """Collects uncaught errors: those in the log, and those that the event loop reports."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))

    def record(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(repr(context))


@asynccontextmanager
async def watched() -> AsyncIterator[Faults]:
    """Fails the test when something was left uncaught in the body."""
    faults = Faults()
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(faults.record)
    logging.getLogger().addHandler(faults)
    try:
        yield faults
        gc.collect()  # exceptions of forgotten tasks show when they are collected
        await asyncio.sleep(0)
    finally:
        logging.getLogger().removeHandler(faults)
        loop.set_exception_handler(before)
    assert not faults.found, faults.found[:3]


def resident_bytes() -> int:
    """Memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
