"""Runs one server whose long-lived tasks fail once:

python -m tests.failing ARGUMENT...     (the arguments of `outrider`)

The environment's FAIL_ONCE names the tasks, as "NAME@FILE,NAME@FILE": each fails as soon as its file exists, at the
await where the task then is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Generator
from typing import Any

from outrider.rpc import supervision
from outrider.rpc.supervision import Work

FAIL_ONCE = "FAIL_ONCE"
POLL_S = 0.02  # between two looks for a fault's file


class InjectedFault(Exception):
    """A fault that a test injects."""


class Failing:
    """Work in which an InjectedFault is raised, at its present await, when `file` appears."""

    def __init__(self, name: str, work: Coroutine[Any, Any, object], file: str) -> None:
        self._name = name
        self._work = work
        self._file = file

    async def _inject(self, task: asyncio.Task[Any]) -> None:
        while not os.path.exists(self._file):  # noqa: ASYNC240 (of a local file)
            await asyncio.sleep(POLL_S)
        task.cancel(self)

    def __await__(self) -> Generator[Any, Any, object]:
        task = asyncio.current_task()
        assert task is not None
        injection = asyncio.create_task(self._inject(task))
        inner, sent = self._work.__await__(), None
        error: BaseException | None = None
        try:
            while True:
                waits = inner.send(sent) if error is None else inner.throw(error)
                error = sent = None
                try:
                    sent = yield waits
                except BaseException as thrown:
                    error = thrown
                    if isinstance(thrown, asyncio.CancelledError) and thrown.args == (self,):
                        task.uncancel()
                        error = InjectedFault(self._name)
        except StopIteration as end:
            return end.value
        finally:
            injection.cancel()


def main() -> None:
    entries = (entry.partition("@") for entry in os.environ[FAIL_ONCE].split(","))
    faults = {name: file for name, _, file in entries}
    run_to_end = supervision.run_to_end

    async def run(name: str, work: Work) -> Exception:
        file = faults.pop(name, None)

        async def failing() -> object:
            assert file is not None
            return await Failing(name, work(), file)

        return await run_to_end(name, work if file is None else failing)

    supervision.run_to_end = run  # type: ignore[assignment]
    from outrider.cli.main import app

    app(prog_name="outrider")


if __name__ == "__main__":
    main()
