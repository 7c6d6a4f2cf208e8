"""Starts the processes of grammars: a first one reads the tokenizer and forks the others (`outrider.grammar.child`)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from outrider.errors import OutriderError, Unavailable
from outrider.grammar.connection import GrammarConnection

TokenizerJson = Path | Callable[[], bytes]  # a checkpoint's folder, or what makes the content of its tokenizer.json

SPARE_S = 0.05  # after which the next process is forked, so that it does not take the processor from this one's grammar
INHERITED = ("PYTHONPATH", "PYTHONUTF8", "LANG", "LC_ALL", "TZ")  # variables of a bounded child process: no secrets


def child_environment() -> dict[str, str]:
    """Return the environment of a child process that reads what callers send."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


class GrammarProcesses:
    """Processes for the vocabulary of one checkpoint. The first one starts when it is needed."""

    def __init__(self, tokenizer: TokenizerJson, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._inputs = (str(vocabulary), json.dumps([*eos_ids]))
        self._first: _FirstProcess | None = None
        self._spare: GrammarConnection | None = None  # to a process that has begun already

    def start(self) -> GrammarConnection:
        """Return a connection to a process without a grammar. Raises Unavailable."""
        spare, self._spare = self._spare, None
        found = self._connect() if spare is None or spare.failure is not None else spare
        try:
            asyncio.get_running_loop().call_later(SPARE_S, self._keep_spare)
        except RuntimeError:  # no event loop runs
            self._keep_spare()
        return found

    def _keep_spare(self) -> None:
        if self._first is not None and self._spare is None:
            self._spare = self._connect()

    def _connect(self) -> GrammarConnection:
        for _ in range(2):  # the first process may have been killed
            if self._first is None:
                self._first = _FirstProcess(self._tokenizer, self._inputs)
            ours, theirs = socket.socketpair()
            with theirs:
                if self._first.pass_on(theirs):
                    return GrammarConnection(ours)
            ours.close()
            self.close()
        raise Unavailable("grammar: no process can be started for it; try again")

    def close(self) -> None:
        """End the first process; those that it has forked end with their connections."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._first is not None:
            self._first.close()
            self._first = None


class _FirstProcess:
    def __init__(self, tokenizer: TokenizerJson, inputs: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        path, passed = str(tokenizer), tuple[int, ...]()
        if callable(tokenizer):
            reading, writing = os.pipe()
            path, passed = f"/dev/fd/{reading}", (reading,)
            Thread(target=_write, args=(tokenizer, writing), name="tokenizer of grammars", daemon=True).start()
        with theirs:
            self._process = subprocess.Popen(
                # -P: files in the current directory must not shadow our modules.
                [sys.executable, "-P", "-m", "outrider.grammar.child", path, *inputs],
                stdin=theirs.fileno(),
                pass_fds=passed,
                env=child_environment(),
            )
        for fd in passed:
            os.close(fd)
        self._fd = ours.detach()
        self.close = weakref.finalize(self, _end, self._process, self._fd)

    def pass_on(self, connection: socket.socket) -> bool:
        """Have a process forked for a connection. Return whether the first process still takes connections."""
        with socket.socket(fileno=os.dup(self._fd)) as control:
            try:
                socket.send_fds(control, [b"+"], [connection.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                return False
        return True


def _write(content: Callable[[], bytes], fd: int) -> None:
    """Write what a first process reads, which may have ended."""
    with open(fd, "wb") as file, suppress(BrokenPipeError, OutriderError):
        file.write(content())


def _end(process: subprocess.Popen[bytes], fd: int) -> None:
    os.close(fd)
    process.kill()
    process.wait()
