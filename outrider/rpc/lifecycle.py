"""The life of a server process, from its start to the signal that ends it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from outrider.errors import InternalError, OutriderError
from outrider.rpc.core_dumps import forbid_core_dumps

PARENT = "OUTRIDER_PARENT"  # environment: the process that a server must not outlive
USER_ERROR_STATUS = 2  # exit status of an error that the user can fix
_PR_SET_PDEATHSIG = 1


def run_until_signal(
    main: Coroutine[Any, Any, None], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    """Run `main` to its end, or until SIGTERM or SIGINT cancels it; a second signal cuts its clean-up short.

    `loop_factory`: makes the event loop; None: asyncio does. Neither this process nor its children write core dumps.

    An error that the user can fix (any OutriderError but InternalError, also inside exception groups) is printed on
    stderr, without a traceback, and the process exits with status 2.
    """
    forbid_core_dumps()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_cancelled_by_signals(main))
    except Exception as error:
        expected = user_error(error)
        if expected is None:
            raise
        print(f"outrider: {expected}", file=sys.stderr)
        raise SystemExit(USER_ERROR_STATUS) from None


def fast_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of uvloop, or of asyncio where uvloop is not installed.

    A delay is rounded to a millisecond by uvloop, so it is not for servers whose decisions are finer than that.
    """
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def die_with_parent() -> None:
    """Make the kernel kill this process when the parent process that the environment names ends, even if it is killed.

    Do nothing where the environment names none, and on systems other than Linux.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before the call of prctl
        raise SystemExit(1)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a task group that raises a single exception as it is, also one of the body, instead of in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) > 1:
            raise
        raise errors.exceptions[0] from None


def user_error(error: BaseException) -> OutriderError | None:
    """Return the OutriderError that `error` is, or that all of an exception group is; None for bugs."""
    if isinstance(error, InternalError):
        return None
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, BaseExceptionGroup):
        causes = [user_error(inner) for inner in error.exceptions]
        return causes[0] if None not in causes else None
    return None


async def _cancelled_by_signals(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(main)
    signalled = False

    def stop() -> None:
        nonlocal signalled
        signalled = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled:
            raise
