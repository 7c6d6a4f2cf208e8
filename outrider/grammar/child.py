"""The processes in which grammars are compiled and followed: python -m outrider.grammar.child FOLDER VOCABULARY EOS_IDS

The first process reads the tokenizer of a checkpoint and forks one process for each connection that it is passed on
its standard input, a socket; it ends when that is closed. So a new process costs two milliseconds and three megabytes.

A forked process serves one grammar (`outrider.grammar.wire` has the messages). Its memory is bounded, and for each
request the seconds of the processor; it ends when it exceeds one, when the stack overflows, and when its connection is
closed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.grammar.matching import CompiledGrammar, GrammarError, GrammarVocabulary, GrammarWalk, TokenizerError
from outrider.grammar.wire import ANSWER, LENGTH, Status

GRAMMAR_BYTES = 64 << 20  # memory of one grammar with all places in it
PROCESS_KIB = 2560  # of these, what a small grammar takes
COMPILE_S = 1.0  # processor seconds to compile a grammar
REQUEST_S = 0.5  # of any other request
USUAL = ("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}', "")
OUT_OF_MEMORY = "takes too much memory"


class GrammarProcess:
    """Serves one grammar over one connection."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammar: CompiledGrammar | None = None
        self._places: dict[int, GrammarWalk] = {}
        self._usual_kib = 0  # memory of this process with a small grammar
        self._handlers: dict[str, Callable[..., bytes]] = {
            "identify": self._identify,
            "compile": self._compile,
            "open": self._open,
            "extend": self._extend,
            "masks": lambda place, *paths: b"".join(map(self._places[place].mask, paths)),
            "first": lambda place, *inputs: array("I", self._places[place].first(*inputs)).tobytes(),
            "close": self._close,
        }

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the connection is closed."""
        with connection, connection.makefile("rb") as requests:
            while header := requests.read(LENGTH.size):
                operation, *inputs = json.loads(requests.read(*LENGTH.unpack(header)))
                signal.setitimer(signal.ITIMER_PROF, COMPILE_S if operation == "compile" else REQUEST_S)
                status, payload = self._answer(operation, inputs)
                signal.setitimer(signal.ITIMER_PROF, 0)
                memory = PROCESS_KIB + _peak_kib() - self._usual_kib
                connection.sendall(ANSWER.pack(len(payload), status, time.process_time(), memory) + payload)

    def _answer(self, operation: str, inputs: list[Any]) -> tuple[Status, bytes]:
        try:
            return Status.DONE, self._handlers[operation](*inputs)
        except GrammarError as error:
            return Status.REFUSED, str(error).encode()
        except MemoryError:
            return Status.REFUSED, OUT_OF_MEMORY.encode()
        except TokenizerError as error:
            return Status.BROKEN, str(error).encode()

    def _identify(self) -> bytes:
        """Return the process' id. Memory that is shared with the first process until it is written is copied here,
        so that a caller's grammar does not wait for that."""
        with suppress(TokenizerError):
            CompiledGrammar(self._vocabulary, *USUAL)
        self._usual_kib = _peak_kib()
        return str(os.getpid()).encode()

    def _compile(self, kind: str, text: str, reasoning: str) -> bytes:
        self._grammar = CompiledGrammar(self._vocabulary, kind, text, reasoning)
        return b""

    def _open(self, place: int) -> bytes:
        assert self._grammar is not None
        self._places[place] = self._grammar.begin()
        return b""

    def _extend(self, place: int, tokens: list[int]) -> bytes:
        """Return the tokens of the text that has to follow then."""
        found = self._places[place]
        found.extend(tokens)
        return array("I", found.forced).tobytes()

    def _close(self, place: int) -> bytes:
        self._places.pop(place, None)
        return b""


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _bound() -> None:
    """Bound this process. What exceeds a bound, or overflows the stack, ends it by a signal."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + GRAMMAR_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Fork a process for each connection that arrives, until there are none."""
    tokenizer, vocabulary, eos_ids = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes the connections
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes: none stays a zombie
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = GrammarVocabulary(Path(tokenizer), int(vocabulary), json.loads(eos_ids))
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            message, connections, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            connection = socket.socket(fileno=connections[0])
            if os.fork() == 0:
                control.close()
                os.close(0)
                status = 1
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a caller's grammar causes fills no log
                    _bound()
                    GrammarProcess(found).serve(connection)
                    status = 0
                finally:
                    os._exit(status)  # without the handlers at exit, which are the first process'
            connection.close()


if __name__ == "__main__":
    main()
