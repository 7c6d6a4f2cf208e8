"""What a verifier counts of its steps, and how that is told."""

from __future__ import annotations

from outrider.core.contract import StepReport
from outrider.core.depths import Depths
from outrider.telemetry.metrics import by_position, histogram, watch


class Tally:
    """Counts."""

    def __init__(self) -> None:
        self.steps = self.rows = self.committed = self.wire = 0
        self._depths = depths = Depths()
        self._forward = histogram("outrider.step.forward")
        self._wait = histogram("outrider.step.wait")
        self._reply = histogram("outrider.draft.reply")
        watch("outrider.steps", lambda: self.steps)
        watch("outrider.step.rows", lambda: self.rows)
        watch("outrider.tokens.committed", lambda: self.committed)
        watch("outrider.wire", lambda: self.wire)
        watch("spec_decode_num_drafts", lambda: depths.steps)
        watch("spec_decode_num_draft_tokens", lambda: depths.verified)
        watch("spec_decode_num_accepted_tokens", lambda: depths.accepted)
        watch("spec_decode_num_draft_tokens_per_pos", lambda: by_position(depths.tried))
        watch("spec_decode_num_accepted_tokens_per_pos", lambda: by_position(depths.reached))

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
        self._depths.observe(report)
