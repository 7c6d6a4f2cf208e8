"""What drafters learn from, taken down while texts are said: of the tenants that allow it, and never waited for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from outrider.core.contract import Contract
from outrider.core.examples import MOST_SAID, TOP, Example, example_of
from outrider.core.logprobs import alternatives, narrowed, stride
from outrider.errors import InternalError, OutriderError
from outrider.store.client import Client
from outrider.store.examples import Examples
from outrider.telemetry.metrics import watch
from router.decoding import Commit
from router.models import ServedModel

EVERYBODY = "*"
MOST_WAITING = 64  # examples on their way to Redis; more than that are dropped

log = logging.getLogger(__name__)


class Lecture(Protocol):
    """What one generation teaches."""

    def contract(self, asked: Contract) -> Contract:
        """What the verifier is told, for what the caller has asked for."""

    def heard(self, commit: Commit) -> Commit:
        """A commit as the caller's contract has it. Raises InternalError for one that is not as was asked for."""

    def durable(self, tokens: Sequence[int], taken: int, commit: Commit) -> None:
        """The log is `tokens` now, the last `taken` of which are the first of that commit."""

    def end(self) -> None:
        """There is no more."""


class NoLecture:
    """Teaches nothing."""

    def contract(self, asked: Contract) -> Contract:
        return asked

    def heard(self, commit: Commit) -> Commit:
        return commit

    def durable(self, tokens: Sequence[int], taken: int, commit: Commit) -> None:
        pass

    def end(self) -> None:
        pass


class Teaching:
    """A router's. `keep` has to run for anything to be written."""

    def __init__(self, redis: Client, tenants: Collection[str]) -> None:
        """`tenants`: who lets drafters learn from what is said to them; EVERYBODY among them: all do."""
        self.written = self.dropped = 0  # examples
        self._redis = redis
        self._tenants = frozenset(tenants)
        self._waiting: deque[tuple[ServedModel, Example]] = deque()
        self._come = asyncio.Event()
        watch("outrider.examples.written", lambda: self.written)
        watch("outrider.examples.dropped", lambda: self.dropped)

    def lecture(self, tenant: str, model: ServedModel, contract: Contract) -> Lecture:
        """What a generation of that tenant's teaches; nothing, unless it allows that."""
        if self._tenants.isdisjoint((tenant, EVERYBODY)):
            return NoLecture()
        return _Lecture(self, model, contract.logprobs, greedy=contract.greedy)

    def offer(self, model: ServedModel, example: Example) -> None:
        """Has it written, or drops it where Redis does not keep up."""
        if len(self._waiting) == MOST_WAITING:
            self.dropped += 1
            return
        self._waiting.append((model, example))
        self._come.set()

    async def keep(self) -> None:
        """Writes what comes. Until cancelled; what Redis does not take is dropped."""
        failing = False
        while True:
            await self._come.wait()
            self._come.clear()
            by_model: dict[str, list[Example]] = {}
            models = {model.name: model for model, _ in self._waiting}
            while self._waiting:
                model, example = self._waiting.popleft()
                by_model.setdefault(model.name, []).append(example)
            for name, examples in by_model.items():
                try:
                    await Examples(self._redis, name, models[name].digest).add(examples)
                    self.written += len(examples)
                    failing = False
                except OutriderError as error:
                    self.dropped += len(examples)
                    log.log(logging.DEBUG if failing else logging.WARNING, "examples are dropped: %s", error)
                    failing = True


class _Lecture:
    """Collects a generation's rows until they make an example."""

    def __init__(self, teaching: Teaching, model: ServedModel, asked: int | None, *, greedy: bool) -> None:
        self._teaching = teaching
        self._model = model
        self._asked = asked
        self._greedy = greedy
        self._held = max(asked or 0, TOP)  # alternatives that the verifier sends
        self._rows: list[bytes] = []
        self._said = 0  # tokens in these
        self._tokens: Sequence[int] = ()  # of the session, these last

    def contract(self, asked: Contract) -> Contract:
        return replace(asked, logprobs=self._held)

    def heard(self, commit: Commit) -> Commit:
        if len(commit.logprobs) != len(commit.tokens) * stride(self._held):
            raise InternalError(f"the verifier sent {len(commit.logprobs)} bytes of log-probabilities to learn from")
        return replace(commit, logprobs=narrowed(commit.logprobs, self._held, self._asked))

    def durable(self, tokens: Sequence[int], taken: int, commit: Commit) -> None:
        self._rows.append(commit.logprobs[: taken * stride(self._held)])
        self._said += taken
        self._tokens = tokens
        if self._said >= MOST_SAID:
            self.end()

    def end(self) -> None:
        if self._said:
            ids, logprobs = alternatives(b"".join(self._rows), self._held)
            self._teaching.offer(self._model, example_of(self._tokens, ids, logprobs, greedy=self._greedy))
        self._rows.clear()
        self._said = 0
