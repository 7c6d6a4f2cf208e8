"""What the ordinary client promises beyond the asyncio one: threads, loops, clean ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

import outrider
from outrider import errors
from tests.client.conftest import WORDS, ScriptedRouter

TEXT = "".join(WORDS)

TraceFunction = Callable[[FrameType, str, Any], Any]


def test_a_sync_client_generates_streams_and_lists_models(router: ScriptedRouter) -> None:
    with outrider.Client(router.address) as client:
        assert [model.name for model in client.models(timeout=5)] == ["toy"]
        assert client.generate("hello", seed=3, timeout=5).seed == 3
        stream = client.stream("hello")
        assert [chunk.text for chunk in stream] == WORDS
        assert stream.result.text == TEXT


def test_threads_share_one_client(router: ScriptedRouter) -> None:
    with outrider.Client(router.address) as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda seed: client.generate("hello", seed=seed), range(1, 33)))
    assert [result.seed for result in results] == list(range(1, 33))
    assert {result.text for result in results} == {TEXT}
    assert len({result.session_id for result in results}) == 32


def test_errors_are_typed(router: ScriptedRouter) -> None:
    with outrider.Client(router.address) as client:
        with pytest.raises(errors.InvalidRequest, match="prompt: is refused"):
            client.generate("refused")
        with pytest.raises(errors.DeadlineExceeded):
            client.generate("slow", timeout=0.2)
        with pytest.raises(errors.InvalidRequest, match="temperature"):
            client.stream("hello", temperature=-1)
    with outrider.Client("127.0.0.1:1") as client, pytest.raises(errors.Unavailable):
        client.models(timeout=5)


def test_leaving_the_loop_early_cancels_on_the_server_before_the_next_line(router: ScriptedRouter) -> None:
    with outrider.Client(router.address) as client:
        for _ in client.stream("endless"):
            break
        assert router.cancelled_sessions == ["session-1"]
        assert router.broken.wait(5)


def test_leaving_a_with_block_cancels_on_the_server(router: ScriptedRouter) -> None:
    with outrider.Client(router.address) as client:
        with client.stream("endless") as stream:
            next(iter(stream))
        assert router.cancelled_sessions == ["session-1"]


def test_cancel_from_another_thread_ends_the_reader(router: ScriptedRouter) -> None:
    with outrider.Client(router.address) as client:
        stream = client.stream("endless")
        timer = threading.Timer(0.1, stream.cancel)
        timer.start()
        with pytest.raises(errors.Cancelled):
            for _ in stream:
                pass
        timer.join()


def interrupt(after: threading.Event) -> threading.Thread:
    """Presses Ctrl-C once, when what was sent by then has been read, too."""

    def press() -> None:
        assert after.wait(5)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: a shell's background jobs ignore interrupts, and so would we with them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("call", ["stream", "generate"])
def test_an_interrupt_cancels_on_the_server_before_the_client_is_closed(router: ScriptedRouter, call: str) -> None:
    thread = interrupt(router.under_way)
    with pytest.raises(KeyboardInterrupt), outrider.Client(router.address) as client:  # noqa: PT012
        if call == "generate":
            client.generate("endless")
        for _ in client.stream("endless"):
            pass
    thread.join()
    assert router.cancelled_sessions == ["session-1"]
    assert router.broken.wait(5)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_at_any_line_leaves_nothing_that_was_never_awaited(
    router: ScriptedRouter, recwarn: pytest.WarningsRecorder
) -> None:
    """A signal may come between any two lines of the client's code in the calling thread."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal lines
        if "outrider/client" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        if event == "line" and lines == number:
            signal.raise_signal(signal.SIGINT)
        return trace

    number = 0  # of the line at which the signal comes
    with outrider.Client(router.address) as client:
        while number < 200:
            number += 1
            lines = 0
            sys.settrace(trace)
            try:
                client.models(timeout=5)
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(None)
            break
        assert [model.name for model in client.models(timeout=5)] == ["toy"]
    assert number > 5
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


def test_a_client_that_the_garbage_collector_finds_on_its_own_thread_ends(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, others = asyncio.new_event_loop(), {*threading.enumerate()}
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "new_event_loop", lambda: loop)
        client = outrider.Client(router.address)
    client.generate("hello")
    (thread,) = (it for it in threading.enumerate() if it.name == "outrider-client" and it not in others)
    client.itself = client  # type: ignore[attr-defined]
    del client
    loop.call_soon_threadsafe(gc.collect)
    thread.join(5)
    assert not thread.is_alive()


def test_close_breaks_off_calls_of_other_threads(router: ScriptedRouter) -> None:
    client = outrider.Client(router.address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "slow")
        while not router.requests:
            time.sleep(0.01)
        client.close()
        with pytest.raises(errors.Cancelled):
            waiting.result(5)
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.models()


def test_a_forgotten_client_ends_its_thread(router: ScriptedRouter) -> None:
    client = outrider.Client(router.address)
    client.generate("hello")
    del client
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "outrider-client"]


def test_a_script_that_never_closes_its_client_still_exits_cleanly(router: ScriptedRouter) -> None:
    script = f"""
import outrider
client = outrider.Client({router.address!r})
stream = client.stream("endless")
chunks = iter(stream)
print(next(chunks).text)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "def \n", "")
