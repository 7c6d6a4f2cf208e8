"""The model itself: events in the order of their time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from outrider.core.budget import CostModel, choose_budget
from outrider.core.contract import Overlap, StepReport
from outrider.core.control import GammaPolicy
from outrider.core.pace import Pace
from outrider.core.waiting import Arrivals
from outrider.core.ways import Speed, Way
from outrider.simulation.deployment import Deployment, Kind, Outcome, Phase, Scenario

LEAST_HOLD = 1e-5  # seconds: an event takes no time here

NewPolicy = Callable[[Kind], GammaPolicy]


class Clock:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Has something happen later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), event))

    def run(self, until: float) -> None:
        """Until that time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until


class Session:
    """One generation on its verifier.

    Which child of each position's node the target will say is drawn beforehand, so that what was drafted ahead stays
    good for as long as it would: a chain of best children, each with its siblings.
    """

    greedy = False

    def __init__(self, kind: Kind, policy: GammaPolicy, verifier: Verifier, ended: Callable[[], None]) -> None:
        rng = verifier.cluster.rng
        self.kind = kind
        self.policy = policy
        self.plan = policy.plan()
        self.committed_at = 0.0
        self.arrivals = Arrivals(verifier.pace.patterns(greedy=False))
        self.speed = Speed()
        self.way = Way.TURNS
        self.unread = kind.prompt
        self.position = 0  # tokens committed
        self.began = verifier.cluster.clock.now
        self.price = 0.0
        self.drafter: Drafter | None = None
        self.passing = False
        self.exhausted = -1  # tokens that were committed when its drafter had nothing more to send
        self.ended = ended
        self.truth = [_rank(kind, rng) for _ in range(kind.answer)]  # of each token among the drafter's children
        self._wrong = _next_wrong(self.truth)
        self._drafted = Drafted(0, 0)

    @property
    def left(self) -> int:
        """Tokens that are still to come."""
        return self.kind.answer - self.position

    @property
    def ahead(self) -> bool:
        """Whether its drafter goes on while steps run."""
        return self.way is Way.AHEAD

    @property
    def awaited(self) -> bool:
        """Whether its drafter may still send something that a step could take."""
        coming = self.drafter is not None and self.exhausted != self.position
        return coming and self.way is not Way.REST and self.levels < self.plan.depth

    @property
    def levels(self) -> int:
        """Of its tree that are below what was committed."""
        return self.below(self._drafted, self.position)

    def below(self, drafted: Drafted, position: int) -> int:
        """Levels of a draft that are still good when so much is committed."""
        return max(0, drafted.end - position) if self._wrong[drafted.known] >= position else 0

    def take(self, drafted: Drafted) -> None:
        """A level has come."""
        if self.below(drafted, self.position) >= self.levels:
            self._drafted = drafted

    def scores(self) -> list[float]:
        """Path scores of its tree's nodes, as its drafter believes them, best first."""
        plan = self.plan
        return [score for score, _ in _best(self.kind, min(self.levels, plan.depth), plan.width, plan.nodes)]

    def gain(self, levels: int) -> float:
        """Tokens that another level is expected to bring."""
        kind = self.kind
        return (kind.agreement * kind.ranks[0]) ** levels * kind.agreement * sum(kind.ranks[: self.plan.width])

    def worth(self) -> float:
        """Tokens that a step over its tree is expected to commit."""
        return 1.0 + sum(max(0.0, score - self.price) for score in self.scores())


class Drafted(NamedTuple):
    """A chain of levels."""

    known: int  # tokens that were committed when it was begun
    end: int  # position of its last level


class Drafter:
    """Drafts a level at a time for all sessions that want one."""

    def __init__(self, cluster: Cluster) -> None:
        self.sessions: set[Session] = set()
        self._cluster = cluster
        self._drafts: dict[Session, tuple[int, Drafted]] = {}  # what it knows to be committed, and its draft
        self._running = False

    def told(self, session: Session, position: int) -> None:
        """Of a commit."""
        if session not in self.sessions:
            return
        _, drafted = self._drafts.get(session, (0, Drafted(0, 0)))
        if not session.below(drafted, position):
            drafted = Drafted(position, position)
        self._drafts[session] = position, drafted
        self._start()

    def forget(self, session: Session) -> None:
        """It drafts for others now."""
        self.sessions.discard(session)
        self._drafts.pop(session, None)

    def _start(self) -> None:
        turn = {it: drafted for it, (known, drafted) in self._drafts.items() if self._may(it, known, drafted)}
        if self._running or not turn:
            return
        deployment = self._cluster.deployment
        seconds = (deployment.level_ms + (len(turn) - 1) * deployment.level_more_ms) / 1e3
        waited_for = [it for it in turn if not it.ahead]
        gain = sum(it.gain(turn[it].end - self._drafts[it][0]) for it in waited_for)
        if waited_for and gain < seconds * sum(it.speed.per_second for it in waited_for):
            for it in waited_for:  # the price of time: the level is not worth what it holds up
                self._cluster.clock.after(self._cluster.one_way(), self._exhaustion(it, self._drafts[it][0]))
            return
        self._running = True
        self._cluster.outcome.drafting += seconds
        self._cluster.clock.after(seconds, lambda: self._done(turn))

    @staticmethod
    def _may(session: Session, known: int, drafted: Drafted) -> bool:
        """Whether it grows that session's tree now."""
        if session.way is Way.REST or drafted.end - known >= session.plan.depth:
            return False
        return session.ahead or not (session.passing and known == session.position)

    def _done(self, turn: dict[Session, Drafted]) -> None:
        self._running = False
        for session, drafted in turn.items():
            known, now = self._drafts.get(session, (0, None))
            if now == drafted:
                longer = drafted._replace(end=drafted.end + 1)
                self._drafts[session] = known, longer
                self._cluster.clock.after(self._cluster.one_way(), self._arrival(session, longer))
        self._start()

    def _exhaustion(self, session: Session, known: int) -> Callable[[], None]:
        return lambda: self._cluster.verifier_of(session).exhausted(session, known)

    def _arrival(self, session: Session, drafted: Drafted) -> Callable[[], None]:
        return lambda: self._cluster.verifier_of(session).grown(session, drafted)


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
        self._cost = _cost_model(cluster.deployment)
        self.pace = Pace(self._cost)
        self._running = False
        self._alarm = 0  # the latest one counts
        self._ended = 0.0
        self._committed = 0.0

    def open(self, session: Session) -> None:
        """Takes a session."""
        session.way = self.pace.way
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
        offers = sorted(((score, index) for index, it in enumerate(deciding) for score in it.scores()), reverse=True)[
            : deployment.max_nodes
        ]
        base = len(deciding) + reads
        certain = len(deciding) + self._cost.in_tokens(len(deciding), reads)
        since = min(clock.now - self._ended, self._cost.seconds(max(1, base)))
        budget = choose_budget([score for score, _ in offers], max(1, base), certain, self._cost, since)
        hold = 0.0 if reads else self.pace.patience(deciding, budget, clock.now)
        if hold > LEAST_HOLD:
            self._alarm += 1
            alarm = self._alarm
            clock.after(hold, lambda: self._woken(alarm))
            return
        nodes = [0] * len(deciding)
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
            session.way = self.pace.way if session.plan.overlap is Overlap.MEASURED else session.way
        self._running = False
        self.choose()

    def _say(self, session: Session, count: int, step: Step) -> tuple[int, StepReport]:
        """What the target says: how many tokens, and the report."""
        plan = session.plan
        wide = [0] * plan.depth  # children at each level that were taken
        for _, level in _best(session.kind, min(session.levels, plan.depth), plan.width, count):
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
        self._cost = _cost_model(deployment)
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


def _rank(kind: Kind, rng: random.Random) -> int:
    """Which of the children the target says; one that is never drafted, where it says another token."""
    return rng.choices(range(len(kind.ranks)), kind.ranks)[0] if rng.random() < kind.agreement else len(kind.ranks)


def _next_wrong(truth: Sequence[int]) -> list[int]:
    """For each position, how far the best children that follow are what the target says."""
    ends = [len(truth)] * (len(truth) + 1)
    for position in range(len(truth) - 1, -1, -1):
        ends[position] = position if truth[position] else ends[position + 1]
    return ends


@cache
def _best(kind: Kind, levels: int, width: int, count: int) -> list[tuple[float, int]]:
    """The `count` best nodes of a tree: path score and level, best first."""
    nodes, path = [], 1.0
    for level in range(levels):
        nodes += [(path * kind.agreement * share, level) for share in kind.ranks[:width]]
        path *= kind.agreement * kind.ranks[0]
    return sorted(nodes, reverse=True)[:count]


def _cost_model(deployment: Deployment) -> CostModel:
    return CostModel([(tokens, took / 1e3) for tokens, took in deployment.pass_ms.items()])
