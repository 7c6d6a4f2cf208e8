"""A session whose target runs in an engine that is not ours: its drafters, its tree, and the chains to verify next."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.session.contract import Contract, Plan
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.upstream.upstream_session import Subscription, UpstreamSession
from outrider.wire.tickets import OWN_TENANT

CAPACITY = 256  # nodes of a session's tree
EPOCH = 1  # a session that comes back is another one
MOST_DRAFTERS = 4  # of a session


class DraftChain(NamedTuple):
    """Drafts that follow one another."""

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()  # probability of each that it is the target's token, if those before it are

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

    def after(self, tokens: tuple[int, ...]) -> DraftChain:
        """Return what is drafted behind tokens that follow the position; nothing if they leave the drafts."""
        best = self.best.tokens
        for place, token in enumerate(tokens):
            if place >= len(best):
                return NONE
            if best[place] != token:
                return self.beside.get((place, token), NONE).behind(tokens[place + 1 :])
        return self.best.behind(tokens)


def drafts_of(tree: TokenTree, *, drafting: bool) -> Drafts:
    """Return the drafts of a tree: the likeliest path, and the paths that leave it."""
    best, beside = _path(tree.root), dict[tuple[int, int], DraftChain]()
    for place, node in enumerate([tree.root, *best]):
        for child in node.children.values():
            if place == len(best) or child is not best[place]:
                beside[place, child.token] = _chain(_path(child))
    return Drafts(tree.root.position, _chain(best), beside, drafting)


def _path(node: Node) -> list[Node]:
    """Return the likeliest path below a node."""
    path = []
    while node.children:
        node = max(node.children.values(), key=lambda child: child.edge)
        path.append(node)
    return path


def _chain(path: Sequence[Node]) -> DraftChain:
    return DraftChain(tuple(node.token for node in path), tuple(math.exp(node.edge) for node in path))


class ForeignSession(UpstreamSession):
    """Only the thread of the upstream's event loop touches it."""

    terms: DraftingTerms

    def __init__(
        self,
        name: str,
        tokens: Sequence[int],
        contract: Contract,
        plan: Plan,
        vocabulary: int,
        row: Row,
        on_news: Callable[[ForeignSession], None],
    ) -> None:
        """`row`: where the drafts are published. `on_news`: called when the tree has changed, or no drafter drafts any
        more.
        """
        super().__init__(contract, 0)
        self.id = name
        self.tenant = OWN_TENANT
        self.epoch = EPOCH
        self.tokens = [*tokens]
        self.answer_position = len(self.tokens)
        self.vocabulary = self.unpadded_vocabulary = vocabulary
        self.tree = TokenTree(self.tokens, capacity=CAPACITY)
        self.terms = DraftingTerms(plan, drawn=False)
        self.terms.set_overlap_mode(OverlapMode.REST)
        self._row = row
        self._on_news = on_news

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
        self._row.drafts = drafts_of(self.tree, drafting=self.drafting and not resting)
        self._row.resting = resting


class Row:
    """A session as the engine's thread sees it. Only that thread touches it, but for `drafts`, `resting` and `ended`,
    which it reads.
    """

    def __init__(self, length: int) -> None:
        self.drafts = Drafts(length - 1, NONE, {}, drafting=False)  # the last that were published
        self.resting = False  # drafts would cost more than they bring
        self.ended = False  # no step has named it for too long
        self.named = time.monotonic()  # when a step named it last
        self.length = length  # tokens of the text
        self.recent: list[int] = []  # the last of them
        self.given = NONE  # the chain of the last step

    def commit(self, tokens: Sequence[int]) -> int:
        """Take the tokens of a step. Return how many of the given chain they accept."""
        accepted, given = 0, self.given.tokens
        most = min(len(given), len(tokens))
        while accepted < most and given[accepted] == tokens[accepted]:
            accepted += 1
        self.recent += tokens
        if len(self.recent) > 2 * CAPACITY:
            del self.recent[:-CAPACITY]
        self.length += len(tokens)
        return accepted

    def offer(self, most: int) -> DraftChain:
        """Return the drafts that may be verified next, at most `most`."""
        behind = self.length - 1 - self.drafts.position
        if self.resting or behind > len(self.recent):
            return NONE
        tokens, chances = self.drafts.after(tuple(self.recent[-behind:] if behind else ()))
        return DraftChain(tokens[:most], chances[:most])

    def give(self, offer: DraftChain, count: int) -> None:
        """Note that the next pass verifies the first drafts of an offer."""
        self.given = DraftChain(offer.tokens[:count], offer.chances[:count])

    @property
    def expected(self) -> float:
        """Tokens that the pass over the given chain is expected to choose."""
        return 1.0 + math.fsum(accumulate(self.given.chances, operator.mul))

    def awaits(self, offered: DraftChain, most: int) -> bool:
        """Return whether an offer is shorter than `most`, and more may come."""
        may_come = self.drafts.drafting or self.drafts.position < self.length - 1
        return len(offered.tokens) < most and may_come and not self.resting
