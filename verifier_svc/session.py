"""One session on the verifier: committed tokens, the tree that its drafters grow, and who listens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from outrider.core.calibration import Calibration
from outrider.core.contract import Contract, Overlap, Plan, StepReport
from outrider.core.credit import Credit
from outrider.core.drawn_tree import tree_of
from outrider.core.rules import Drawn, rule_of
from outrider.core.sampler import Choice, Sampler
from outrider.core.tree import Delta, Node
from outrider.core.waiting import Arrivals, Patterns
from outrider.core.ways import Speed, Way
from outrider.engine.slots import Taken
from outrider.errors import InvalidRequest, Overloaded
from verifier_svc.own import SENDER, OwnDrafts
from verifier_svc.stream import DraftStream

TREE_CAPACITY = 512  # nodes that a session's tree may hold
MAX_DRAFTERS = 16  # of one session
RESTING_PRICE = 1.0  # no node is better than certain


@dataclass(frozen=True, slots=True)
class Start:
    """A checked request to decode."""

    session_id: str
    tenant: str
    epoch: int
    tokens: Sequence[int]  # the session so far, prompt included; not empty
    answer_position: int  # where the contract's max_tokens counts from
    contract: Contract
    plan: Plan
    window: int  # tokens that may be committed beyond the durable position


class Commit(NamedTuple):
    """What a step committed for a session."""

    position: int  # of the first token
    choices: list[Choice]
    digest: int  # over all tokens of the session, these included
    report: StepReport
    last: bool  # whether the generation ends with it
    owed: tuple[Credit, ...] = ()  # one for each drafter, where there are several


@dataclass(eq=False, slots=True)
class Subscription:
    """One drafter's part in a session. Node ids are scoped to it."""

    session: Session
    stream: DraftStream
    attachment: int
    sender: int  # its key in the tree
    calibration: Calibration  # of the drafter
    granted: int = 0  # the largest id that it was ever allowed
    plan_version: int = -1  # the last one that it was told
    exhausted: int = -1  # position of the root below which it has sent all it will


class Session:
    """State of one session. Only the event loop's thread touches it."""

    def __init__(
        self, start: Start, place: Taken, vocabulary: int, patterns: Patterns, own: OwnDrafts | None = None
    ) -> None:
        self.id = start.session_id
        self.tenant = start.tenant
        self.epoch = start.epoch
        self.contract = start.contract
        self.answer_position = start.answer_position
        self.rule = rule_of(start.contract)
        self.drawn = self.rule.drawn is Drawn.SAMPLED  # whether its tree is drawn from q
        self.plan = start.plan
        self.place = place
        self.tokens = list(start.tokens)
        self.cached = place.cached  # cache rows [0, cached) hold the KV of tokens[:cached]
        self.durable = len(self.tokens)
        self.end = start.answer_position + start.contract.max_tokens  # the length at which it must stop
        self.tree = tree_of(start.contract, self.tokens, capacity=TREE_CAPACITY)
        self.sampler = Sampler(start.contract, vocabulary, self.tokens, start.answer_position)
        self.arrivals = Arrivals(patterns)
        self.subscriptions: dict[DraftStream, Subscription] = {}
        self.verified_price = 0.0  # path score below which a node was not worth verifying in the last step
        self.speed = Speed()
        self.way = Way.TURNS  # how its drafters work
        self.wire_bytes = 0
        self.committed_at = 0.0  # when the last commit went out
        self.commits: asyncio.Queue[Commit | None] = asyncio.Queue()  # bounded by the window; None: it was closed
        self.finished = False
        self.fenced = False  # a higher epoch took the session over
        self._window = start.window
        self._senders = SENDER
        self._claims: dict[int, Calibration] = {}  # by sender
        self._own = own
        if own is not None:
            self._claims[SENDER] = own.calibration

    @property
    def room(self) -> int:
        """The most tokens that a step may commit now: up to the end, and the window beyond the durable position."""
        return min(self.end, self.durable + self._window) - len(self.tokens)

    @property
    def ready(self) -> bool:
        """Whether a step may serve it now."""
        return not self.finished and self.room > 0

    @property
    def ceilings(self) -> Plan:
        """The plan, cut to what the generation can still use."""
        left = self.end - len(self.tokens) - 1
        return self.plan if self.plan.depth <= left else replace(self.plan, depth=max(0, left))

    def follow(self, way: Way) -> None:
        """Has its drafters work in this way, as far as the plan allows."""
        if self.plan.overlap is Overlap.ALWAYS:
            way = Way.AHEAD
        useless = self.plan.overlap is Overlap.NEVER or self.drawn  # no draw outlives a commit
        self.way = Way.TURNS if way is Way.AHEAD and useless else way

    def worth(self) -> float:
        """Expected tokens of a step that verifies the best of the tree within the plan, less what verifying costs."""
        plan = self.ceilings
        worth = 1.0
        for (score, _), _ in zip(
            self.tree.best_first(depth=plan.depth, width=plan.width), range(plan.nodes), strict=False
        ):
            if score <= self.verified_price:
                break
            worth += score - self.verified_price
        return worth

    def subscribe(self, stream: DraftStream, attachment: int, calibration: Calibration) -> Subscription:
        """Adds a drafter, or restarts its part under new ids. Raises Overloaded when it has too many."""
        self.unsubscribe(stream)
        most = 1 if self.drawn else MAX_DRAFTERS
        if len(self.subscriptions) >= most:
            drafters = "drafter" if most == 1 else "drafters"
            raise Overloaded(f"a session under {self.rule.name} has at most {most} {drafters}")
        self._senders += 1
        subscription = Subscription(self, stream, attachment, self._senders, calibration)
        self.subscriptions[stream] = stream.subscriptions[attachment] = subscription
        self._claims[subscription.sender] = calibration
        self.arrivals.disturb()
        return subscription

    def unsubscribe(self, stream: DraftStream) -> None:
        """Removes a drafter; its nodes stay."""
        subscription = self.subscriptions.pop(stream, None)
        if subscription:
            stream.subscriptions.pop(subscription.attachment, None)
            self.tree.forget(subscription.sender)

    def graft(
        self, subscription: Subscription, delta: Delta, now: float, *, passing: bool
    ) -> dict[Subscription, list[int]]:
        """Takes nodes that came while a pass runs or not. Returns ids that were dropped, by whose they are.

        Raises as the tree does, and InvalidRequest for nodes beyond the credit.
        """
        last = delta.first_id + len(delta.tokens) - 1
        if last > subscription.granted:
            raise InvalidRequest("first_id", f"node {last} is beyond the credit, which ends at {subscription.granted}")
        grafted = self.tree.graft(subscription.sender, delta, subscription.calibration.corrected)
        if grafted.added:
            self.arrivals.arrived(now, self.worth(), passing=passing)
        theirs = {other.sender: other for other in self.subscriptions.values()} if grafted.dropped else {}
        dropped: dict[Subscription, list[int]] = {}
        for sender, identity in grafted.dropped:
            if sender in theirs:
                dropped.setdefault(theirs[sender], []).append(identity)
        return dropped

    @property
    def ahead(self) -> bool:
        """Whether drafters go on below nodes that may be in verification."""
        return self.way is Way.AHEAD

    @property
    def resting(self) -> bool:
        """Whether drafting for it would cost more than it brings."""
        return self.way is Way.REST

    @property
    def price(self) -> float:
        """Path score below which drafters need not draft.

        Nothing is worth it while they are to rest, or before their turn: until the prompt has been read here, for then
        they would only delay the first token.
        """
        before = self.way is Way.TURNS and not self.committed_at
        return RESTING_PRICE if self.resting or before else self.verified_price

    @property
    def time_price(self) -> float:
        """Tokens that a second is worth to drafters that draft while the step is held back."""
        return 0.0 if self.ahead else self.speed.per_second

    @property
    def awaited(self) -> bool:
        """Whether drafters may still send something that a step could take."""
        return self.drafting and not self.resting and self.ceilings.depth > 0 and self.room > 1

    @property
    def drafting(self) -> bool:
        """Whether some drafter may still send something below the present root."""
        root = self.tree.root.position
        return any(subscription.exhausted != root for subscription in self.subscriptions.values())

    def grant(self, subscription: Subscription) -> int:
        """The largest id that the drafter may send from here on."""
        credit = self.tree.last_id(subscription.sender) + max(0, TREE_CAPACITY - self.tree.size)
        subscription.granted = max(subscription.granted, credit)
        return credit

    def draft_own(self) -> None:
        """Reads on, and drafts without a model, where the verifier does that."""
        if self._own is not None and self.plan.depth and self._own.read(self.tokens):
            plan = self.ceilings
            price = self.verified_price
            self._own.grow(self.tree, nodes=plan.nodes, depth=plan.depth, width=plan.width, price=price)

    def leave_answer(self) -> None:
        """The session is over: keeps its answer for others."""
        if self._own is not None:
            self._own.finish(self.tokens[self.answer_position :])

    def learn(self, nodes: Sequence[Node], path: set[Node]) -> None:
        """Holds claims against what the target said: those of verified nodes whose parent is on the path."""
        for node in nodes:
            if node.claim and (node.parent is self.tree.root or node.parent in path):
                sender, claimed = node.claim
                self._claims[sender].observe(claimed, node in path)

    def owed(self, nodes: Sequence[Node], path: set[Node]) -> tuple[Credit, ...]:
        """What a step that verified `nodes` and accepts `path` owes to each drafter, where there are several."""
        if len(self.subscriptions) < 2:
            return ()
        sent = Counter(sender for node in nodes for sender in node.senders)
        accepted = Counter(sender for node in path for sender in node.senders)
        alone = Counter(sender for node in path for sender in node.senders if len(node.senders) == 1)
        return tuple(
            Credit(stream.drafter_id, sent[own.sender], accepted[own.sender], alone[own.sender])
            for stream, own in self.subscriptions.items()
        )

    def commit(
        self, choices: Sequence[Choice], report: StepReport, now: float, owed: tuple[Credit, ...] = ()
    ) -> Commit:
        """Appends what the target said, re-roots the tree, and hands the commit to the router's stream."""
        tokens = [choice.token for choice in choices]
        self.tree.commit(tokens)
        position = len(self.tokens)
        self.tokens.extend(tokens)
        self.sampler.extend(tokens)
        if self.committed_at:
            self.speed.observe(len(tokens), now - self.committed_at)
        self.committed_at = now
        self.draft_own()
        self.arrivals.restart(now, self.worth())
        self.finished = tokens[-1] in self.contract.stop_ids or len(self.tokens) >= self.end
        commit = Commit(position, list(choices), self.tree.digest, report, self.finished, owed)
        self.commits.put_nowait(commit)
        return commit
