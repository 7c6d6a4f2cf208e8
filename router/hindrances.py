"""What keeps the drafters of one session from drafting, by drafter: the nearer to the verifier, the more it matters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from outrider.core.speculation import SpeculationReason, SpeculationStatus, status_of
from outrider.errors import DeadlineExceeded, Moved, OutriderError, Overloaded, Unavailable
from outrider.store.registry import Worker
from outrider.v1 import drafter_pb2
from router.placement import Placed


class Hindrances:
    """Kept by worker id, from the answers of drafters that are attached and the failures of those that are not."""

    def __init__(self, verifier: Worker) -> None:
        self._verifier = verifier
        self._known: dict[str, tuple[Placed, SpeculationStatus]] = {}
        self._unplaced: SpeculationStatus | None = None  # why there is nobody to ask

    @property
    def foremost(self) -> SpeculationStatus | None:
        """That of a drafter whose upstream is the verifier before those of lower tiers, which follow from it; None:
        nothing is known to be wrong."""
        known = sorted(self._known.values(), key=lambda one: not self._direct(one[0]))
        return known[0][1] if known else self._unplaced

    def answered(self, placed: Placed, answer: drafter_pb2.AttachResponse, attached: Container[str]) -> None:
        """A drafter took the session. With nothing wrong there, failures of those in whose place it may be, which are
        not `attached` (worker ids) at the same upstream, count no more."""
        status = _answered(placed, answer)
        if status is not None:
            self._known[placed.drafter.worker_id] = placed, status
            return
        self.forget(placed.drafter)
        self._known = {
            name: known
            for name, known in self._known.items()
            if name in attached or known[0].upstream.worker_id != placed.upstream.worker_id
        }

    def failed(self, placed: Placed, error: OutriderError) -> None:
        """A drafter did not take the session."""
        self._known[placed.drafter.worker_id] = placed, _failure(placed.drafter, error)

    def forget(self, drafter: Worker) -> None:
        """It is detached, and what it was answered is of no matter."""
        self._known.pop(drafter.worker_id, None)

    def nobody(self, why: SpeculationStatus) -> None:
        """There is no drafter that fits the session: what was wrong with those that were there is of no matter."""
        self._known.clear()
        self._unplaced = why

    def placed(self, places: Sequence[Placed], suspects: Iterable[Worker]) -> None:
        """Where drafters that fit the session are to draft; `suspects`: those among them that failed lately, maybe for
        others."""
        self._unplaced = None if places else _unplaced(suspects)

    def _direct(self, placed: Placed) -> bool:
        return placed.upstream.worker_id == self._verifier.worker_id


def _unplaced(suspects: Iterable[Worker]) -> SpeculationStatus:
    """Why none of the drafters that fit is asked."""
    named = ", ".join(f"drafter {worker.address}" for worker in suspects)
    if named:
        return status_of(SpeculationReason.UNREACHABLE, f"{named} failed lately and will be asked again soon")
    return status_of(
        SpeculationReason.NO_DRAFTER, "those that fit were let go: they drafted nothing that others did not"
    )


def _answered(placed: Placed, answer: drafter_pb2.AttachResponse) -> SpeculationStatus | None:
    """What its upstream answered a drafter the last time; None: nothing is known to be wrong."""
    pair = f"drafter {placed.drafter.address} at {placed.upstream.address}"
    if answer.refused:
        return status_of(SpeculationReason.REFUSED, f"{pair}: {answer.refused}")
    return status_of(SpeculationReason.UNREACHABLE, f"{pair}: {answer.unreachable}") if answer.unreachable else None


def _failure(worker: Worker, error: OutriderError) -> SpeculationStatus:
    """Why a drafter did not take the session."""
    match error:
        case Overloaded():
            reason = SpeculationReason.BUSY
        case Moved() | Unavailable() | DeadlineExceeded():
            reason = SpeculationReason.UNREACHABLE
        case _:
            reason = SpeculationReason.REFUSED
    return status_of(reason, f"drafter {worker.address}: {error}")
