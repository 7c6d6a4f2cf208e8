"""A bounded child process that renders chat templates, and the turns of callers at it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from outrider.grammar.processes import child_environment
from outrider.limits.fair_turns import FairTurns

TOO_LONG = (-signal.SIGPROF, -signal.SIGXCPU)  # statuses of a process that exceeded its time

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class TemplateError(Exception):
    """A template does not compile, or refuses messages."""


class TemplateProcess:
    """Runs work that has conversations rendered by a child process (`router.requests.template_sandbox`), one at a time.

    The process starts with the first work, and again at the end of work that ended it. `close` ends it.
    """

    def __init__(self, setup: Mapping[str, Any], what: str) -> None:
        """`setup`: the first message of the process; `what`: callers wait for, in messages."""
        self._setup = setup
        self._process: subprocess.Popen[str] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._turns = FairTurns(1, what)

    def check(self) -> None:
        """Start the process. Raises TemplateError for a template that does not compile."""
        self._thread.submit(self._start).result()

    async def run(self, tenant: str, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs) -> ResultT:
        """Return the result of `work`, which runs in a thread in the tenant's turn and may call `request`.

        Raises what it raises, and Overloaded when too much of the tenant's work waits.
        """
        return await self._turns.run(self._thread, tenant, self._run, lambda: work(*args, **options))

    def request(self, message: Any) -> str:
        """Send a request to the process and return the text of its answer. Raises TemplateError."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = process.wait()
            self._stop()
            raise TemplateError(
                "it takes too long (template_s)" if status in TOO_LONG else f"its process ended with {status}"
            )
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the process, and wait for work that runs."""
        self._thread.submit(self._stop).result()
        self._thread.shutdown()

    def _run(self, work: Callable[[], ResultT]) -> ResultT:
        if self._process is None:
            self._start()
        try:
            return work()
        finally:
            if self._process is None:  # the next process starts in the turn of the tenant that has ended this one
                with suppress(TemplateError):
                    self._start()

    def _start(self) -> None:
        # A new session, so that Ctrl-C reaches the router only. -P: files in the current directory must not shadow our
        # modules.
        command = [sys.executable, "-P", "-m", "router.requests.template_sandbox"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=child_environment(),
        )
        try:
            self.request(self._setup)
        except TemplateError:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
