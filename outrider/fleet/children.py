"""Servers as processes of this machine: forked where that can be, because it is quick, and else started anew."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from outrider.fleet.command_line import command_line

LINE_BYTES = 2**20  # of what a server says

log = logging.getLogger(__name__)


class Child(Protocol):
    """A process, as asyncio has it."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """What it prints."""

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        """What it reports."""

    async def wait(self) -> int:
        """Its exit status, once it has ended."""

    def terminate(self) -> None:
        """SIGTERM. Raises ProcessLookupError once it has ended."""

    def kill(self) -> None:
        """SIGKILL. Raises ProcessLookupError once it has ended."""


async def start_child(arguments: Sequence[str], environment: Mapping[str, str], *, forked: bool) -> Child:
    """Runs `outrider ARGUMENTS` in a session of its own: a Ctrl-C reaches us alone, and we stop the others in order."""
    if forked and sys.platform == "linux":
        from outrider.fleet.forking import fork

        try:
            return await fork(arguments, environment, LINE_BYTES)
        except OSError as error:
            log.warning("a server is started anew, which takes longer, because none could be forked: %s", error)
    return await asyncio.create_subprocess_exec(
        *command_line(arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        limit=LINE_BYTES,
        start_new_session=True,
    )
