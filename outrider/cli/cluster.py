"""A cluster on this machine: each server a process of this same command line, started, watched and stopped.

async with LocalCluster(config) as cluster:
    client = outrider.AsyncClient(cluster.router_address)
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from outrider.cli.reporting import MISTAKE
from outrider.cli.serve import PARENT
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, Section
from outrider.core.digest import tokenizer_digest
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.store.embedded import EmbeddedRedis

Role = Literal["router", "verifier", "drafter"]

START_S = 300.0  # a large checkpoint takes its time
REGISTER_S = 30.0  # for heartbeats to arrive
GRACE_S = 3.0  # beyond its own drain, before a process is killed
_LISTENING = re.compile(r"outrider \w+: listening on (\S+)")
_LAST_LINES = 40


class Process:
    """One server of a cluster."""

    def __init__(self, role: Role, name: str, section: Section, forward: Callable[[str, str], None]) -> None:
        self.role = role
        self.name = name  # "router", "verifier-0", "drafter-1"
        self.address = ""  # "host:port", once it is ready
        self._section = section
        self._forward = forward
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._ready = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running().pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._running().returncode

    async def start(self, redis_url: str) -> None:
        """Starts it, be it again, and waits until it listens. Raises ConfigError or Unavailable with what it said if it
        ends."""
        self._ready.clear()
        # -P: what lies in the current directory must not shadow our modules.
        command = [sys.executable, "-P", "-m", "outrider.cli", self.role, *flags(self._section)]
        self._child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "REDIS_URL": redis_url, PARENT: str(os.getpid())},
            limit=2**20,  # bytes of a line
            start_new_session=True,  # a Ctrl-C reaches us alone; we stop the others in order
        )
        self._readers = [
            asyncio.create_task(self._read(self._child.stdout)),
            asyncio.create_task(self._read(self._child.stderr)),
        ]
        ready = asyncio.create_task(self._ready.wait())
        ended = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({ready, ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if self.status is not None:
            await asyncio.gather(*self._readers)
            raise self._start_failure(self.status)
        if not self._ready.is_set():
            raise Unavailable(f"{self.name} is not ready after {START_S:.0f} s")

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await self._running().wait()

    async def stop(self) -> None:
        """Asks it to end, and kills it if it has not after its drain. Nothing happens if it never started."""
        if self._child is None:
            return
        with suppress(ProcessLookupError):
            self._child.terminate()
        try:
            drain = float(getattr(self._section, "drain_s", 0.0))
            await asyncio.wait_for(self._child.wait(), drain + GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()
        await asyncio.gather(*self._readers)

    def _running(self) -> asyncio.subprocess.Process:
        if self._child is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._child

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        async for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            if match := _LISTENING.fullmatch(line):
                self.address = match[1]
                self._ready.set()
                for earlier in self._last_lines:  # had the start failed, they would be in its error
                    self._forward(self.name, earlier)
                continue
            self._last_lines.append(line)
            if self._ready.is_set():
                self._forward(self.name, line)

    def _start_failure(self, status: int) -> OutriderError:
        said = list(self._last_lines)
        if status == MISTAKE:
            begins = [index for index, line in enumerate(said) if line.startswith("outrider: ")]
            message = "\n".join(said[begins[-1] :] if begins else said)
            return ConfigError(f"{self.name}: {message.removeprefix('outrider: ')}")
        ending = signal.Signals(-status).name if status < 0 else f"status {status}"
        return Unavailable("\n".join([f"{self.name} ended with {ending} while it started; it said:", *said]))


class LocalCluster:
    """All processes of a configuration, and a Redis of its own unless the configuration or REDIS_URL names one.

    `forward(name, line)` gets every line that a process prints; `ready(process)` hears of each that is ready.
    The processes die with this one, even when it is killed (Linux).

    Entering raises ConfigError and Unavailable; nothing is left running then.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        forward: Callable[[str, str], None] = lambda name, line: None,
        ready: Callable[[Process], None] = lambda process: None,
    ) -> None:
        _check_names(config)
        _check_tokenizers(config)
        self.processes: dict[str, Process] = {}
        self.redis_url = ""
        self._config = config
        self._ready = ready
        self._stack = AsyncExitStack()
        sections: list[tuple[Role, str, Section]] = [
            *(("verifier", f"verifier-{number}", section) for number, section in enumerate(config.verifier)),
            *(("drafter", f"drafter-{number}", section) for number, section in enumerate(config.drafters)),
            ("router", "router", config.router),
        ]
        for role, name, section in sections:
            self.processes[name] = Process(role, name, section, forward)

    @property
    def router_address(self) -> str:
        """ "host:port" for clients."""
        return self.processes["router"].address

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.redis_url = self._config.redis.url or os.environ.get("REDIS_URL") or self._own_redis(stack)
            stack.push_async_callback(self._stop)
            await _all(self._start(process) for process in self.processes.values())
            await self._registered()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def next_end(self) -> Process:
        """Waits for the next process that ends, among those that run now."""
        running = {process.name: process for process in self.processes.values() if process.status is None}
        waits = {asyncio.create_task(process.wait(), name=name) for name, process in running.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return running[done.pop().get_name()]
        finally:
            for task in waits:
                task.cancel()

    def _own_redis(self, stack: AsyncExitStack) -> str:
        return stack.enter_context(EmbeddedRedis(self._config.redis.data)).url

    async def _start(self, process: Process) -> None:
        await process.start(self.redis_url)
        self._ready(process)

    async def _stop(self) -> None:
        for role in ("router", "drafter", "verifier"):  # the callers first, so that they can still say goodbye
            await _all(process.stop() for process in self.processes.values() if process.role == role)

    async def _registered(self) -> None:
        """Waits until the router sees the workers. Raises ConfigError when it does not."""
        verifiers = len(self._config.verifier)
        drafters = len(self._config.drafters)
        async with AsyncClient(self.router_address) as client:
            give_up = asyncio.get_running_loop().time() + REGISTER_S
            while asyncio.get_running_loop().time() < give_up:
                models = await client.models(timeout=REGISTER_S)
                seen = sum(model.verifiers for model in models)
                fitting = sum(model.drafters for model in models)
                if seen >= verifiers and fitting >= drafters:
                    return
                await asyncio.sleep(0.05)
        raise ConfigError(
            f"router: sees {seen} of {verifiers} verifiers and {fitting} of {drafters} drafters that fit them; "
            "the tokenizer.json in the folders of [router.models], of the verifiers and of the drafters must agree"
        )


def flags(section: Section) -> list[str]:
    """The command line that gives a server this section."""
    arguments: list[str] = []
    for field in type(section).model_fields:
        name, value = "--" + field.replace("_", "-"), getattr(section, field)
        match value:
            case None:
                pass
            case bool():
                arguments.append(name if value else name.replace("--", "--no-", 1))
            case dict():
                arguments += [part for key, folder in value.items() for part in ("--model", f"{key}={folder}")]
            case tuple():
                arguments += [part for item in value for part in (name, str(item))]
            case _:
                arguments += [name, str(value)]
    return arguments


def _check_names(config: ClusterConfig) -> None:
    for number, worker in enumerate(config.verifier):
        if worker.model_name not in config.router.models:
            known = ", ".join(config.router.models)
            raise ConfigError(f"verifier.{number}.name: '{worker.model_name}' is not in [router.models] ({known})")


def _check_tokenizers(config: ClusterConfig) -> None:
    """Raises ConfigError for a drafter that no verifier can take. A checkpoint that is none is left to its worker to
    report."""
    targets = {_tokenizer(worker.model): worker.model_name for worker in config.verifier}
    for number, drafter in enumerate(config.drafters):
        if None not in (*targets, own := _tokenizer(drafter.target or drafter.model)) and own not in targets:
            raise ConfigError(
                f"drafter.{number}.model: {drafter.model} has another tokenizer than {', '.join(targets.values())}; "
                "name that one's folder as `target` to draft by text, or draft with a model of its family"
            )


def _tokenizer(checkpoint: Path) -> bytes | None:
    """The digest of its tokenizer, if it has one."""
    try:
        return tokenizer_digest((checkpoint / "tokenizer.json").read_bytes())
    except (OSError, ValueError):
        return None


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs all; the first failure cancels the rest and is raised alone."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
