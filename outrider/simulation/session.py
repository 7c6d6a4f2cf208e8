"""A simulated generation: what its target will say, and what of it has been drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from outrider.core.contract import Overlap
from outrider.core.control import GammaPolicy
from outrider.core.waiting import Arrivals
from outrider.core.ways import Speed, Way
from outrider.simulation.deployment import Kind

if TYPE_CHECKING:
    from outrider.simulation.drafter import Drafter
    from outrider.simulation.verifier import Verifier


class Drafted(NamedTuple):
    """A chain of levels."""

    known: int  # tokens that were committed when it was begun
    end: int  # position of its last level


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
        self.length = kind.answer
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
        return self.length - self.position

    @property
    def ahead(self) -> bool:
        """Whether its drafter goes on while steps run."""
        return self.way is Way.AHEAD

    @property
    def rounds(self) -> bool:
        """Whether steps wait for all that its plan allows, and take all of it."""
        return self.plan.overlap is Overlap.ROUNDS

    @property
    def lacking(self) -> bool:
        """Whether its step waits for a deeper tree."""
        return self.rounds and self.committed_at > 0.0 and self.levels < min(self.plan.depth, self.left - 1)

    def follow(self, way: Way) -> None:
        """Has its drafter work in this way, as far as the plan allows."""
        self.way = Way.TURNS if self.rounds else way

    @property
    def awaited(self) -> bool:
        """Whether its drafter may still send something that a step could take."""
        coming = self.drafter is not None and self.exhausted != self.position
        return coming and self.way is not Way.REST and self.levels < self.plan.depth

    @property
    def levels(self) -> int:
        """Of its tree that are below what was committed."""
        return self.below(self._drafted, self.position)

    def hang_up(self) -> None:
        """Its caller goes away: the next step is the last."""
        self.length = min(self.length, self.position + 1)

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
        return [score for score, _ in best_nodes(self.kind, min(self.levels, plan.depth), plan.width, plan.nodes)]

    def gain(self, levels: int) -> float:
        """Tokens that another level is expected to bring."""
        kind = self.kind
        return (kind.agreement * kind.ranks[0]) ** levels * kind.agreement * sum(kind.ranks[: self.plan.width])

    def worth(self) -> float:
        """Tokens that a step over its tree is expected to commit."""
        return 1.0 + sum(max(0.0, score - self.price) for score in self.scores())


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
def best_nodes(kind: Kind, levels: int, width: int, count: int) -> list[tuple[float, int]]:
    """The `count` best nodes of a tree: path score and level, best first."""
    nodes, path = [], 1.0
    for level in range(levels):
        nodes += [(path * kind.agreement * share, level) for share in kind.ranks[:width]]
        path *= kind.agreement * kind.ranks[0]
    return sorted(nodes, reverse=True)[:count]
