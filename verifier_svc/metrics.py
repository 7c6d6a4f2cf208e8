"""Figures of a verifier's steps: counters and histograms, and where the time of the latest ones went."""

from __future__ import annotations

from collections import deque
from functools import partial
from statistics import median
from typing import NamedTuple

from outrider.core.control.depth.depth_stats import Depths
from outrider.core.session.contract import Adapter, StepReport
from outrider.telemetry.metrics import by_position, histogram, register_metric

MAX_ADAPTERS = 256  # labels; further adapters share one
OTHERS = "others"
REMEMBERED = 32  # steps whose times are kept


class StepMetrics:
    """Count steps and their tokens, and records their times."""

    def __init__(self) -> None:
        self.steps = self.rows = self.committed = self.wire = 0
        self._depths = depths = Depths()
        self._forward = histogram("outrider.step.forward")
        self._wait = histogram("outrider.step.wait")
        self._reply = histogram("outrider.draft.reply")
        register_metric("outrider.steps", lambda: self.steps)
        register_metric("outrider.step.rows", lambda: self.rows)
        register_metric("outrider.tokens.committed", lambda: self.committed)
        register_metric("outrider.wire", lambda: self.wire)
        register_metric("spec_decode_num_drafts", lambda: depths.steps)
        register_metric("spec_decode_num_draft_tokens", lambda: depths.verified)
        register_metric("spec_decode_num_accepted_tokens", lambda: depths.accepted)
        register_metric("spec_decode_num_draft_tokens_per_pos", lambda: by_position(depths.tried))
        register_metric("spec_decode_num_accepted_tokens_per_pos", lambda: by_position(depths.reached))
        self._adapted: dict[str, Depths] = {}  # by the adapter's folder
        for name in ("steps", "verified", "accepted"):
            register_metric(f"outrider.adapter.{name}", partial(self.by_adapter, name))

    def record_pass(self, rows: int, seconds: float, waited: float) -> None:
        """Record a pass that has ended."""
        self.steps += 1
        self.rows += rows
        self._forward.record(seconds)
        self._wait.record(waited)

    def record_commit(self, report: StepReport, tokens: int, adapter: Adapter | None) -> None:
        """Record a commit of `tokens` tokens for one session, which has this adapter or none."""
        self.committed += tokens
        if adapter is not None:
            known = adapter.folder in self._adapted or len(self._adapted) < MAX_ADAPTERS
            label = adapter.folder if known else OTHERS
            self._adapted.setdefault(label, Depths()).observe(report)
        self.wire += report.wire_bytes
        if report.first_us:
            self._reply.record(report.first_us / 1e6)
        self._depths.observe(report)

    def by_adapter(self, name: str) -> dict[str, float]:
        """Return steps, verified or accepted nodes, as `name` says, by adapter."""
        return {adapter: float(getattr(depths, name)) for adapter, depths in tuple(self._adapted.items())}


class StepTime(NamedTuple):
    """One step, in seconds: from the end of the previous pass to the end of the step's own."""

    rows: float  # of the pass
    forward: float  # the pass
    waited: float  # the step was held back on purpose
    overhead: float  # neither: the walk, the commit, the choice of work, and the rest of the event loop's work


class StepTimes:
    """The latest steps that followed another without the scheduler being idle in between."""

    def __init__(self) -> None:
        self._latest: deque[StepTime] = deque(maxlen=REMEMBERED)

    def add(self, time: StepTime) -> None:
        """Add a step."""
        self._latest.append(time)

    def medians(self) -> StepTime:
        """Return the median of each figure by itself; zeros before the first step."""
        if not self._latest:
            return StepTime(0.0, 0.0, 0.0, 0.0)
        return StepTime(*map(median, zip(*self._latest, strict=True)))
