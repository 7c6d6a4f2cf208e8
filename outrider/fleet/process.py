"""One server of a cluster as a child process: starts it, reads its output, and stops it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Protocol

from outrider.config import GatewayConfig, RayResources, RouterConfig, Section
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.hub import hub_name
from outrider.rpc.backoff import Backoff
from outrider.rpc.lifecycle import PARENT, USER_ERROR_STATUS
from outrider.store.redis.acl import PASSWORD as REDIS_PASSWORD

Role = Literal["router", "verifier", "drafter", "gateway"]

START_S = 300.0  # timeout of a start; loading a large checkpoint takes long
FETCH_S = 6 * 3600.0  # added to it for a checkpoint that may have to be downloaded first
RESTART_S, LONGEST_RESTART_S = 1.0, 30.0  # pauses before the restarts of a server that ended
STEADY_S = 60.0  # a server that ran longer is restarted after the first pause again
GRACE_S = 3.0  # beyond the process's drain time, before the process is killed
LINE_BYTES = 2**20  # longest line that is read from a server's output
_LISTENING = re.compile(r"outrider \w+: listening on (\S+)")
NOT_INHERITED = (  # environment variables that name Redis, a server's certificates, and those for clients
    "REDIS_URL",
    *("OUTRIDER_CA", "OUTRIDER_CERT", "OUTRIDER_KEY", "OUTRIDER_SERVER_NAME", "OUTRIDER_ROUTER"),
    *("OUTRIDER_API_KEY", "OUTRIDER_API_KEY_FILE", "OUTRIDER_PROFILE", "OUTRIDER_PROFILES"),
)
_FETCHING = " outrider.hub: "
_LAST_LINES = 40


def restart_backoff() -> Backoff:
    """Return the pauses before the restarts of one server."""
    return Backoff(RESTART_S, LONGEST_RESTART_S, steady_s=STEADY_S)


class ClusterServer(Protocol):
    """One server of a cluster, on any machine."""

    role: Role
    name: str  # "router", "verifier-0", "drafter-1", "gateway"
    section: Section
    address: str  # "host:port", once it is ready

    @property
    def where(self) -> str:
        """Where the server runs, for people: "pid 123"."""

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the server runs."""

    async def start(self, redis_url: str) -> None:
        """Start or restart the server and wait until it listens. `redis_url` is empty for a server without Redis.

        Raises ConfigError or Unavailable with the server's output if it ends instead.
        """

    async def wait(self) -> int:
        """Wait until the server has ended and return its exit status."""

    async def stop(self) -> None:
        """Make the server drain and end; kill it after its drain time. Do nothing if it never started."""


class Process:
    """A ClusterServer on this machine."""

    def __init__(self, role: Role, name: str, section: Section, forward: Callable[[str, str], None]) -> None:
        self.role = role
        self.name = name
        self.address = ""
        self.section = section
        self._forward = forward
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._ready = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._running().pid

    @property
    def where(self) -> str:
        return f"pid {self.pid}"

    @property
    def status(self) -> int | None:
        return self._running().returncode

    async def start(self, redis_url: str) -> None:
        self._ready.clear()
        self._last_lines.clear()
        limit = start_limit(self.section)
        environment = {**_inherited(), PARENT: str(os.getpid())}
        if redis_url:
            environment["REDIS_URL"] = redis_url
        self._child = await self._run([self.role, *flags(self.section)], environment)
        self._readers = [
            asyncio.create_task(self.read_output(self._child.stdout)),
            asyncio.create_task(self.read_output(self._child.stderr)),
        ]
        ready = asyncio.create_task(self._ready.wait())
        ended = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({ready, ended}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if self.status is not None:
            await asyncio.gather(*self._readers)
            raise self._start_failure(self.status)
        if not self._ready.is_set():
            raise Unavailable(f"{self.name} is not ready after {limit:.0f} s")

    async def _run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Run `outrider ARGUMENTS` in a new process session.

        A Ctrl-C then reaches only this process, which stops the servers in order.
        """
        return await asyncio.create_subprocess_exec(
            # -P: files in the current directory must not shadow our modules.
            *(sys.executable, "-P", "-m", "outrider.cli", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_BYTES,
            start_new_session=True,
        )

    async def wait(self) -> int:
        return await self._running().wait()

    async def stop(self) -> None:
        if self._child is None:
            return
        with suppress(ProcessLookupError):
            self._child.terminate()
        try:
            drain = float(getattr(self.section, "drain_s", 0.0))
            async with asyncio.timeout(drain + GRACE_S):
                await self._child.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()
        await asyncio.gather(*self._readers)

    def _running(self) -> asyncio.subprocess.Process:
        if self._child is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._child

    async def read_output(self, stream: asyncio.StreamReader | None) -> None:
        """Read what the server writes, until it ends: its address, and the lines to forward."""
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # a line beyond the limit: skip it, and read on so that the server does not block
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if match := _LISTENING.fullmatch(line):
                self.address = match[1]
                if not self._ready.is_set():
                    self._ready.set()
                    for earlier in self._last_lines:  # held back until now, for the error of a failed start
                        if _FETCHING not in earlier:
                            self._forward(self.name, earlier)
                continue
            self._last_lines.append(line)
            if self._ready.is_set() or _FETCHING in line:  # a download takes long, so its progress is forwarded at once
                self._forward(self.name, line)

    def _start_failure(self, status: int) -> OutriderError:
        lines = list(self._last_lines)
        if status == USER_ERROR_STATUS:
            begins = [index for index, line in enumerate(lines) if line.startswith("outrider: ")]
            message = "\n".join(lines[begins[-1] :] if begins else lines)
            return ConfigError(f"{self.name}: {message.removeprefix('outrider: ')}")
        ending = signal.Signals(-status).name if status < 0 else f"status {status}"
        return Unavailable("\n".join([f"{self.name} ended with {ending} while it started; its output:", *lines]))


def _inherited() -> dict[str, str]:
    """Return the environment without `NOT_INHERITED` and the passwords of users in Redis.

    A section names its server's certificates, its URL of Redis is its role's, and the variables for clients belong to
    the user of this command.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_INHERITED and not name.startswith(REDIS_PASSWORD)
    }


def start_limit(section: Section) -> float:
    """Return the timeout of a server's start, in seconds."""
    named = section.models.values() if isinstance(section, RouterConfig) else [getattr(section, "model", "")]
    return START_S + (FETCH_S if any(map(hub_name, named)) else 0.0)


def flags(section: Section) -> list[str]:
    """Return the flags that give a server this section."""
    arguments: list[str] = []
    for field in flagged(section):
        name, value = "--" + field.replace("_", "-"), getattr(section, field)
        match value:
            case None:
                pass
            case bool():
                arguments.append(name if value else name.replace("--", "--no-", 1))
            case dict():
                name = name.removesuffix("s")
                arguments += [part for key, item in value.items() for part in (name, f"{key}={item}")]
            case tuple():
                arguments += [part for item in value for part in (name, str(item))]
            case _:
                arguments += [name, str(value)]
    return arguments


def flagged(section: Section) -> list[str]:
    """Return the fields that have a flag of the server's command; the others are for the process that starts it."""
    others = {"count", *(RayResources.model_fields if isinstance(section, RouterConfig | GatewayConfig) else ())}
    return [field for field in type(section).model_fields if field not in others]
