"""Servers forked from a process that has imported everything, `outrider.fleet.forkserver` (Linux).

This process has one of these from its first server on, and another in its place once that has ended or the environment
has changed: libraries read more than two hundred variables while they load, so a server gets one that has loaded in its
own.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO

from outrider.fleet.forkserver import READY
from outrider.rpc.lifecycle import FAIL_ONCE, PARENT

LOAD_S = 120.0  # for all imports, on a machine that is busy
FORK_S = 30.0
# Of the environment: nothing reads them while it loads. The last one is another in each test of a run.
READ_LATER = frozenset({"REDIS_URL", PARENT, FAIL_ONCE, "PYTEST_CURRENT_TEST"})

_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A server that was forked, like an asyncio.subprocess.Process.

    `life` is a descriptor of its process, which it closes.
    """

    def __init__(self, pid: int, life: int, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        self.stderr = stderr
        self._life = life
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(life, self._end)

    async def wait(self) -> int:
        """Its exit status, negative for a signal, once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM. Raises ProcessLookupError once it has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL. Raises ProcessLookupError once it has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._life)
        os.close(self._life)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


async def fork(arguments: Sequence[str], environment: Mapping[str, str], limit: int) -> Forked:
    """Starts `outrider ARGUMENTS` as a session of its own; `limit` as for a StreamReader. Raises OSError where it
    cannot be done this way."""
    with ExitStack() as opened:
        readers, ends = [], []
        for _ in range(2):
            reader, end = await _pipe(opened, limit)
            readers.append(reader)
            ends.append(end)
        forking = asyncio.ensure_future(asyncio.to_thread(_servers.fork, arguments, environment, ends))
        try:
            pid, life = await asyncio.shield(forking)
        except asyncio.CancelledError:
            await asyncio.wait([forking])
            if forking.exception() is None:  # nobody would know it
                Forked(*forking.result(), *readers).kill()
            raise
        return Forked(pid, life, *readers)


async def _pipe(opened: ExitStack, limit: int) -> tuple[asyncio.StreamReader, int]:
    """A pipe that is read to its end, and where to write to it while `opened` is."""
    reading, writing = os.pipe()
    opened.callback(os.close, writing)
    reader = asyncio.StreamReader(limit)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), FileIO(reading))
    return reader, writing


class _ForkServer:
    """The process that forks. Starting it raises OSError with what it said if it does not get ready."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "outrider.fleet.forkserver", str(its_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # like a server's, which inherits the file objects that Python makes of it
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=[its_end.fileno()],
                start_new_session=True,
            )
        self._socket.settimeout(LOAD_S)
        try:
            if self._socket.recv(len(READY)) != READY:
                assert self._process.stdout is not None
                raise OSError(self._process.stdout.read().decode(errors="replace").strip())
        except OSError:
            self.end()
            raise
        self._socket.settimeout(FORK_S)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def fork(self, *descriptors: int) -> int:
        """The pid of a new child of ours. Raises OSError."""
        with _adopting():
            socket.send_fds(self._socket, [b"f"], descriptors)
            answer = self._socket.recv(32)
        if not answer:
            raise OSError("the process that forks servers has ended")
        os.waitpid(int(answer), os.WNOHANG)  # raises ChildProcessError where we could not adopt it
        return int(answer)

    def end(self) -> None:
        """Nothing happens to the servers."""
        self._socket.close()
        with self._process:
            self._process.kill()


class _ForkServers:
    """One at a time, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: _ForkServer | None = None

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], ends: Sequence[int]) -> tuple[int, int]:
        """A server's pid and a descriptor of its process. Raises OSError."""
        order = json.dumps([arguments, dict(environment), os.getcwd()])
        with self._lock:
            reading, writing = os.pipe()
            with open(writing, "w", encoding="utf-8") as file:
                try:
                    pid = self._fitting(environment).fork(*ends, reading)
                    life = os.pidfd_open(pid)
                except OSError:  # without an order, what may have been forked ends
                    self.end()
                    raise
                finally:
                    os.close(reading)
                with suppress(BrokenPipeError):  # it was killed
                    file.write(order)
                    file.flush()
        return pid, life

    def end(self) -> None:
        """Ends the one that there is."""
        if self._now is not None:
            self._now.end()
            self._now = None

    def _fitting(self, environment: Mapping[str, str]) -> _ForkServer:
        loading = {name: value for name, value in environment.items() if name not in READ_LATER}
        if self._now is not None and not (self._now.runs and self._now.environment == loading):
            self.end()
        if self._now is None:
            self._now = _ForkServer(loading)
        return self._now


@contextmanager
def _adopting() -> Iterator[None]:
    """Within, whatever below this process loses its parent becomes its child."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_servers = _ForkServers()
atexit.register(_servers.end)
