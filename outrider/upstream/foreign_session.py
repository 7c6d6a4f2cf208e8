"""A session whose target runs in an engine that is not ours: its drafters, its tree, and the chains to verify next."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from opentelemetry.trace import SpanKind

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.holds.arrival_model import Arrivals
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.speculation_status import SpeculationReason
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.telemetry.tracing import TRACER, Attributes, Metadata, trace_metadata
from outrider.upstream.upstream_session import Subscription, UpstreamSession
from outrider.wire.tickets import OWN_TENANT

CAPACITY = 256  # nodes of a session's tree
EPOCH = 1  # a session that comes back is another one
MOST_DRAFTERS = 4  # of a session
DRAFTING, RESTING = SpeculationReason.DRAFTING, SpeculationReason.RESTING


class DraftChain(NamedTuple):
    """Drafts that follow one another."""

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()  # probability of each that it is the target's token, if those before it are

    @property
    def value(self) -> float:
        """Tokens that a pass over it is expected to choose."""
        return 1.0 + math.fsum(accumulate(self.chances, operator.mul))

    def first(self, count: int) -> DraftChain:
        """Return its first drafts."""
        return DraftChain(self.tokens[:count], self.chances[:count])

    def behind(self, tokens: tuple[int, ...]) -> DraftChain:
        """Return what is left of it behind its first tokens; nothing if these are others."""
        count = len(tokens)
        return DraftChain(self.tokens[count:], self.chances[count:]) if self.tokens[:count] == tokens else NONE


NONE = DraftChain()


class Drafts(NamedTuple):
    """What is drafted below a position of the text. It never changes, so that the engine's thread may read it."""

    position: int  # of the token that it follows
    best: DraftChain  # the path of the likeliest children
    beside: dict[tuple[int, int], DraftChain]  # by place in `best` and the token there: what follows this one
    drafting: bool  # whether a drafter may still send more
    arrived: float  # when the last of them came, of the monotonic clock

    def beside_best(self, tokens: tuple[int, ...]) -> DraftChain:
        """Return what is drafted behind tokens that follow the position, and leave the likeliest path."""
        for place, (token, best) in enumerate(zip(tokens, self.best.tokens, strict=False)):
            if token != best:
                return self.beside.get((place, token), NONE).behind(tokens[place + 1 :])
        return NONE


def drafts_of(tree: TokenTree, *, drafting: bool, arrived: float) -> Drafts:
    """Return the drafts of a tree: the likeliest path, and the paths that leave it."""
    best, beside = _path(tree.root), dict[tuple[int, int], DraftChain]()
    for place, node in enumerate([tree.root, *best]):
        for child in node.children.values():
            if place == len(best) or child is not best[place]:
                beside[place, child.token] = _chain(_path(child))
    return Drafts(tree.root.position, _chain(best), beside, drafting, arrived)


def _path(node: Node) -> list[Node]:
    """Return the likeliest path below a node."""
    path = []
    while node.children:
        node = max(node.children.values(), key=lambda child: child.edge)
        path.append(node)
    return path


def _chain(path: Sequence[Node]) -> DraftChain:
    return DraftChain(tuple(node.token for node in path), tuple(math.exp(node.edge) for node in path))


class RowTerms(NamedTuple):
    """How a row's text goes on; see `RemoteDrafts.open`."""

    contract: Contract
    prompt: int  # tokens of the prompt
    accepts_at_random: bool

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.contract.greedy and not self.accepts_at_random


class ForeignSession(UpstreamSession):
    """Only the thread of the upstream's event loop touches it."""

    terms: DraftingTerms

    def __init__(
        self,
        name: str,
        tokens: list[int],
        terms: RowTerms,
        plan: Plan,
        vocabulary: int,
        row: Row,
        on_news: Callable[[ForeignSession], None],
    ) -> None:
        """`tokens`: its text so far, which is its own from here on. `row`: where the drafts are published. `on_news`:
        called when the tree has changed, or no drafter drafts any more.
        """
        super().__init__(terms.contract, 0)
        self.id = name
        self.tenant = OWN_TENANT
        self.epoch = EPOCH
        self.tokens = tokens
        self.answer_position = terms.prompt
        self.vocabulary = self.unpadded_vocabulary = vocabulary
        self.tree = TokenTree(self.tokens, capacity=CAPACITY)
        self.terms = DraftingTerms(plan, drawn=False)
        self.terms.set_overlap_mode(OverlapMode.REST)
        self._row = row
        self._on_news = on_news
        self._row_terms = terms
        self._arrived = 0.0  # when the last drafts came
        about: Attributes = {"outrider.session.id": name, "outrider.position": len(self.tokens)}
        self._span = TRACER.start_span("drafts", None, SpanKind.INTERNAL, about)

    @property
    def trace(self) -> Metadata:
        """What a call for the session carries, so that what it does is in the session's trace."""
        return trace_metadata(self._span)

    def end(self) -> None:
        """Dismiss its drafters, and end its trace."""
        self.dismiss("finished")
        row = self._row
        self._span.set_attributes(
            {
                "gen_ai.request.id": row.name,
                "gen_ai.usage.output_tokens": row.length - row.began,
                "outrider.steps": row.steps,
                "outrider.nodes.verified": row.drafted,
                "outrider.nodes.accepted": row.accepted,
                "outrider.speculation": row.reason,
            }
        )
        self._span.end()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self._row_terms.greedy

    @property
    def representative(self) -> bool:
        """Whether other sessions may learn from this one."""
        return super().representative and not self._row_terms.accepts_at_random

    @property
    def ceilings(self) -> Plan:
        """The plan."""
        return self.terms.plan

    @property
    def free_nodes(self) -> int:
        """Nodes that the tree still has room for."""
        return CAPACITY - self.tree.size

    @property
    def max_drafters(self) -> int:
        """The most drafters that the session may have."""
        return MOST_DRAFTERS

    def on_drafter_subscribed(self) -> None:
        """Its drafts are on their way."""
        self._on_news(self)

    def on_delta(
        self, subscription: Subscription, delta: Delta, added: Sequence[Node], now: float, *, passing: bool
    ) -> None:
        """Has the drafts published."""
        self._arrived = now
        self._on_news(self)

    def exhaust(self, subscription: Subscription, position: int) -> None:
        """Note that the drafter has sent all its nodes below the root at that position."""
        super().exhaust(subscription, position)
        self._on_news(self)

    def commit(self, tokens: Sequence[int]) -> int:
        """Take the tokens that the engine has chosen, and calibrate the drafters by them. Return their position."""
        position = len(self.tokens)
        for token in tokens:
            children = self.tree.root.children
            if children:
                self.calibrate([*children.values()], children.get(token))
            self.tree.commit([token])
        self.tokens += tokens
        self.terms.committed_at = time.monotonic()
        return position

    def publish(self) -> None:
        """Let the engine's thread see what is drafted now."""
        resting = self.terms.resting
        self._row.drafts = drafts_of(self.tree, drafting=self.drafting and not resting, arrived=self._arrived)
        self._row.resting = resting
        self._row.drafters = [stream.drafter_id for stream in self.subscriptions]


class Row:
    """A session as the engine's thread sees it. Only that thread touches it, but for `drafts`, `resting`, `drafters`
    and `ended`, which it reads.
    """

    def __init__(self, name: str, length: int, arrivals: Arrivals) -> None:
        self.name = name
        self.drafts = Drafts(length - 1, NONE, {}, drafting=False, arrived=0.0)  # the last that were published
        self.resting = False  # drafts would cost more than they bring
        self.drafters: list[str] = []  # drafters that draft for it
        self.ended = False  # no step has named it for too long
        self.named = time.monotonic()  # when a step named it last
        self.length = length  # tokens of the text
        self.recent: list[int] = []  # the last of them
        self.arrivals = arrivals  # when drafts come, of steps that await some
        self._noted = 0.0  # when the last of which it knows came
        self.given = NONE  # the chain of the last step
        self.expected = 1.0  # tokens that the pass over it chooses
        self.reason = SpeculationReason.STARTING  # what the last step verified
        self.opened = self.named
        self.began = length  # tokens of the text then
        self.steps = self.drafted = self.accepted = 0  # passes since then, and their drafts

    def commit(self, tokens: list[int]) -> int:
        """Take the tokens of a step. Return how many of the given chain they accept."""
        given, new = self.given.tokens, tuple(tokens)
        accepted = min(len(given), len(new))
        while given[:accepted] != new[:accepted]:
            accepted -= 1
        self.recent += tokens
        if len(self.recent) > 2 * CAPACITY:
            del self.recent[:-CAPACITY]
        self.length += len(new)
        self.steps += 1
        self.drafted += len(given)
        self.accepted += accepted
        return accepted

    def offer(self, most: int) -> DraftChain:
        """Return the drafts that may be verified next, at most `most`."""
        drafts = self.drafts
        behind = self.length - 1 - drafts.position
        if self.resting or behind > len(self.recent):
            return NONE
        tokens, chances = drafts.best
        if behind:
            recent = tuple(self.recent[-behind:])
            if tokens[:behind] != recent:
                tokens, chances = drafts.beside_best(recent)
                behind = 0
        return DraftChain(tokens[behind : behind + most], chances[behind : behind + most])

    def give(self, offer: DraftChain, count: int, expected: float, late: SpeculationReason) -> None:
        """Note that the next pass verifies the first `count` drafts of an offer. `expected`: tokens that it chooses
        then. `late`: why it verifies none, if control would have had some.
        """
        self.given = NONE if not count else offer if count == len(offer.tokens) else offer.first(count)
        self.expected = expected
        self.reason = DRAFTING if count else RESTING if self.resting else late

    def note_drafts(self, offer: DraftChain, began: float | None) -> None:
        """Note when drafts came, for a step that awaits more than it is offered. `began`: when it began, the first
        time.
        """
        arrived, value = self.drafts.arrived, offer.value
        if arrived > self._noted:
            self._noted = arrived
            self.arrivals.arrived(arrived, value, passing=began is not None)
        if began is not None:
            self.arrivals.restart(began, value)

    def awaits(self, offered: DraftChain, most: int) -> bool:
        """Return whether an offer is shorter than `most`, and more may come."""
        may_come = self.drafts.drafting or self.drafts.position < self.length - 1
        return len(offered.tokens) < most and may_come and not self.resting
