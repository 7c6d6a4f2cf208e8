"""Starts servers by forks of a process that has imported everything, `outrider.fleet.forkserver` (Linux).

This process starts a fork server with its first server, and replaces it when it has ended or when the environment has
changed: libraries read more than two hundred variables while they load, so a server must be forked from a process that
has loaded them in the server's environment.
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
from outrider.rpc.lifecycle import PARENT

LOAD_S = 120.0  # timeout of all imports, on a busy machine
FORK_S = 30.0  # timeout of one fork
# Variables that no library reads while it loads. The last one differs in each test of a run.
READ_LATER = frozenset({"REDIS_URL", PARENT, "PYTEST_CURRENT_TEST"})

_PR_SET_CHILD_SUBREAPER = 36


class ForkedServer:
    """A forked server, with the interface of asyncio.subprocess.Process.

    `pidfd` is a descriptor of the server's process; this object closes it.
    """

    def __init__(self, pid: int, pidfd: int, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        self.stderr = stderr
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._end)

    async def wait(self) -> int:
        """Wait until the server has ended and return its exit status, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM. Raises ProcessLookupError if the server has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessLookupError if the server has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


async def fork(arguments: Sequence[str], environment: Mapping[str, str], limit: int) -> ForkedServer:
    """Fork a server that runs `outrider ARGUMENTS` in a new process session; `limit` as for a StreamReader.

    Raises OSError if no server can be forked.
    """
    with ExitStack() as opened:
        readers, ends = [], []
        for _ in range(2):
            reader, end = await _pipe(opened, limit)
            readers.append(reader)
            ends.append(end)
        forking = asyncio.ensure_future(asyncio.to_thread(_servers.fork, arguments, environment, ends))
        try:
            pid, pidfd = await asyncio.shield(forking)
        except asyncio.CancelledError:
            await asyncio.wait([forking])
            if forking.exception() is None:  # the caller is gone, so no one else would end the server
                ForkedServer(*forking.result(), *readers).kill()
            raise
        return ForkedServer(pid, pidfd, *readers)


async def _pipe(opened: ExitStack, limit: int) -> tuple[asyncio.StreamReader, int]:
    """Create a pipe. Return a reader, and the descriptor to write to, which `opened` closes."""
    reading, writing = os.pipe()
    opened.callback(os.close, writing)
    reader = asyncio.StreamReader(limit)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), FileIO(reading))
    return reader, writing


class _ForkServer:
    """A fork server's process. The constructor raises OSError with the process's output if it does not become ready."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._socket, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "outrider.fleet.forkserver", str(remote_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as for a server, which inherits Python's file objects of these descriptors
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=[remote_end.fileno()],
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
        """Whether the process has not ended."""
        return self._process.poll() is None

    def fork(self, *descriptors: int) -> int:
        """Fork a server, which becomes a child of this process, and return its pid. Raises OSError."""
        with _adopting():
            socket.send_fds(self._socket, [b"f"], descriptors)
            answer = self._socket.recv(32)
        if not answer:
            raise OSError("the process that forks servers has ended")
        os.waitpid(int(answer), os.WNOHANG)  # raises ChildProcessError if the server is not our child
        return int(answer)

    def end(self) -> None:
        """End the fork server. The servers that it forked keep running."""
        self._socket.close()
        with self._process:
            self._process.kill()


class _ForkServers:
    """The current fork server of this process, shared by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _ForkServer | None = None

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], ends: Sequence[int]) -> tuple[int, int]:
        """Fork a server. Return its pid and a descriptor of its process. Raises OSError."""
        order = json.dumps([arguments, dict(environment), os.getcwd()])
        with self._lock:
            reading, writing = os.pipe()
            with open(writing, "w", encoding="utf-8") as file:
                try:
                    pid = self._server_for(environment).fork(*ends, reading)
                    pidfd = os.pidfd_open(pid)
                except OSError:  # a server that may have been forked ends without an order
                    self.end()
                    raise
                finally:
                    os.close(reading)
                with suppress(BrokenPipeError):  # the server was killed
                    file.write(order)
                    file.flush()
        return pid, pidfd

    def end(self) -> None:
        """End the current fork server, if there is one."""
        if self._current is not None:
            self._current.end()
            self._current = None

    def _server_for(self, environment: Mapping[str, str]) -> _ForkServer:
        loading = {name: value for name, value in environment.items() if name not in READ_LATER}
        if self._current is not None and not (self._current.runs and self._current.environment == loading):
            self.end()
        if self._current is None:
            self._current = _ForkServer(loading)
        return self._current


@contextmanager
def _adopting() -> Iterator[None]:
    """Within the block, descendants of this process that lose their parent become its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_servers = _ForkServers()
atexit.register(_servers.end)
