"""The speculation status of a generation: whether its drafts are verified, and if not, why.

Every part that shows a reason (results, the page, metrics, logs) takes the word and the sentence from this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

LATE_STEPS = 32  # consecutive steps without a draft in time from which LATE is the generation's status
MAX_DETAIL = 240  # characters of a peer's answer that are kept


class SpeculationReason(StrEnum):
    """Why a step verified no drafts. `DRAFTING` means that the step did verify drafts."""

    UNKNOWN = "unknown"
    DRAFTING = "drafting"
    STARTING = "starting"
    LATE = "late"
    REJECTED = "rejected"
    NO_DRAFTER = "no-drafter"
    OTHER_TOKENIZER = "other-tokenizer"
    OTHER_TARGET = "other-target"
    RULE = "rule"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TREELESS = "treeless"
    RESTING = "resting"
    OFF_BY_REQUEST = "off-by-request"
    OFF_BY_ROUTER = "off-by-router"


class Advice(NamedTuple):
    """The explanation of a reason for users."""

    what: str  # the fact
    remedy: str  # what to do about it; empty: nothing


ADVICE: Mapping[SpeculationReason, Advice] = {
    SpeculationReason.UNKNOWN: Advice("nothing is known of its steps", ""),
    SpeculationReason.DRAFTING: Advice("drafts are verified", ""),
    SpeculationReason.STARTING: Advice(
        "drafting has not begun yet",
        "if this continues, read the drafter's log",
    ),
    SpeculationReason.LATE: Advice(
        "drafters are connected, but no draft arrived in time for a step, or none was worth verifying",
        "bring drafters nearer to the verifier, or give them a smaller model",
    ),
    SpeculationReason.REJECTED: Advice(
        "drafts were verified, and the target chose none of them",
        "draft with a model that was trained for this target",
    ),
    SpeculationReason.NO_DRAFTER: Advice("no drafter is running", "start one with `outrider drafter`"),
    SpeculationReason.OTHER_TOKENIZER: Advice(
        "no drafter has the tokenizer of this model",
        "start one of the model's family, or name the model's folder as the drafter's `target` to draft by text",
    ),
    SpeculationReason.OTHER_TARGET: Advice(
        "the drafters were trained for another target",
        "train one for this target, or start the drafter with --any-target",
    ),
    SpeculationReason.RULE: Advice(
        "the acceptance rule draws from q, and no drafter here can or may",
        "use the rule shared-noise, or start a drafter that has a model with the target's tokenizer and is trusted",
    ),
    SpeculationReason.BUSY: Advice("all slots of the drafters are in use", "start more drafters, or give them slots"),
    SpeculationReason.UNREACHABLE: Advice(
        "the drafter or its upstream cannot be reached",
        "check that it runs, and that the network allows the connection",
    ),
    SpeculationReason.REFUSED: Advice("the drafter was refused", "do what the answer says"),
    SpeculationReason.TREELESS: Advice(
        "the target cannot verify trees", "nothing can be drafted for it; stop its drafters"
    ),
    SpeculationReason.RESTING: Advice(
        "drafters rest, because steps were measured to be faster without them or to find out whether they are",
        "use a faster drafter, or move it off the verifier's cores",
    ),
    SpeculationReason.OFF_BY_REQUEST: Advice(
        "the request switched it off", "leave out `speculation` to have the router's policy"
    ),
    SpeculationReason.OFF_BY_ROUTER: Advice(
        "the router's configuration switched it off",
        "set `policy`, `depth`, `nodes` and `drafters_per_session` of the router",
    ),
}

# Ordered by how far a drafter got. If drafters fail for different reasons, report the one furthest down this list.
NEARNESS = (
    SpeculationReason.NO_DRAFTER,
    SpeculationReason.TREELESS,
    SpeculationReason.OTHER_TOKENIZER,
    SpeculationReason.OTHER_TARGET,
    SpeculationReason.RULE,
)
_PASSING = (SpeculationReason.STARTING, SpeculationReason.LATE)  # reasons of single steps among steps that do verify


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """Whether drafts are verified, and if not, why. Rates are in tokens per second over all the verifier's sessions."""

    reason: SpeculationReason = SpeculationReason.UNKNOWN
    detail: str = ""  # the peer, and its answer
    steps: int = 0  # steps with this status
    plain_rate: float = 0.0  # measured while drafters rest; 0: not measured
    drafted_rate: float = 0.0  # measured while drafters draft; 0: not measured

    @property
    def drafting(self) -> bool:
        """Whether drafts are verified."""
        return self.reason is SpeculationReason.DRAFTING

    @property
    def figures(self) -> str:
        """The two rates as text; empty where they were not measured."""
        if not self.plain_rate or not self.drafted_rate:
            return ""
        return f"plain {self.plain_rate:.0f} tokens/s, with drafting {self.drafted_rate:.0f}"

    @property
    def explanation(self) -> str:
        """One sentence: the fact, its source, and what to do."""
        advice = ADVICE[self.reason]
        if self.figures:
            advice = advice._replace(what="drafting was measured not to pay")
        about = ", ".join(filter(None, (self.figures, self.detail)))
        return advice.what + (f" ({about})" if about else "") + (f"; {advice.remedy}" if advice.remedy else "")


UNKNOWN = SpeculationStatus()


def status_of(reason: SpeculationReason, detail: str) -> SpeculationStatus:
    """Return a status with a peer's answer as detail, shortened and without control characters."""
    return SpeculationStatus(reason, printable(detail))


def printable(text: str) -> str:
    """Return a peer's text as one line of at most MAX_DETAIL printable characters, for a terminal or a page."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: MAX_DETAIL + 1])
    return line if len(line) <= MAX_DETAIL else line[: MAX_DETAIL - 3] + "..."


def nearest(statuses: Iterable[SpeculationStatus]) -> SpeculationStatus:
    """Return, among the statuses of several drafters, that of the drafter that is nearest to drafting."""
    return max(
        statuses,
        key=lambda status: NEARNESS.index(status.reason) if status.reason in NEARNESS else len(NEARNESS),
        default=SpeculationStatus(SpeculationReason.NO_DRAFTER),
    )


class SpeculationTally:
    """Counts the steps of one generation by reason, and keeps its present status.

    Single steps without a draft in time are normal, so LATE becomes the status only after LATE_STEPS in a row.
    """

    def __init__(self) -> None:
        self.now = UNKNOWN
        self._late = 0  # steps in a row
        self._steps: Counter[SpeculationReason] = Counter()
        self._latest: dict[SpeculationReason, SpeculationStatus] = {}

    def observe(self, status: SpeculationStatus) -> None:
        """Add the status of one step."""
        self._latest[status.reason] = status
        self._steps[status.reason] += 1
        self._late = self._late + 1 if status.reason is SpeculationReason.LATE else 0
        if not 0 < self._late < LATE_STEPS:
            self.now = status

    def summary(self, accepted: int) -> SpeculationStatus:
        """Return the status of most steps of a generation that accepted `accepted` drafted tokens.

        Where drafts were accepted, steps without a draft in time count as DRAFTING. Where other reasons than STARTING,
        LATE and DRAFTING occurred, the steps of STARTING, during which no reason was known yet, count as the most
        frequent one.
        """
        steps = Counter(self._steps)
        unknown = 0
        if accepted:
            for passing in _PASSING:
                steps[SpeculationReason.DRAFTING] += steps.pop(passing, 0)
        elif not steps.keys() <= {*_PASSING, SpeculationReason.DRAFTING}:
            unknown = steps.pop(SpeculationReason.STARTING, 0)
        if not steps.total():
            return self.now
        reason, count = steps.most_common(1)[0]
        count += unknown
        if reason is SpeculationReason.DRAFTING and not accepted:
            return SpeculationStatus(SpeculationReason.REJECTED, steps=count)
        return replace(self._latest.get(reason, SpeculationStatus(reason)), steps=count)

    def dump(self) -> dict[str, Any]:
        """Return the record that another router needs to continue the generation."""
        return {
            reason: [count, (it := self._latest[reason]).detail, it.plain_rate, it.drafted_rate]
            for reason, count in self._steps.items()
        }

    def load(self, record: Mapping[str, Any]) -> None:
        """Continue from a record of `dump`. Raises ValueError or TypeError for a malformed record."""
        for name, (count, detail, plain_rate, drafted_rate) in record.items():
            reason = SpeculationReason(name)
            self._steps[reason] = int(count)
            self.now = self._latest[reason] = SpeculationStatus(
                reason, str(detail), 0, float(plain_rate), float(drafted_rate)
            )
