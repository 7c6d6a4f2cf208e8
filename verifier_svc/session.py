"""One session on the verifier: committed tokens, the tree that its drafters grow, and who listens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from outrider.core.contract import Contract, Overlap, Plan, StepReport
from outrider.core.credit import Credit
from outrider.core.digest import NOTHING, Prefix
from outrider.core.drawn_tree import tree_of
from outrider.core.sampler import Choice, Sampler
from outrider.core.tree import Delta, Node
from outrider.core.waiting import Arrivals, Patterns
from outrider.core.ways import Speed, Way
from outrider.engine.slots import Taken
from outrider.sink.drafted import MAX_DRAFTERS, RESTING_PRICE, Drafted, Subscription
from verifier_svc.heads import SENDER as HEADS
from verifier_svc.heads import HeadDrafts
from verifier_svc.own import SENDER, OwnDrafts
from verifier_svc.traced import TracedSteps
from verifier_svc.watch import Watch

TREE_CAPACITY = 512  # nodes that a session's tree may hold


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
    known: Prefix = NOTHING  # of the tokens: `settled`, which was computed beside the event loop


class Commit(NamedTuple):
    """What a step committed for a session."""

    position: int  # of the first token
    choices: list[Choice]
    digest: int  # over all tokens of the session, these included
    report: StepReport
    last: bool  # whether the generation ends with it
    owed: tuple[Credit, ...] = ()  # one for each drafter, where there are several


class Session(Drafted):
    """State of one session. Only the event loop's thread touches it."""

    def __init__(
        self,
        start: Start,
        place: Taken,
        vocabulary: int,
        patterns: Patterns,
        own: OwnDrafts | None = None,
        heads: HeadDrafts | None = None,
        *,
        sayable: int | None = None,
    ) -> None:
        """`vocabulary`: ids that the target has; `sayable`: it can say those below, if they are fewer."""
        super().__init__(start.contract, SENDER)
        self.id = start.session_id
        self.tenant = start.tenant
        self.epoch = start.epoch
        self.answer_position = start.answer_position
        self.vocabulary = vocabulary
        self.sayable = vocabulary if sayable is None else sayable
        self.plan = start.plan
        self.place = place
        self.tokens = list(start.tokens)
        self.cached = place.cached  # cache rows [0, cached) hold the KV of tokens[:cached]
        self.durable = len(self.tokens)
        self.end = start.answer_position + start.contract.max_tokens  # the length at which it must stop
        self.tree = tree_of(start.contract, self.tokens, capacity=TREE_CAPACITY, known=start.known)
        self.sampler = Sampler(start.contract, self.sayable, self.tokens, start.answer_position)
        self.arrivals = Arrivals(patterns)
        self.verified_price = 0.0  # path score below which a node was not worth verifying in the last step
        self.speed = Speed()
        self.way = Way.TURNS  # how its drafters work
        self.committed_at = 0.0  # when the last commit went out
        self.commits: asyncio.Queue[Commit | None] = asyncio.Queue()  # bounded by the window; None: it was closed
        self.finished = False
        self.fenced = False  # a higher epoch took the session over
        self.moved = False  # this verifier is going down
        self.answered = False  # the router is told how it ended, and may hang up
        self.traced: TracedSteps | None = None  # where its request is traced
        self.watch = Watch()
        self._window = start.window
        self.own = own  # what the verifier drafts by itself for it
        if own is not None:
            self._claims[SENDER] = own.calibration
        self.heads = heads  # what heads on the target draft for it
        if heads is not None:
            self._claims[HEADS] = heads.calibration

    @property
    def room(self) -> int:
        """The most tokens that a step may commit now: up to the end, and the window beyond the durable position."""
        return min(self.end, self.durable + self._window) - len(self.tokens)

    @property
    def ready(self) -> bool:
        """Whether a step may serve it now."""
        return not self.finished and self.room > 0

    @property
    def unread(self) -> int:
        """Tokens whose KV the next steps have to write."""
        return len(self.tokens) - self.cached

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
        self.way = Way.TURNS if self.rounds or (way is Way.AHEAD and useless) else way

    @property
    def rounds(self) -> bool:
        """Whether steps wait for all that its plan allows, and take all of it."""
        return self.plan.overlap is Overlap.ROUNDS

    @property
    def whole(self) -> bool:
        """Whether steps take its tree as it is, and choose nothing."""
        return self.drawn or self.rounds

    @property
    def lacking(self) -> bool:
        """Whether its step waits for a deeper tree."""
        depth = self.ceilings.depth
        return self.rounds and self.committed_at > 0.0 and len([*islice(self.tree.levels(), depth)]) < depth

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

    @property
    def space(self) -> int:
        """Nodes that may still come."""
        return TREE_CAPACITY - self.tree.size

    @property
    def most(self) -> int:
        """Drafters that it may have. What two have drawn is no draw from either's q."""
        return 1 if self.drawn else MAX_DRAFTERS

    def joined(self) -> None:
        """What was learned of its drafters' pace does not hold any more."""
        self.arrivals.disturb()

    def grown(
        self, subscription: Subscription, delta: Delta, added: Sequence[Node], now: float, *, passing: bool
    ) -> None:
        """Learns what a delta brings, and when."""
        if self.traced is not None:
            self.traced.grafted(subscription.sender, delta, added)
        if added or delta.rescored:
            self.arrivals.arrived(now, self.worth(), passing=passing)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always the one."""
        return self.contract.greedy

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
        return RESTING_PRICE if self.resting or before else 0.0 if self.rounds else self.verified_price

    @property
    def time_price(self) -> float:
        """Tokens that a second is worth to drafters that draft while the step is held back."""
        return 0.0 if self.ahead or self.rounds else self.speed.per_second

    @property
    def awaited(self) -> bool:
        """Whether drafters may still send something that a step could take."""
        return self.drafting and not self.resting and self.ceilings.depth > 0 and self.room > 1

    def draft_own(self) -> None:
        """Reads on, and drafts without a model, where the verifier does that."""
        if self.own is not None and self.plan.depth and self.own.read(self.tokens):
            plan = self.ceilings
            price = self.verified_price
            self.own.grow(
                self.tree,
                nodes=plan.nodes,
                depth=plan.depth,
                width=plan.width,
                vocabulary=self.sayable,
                price=price,
            )

    def leave_answer(self) -> None:
        """The session is over: keeps its answer for others."""
        if self.own is not None:
            self.own.finish(self.tokens[self.answer_position :])

    def learn(self, nodes: Sequence[Node], path: set[Node]) -> None:
        """Holds claims against what the target said: those of verified nodes whose parent is on the path."""
        for node in nodes:
            if node.parent is self.tree.root or node.parent in path:
                self.hold((node,), node if node in path else None)

    def owed(self, nodes: Sequence[Node], path: set[Node]) -> tuple[Credit, ...]:
        """What a step that verified `nodes` and accepts `path` owes to each drafter, where there are several."""
        drafters = {stream.drafter_id: own.sender for stream, own in self.subscriptions.items()}
        drafters |= self._origins
        if len(drafters) < 2:
            return ()
        sent = Counter(sender for node in nodes for sender in self.tree.origins(node))
        origins = [self.tree.origins(node) for node in path]
        accepted = Counter(sender for senders in origins for sender in senders)
        alone = Counter(sender for senders in origins for sender in senders if len(senders) == 1)
        return tuple(
            Credit(drafter, sent[sender], accepted[sender], alone[sender]) for drafter, sender in drafters.items()
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


class Reading(Session):
    """A text that is only read, for a session elsewhere. It is over when the KV of all but its last token is there."""

    @property
    def ready(self) -> bool:
        """Whether a step may serve it now."""
        return not self.finished and self.unread > 0

    @property
    def unread(self) -> int:
        """The last token is for the session that comes."""
        return super().unread - 1
