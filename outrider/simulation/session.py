"""A simulated generation: the target's future tokens, and how many of them are drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

from outrider.core.control.depth.policies import GammaPolicy
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.holds.arrival_model import Arrivals
from outrider.simulation.clock import Clock
from outrider.simulation.deployment import Deployment, DrafterKind, SimulationOutcome


class SimulatedDraft(NamedTuple):
    """A drafted chain of levels."""

    known: int  # committed tokens when the draft was begun
    end: int  # position of the last level


class SessionDrafter(Protocol):
    """What a session needs of its drafter."""

    sessions: set[SimulatedSession]

    def on_commit(self, session: SimulatedSession, position: int) -> None:
        """Receive a commit, after which `position` tokens are committed."""

    def forget(self, session: SimulatedSession) -> None:
        """Stop drafting for a session."""


class SessionVerifier(Protocol):
    """What a drafter needs of a session's verifier."""

    def on_level(self, session: SimulatedSession, drafted: SimulatedDraft) -> None:
        """Receive a level of a session's draft."""

    def on_exhausted(self, session: SimulatedSession, known: int) -> None:
        """Record that a session's drafter has nothing more to send before the next commit."""


class SimulationEnvironment(Protocol):
    """What verifiers and drafters need of their cluster."""

    deployment: Deployment
    clock: Clock
    outcome: SimulationOutcome

    @property
    def drafted_s(self) -> float:
        """The seconds for which all drafters have worked."""

    def one_way(self) -> float:
        """Return the seconds that a message between a verifier and a drafter takes."""

    def pass_seconds(self, rows: int, *, drafted: bool) -> float:
        """Return the seconds that a pass over `rows` rows takes, after drafters or without."""

    def verifier_of(self, session: SimulatedSession) -> SessionVerifier:
        """Return the session's verifier."""

    def assign(self, session: SimulatedSession) -> None:
        """Assign a drafter to the session, if its verifier wants one for it and it has none."""

    def release(self, session: SimulatedSession) -> None:
        """Remove an ended session."""


class SimulatedSession:
    """One generation on its verifier.

    Which child the target will choose at each position is drawn in advance, so that levels drafted ahead stay valid for
    as long as they would in reality. A draft is a chain of best children, each with its siblings.
    """

    greedy = False
    representative = True

    def __init__(
        self,
        kind: DrafterKind,
        policy: GammaPolicy,
        arrivals: Arrivals,
        rng: random.Random,
        began: float,
        ended: Callable[[], None],
        chain: int = 0,
    ) -> None:
        """`began`: the simulated time, in seconds; `ended` is called when the generation ends. `chain`: the longest
        path that a step verifies; 0: trees."""
        self.kind = kind
        self.policy = policy
        self.terms = DraftingTerms(policy.plan(), drawn=False)
        self.arrivals = arrivals
        self.unread = kind.prompt
        self.position = 0  # tokens committed
        self.length = kind.answer
        self.began = began
        self.drafter: SessionDrafter | None = None
        self._chain = chain
        self.passing = False
        self.exhausted = -1  # committed tokens when the drafter had nothing more to send
        self.ended = ended
        self.target_ranks = [_rank(kind, rng) for _ in range(kind.answer)]  # among the drafter's children
        self._wrong = _next_wrong(self.target_ranks)
        self._drafted = SimulatedDraft(0, 0)

    @property
    def left(self) -> int:
        """The number of tokens to be committed until the end."""
        return self.length - self.position

    @property
    def drafting(self) -> bool:
        """Whether the session has a drafter."""
        return self.drafter is not None

    @property
    def awaiting_depth(self) -> bool:
        """Whether the next step waits for a deeper tree."""
        terms = self.terms
        return terms.rounds and terms.committed_at > 0.0 and self.levels < min(terms.plan.depth, self.left - 1)

    @property
    def awaited(self) -> bool:
        """Whether the drafter may still send nodes that a step could take."""
        coming = self.drafter is not None and self.exhausted != self.position
        return coming and not self.terms.resting and self.levels < self.terms.plan.depth

    @property
    def levels(self) -> int:
        """The number of levels of the tree below the committed tokens."""
        return self.below(self._drafted, self.position)

    def cancel(self) -> None:
        """End the generation with the next step, because the caller has cancelled it."""
        self.length = min(self.length, self.position + 1)

    def below(self, drafted: SimulatedDraft, position: int) -> int:
        """Return the number of levels of a draft that are still valid when `position` tokens are committed."""
        return max(0, drafted.end - position) if self._wrong[drafted.known] >= position else 0

    def take(self, drafted: SimulatedDraft) -> None:
        """Receive a draft, which replaces the present one unless that is deeper."""
        if self.below(drafted, self.position) >= self.levels:
            self._drafted = drafted

    def nodes(self) -> list[tuple[float, int]]:
        """Return the path scores and levels of what a step may verify, as the drafter sends them, best first."""
        plan, chain = self.terms.plan, self._chain
        if chain:
            return best_nodes(self.kind, min(self.levels, chain), 1, chain)
        return best_nodes(self.kind, min(self.levels, plan.depth), plan.width, plan.nodes)

    def scores(self) -> list[float]:
        """Return the path scores of these nodes."""
        return [score for score, _ in self.nodes()]

    def gain(self, levels: int) -> float:
        """Return the tokens that a level below `levels` levels is expected to add."""
        kind = self.kind
        return (kind.agreement * kind.ranks[0]) ** levels * kind.agreement * sum(kind.ranks[: self.terms.plan.width])

    def expected_tokens(self) -> float:
        """Return the tokens that a step over the tree is expected to commit, less what its nodes cost."""
        return 1.0 + sum(max(0.0, score - self.terms.verified_min_path_score) for score in self.scores())


def _rank(kind: DrafterKind, rng: random.Random) -> int:
    """Draw the rank of the child that the target chooses; a rank beyond all children where it chooses another token."""
    return rng.choices(range(len(kind.ranks)), kind.ranks)[0] if rng.random() < kind.agreement else len(kind.ranks)


def _next_wrong(target_ranks: Sequence[int]) -> list[int]:
    """Return, for each position, the next position at which the target does not choose the best child."""
    ends = [len(target_ranks)] * (len(target_ranks) + 1)
    for position in range(len(target_ranks) - 1, -1, -1):
        ends[position] = position if target_ranks[position] else ends[position + 1]
    return ends


@cache
def best_nodes(kind: DrafterKind, levels: int, width: int, count: int) -> list[tuple[float, int]]:
    """Return the path scores and levels of the `count` best nodes of a tree, best first."""
    nodes, path = [], 1.0
    for level in range(levels):
        nodes += [(path * kind.agreement * share, level) for share in kind.ranks[:width]]
        path *= kind.agreement * kind.ranks[0]
    return sorted(nodes, reverse=True)[:count]
