"""Starts servers as processes of this machine: by a fork where possible, because that is quick, else by exec."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from outrider.fleet.command_line import command_line

LINE_BYTES = 2**20  # longest line that is read from a server's output

log = logging.getLogger(__name__)


class Child(Protocol):
    """A child process, with the interface of asyncio.subprocess.Process."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """The process's standard output."""

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        """The process's standard error."""

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit status."""

    def terminate(self) -> None:
        """Send SIGTERM. Raises ProcessLookupError if the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessLookupError if the process has ended."""


async def start_child(arguments: Sequence[str], environment: Mapping[str, str], *, forked: bool) -> Child:
    """Run `outrider ARGUMENTS` in a new process session.

    A Ctrl-C then reaches only this process, which stops the servers in order.
    """
    if forked and sys.platform == "linux":
        from outrider.fleet.forking import fork

        try:
            return await fork(arguments, environment, LINE_BYTES)
        except OSError as error:
            log.warning("a server could not be forked and is started by exec, which takes longer: %s", error)
    return await asyncio.create_subprocess_exec(
        *command_line(arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        limit=LINE_BYTES,
        start_new_session=True,
    )
