"""The page for probes of liveness answers while the event loop works, and only then."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from outrider.errors import Unavailable
from outrider.telemetry import loop_probe
from outrider.telemetry.loop_probe import LoopProbe


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in a thread of its own."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    try:
        yield running
    finally:
        running.call_soon_threadsafe(running.stop)
        thread.join()
        running.close()


def test_a_working_event_loop_is_alive_and_a_stuck_one_is_not(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_probe, "ANSWER_S", 0.2)
    probe = LoopProbe()
    assert probe.page().body == b"alive\n"  # it starts
    watching = threading.Event()
    loop.call_soon_threadsafe(lambda: (probe.watch(), watching.set()))
    assert watching.wait(10)
    assert probe.page().body == b"alive\n"
    free = threading.Event()
    loop.call_soon_threadsafe(free.wait)
    with pytest.raises(Unavailable, match="has done nothing"):
        probe.page()
    free.set()
    monkeypatch.setattr(loop_probe, "ANSWER_S", 10.0)
    began = time.monotonic()
    assert probe.page().body == b"alive\n"
    assert time.monotonic() - began < 10
