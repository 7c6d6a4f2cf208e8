"""The figures of a run: a table by fault, the bounds, and the line that scripts read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tests.chaos.injector import FaultOutcome
from tests.chaos.load import Tally, commonest

# Seconds from a fault to the session's next token, for 99 of 100. What freezes or is cut off has to be noticed first.
KILLED = {"drafter": 0.5, "router": 2.0, "redis": 3.0, "verifier": 3.0}
NOTICED_S = 2.5
COLUMNS = (
    *("fault", "faults", "sessions", "median", "p99", "worst"),
    *("of it re-reading: median, worst", "p99 without it", "stranded", "bound", ""),
)


@dataclass(frozen=True, slots=True)
class Row:
    """All faults of one kind."""

    what: str
    faults: int
    sessions: int
    times: tuple[float, ...]  # s, sorted
    reading: tuple[float, ...]  # s, sorted
    besides: tuple[float, ...]  # s, sorted: the times without reading
    stranded: int

    @property
    def p99(self) -> float:
        """The time that 99 of 100 stay below; the worst of fewer."""
        return quantile(self.times, 0.99)

    @property
    def met(self) -> bool | None:
        """Whether the bound was kept; None: there is none, or no session was affected."""
        if self.bound is None or not (self.times or self.stranded):
            return None
        return self.p99 <= self.bound and not self.stranded

    @property
    def bound(self) -> float | None:
        """The promised bound in seconds; None where there is none."""
        kind, _, role = self.what.partition(" ")
        if role == "redis" or kind == "kill":  # what is frozen is counted from its thawing if it is Redis
            return KILLED.get(role) if kind in ("kill", "freeze") else None
        return NOTICED_S + KILLED[role] if kind in ("freeze", "black-hole") and role in KILLED else None

    def cells(self) -> tuple[str, ...]:
        """The cells of its line in the table."""
        times = _median(self.times), self.p99, max(self.times, default=0.0)
        return (
            self.what,
            str(self.faults),
            str(self.sessions),
            *(f"{time:.2f} s" if self.times else "-" for time in times),
            f"{_median(self.reading):.2f} s, {max(self.reading):.2f} s" if self.reading else "-",
            f"{quantile(self.besides, 0.99):.2f} s" if self.reading else "-",
            str(self.stranded),
            f"{self.bound:g} s" if self.bound else "-",
            {None: "", True: "met", False: "not met"}[self.met],
        )


def rows(done: Iterable[FaultOutcome]) -> list[Row]:
    """One for each kind of fault, in the order in which they first came."""
    kinds: dict[str, list[FaultOutcome]] = {}
    for outcome in done:
        kinds.setdefault(str(outcome.fault), []).append(outcome)
    return [
        Row(
            what,
            len(some),
            sum(len(outcome.sessions) for outcome in some),
            tuple(sorted(time for outcome in some for time in outcome.recoveries)),
            tuple(sorted(time for outcome in some for time in outcome.read_again)),
            tuple(sorted(time for outcome in some for time in outcome.besides)),
            sum(outcome.stranded for outcome in some),
        )
        for what, some in kinds.items()
    ]


def missed(done: Iterable[FaultOutcome]) -> list[str]:
    """The bounds that were not kept, a line for each."""
    return [
        f"bound not kept: {row.what}: p99 {row.p99:.2f} s of {row.bound:g} s allowed, stranded {row.stranded}"
        for row in rows(done)
        if row.met is False
    ]


def table(done: Sequence[FaultOutcome], tally: Tally) -> str:
    """For people; in Markdown, so that it can go into docs/reliability.md as it is."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(row.cells() for row in rows(done))]
    summary = [
        f"{tally.answers} answers of {tally.tokens} tokens, {tally.cancelled} cancelled, {tally.resumes} calls resumed",
        f"lost={tally.lost} repeated={tally.repeated} changed={tally.changed} near_ties={tally.near_ties} "
        f"errors={len(tally.errors)}",
        *commonest(tally.errors),
    ]
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in lines] + ["", *summary])


def status(done: Iterable[FaultOutcome], tally: Tally) -> int:
    """The exit status: 1 if an answer was not as it must be, or a bound was not kept."""
    return int(tally.wrong or bool(missed(done)))


def last_line(done: Sequence[FaultOutcome], tally: Tally) -> str:
    """The line that scripts read."""
    kills = sum(outcome.fault.kind == "kill" for outcome in done)
    worst = max((time for outcome in done if outcome.fault.kind == "kill" for time in outcome.recoveries), default=0.0)
    return (
        f"chaos: kills={kills} lost={tally.lost} repeated={tally.repeated} changed={tally.changed} "
        f"worst_recovery_s={worst:.2f}"
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the figures that a share of them does not exceed; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _median(ordered: Sequence[float]) -> float:
    return median(ordered) if ordered else 0.0
