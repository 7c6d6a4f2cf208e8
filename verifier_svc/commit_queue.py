"""What a session's steps have committed and its router has not yet been sent, and how far the router's log is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from outrider.core.control.drafters.contributions import DrafterContribution
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import StepReport
from outrider.core.session.decoding import PromptScores
from outrider.errors import OutriderError


class StepCommit(NamedTuple):
    """The tokens that a step committed for a session, and its report."""

    position: int  # of the first token
    choices: list[Choice]
    digest: int  # over all tokens of the session up to and with these
    report: StepReport
    last: bool  # whether the generation ends with this commit
    contributions: tuple[DrafterContribution, ...] = ()  # one for each drafter, if there are several


class CommitQueue(asyncio.Queue[StepCommit | PromptScores | None]):
    """A session's commits on their way to its router, behind its prompt's log-probabilities. Both are bounded by what
    the router has acknowledged; None: the session is closed."""

    def __init__(self, durable: int, window: int) -> None:
        """`durable`: number of tokens in the router's log, or of the prompt's with log-probabilities there; `window`:
        tokens that may be committed beyond it."""
        super().__init__()
        self.durable = durable
        self.fenced = False  # a higher epoch took the session over
        self.moved = False  # this verifier is going down
        self.failure: OutriderError | None = None  # why the generation cannot go on
        self.on_change: Callable[[], None] = lambda: None  # called when a commit, or the end, is put here
        self._window = window

    @property
    def limit(self) -> int:
        """Number of tokens up to which steps may commit."""
        return self.durable + self._window

    def acknowledge(self, durable: int) -> None:
        """Note that the router's log holds `durable` tokens."""
        self.durable = max(self.durable, durable)

    def close(self) -> None:
        """End the reader's wait: no commit follows."""
        self.put_nowait(None)

    def _put(self, item: StepCommit | PromptScores | None) -> None:
        super()._put(item)
        self.on_change()
