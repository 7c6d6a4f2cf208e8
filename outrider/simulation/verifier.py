"""A simulated verifier: the real one's decisions over modelled passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from outrider.core.budget import CostModel, choose_budget
from outrider.core.contract import StepReport
from outrider.core.pace import Pace
from outrider.core.ways import Way
from outrider.simulation.deployment import Deployment
from outrider.simulation.session import Drafted, Session, best_nodes

if TYPE_CHECKING:
    from outrider.simulation.cluster import Cluster

LEAST_HOLD = 1e-5  # seconds: an event takes no time here


class Step(NamedTuple):
    """What one pass does. Times in seconds."""

    deciding: Sequence[Session]
    nodes: Sequence[int]  # of each
    reading: dict[Session, int]  # tokens of prompts
    price: float  # path score below which a node was not worth its row
    rows: int
    seconds: float
    waited: float  # since the step before


class Verifier:
    """Steps over all its sessions, as the real loop chooses them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sessions: list[Session] = []
        self._cost = cost_model(cluster.deployment)
        self.pace = Pace(self._cost)
        self._running = False
        self._alarm = 0  # the latest one counts
        self._ended = 0.0
        self._committed = 0.0

    def open(self, session: Session) -> None:
        """Takes a session."""
        session.follow(self.pace.way)
        self.sessions.append(session)
        self.choose()

    def grown(self, session: Session, drafted: Drafted) -> None:
        """A level has come."""
        if session.left <= 0:
            return
        before = session.levels
        session.take(drafted)
        if session.levels > before and not session.unread:
            session.arrivals.arrived(self.cluster.clock.now, session.worth(), passing=self._running)
        self.choose()

    def exhausted(self, session: Session, known: int) -> None:
        """Nothing more comes before the next commit."""
        session.exhausted = known
        self.choose()

    def choose(self) -> None:
        """Starts a step, or waits for a better tree."""
        if self._running or not self.sessions:
            return
        clock, deployment = self.cluster.clock, self.cluster.deployment
        chunk, reads = deployment.prefill_chunk, 0
        deciding: list[Session] = []
        reading: dict[Session, int] = {}
        for session in self.sessions:
            if session.unread:
                reading[session] = taken = min(chunk, session.unread)
                chunk -= taken
                reads += taken
            else:
                deciding.append(session)
        nodes = [len(it.scores()) if it.rounds else 0 for it in deciding]
        choosing = [(index, it) for index, it in enumerate(deciding) if not it.rounds]
        offers = sorted(((score, index) for index, it in choosing for score in it.scores()), reverse=True)
        offers = offers[: deployment.max_nodes]
        base = len(deciding) + reads + sum(nodes)
        certain = len(deciding) + self._cost.in_tokens(len(deciding), reads)
        since = min(clock.now - self._ended, self._cost.seconds(max(1, base)))
        budget = choose_budget([score for score, _ in offers], max(1, base), certain, self._cost, since)
        hold = 0.0 if reads else self.pace.patience(deciding, budget, clock.now)
        if hold > LEAST_HOLD:
            self._alarm += 1
            alarm = self._alarm
            clock.after(hold, lambda: self._woken(alarm))
            return
        for _, index in offers[: budget.nodes]:
            nodes[index] += 1
        self._step(deciding, nodes, reading, budget.price)

    def _woken(self, alarm: int) -> None:
        if alarm == self._alarm and not self._running:
            self.choose()

    def _step(
        self, deciding: Sequence[Session], nodes: Sequence[int], reading: dict[Session, int], price: float
    ) -> None:
        self._running = True
        self._alarm += 1
        clock = self.cluster.clock
        rows = len(deciding) + sum(nodes) + sum(reading.values())
        step = Step(deciding, nodes, reading, price, rows, self.cluster.pass_seconds(rows), clock.now - self._ended)
        for session in deciding:
            session.passing = True
        self.cluster.outcome.passes += step.seconds
        clock.after(step.seconds + self.cluster.deployment.overhead_ms / 1e3, lambda: self._commit(step))

    def _commit(self, step: Step) -> None:
        clock, outcome = self.cluster.clock, self.cluster.outcome
        for session, taken in step.reading.items():
            session.unread -= taken
        committed = 0
        for session, count in zip(step.deciding, step.nodes, strict=True):
            tokens, report = self._say(session, count, step)
            committed += tokens
            session.price = step.price
            self._tell(session, tokens, report)
        if step.deciding and self._committed:
            self.pace.learn(
                self.sessions or step.deciding,
                len(step.deciding),
                sum(step.reading.values()),
                committed,
                clock.now - self._committed,
            )
        self._committed = self._ended = clock.now
        outcome.tokens += committed
        outcome.steps += len(step.deciding)
        for session in self.sessions:
            session.follow(self.pace.way)
        self._running = False
        self.choose()

    def _say(self, session: Session, count: int, step: Step) -> tuple[int, StepReport]:
        """What the target says: how many tokens, and the report."""
        plan = session.plan
        wide = [0] * plan.depth  # children at each level that were taken
        for _, level in best_nodes(session.kind, min(session.levels, plan.depth), plan.width, count):
            wide[level] += 1
        depth = sum(children > 0 for children in wide)
        ranks: list[int] = []
        for rank, children in zip(session.truth[session.position :], wide[: session.left - 1], strict=False):
            if rank >= children:
                break
            ranks.append(rank)
            if rank:
                break  # what is below was drafted for the best child alone
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
            elapsed_us=int((now - session.committed_at) * 1e6) if session.committed_at else 0,
            rows=step.rows,
            sessions=len(step.deciding) + len(step.reading),
            first_us=int(first * 1e6),
            level_us=int(gap * 1e6),
            ranks=bytes(ranks),
            resting=session.way is Way.REST,
        )
        return accepted + 1, report

    def _tell(self, session: Session, tokens: int, report: StepReport) -> None:
        """Of the commit: its drafter, its policy, and who waits for its end."""
        clock = self.cluster.clock
        session.passing = False
        session.position += tokens
        if session.committed_at:
            session.speed.observe(tokens, clock.now - session.committed_at)
        session.committed_at = clock.now
        if session.left <= 0:
            self.sessions.remove(session)
            self.cluster.release(session)
            session.ended()
            return
        session.arrivals.restart(clock.now, session.worth())
        session.policy.observe(report)
        plan = session.policy.plan()
        if plan is not session.plan:
            self.cluster.outcome.switches += 1
            session.plan = plan
            self.cluster.assign(session)
        if (drafter := session.drafter) is not None:
            position = session.position
            clock.after(self.cluster.one_way(), lambda: drafter.told(session, position))


def cost_model(deployment: Deployment) -> CostModel:
    return CostModel([(tokens, took / 1e3) for tokens, took in deployment.pass_ms.items()])
