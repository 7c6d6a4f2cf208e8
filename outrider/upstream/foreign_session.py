"""A session whose target runs in an engine that is not ours: its drafters, its tree, and the chains to verify next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.session.contract import Contract, Plan
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.upstream.upstream_session import Subscription, UpstreamSession

CAPACITY = 256  # nodes of a session's tree
TENANT = "upstream"
EPOCH = 1  # a session that comes back is another one
MOST_DRAFTERS = 4  # of a session


class Drafts(NamedTuple):
    """What is drafted below a position of the text. It never changes, so that the engine's thread may read it."""

    position: int  # of the token that it follows
    best: tuple[int, ...]  # the path of the likeliest children
    beside: dict[tuple[int, int], tuple[int, ...]]  # by place in `best` and the token there: what follows this one
    drafting: bool  # whether a drafter may still send more

    def after(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return what is drafted behind tokens that follow the position; () if they leave the drafts."""
        if self.best[: len(tokens)] == tokens:
            return self.best[len(tokens) :]
        for place, token in enumerate(tokens):
            if place >= len(self.best):
                return ()
            if self.best[place] != token:
                below = self.beside.get((place, token), ())
                rest = tokens[place + 1 :]
                return below[len(rest) :] if below[: len(rest)] == rest else ()
        return ()


def drafts_of(tree: TokenTree, *, drafting: bool) -> Drafts:
    """Return the drafts of a tree: the likeliest path, and the paths that leave it."""
    best: list[int] = []
    beside: dict[tuple[int, int], tuple[int, ...]] = {}
    node = tree.root
    while node.children:
        chosen = _likeliest(node)
        for child in node.children.values():
            if child is not chosen:
                beside[len(best), child.token] = _below(child)
        best.append(chosen.token)
        node = chosen
    return Drafts(tree.root.position, tuple(best), beside, drafting)


def _likeliest(node: Node) -> Node:
    return max(node.children.values(), key=lambda child: child.edge)


def _below(node: Node) -> tuple[int, ...]:
    path = []
    while node.children:
        node = _likeliest(node)
        path.append(node.token)
    return tuple(path)


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
        self.tenant = TENANT
        self.epoch = EPOCH
        self.tokens = [*tokens]
        self.answer_position = len(self.tokens)
        self.vocabulary = self.unpadded_vocabulary = vocabulary
        self.tree = TokenTree(self.tokens, capacity=CAPACITY)
        self.terms = DraftingTerms(plan, drawn=False)
        self.terms.set_overlap_mode(OverlapMode.AHEAD)
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
        self._row.drafts = drafts_of(self.tree, drafting=self.drafting)


class Row:
    """A session as the engine's thread sees it. Only that thread touches it, but for `drafts`."""

    def __init__(self, length: int) -> None:
        self.drafts = Drafts(length - 1, (), {}, drafting=False)  # the last that were published
        self.named = time.monotonic()  # when a step named it last
        self.length = length  # tokens of the text
        self.recent: list[int] = []  # the last of them
        self.given: tuple[int, ...] = ()  # the chain of the last step

    def commit(self, tokens: Sequence[int]) -> int:
        """Take the tokens of a step. Return how many of the given chain they accept."""
        accepted = 0
        most = min(len(self.given), len(tokens))
        while accepted < most and self.given[accepted] == tokens[accepted]:
            accepted += 1
        self.recent += tokens
        if len(self.recent) > 2 * CAPACITY:
            del self.recent[:-CAPACITY]
        self.length += len(tokens)
        self.given = ()
        return accepted

    def chain(self, most: int) -> tuple[int, ...]:
        """Return the tokens to verify next, at most `most`."""
        drafts = self.drafts
        behind = self.length - 1 - drafts.position
        if behind > len(self.recent):
            return ()
        self.given = drafts.after(tuple(self.recent[-behind:] if behind else ()))[:most]
        return self.given

    def awaits(self, most: int) -> bool:
        """Return whether the step's chain is shorter than `most`, and more may come."""
        drafts = self.drafts
        return len(self.given) < most and (drafts.drafting or drafts.position < self.length - 1)
