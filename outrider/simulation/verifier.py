"""A simulated verifier: the real verifier's decisions, with modelled passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.control.arms.arm import MODES, OverlapMode
from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.steering import SessionTokens, Steering
from outrider.core.control.cost.budget import CostModel, choose_budget
from outrider.core.control.cost.plain_pace import PlainPace
from outrider.core.control.holds.hold_policy import HoldPolicy
from outrider.core.session.contract import StepReport
from outrider.simulation.deployment import Deployment
from outrider.simulation.session import SimulatedDraft, SimulatedSession, SimulationEnvironment

MIN_HOLD_S = 1e-5  # seconds; a shorter hold is skipped, because an event takes no simulated time


class SimulatedStep(NamedTuple):
    """The contents of one pass. Times are in seconds."""

    deciding: Sequence[SimulatedSession]  # sessions that decode
    nodes: Sequence[int]  # [deciding] verified nodes
    reading: dict[SimulatedSession, int]  # prompt tokens that the pass reads
    min_path_score: float  # path score below which a node was not worth its row
    rows: int
    seconds: float
    waited: float  # since the end of the step before


class SimulatedVerifier:
    """Runs steps over all its sessions, chosen as in the real scheduler."""

    def __init__(self, cluster: SimulationEnvironment) -> None:
        self.cluster = cluster
        self.sessions: list[SimulatedSession] = []
        self._cost = cost_model(cluster.deployment)
        self.hold_policy = HoldPolicy()
        self._chain = cluster.deployment.chain
        modes = (OverlapMode.AHEAD,) if self._chain else MODES
        self.steering = Steering(Governor(PlainPace(self._cost.points()), modes=modes), self._cost)
        self._running = False
        self._alarm = 0  # number of the latest alarm; earlier alarms are ignored
        self._ended = 0.0
        self._committed = 0.0

    def open(self, session: SimulatedSession) -> None:
        """Add a session."""
        self.sessions.append(session)
        self.steering.on_opened(self.sessions)
        self._assign_drafters()
        self.choose()

    def on_level(self, session: SimulatedSession, drafted: SimulatedDraft) -> None:
        """Receive a level of a session's draft."""
        if session.left <= 0:
            return
        before = session.levels
        session.take(drafted)
        if session.levels > before and not session.unread:
            session.arrivals.arrived(self.cluster.clock.now, session.expected_tokens(), passing=self._running)
        self.choose()

    def on_exhausted(self, session: SimulatedSession, known: int) -> None:
        """Record that a session's drafter has nothing more to send before the next commit."""
        session.exhausted = known
        self.choose()

    def choose(self) -> None:
        """Start a step, or wait for a better tree."""
        if self._running or not self.sessions:
            return
        clock, deployment = self.cluster.clock, self.cluster.deployment
        chunk, reads = deployment.prefill_chunk, 0
        deciding: list[SimulatedSession] = []
        reading: dict[SimulatedSession, int] = {}
        for session in self.sessions:
            if session.unread:
                reading[session] = taken = min(chunk, session.unread)
                chunk -= taken
                reads += taken
            else:
                deciding.append(session)
        nodes = [len(it.scores()) if it.terms.rounds else 0 for it in deciding]
        choosing = [(index, it) for index, it in enumerate(deciding) if not it.terms.rounds]
        offers = sorted(((score, index) for index, it in choosing for score in it.scores()), reverse=True)
        offers = offers[: deployment.max_nodes]
        base = len(deciding) + reads + sum(nodes)
        certain = len(deciding) + self._cost.in_tokens(len(deciding), reads)
        since = min(clock.now - self._ended, self._cost.seconds(max(1, base)))
        outside = since + self._cost.overhead(len(deciding) + len(reading))
        budget = choose_budget([score for score, _ in offers], max(1, base), certain, self._cost, outside)
        lately = self.steering.tokens_per_s
        hold = 0.0 if reads or self._chain else self.hold_policy.hold_seconds(deciding, budget, clock.now, lately)
        if hold > MIN_HOLD_S:
            self._alarm += 1
            alarm = self._alarm
            clock.after(hold, lambda: self._woken(alarm))
            return
        for _, index in offers[: budget.nodes]:
            nodes[index] += 1
        self._step(deciding, nodes, reading, budget.min_path_score)

    def _woken(self, alarm: int) -> None:
        if alarm == self._alarm and not self._running:
            self.choose()

    def _step(
        self,
        deciding: Sequence[SimulatedSession],
        nodes: Sequence[int],
        reading: dict[SimulatedSession, int],
        min_path_score: float,
    ) -> None:
        self._running = True
        self._alarm += 1
        clock = self.cluster.clock
        rows = len(deciding) + sum(nodes) + sum(reading.values())
        seconds = self.cluster.pass_seconds(rows, drafted=any(nodes))
        step = SimulatedStep(deciding, nodes, reading, min_path_score, rows, seconds, clock.now - self._ended)
        for session in deciding:
            session.passing = True
        self.cluster.outcome.passes += step.seconds
        drafted = self.cluster.drafted_s
        clock.after(step.seconds, lambda: self._contend(step, drafted))

    def _contend(self, step: SimulatedStep, drafted: float) -> None:
        """End a pass as much later as drafters have slowed it. They had worked for `drafted` seconds when it began."""
        deployment = self.cluster.deployment
        stolen = deployment.contention * min(step.seconds, self.cluster.drafted_s - drafted)
        overhead = (deployment.overhead_ms + deployment.trees_ms * any(step.nodes)) / 1e3
        self._cost.observe_overhead(len(step.deciding) + len(step.reading), overhead)
        self.cluster.clock.after(stolen + overhead, lambda: self._commit(step))

    def _commit(self, step: SimulatedStep) -> None:
        clock, outcome = self.cluster.clock, self.cluster.outcome
        for session, taken in step.reading.items():
            session.unread -= taken
        commits: list[SessionTokens] = []
        for session, count in zip(step.deciding, step.nodes, strict=True):
            expected = 1.0 + sum(session.scores()[:count])
            tokens, report = self._decide(session, count, step)
            commits.append(SessionTokens(session, tokens, expected))
            session.terms.verified_min_path_score = step.min_path_score
            self._deliver(session, tokens, report)
        if step.deciding and self._committed:
            read = sum(step.reading.values())
            switches = self.steering.governor.switches
            self.steering.on_step(self.sessions, commits, read, clock.now - self._committed)
            self._assign_drafters()
            outcome.switches += (self.steering.governor.switches - switches) * len(self.sessions)
        self._committed = self._ended = clock.now
        outcome.tokens += sum(it.tokens for it in commits)
        outcome.steps += len(step.deciding)
        self._running = False
        self.choose()

    def _assign_drafters(self) -> None:
        for session in self.sessions:
            self.cluster.assign(session)

    def _decide(self, session: SimulatedSession, count: int, step: SimulatedStep) -> tuple[int, StepReport]:
        """Decide how many tokens a session commits. Return that number and the report."""
        plan = session.terms.plan
        wide = [0] * session.levels  # verified children at each level
        for _, level in session.nodes()[:count]:
            wide[level] += 1
        depth = sum(children > 0 for children in wide)
        ranks: list[int] = []
        for rank, children in zip(session.target_ranks[session.position :], wide[: session.left - 1], strict=False):
            if rank >= children:
                break
            ranks.append(rank)
            if rank:
                break  # the levels below were drafted only below the best child
        accepted = len(ranks)
        first, gap = session.arrivals.times
        now = self.cluster.clock.now
        report = StepReport(
            verified=count,
            accepted=accepted,
            verified_depth=depth,
            waited_us=int(step.waited * 1e6),
            forward_us=int(step.seconds * 1e6),
            plan_version=plan.version,
            drafters=int(session.drafter is not None),
            elapsed_us=int((now - session.terms.committed_at) * 1e6) if session.terms.committed_at else 0,
            rows=step.rows,
            sessions=len(step.deciding) + len(step.reading),
            first_us=int(first * 1e6),
            level_us=int(gap * 1e6),
            ranks=bytes(ranks),
            resting=session.terms.resting,
        )
        return accepted + 1, report

    def _deliver(self, session: SimulatedSession, tokens: int, report: StepReport) -> None:
        """Deliver a commit to the session's drafter and policy, and end a complete session."""
        clock = self.cluster.clock
        session.passing = False
        session.position += tokens
        session.terms.committed_at = clock.now
        if session.left <= 0:
            self.sessions.remove(session)
            self.cluster.release(session)
            session.ended()
            return
        session.arrivals.restart(clock.now, session.expected_tokens(), resting=session.terms.resting)
        session.policy.observe(report)
        plan = session.policy.plan()
        if plan is not session.terms.plan:
            self.cluster.outcome.switches += 1
            session.terms.plan = plan
        if (drafter := session.drafter) is not None:
            position = session.position
            clock.after(self.cluster.one_way(), lambda: drafter.on_commit(session, position))


def cost_model(deployment: Deployment) -> CostModel:
    return CostModel([(tokens, took / 1e3) for tokens, took in deployment.pass_ms.items()])
