"""Acceptance by depth."""

from __future__ import annotations

from outrider.core.control.depth.depth_stats import Depths
from outrider.core.session.contract import StepReport


def test_a_depth_that_was_tried_but_never_reached_counts_as_zero() -> None:
    depths = Depths()
    for verified, accepted in ((4, 2), (2, 0), (0, 0)):
        depths.observe(StepReport(verified=verified, verified_depth=verified, accepted=accepted))
    assert depths.tried == [2, 2, 1, 1]
    assert depths.reached == [1, 1, 0, 0]
