"""What keeps the drafters of one session from drafting, and its steps from verifying drafts, as a router knows it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from outrider.config import RouterConfig
from outrider.core.control.depth.policies import GammaPolicy, NoSpeculation
from outrider.core.session.contract import StepReport
from outrider.core.session.speculation_status import SpeculationReason, SpeculationStatus, status_of
from outrider.errors import DeadlineExceeded, Moved, OutriderError, Overloaded, Unavailable
from outrider.store.registry import Worker
from outrider.wire import drafter as wire
from router.scheduling.placement import DrafterPlacement

DRAFTING = SpeculationStatus(SpeculationReason.DRAFTING)
STARTING = SpeculationStatus(SpeculationReason.STARTING)
LATE = SpeculationStatus(SpeculationReason.LATE)
MILLI = 1e-3  # of the rates in a report


class Obstacles:
    """The obstacles by worker id, from the answers of attached drafters and the failures of others. Those of drafters
    nearer to the verifier count more."""

    def __init__(self, verifier: Worker) -> None:
        self._verifier = verifier
        self._known: dict[str, tuple[DrafterPlacement, SpeculationStatus]] = {}
        self._unplaced_reason: SpeculationStatus | None = None  # why no drafter can be attached

    @property
    def foremost(self) -> SpeculationStatus | None:
        """The obstacle of a drafter whose upstream is the verifier, before those of lower tiers, which follow from it;
        None: no obstacle is known."""
        known = sorted(self._known.values(), key=lambda one: not self._direct(one[0]))
        return known[0][1] if known else self._unplaced_reason

    def on_attached(self, placement: DrafterPlacement, answer: wire.AttachResponse, attached: Container[str]) -> None:
        """Take a drafter's answer to Attach. If it names no obstacle, drop the failures of drafters that this one may
        replace: those that are not `attached` (worker ids) at the same upstream."""
        status = _upstream_obstacle(placement, answer)
        if status is not None:
            self._known[placement.drafter.worker_id] = placement, status
            return
        self.forget(placement.drafter)
        self._known = {
            name: known
            for name, known in self._known.items()
            if name in attached or known[0].upstream.worker_id != placement.upstream.worker_id
        }

    def on_failed(self, placement: DrafterPlacement, error: OutriderError) -> None:
        """Take the error of a drafter that did not accept the session."""
        self._known[placement.drafter.worker_id] = placement, _attach_obstacle(placement.drafter, error)

    def forget(self, drafter: Worker) -> None:
        """Drop the obstacle of a drafter that was detached."""
        self._known.pop(drafter.worker_id, None)

    def on_no_drafter(self, why: SpeculationStatus) -> None:
        """Note that no drafter fits the session; obstacles of earlier drafters are dropped."""
        self._known.clear()
        self._unplaced_reason = why

    def on_placed(self, places: Sequence[DrafterPlacement], suspects: Iterable[Worker]) -> None:
        """Take the placements of drafters that fit the session. `suspects`: drafters among those that fit which failed
        lately, maybe for other sessions."""
        self._unplaced_reason = None if places else _unplaced_reason(suspects)

    def _direct(self, placement: DrafterPlacement) -> bool:
        return placement.upstream.worker_id == self._verifier.worker_id


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


def _unplaced_reason(suspects: Iterable[Worker]) -> SpeculationStatus:
    """Return why none of the fitting drafters is attached."""
    named = ", ".join(f"drafter {worker.address}" for worker in suspects)
    if named:
        return status_of(SpeculationReason.UNREACHABLE, f"{named} failed lately and will be asked again soon")
    return status_of(SpeculationReason.NO_DRAFTER, "those that fit were detached: others drafted the same")


def _upstream_obstacle(placement: DrafterPlacement, answer: wire.AttachResponse) -> SpeculationStatus | None:
    """Return what the upstream last answered to a drafter; None: no obstacle."""
    pair = f"drafter {placement.drafter.address} at {placement.upstream.address}"
    if answer.refused:
        return status_of(SpeculationReason.REFUSED, f"{pair}: {answer.refused}")
    return status_of(SpeculationReason.UNREACHABLE, f"{pair}: {answer.unreachable}") if answer.unreachable else None


def _attach_obstacle(worker: Worker, error: OutriderError) -> SpeculationStatus:
    """Return why a drafter did not accept the session."""
    match error:
        case Overloaded():
            reason = SpeculationReason.BUSY
        case Moved() | Unavailable() | DeadlineExceeded():
            reason = SpeculationReason.UNREACHABLE
        case _:
            reason = SpeculationReason.REFUSED
    return status_of(reason, f"drafter {worker.address}: {error}")


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
