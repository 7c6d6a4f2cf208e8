"""A server's connection to the process of one grammar."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from outrider.errors import ConfigError, InvalidRequest, OutriderError, Unavailable
from outrider.grammar.wire import ANSWER, LENGTH, Status

POLITE_S = 0.05  # processor seconds for a request, after which a process yields to all others from then on
LOOK_S = 0.05  # between two looks at a process that has a request
NICE = 10
SILENCE_S = 10.0  # of a process that has a request: it is stopped, or waits for memory
PIECE = 1 << 16  # bytes that are read at a time
MAX_PAYLOAD = 1 << 20  # bytes of an answer
SILENT = "grammar: its process does not answer; try again"
TOO_MUCH = "takes too much time or memory, or nests too deeply; simplify it"


class Answer(NamedTuple):
    """The answer to a request."""

    payload: bytes
    seconds: float  # of the processor
    failure: OutriderError | None = None  # why there is no payload


OnAnswer = Callable[[Answer], None]


class GrammarConnection:
    """Send requests to a process, and hands each answer to the callback of its request.

    It belongs to one thread. Within an event loop, answers are also read as they arrive; `wait` reads them anywhere.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.failure: OutriderError | None = None  # why no more answers come
        self.memory_kib = 0  # memory of the grammar
        self._fd = connection.detach()
        os.set_blocking(self._fd, False)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._waiting: deque[OnAnswer] = deque()  # for answers, in the order of the requests
        self._unsent = bytearray()
        self._writing = False  # the event loop calls `_flush` when the process reads on
        self._received = bytearray()
        self._since = 0.0  # when the process got the oldest request without an answer, or answered the one before
        self._seconds = 0.0  # of the processor that the process had taken with its latest answer
        self.pid = 0  # 0: the process has not begun
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self.receive)
        except RuntimeError:
            self._loop = None
        self.send(self._identified, "identify")

    def send(self, on_answer: OnAnswer, operation: str, *inputs: Any) -> None:
        """Send a request (`child.GrammarProcess` has the operations).

        `on_answer` is called once, with the answer or why there is none.
        """
        if not self._waiting:
            self.receive()  # it may have ended meanwhile, which is no fault of this request
        if self.failure is not None:
            on_answer(Answer(b"", 0.0, self.failure))
            return
        request = json.dumps((operation, *inputs), separators=(",", ":")).encode()
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(on_answer)
        self._unsent += LENGTH.pack(len(request)) + request
        self._flush()
        if self._loop is not None and self._timer is None and not self._loop.is_closed():
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def wait(self, seconds: float | None, until: Callable[[], bool]) -> bool:
        """Read answers until `until` returns true, or the process fails, at most `seconds`. Return whether it
        does."""
        ends = None if seconds is None else time.monotonic() + seconds
        while not until() and self.failure is None:
            left = SILENCE_S if ends is None else ends - time.monotonic()
            if left <= 0.0:
                break
            poll = select.poll()
            poll.register(self._fd, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            if not poll.poll(left * 1000) and ends is None:
                self._end(Unavailable(SILENT))
                break
            self._flush()
            self.receive()
        return until()

    def close(self) -> None:
        """End the process."""
        self._end(Unavailable("grammar: its process was ended; try again"))

    def _end(self, failure: OutriderError) -> None:
        if self.failure is None and self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
        self._fail(failure)

    def _identified(self, answer: Answer) -> None:
        self.pid = int(answer.payload or b"0")

    def _flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # a lost connection is found by reading
            while self._unsent:
                del self._unsent[: os.write(self._fd, self._unsent)]
        if self._loop is not None and bool(self._unsent) is not self._writing and not self._loop.is_closed():
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)

    def receive(self) -> None:
        """Read what has arrived, without waiting, and hand answers on."""
        while self.failure is None:
            try:
                piece = os.read(self._fd, PIECE)
            except BlockingIOError:
                break
            except ConnectionResetError:
                piece = b""
            if not piece:
                self._lost()
                break
            self._received += piece
            self._hand_on()

    def _hand_on(self) -> None:
        while len(self._received) >= ANSWER.size and self.failure is None:
            length, status, seconds, memory_kib = ANSWER.unpack_from(self._received)
            end = ANSWER.size + length
            if length > MAX_PAYLOAD:
                self._end(Unavailable("grammar: its process sent what is no answer; try again"))
                return
            if len(self._received) < end:
                return
            payload = bytes(self._received[ANSWER.size : end])
            del self._received[:end]
            self._since, self.memory_kib = time.monotonic(), memory_kib
            took, self._seconds = seconds - self._seconds, seconds
            self._waiting.popleft()(Answer(payload, took, _failure(status, payload)))

    def _lost(self) -> None:
        """The process has ended: by its bounds, if it had something to do."""
        if self._waiting and self.pid:
            self._waiting.popleft()(Answer(b"", 0.0, InvalidRequest("grammar", TOO_MUCH)))
        self._fail(Unavailable("grammar: its process has ended; try again"))

    def _look(self) -> None:
        """Look after a process that takes long for a request."""
        self._timer = None
        if not self._waiting or self.failure is not None or self._loop is None:
            return
        if time.monotonic() - self._since >= SILENCE_S:
            self._end(Unavailable(SILENT))
            return
        if self.pid:
            with suppress(OSError):  # it has just ended
                if time.clock_gettime(_processor_clock(self.pid)) - self._seconds >= POLITE_S:
                    os.setpriority(os.PRIO_PROCESS, self.pid, NICE)
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _fail(self, failure: OutriderError) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        self._close()
        while self._waiting:
            self._waiting.popleft()(Answer(b"", 0.0, failure))


def _processor_clock(pid: int) -> int:
    """Return Linux's clock of the processor seconds of another process (clock_getcpuclockid)."""
    return (~pid << 3) | 2


def _failure(status: int, payload: bytes) -> OutriderError | None:
    if status == Status.DONE:
        return None
    reason = payload.decode(errors="replace")
    return InvalidRequest("grammar", reason) if status == Status.REFUSED else ConfigError(f"grammar: {reason}")
