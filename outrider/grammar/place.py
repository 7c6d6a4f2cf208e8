"""A session's place in a grammar that another process follows."""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.grammar import GrammarDelayed, GrammarState
from outrider.errors import InvalidRequest, OutriderError
from outrider.grammar.connection import Answer, GrammarConnection

STEP_S = 0.1  # processor seconds of a grammar's work for one session and step
MAX_OVERRUNS = 2  # steps that take longer: the session fails
SLOW_TOKENS = 64  # after an answer that was late, until nodes are verified again
KEPT_MASKS = 32
MAX_UNANSWERED = 64  # requests, beyond which masks are not asked for
PIECE = 256  # tokens of an answer that are followed at a time
MAX_BEHIND = 128  # commits that the process may be behind a drafter's text
TOO_SLOW = "takes too much time to follow; simplify it"

_Path = tuple[int, ...]


class Patience:
    """For how long an event loop waits for processes of grammars: a while at most, and half of the time."""

    ONCE_S = 0.02
    MOST_S = 0.05
    SHARE = 0.5

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = self.MOST_S
        self._counted = clock()

    def left(self) -> float:
        """Return the seconds that may be waited now."""
        now = self._clock()
        self._left = min(self.MOST_S, self._left + self.SHARE * (now - self._counted))
        self._counted = now
        return min(self.ONCE_S, self._left)

    def spend(self, seconds: float) -> None:
        """Count what was waited."""
        self._left -= seconds


class GrammarPlace(GrammarState):
    """What a session knows of its grammar's process. Requests are answered in their order."""

    def __init__(
        self,
        connection: GrammarConnection,
        number: int,
        vocabulary: int,
        patience: Patience | None,
        on_close: Callable[[], None],
        answer: Sequence[int],
        *,
        lenient: bool,
        eager: bool,
    ) -> None:
        """`number`: of the place, in its process; `patience`: None: it waits as long as it takes; `answer`: tokens that
        it is behind; `lenient`: what is not known in time is allowed, instead of GrammarDelayed; `eager`: a step needs
        to know what may follow before it begins."""
        self.failure: OutriderError | None = None
        self.on_change: Callable[[], None] = _nothing
        self.connection = connection
        self._number = number
        self._vocabulary = vocabulary
        self._patience = patience
        self._lenient = lenient
        self._eager = eager
        self._version = 0  # how often it was extended
        self._answered = 0  # version of the latest answer
        self._masks: dict[_Path, bytes | None] = {}  # by path; None: requested
        self._forced: list[int] | None = None  # None: not known yet
        self._seconds = 0.0  # of the processor, since it was extended
        self._overruns = 0
        self._slow_for = 0  # tokens
        self._unanswered = 0  # requests
        self._leave = weakref.finalize(self, _leave, connection, number, on_close)
        self._leave.atexit = False
        self._send(self._on_begun, "open")
        begun = max(0, len(answer) - 1) // PIECE * PIECE
        for start in range(0, begun, PIECE):
            self._send(self._on_begun, "extend", [*answer[start : start + PIECE]])
        self.extend(answer[begun:])

    @property
    def slow(self) -> bool:
        return self._overruns > 0 or self._slow_for > 0

    @property
    def pending(self) -> bool:
        if self._awaits():
            self.connection.receive()
        return self._awaits()

    def _awaits(self) -> bool:
        late = (self._eager or self.slow) and self._masks.get(()) is None
        return self.failure is None and (self._forced is None or late)

    def mark_slow(self) -> None:
        self._slow_for = SLOW_TOKENS

    def prefetch(self, paths: Sequence[Sequence[int]]) -> None:
        missing = [path for path in map(tuple, paths) if path not in self._masks]
        if missing and self._unanswered < MAX_UNANSWERED:
            if len(self._masks) + len(missing) > KEPT_MASKS:
                self._masks = {path: mask for path, mask in self._masks.items() if not path}
            self._masks |= dict.fromkeys(missing)
            self._send(partial(self._on_masks, self._version, missing), "masks", *missing)

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        key = tuple(path)
        self.prefetch([key])
        self._wait(lambda: self._masks.get(key) is not None)
        mask = self._masks.get(key)
        if mask is None:
            return np.ones(self._vocabulary, np.bool_)
        bits = np.frombuffer(mask, np.uint8)
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)

    def first_allowed(self, path: Sequence[int], tokens: Sequence[int], count: int) -> Sequence[int]:
        key = tuple(path)
        mask = self._masks.get(key)
        if mask is not None:
            return [index for index, token in enumerate(tokens) if mask[token // 8] >> token % 8 & 1][:count]
        found: list[array[int]] = []
        if self._unanswered < MAX_UNANSWERED:
            self._send(partial(self._on_first, found), "first", key, [*tokens], count)
        self._wait(lambda: bool(found))
        return [*found[0]] if found else range(min(count, len(tokens)))

    def extend(self, tokens: Sequence[int]) -> None:
        self._version += 1
        self._masks.clear()
        self._forced, self._seconds = None, 0.0
        self._slow_for = max(0, self._slow_for - len(tokens))
        if self._version - self._answered > MAX_BEHIND:
            self._fail(InvalidRequest("grammar", TOO_SLOW))
        self._send(partial(self._on_extended, self._version), "extend", [*tokens])
        self.prefetch([()])

    def forced(self) -> list[int]:
        self._wait(lambda: self._forced is not None)
        return self._forced or []

    def close(self) -> None:
        self._leave()

    def _send(self, on_answer: Callable[[Answer], None], operation: str, *inputs: object) -> None:
        if self.failure is None and self._leave.alive:
            self._unanswered += 1
            self.connection.send(on_answer, operation, self._number, *inputs)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for an answer. Raises GrammarDelayed where there is none in time, unless lenient."""
        if until():
            return
        if self.failure is None and not (self._lenient and self.slow):
            began, patience = time.monotonic(), self._patience
            seconds = None if patience is None else patience.left()
            in_time = self.connection.wait(seconds, lambda: until() or self.failure is not None)
            if patience is not None:
                patience.spend(time.monotonic() - began)
            if not in_time:
                self.mark_slow()
        if not self._lenient and not until():
            raise GrammarDelayed from self.failure

    def _on_begun(self, answer: Answer) -> None:
        self._take(answer._replace(seconds=0.0))  # these seconds belong to no step

    def _on_extended(self, version: int, answer: Answer) -> None:
        self._answered = version
        if self._take(answer) and version == self._version:
            self._forced = [*array("I", answer.payload)]
            self.on_change()

    def _on_masks(self, version: int, paths: list[_Path], answer: Answer) -> None:
        if self._take(answer) and version == self._version:
            size = len(answer.payload) // len(paths)
            self._masks |= {path: answer.payload[size * at : size * (at + 1)] for at, path in enumerate(paths)}
            self.on_change()

    def _on_first(self, found: list[array[int]], answer: Answer) -> None:
        if self._take(answer):
            found.append(array("I", answer.payload))

    def _take(self, answer: Answer) -> bool:
        """Count an answer's time. Return whether there is a payload."""
        self._unanswered -= 1
        within = self._seconds <= STEP_S
        self._seconds += answer.seconds
        if within and self._seconds > STEP_S:
            self._overruns += 1
        if answer.failure is not None:
            self._fail(answer.failure)
        elif self._overruns >= MAX_OVERRUNS:
            self._fail(InvalidRequest("grammar", TOO_SLOW))
        return answer.failure is None

    def _fail(self, failure: OutriderError) -> None:
        if self.failure is None:
            self.failure = failure
            self.on_change()


def _leave(connection: GrammarConnection, number: int, on_close: Callable[[], None]) -> None:
    connection.send(lambda answer: None, "close", number)
    on_close()


def _nothing() -> None:
    pass
