"""The model itself."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator

from outrider.core.control import GammaPolicy
from outrider.simulation.clock import Clock
from outrider.simulation.deployment import Kind, Outcome, Phase, Scenario
from outrider.simulation.drafter import Drafter
from outrider.simulation.session import Session
from outrider.simulation.verifier import Verifier, cost_model

NewPolicy = Callable[[Kind], GammaPolicy]


class Cluster:
    """A deployment under some phases of traffic, one after another."""

    def __init__(self, scenario: Scenario, new_policy: NewPolicy, seed: int = 0) -> None:
        self.deployment = deployment = scenario.deployment
        self._kinds_by_name = {kind.name: kind for kind in scenario.kind}
        self._phases = scenario.phase
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.outcome = Outcome()
        self._new_policy = new_policy
        self._cost = cost_model(deployment)
        self._phase = scenario.phase[0]
        self._verifiers = [Verifier(self) for _ in range(deployment.verifiers)]
        self._drafters = [Drafter(self) for _ in range(deployment.drafters)]
        self._at: dict[Session, Verifier] = {}
        self._waiting: deque[tuple[Kind, Callable[[], None]]] = deque()
        self._callers = 0
        self._kinds: Iterator[Kind] = iter(())

    def run(self) -> Iterator[Outcome]:
        """What came of each phase."""
        for phase in self._phases:
            self._phase, self.outcome = phase, Outcome()
            began = self.clock.now
            until = began + phase.seconds
            self._kinds = itertools.cycle([self._kinds_by_name[name] for name in phase.kinds])
            stay = phase.callers or len(self._at)
            for index, session in enumerate(self._at):
                if index >= stay or session.kind.name not in phase.kinds:
                    session.hang_up()
            for _ in range(phase.callers - self._callers):
                self._callers += 1
                self._ask()
            if phase.rate:
                self._arrive(self._kinds, phase, until)
            for session in self._at:
                session.began = began
            self.clock.run(until)
            self.outcome.seconds = phase.seconds
            self.outcome.session_seconds += sum(until - max(began, session.began) for session in self._at)
            yield self.outcome

    def one_way(self) -> float:
        """How long a message between a verifier and a drafter takes."""
        return max(0.0, (self._phase.round_trip_ms / 2 + self.rng.gauss(0.0, self._phase.jitter_ms)) / 1e3)

    def pass_seconds(self, rows: int) -> float:
        """How long a pass takes."""
        return self._cost.seconds(max(1, rows))

    def verifier_of(self, session: Session) -> Verifier:
        """Where it is, or was."""
        return self._at.get(session, self._verifiers[0])

    def assign(self, session: Session) -> None:
        """Gives it the drafter with the fewest sessions, or takes it away, as its plan says."""
        if not session.plan.depth:
            if session.drafter is not None:
                session.drafter.forget(session)
                session.drafter = None
        elif session.drafter is None and self._drafters:
            session.drafter = min(self._drafters, key=lambda drafter: len(drafter.sessions))
            session.drafter.sessions.add(session)

    def release(self, session: Session) -> None:
        """It has ended."""
        self.outcome.answers += 1
        self.outcome.session_seconds += self.clock.now - session.began
        del self._at[session]
        if session.drafter is not None:
            session.drafter.forget(session)
        if self._waiting:
            self._place(*self._waiting.popleft())

    def _arrive(self, kinds: Iterator[Kind], phase: Phase, until: float) -> None:
        gap = self.rng.expovariate(phase.rate)

        def arrives() -> None:
            self._offer(next(kinds), lambda: None)
            self._arrive(kinds, phase, until)

        if self.clock.now + gap < until:
            self.clock.after(gap, arrives)

    def _ask(self) -> None:
        """A caller asks, and again when answered, while so many are wanted."""

        def again() -> None:
            if self._callers > self._phase.callers:
                self._callers -= 1
            else:
                self._ask()

        self._offer(next(self._kinds), again)

    def _offer(self, kind: Kind, ended: Callable[[], None]) -> None:
        if any(len(verifier.sessions) < self.deployment.slots for verifier in self._verifiers):
            self._place(kind, ended)
        else:
            self._waiting.append((kind, ended))

    def _place(self, kind: Kind, ended: Callable[[], None]) -> None:
        verifier = min(self._verifiers, key=lambda each: len(each.sessions))
        session = Session(kind, self._new_policy(kind), verifier, ended)
        self._at[session] = verifier
        self.assign(session)
        verifier.open(session)
