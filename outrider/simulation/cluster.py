"""The simulated cluster: verifiers, drafters, and the traffic on them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator

from outrider.core.control.depth.policies import GammaPolicy
from outrider.core.control.holds.arrival_model import Arrivals
from outrider.simulation.clock import Clock
from outrider.simulation.deployment import DrafterKind, Scenario, SimulationOutcome, TrafficPhase
from outrider.simulation.drafter import SimulatedDrafter
from outrider.simulation.session import SimulatedSession
from outrider.simulation.verifier import SimulatedVerifier, cost_model

NewPolicy = Callable[[DrafterKind], GammaPolicy]


class SimulatedCluster:
    """A deployment that serves several phases of traffic, one after another."""

    def __init__(self, scenario: Scenario, new_policy: NewPolicy, seed: int = 0) -> None:
        self.deployment = deployment = scenario.deployment
        self._kinds_by_name = {kind.name: kind for kind in scenario.kind}
        self._phases = scenario.phase
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.outcome = SimulationOutcome()
        self._drafted_before = 0.0  # seconds of drafters' work in earlier phases
        self._new_policy = new_policy
        self._cost = cost_model(deployment)
        self._phase = scenario.phase[0]
        self._verifiers = [SimulatedVerifier(self) for _ in range(deployment.verifiers)]
        self._drafters = [SimulatedDrafter(self) for _ in range(deployment.drafters)]
        self._at: dict[SimulatedSession, SimulatedVerifier] = {}
        self._waiting: deque[tuple[DrafterKind, Callable[[], None]]] = deque()
        self._callers = 0
        self._kinds: Iterator[DrafterKind] = iter(())

    def run(self) -> Iterator[SimulationOutcome]:
        """Simulate the phases in order, and yield the outcome of each."""
        for phase in self._phases:
            self._drafted_before = self.drafted_s
            self._phase, self.outcome = phase, SimulationOutcome()
            began = self.clock.now
            until = began + phase.seconds
            self._kinds = itertools.cycle([self._kinds_by_name[name] for name in phase.kinds])
            kept = phase.callers or len(self._at)
            for index, session in enumerate(self._at):
                if index >= kept or session.kind.name not in phase.kinds:
                    session.cancel()
            for _ in range(phase.callers - self._callers):
                self._callers += 1
                self._send_request()
            if phase.rate:
                self._arrive(self._kinds, phase, until)
            for session in self._at:
                session.began = began
            self.clock.run(until)
            self.outcome.seconds = phase.seconds
            self.outcome.session_seconds += sum(until - max(began, session.began) for session in self._at)
            yield self.outcome

    @property
    def drafted_s(self) -> float:
        """The seconds for which all drafters have worked."""
        return self._drafted_before + self.outcome.drafting

    def one_way(self) -> float:
        """Return the seconds that a message between a verifier and a drafter takes, drawn at random."""
        return max(0.0, (self._phase.round_trip_ms / 2 + self.rng.gauss(0.0, self._phase.jitter_ms)) / 1e3)

    def pass_seconds(self, rows: int, *, drafted: bool) -> float:
        """Return the seconds that a pass over `rows` rows takes. One that follows a drafter's on the same cores finds
        nothing of its weights in the caches."""
        return self._cost.seconds(max(1, rows)) * (1.0 + self.deployment.slowdown * drafted)

    def verifier_of(self, session: SimulatedSession) -> SimulatedVerifier:
        """Return the session's verifier; after the session's end, any verifier."""
        return self._at.get(session, self._verifiers[0])

    def assign(self, session: SimulatedSession) -> None:
        """Assign the drafter with the fewest sessions to one that its verifier wants a drafter for."""
        if session.drafter is None and self._drafters and session.terms.plan.depth and not session.terms.resting:
            session.drafter = min(self._drafters, key=lambda drafter: len(drafter.sessions))
            session.drafter.sessions.add(session)

    def release(self, session: SimulatedSession) -> None:
        """Remove an ended session, and place the next waiting request."""
        self.outcome.answers += 1
        self.outcome.session_seconds += self.clock.now - session.began
        del self._at[session]
        if session.drafter is not None:
            session.drafter.forget(session)
        if self._waiting:
            self._place(*self._waiting.popleft())

    def _arrive(self, kinds: Iterator[DrafterKind], phase: TrafficPhase, until: float) -> None:
        gap = self.rng.expovariate(phase.rate)

        def arrives() -> None:
            self._place_or_queue(next(kinds), lambda: None)
            self._arrive(kinds, phase, until)

        if self.clock.now + gap < until:
            self.clock.after(gap, arrives)

    def _send_request(self) -> None:
        """Send a caller's request, and the caller's next one after each answer, while the phase has as many callers."""

        def send_next() -> None:
            if self._callers > self._phase.callers:
                self._callers -= 1
            else:
                self._send_request()

        self._place_or_queue(next(self._kinds), send_next)

    def _place_or_queue(self, kind: DrafterKind, ended: Callable[[], None]) -> None:
        if any(len(verifier.sessions) < self.deployment.slots for verifier in self._verifiers):
            self._place(kind, ended)
        else:
            self._waiting.append((kind, ended))

    def _place(self, kind: DrafterKind, ended: Callable[[], None]) -> None:
        verifier = min(self._verifiers, key=lambda each: len(each.sessions))
        arrivals = Arrivals(verifier.hold_policy.patterns(greedy=False))
        chain = self.deployment.chain
        session = SimulatedSession(kind, self._new_policy(kind), arrivals, self.rng, self.clock.now, ended, chain)
        self._at[session] = verifier
        verifier.open(session)
