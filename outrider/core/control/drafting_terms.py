"""The terms for the drafters of a session: when they draft beside the target's passes, and down to which path score."""

from __future__ import annotations

from typing import Any

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.session.contract import Plan, PlanOverlap, SentTerms

RESTING_SCORE = 1.0  # no node is better than certain


class DraftingTerms:
    """The terms of one session at its verifier. They follow from the plan, the overlap mode and the last step."""

    def __init__(self, plan: Plan, *, drawn: bool) -> None:
        """`drawn`: the session's trees are drawn from q, and no draw survives a commit."""
        self.plan = plan
        self.overlap_mode = OverlapMode.TURNS
        self.verified_min_path_score = 0.0  # path score below which a node was not worth verifying in the last step
        self.committed_at = 0.0  # when the last commit went out, of the monotonic clock; 0: none has
        self._drawn = drawn
        self.hold_tokens_per_s = 0.0  # tokens that a second of holding a step is worth, for this session's part

    def estimates(self) -> dict[str, Any]:
        """Return the terms and what they follow from."""
        return {
            "depth": self.plan.depth,
            "overlap_mode": self.overlap_mode.value,
            "verified_min_path_score": self.verified_min_path_score,
            "hold_tokens_per_s": self.hold_tokens_per_s,
        }

    def set_overlap_mode(self, mode: OverlapMode) -> None:
        """Set the overlap mode of the session's drafters, as far as the plan allows it."""
        if self.plan.overlap is PlanOverlap.ALWAYS:
            mode = OverlapMode.AHEAD
        useless = self.plan.overlap is PlanOverlap.NEVER or self._drawn
        self.overlap_mode = OverlapMode.TURNS if self.rounds or (mode is OverlapMode.AHEAD and useless) else mode

    @property
    def rounds(self) -> bool:
        """Whether each step waits for all nodes that the plan allows, and verifies all of them."""
        return self.plan.overlap is PlanOverlap.ROUNDS

    @property
    def takes_full_tree(self) -> bool:
        """Whether steps verify the session's complete tree and choose no nodes of it."""
        return self._drawn or self.rounds

    @property
    def ahead(self) -> bool:
        """Whether drafters go on below nodes that may be in verification."""
        return self.overlap_mode is OverlapMode.AHEAD

    @property
    def resting(self) -> bool:
        """Whether drafting for this session would cost more than it brings."""
        return self.overlap_mode is OverlapMode.REST

    @property
    def min_path_score(self) -> float:
        """Path score below which drafters need not draft.

        No node is worth drafting while drafters rest. Nor is one before their first turn, until this verifier has read
        the prompt: drafting would only delay the first token.
        """
        before = self.overlap_mode is OverlapMode.TURNS and not self.committed_at
        return RESTING_SCORE if self.resting or before else 0.0 if self.rounds else self.verified_min_path_score

    @property
    def time_cost_tokens_per_s(self) -> float:
        """Tokens that a second is worth while the step is held back for drafters; 0 when no step waits for them."""
        return 0.0 if self.ahead or self.rounds else self.hold_tokens_per_s

    @property
    def sent(self) -> SentTerms:
        """The terms that go out with commits."""
        return SentTerms(self.min_path_score, self.time_cost_tokens_per_s, self.ahead)
