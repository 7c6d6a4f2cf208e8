"""How far it pays to draft for an engine whose passes are not ours: measured by the time from step to step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.steering import SessionTokens, Steering
from outrider.core.control.cost.budget import CostModel, choose_budget
from outrider.core.control.cost.plain_pace import PlainPace
from outrider.core.control.holds.arrival_model import Arrivals, hold_seconds
from outrider.upstream.foreign_session import DraftChain, ForeignSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepControlTuning:
    """What is assumed of an engine before its steps have shown it."""

    first_steps: int = 4  # plain steps that show how long one takes
    rise: float = 0.01  # share by which one more token prolongs a pass
    sizes: tuple[int, ...] = (1, 2, 3, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens of a pass


STEP_CONTROL = StepControlTuning()


class EngineStep(NamedTuple):
    """A step of the engine, as control needs it."""

    tokens: int  # tokens that its pass computed: a root for each row, drafts, and those of prompts
    rows: int  # rows that decoded
    read: int  # prompt tokens
    seconds: float  # from the call before to this one
    held: float = 0.0  # of these, those that it waited for drafts


class ChosenDrafts(NamedTuple):
    """What the next pass verifies."""

    taken: list[int]  # drafts of each row's offer
    expected: list[float]  # tokens that each row is expected to choose
    min_path_score: float  # path score below which none was worth it


class StepControl:
    """Decides for how many sessions drafts pay, and how many of them a step takes.

    `choose` is for the engine's thread, all else for that of the drafters.
    """

    def __init__(self) -> None:
        self._first: list[float] = []  # seconds of plain steps, until there are enough
        self.cost: CostModel | None = None  # None: too few steps have been seen
        self.steering: Steering | None = None

    def hold_seconds(self, awaited: Sequence[Arrivals], offers: Sequence[DraftChain], now: float) -> float:
        """Return how long to wait for the next drafts of the rows whose arrivals these are; 0 unless that pays for all
        rows. `offers`: what all rows have now.
        """
        if self.cost is None or self.steering is None:
            return 0.0
        seconds = self.cost.seconds(len(offers) + sum(len(it.tokens) for it in offers))
        rate = max(self.steering.tokens_per_s, sum(it.value for it in offers) / seconds)
        group = [it for it in awaited if not it.later(now, seconds, rate)]
        return hold_seconds(group, now, seconds, rate) if group else 0.0

    def choose(self, offers: Sequence[DraftChain], held: float = 0.0) -> ChosenDrafts:
        """Return how many drafts of each row's offer to verify. `held`: seconds that the step has waited for them."""
        rows, cost = len(offers), self.cost
        longest = max((len(it.chances) for it in offers), default=0)
        if cost is None or not longest:
            return ChosenDrafts([0] * rows, [1.0] * rows, 0.0)
        chances = np.array([it.chances + (0.0,) * (longest - len(it.chances)) for it in offers])
        scores = np.cumprod(chances, axis=1)
        ranked = np.argsort(-scores, axis=None, kind="stable")[: np.count_nonzero(scores)]
        budget = choose_budget(scores.ravel()[ranked], rows, rows, cost, held)
        taken = np.bincount(ranked[: budget.nodes] // longest, minlength=rows)
        sums = np.cumsum(np.insert(scores, 0, 1.0, axis=1), axis=1)
        return ChosenDrafts(taken.tolist(), sums[np.arange(rows), taken].tolist(), budget.min_path_score)

    def on_opened(self, sessions: Collection[ForeignSession]) -> None:
        """Take account of a session that was opened; `sessions` are all that are open."""
        if self.steering is not None:
            self.steering.on_opened(sessions)

    def on_step(
        self, sessions: Collection[ForeignSession], commits: Sequence[SessionTokens], step: EngineStep | None
    ) -> None:
        """Learn from a step; None: its time shows nothing, because the engine had nothing to do before."""
        if self.steering is None or self.cost is None:
            if step is not None and not step.read and step.rows:
                self._begin(step, sessions)
        elif step is None:
            self.steering.on_unmeasured_step(sessions)
        else:
            governor = self.steering.governor
            before = governor.switches
            self.cost.observe(step.tokens, step.seconds - step.held)
            self.steering.on_step(sessions, commits, step.read, step.seconds)
            if governor.switches != before:
                log.info("drafters: now %s; %s", governor.arm, governor.reason)

    def estimates(self) -> dict[str, Any]:
        """Return what is steered by."""
        return {} if self.steering is None else self.steering.estimates()

    def _begin(self, step: EngineStep, sessions: Collection[ForeignSession]) -> None:
        """Take plain steps for what all are like, once there are enough."""
        self._first.append(step.seconds / (1.0 + STEP_CONTROL.rise * (step.tokens - 1)))
        if len(self._first) == STEP_CONTROL.first_steps:
            one = median(self._first)
            cost = CostModel([(size, one * (1.0 + STEP_CONTROL.rise * (size - 1))) for size in STEP_CONTROL.sizes])
            self.steering = Steering(Governor(PlainPace(cost.points()), modes=(OverlapMode.AHEAD,)), cost)
            self.cost = cost
            self.steering.on_opened(sessions)
