"""What kept each step of a generation from verifying drafts, as far as the router knows."""

from __future__ import annotations

from outrider.config import RouterConfig
from outrider.core.control.depth.policies import GammaPolicy, NoSpeculation
from outrider.core.session.contract import StepReport
from outrider.core.session.speculation_status import SpeculationReason, SpeculationStatus, status_of
from outrider.store.registry import Worker

DRAFTING = SpeculationStatus(SpeculationReason.DRAFTING)
STARTING = SpeculationStatus(SpeculationReason.STARTING)
LATE = SpeculationStatus(SpeculationReason.LATE)
MILLI = 1e-3  # of the rates in a report


class StepStatuses:
    """Judges the steps of one generation at one verifier."""

    def __init__(self, config: RouterConfig, policy: GammaPolicy, verifier: Worker) -> None:
        self._off = _off(config, policy, verifier)

    def of(self, report: StepReport, obstacle: SpeculationStatus | None) -> SpeculationStatus:
        """Return the status of a step. `obstacle`: what keeps drafters away, if known."""
        if report.verified:
            return DRAFTING
        if self._off is not None:
            return self._off
        if report.resting:
            rates = report.plain_rate * MILLI, report.drafted_rate * MILLI
            if report.drafters or (any(rates) and obstacle is None):
                return SpeculationStatus(SpeculationReason.RESTING, "", 0, *rates)
            return obstacle or STARTING
        return LATE if report.drafters else obstacle or STARTING


def _off(config: RouterConfig, policy: GammaPolicy, verifier: Worker) -> SpeculationStatus | None:
    """Return why no step can verify drafts; None: steps can."""
    if verifier.treeless:
        return status_of(SpeculationReason.TREELESS, f"{verifier.model}: {verifier.treeless_why}")
    if isinstance(policy, NoSpeculation):
        for setting, off in (("policy", "off"), ("depth", 0), ("nodes", 0)):
            if getattr(config, setting) == off:
                return status_of(SpeculationReason.OFF_BY_ROUTER, f"{setting} = {off}")
        return SpeculationStatus(SpeculationReason.OFF_BY_REQUEST)
    if not config.drafters_per_session:
        return status_of(SpeculationReason.OFF_BY_ROUTER, "drafters_per_session = 0")
    return None
