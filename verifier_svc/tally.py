"""What a verifier counts of its steps, and how that is told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from outrider.core.contract import StepReport
from outrider.telemetry.metrics import histogram, watch

DEEPEST = 64  # of a plan


class Tally:
    """Counts. Sums over depths are made when somebody asks."""

    def __init__(self) -> None:
        self.steps = self.rows = self.committed = self.wire = self.trees = self.verified = self.accepted = 0
        self._reached = [0] * (DEEPEST + 1)  # steps whose accepted path ended at that depth
        self._tried = [0] * (DEEPEST + 1)  # steps whose deepest verified node was there
        self._forward = histogram("outrider.step.forward")
        self._wait = histogram("outrider.step.wait")
        self._reply = histogram("outrider.draft.reply")
        watch("outrider.steps", lambda: self.steps)
        watch("outrider.step.rows", lambda: self.rows)
        watch("outrider.tokens.committed", lambda: self.committed)
        watch("outrider.wire", lambda: self.wire)
        watch("spec_decode_num_drafts", lambda: self.trees)
        watch("spec_decode_num_draft_tokens", lambda: self.verified)
        watch("spec_decode_num_accepted_tokens", lambda: self.accepted)
        watch("spec_decode_num_draft_tokens_per_pos", lambda: by_position(self._tried))
        watch("spec_decode_num_accepted_tokens_per_pos", lambda: by_position(self._reached))

    def passed(self, rows: int, seconds: float, waited: float) -> None:
        """A pass has ended."""
        self.steps += 1
        self.rows += rows
        self._forward.record(seconds)
        self._wait.record(waited)

    def committed_for(self, report: StepReport, tokens: int) -> None:
        """It has committed so many tokens for a session."""
        self.committed += tokens
        self.wire += report.wire_bytes
        if report.first_us:
            self._reply.record(report.first_us / 1e6)
        if report.verified:
            self.trees += 1
            self.verified += report.verified
            self.accepted += report.accepted
            self._tried[min(report.verified_depth, DEEPEST)] += 1
            self._reached[min(report.accepted, DEEPEST)] += 1


def by_position(ends: Sequence[int]) -> dict[str, float]:
    """How many went so deep or deeper, by position: 0 is the first below the root. `ends`: how many ended where."""
    beyond = [*accumulate(reversed(ends))][-2::-1]
    return {str(position): float(count) for position, count in enumerate(beyond) if count}
