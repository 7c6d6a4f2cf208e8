"""The answer as it grows: positions, digest, text and figures. No network, no store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.core.contract import Contract
from outrider.core.digest import EMPTY, extend
from outrider.core.logprobs import stride
from outrider.errors import Conflict, InternalError, InvalidRequest
from router.decoding import Commit
from router.text import AnswerText
from router.usage import Figures


class Reason(Enum):
    """Why a generation ended; the values stand in the log."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ABANDONED = "abandoned"  # nobody resumed it in time
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Part:
    """What the answer took of one commit."""

    position: int  # of the first token
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # one for each token; none for tokens that come from the log
    logprobs: bytes  # as the log holds them; empty unless the contract asks for them
    text: str  # that is complete now
    text_offset: int  # characters of the answer so far, these included


def beyond(next_position: int, length: int) -> Conflict:
    """The error for a client that has more than the log."""
    return Conflict(
        f"next_position: is {next_position}, but the log ends at {length}: Redis lost tokens that were "
        "sent already (docs/protocol.md, Durability); generate anew"
    )


class Answer:
    """One answer. Commits go in as the verifier sends them, parts come out as they are to be logged and sent."""

    def __init__(self, prompt: Sequence[int], contract: Contract, text: AnswerText, figures: Figures) -> None:
        self.start = self.position = len(prompt)  # of the first token, of the next one
        self.digest = extend(EMPTY, prompt)
        self.figures = figures
        self.stopped = False  # by a stop string; nothing after it belongs to the answer
        self._contract = contract
        self._stride = 0 if contract.logprobs is None else stride(contract.logprobs)
        self._text = text
        self._said = ""  # text that is complete
        self._last: int | None = None  # token of the answer

    @property
    def reason(self) -> Reason | None:
        """Why it has ended by its contract; None when it has not."""
        if self.stopped or self._last in self._contract.stop_ids:
            return Reason.STOP
        return Reason.LENGTH if self.position - self.start >= self._contract.max_tokens else None

    def take(self, commit: Commit) -> Part:
        """Adds a commit. Raises InternalError when it does not continue this answer."""
        if commit.position != self.position:
            raise InternalError(f"the verifier committed at position {commit.position}, not {self.position}")
        if len(commit.logprobs) != self._stride * len(commit.tokens):
            raise InternalError(f"the verifier sent {len(commit.logprobs)} bytes of log-probabilities")
        text, count = self._feed(commit.tokens)
        if count == len(commit.tokens) and self.digest != commit.digest:
            raise InternalError("the verifier's copy of the session is not the router's: digests differ")
        self.figures.observe(commit.report, count)
        logprobs = commit.logprobs[: count * self._stride]
        return Part(commit.position, commit.tokens[:count], commit.gaps[:count], logprobs, text, len(self._said))

    def replay(
        self, tokens: Sequence[int], logprobs: bytes, next_position: int, text_offset: int, *, ended: bool
    ) -> Part:
        """Takes the tokens that the log holds; `ended`: no more come. Returns what a client lacks who has all before
        that position and offset.

        0 and 0 stand for a client that has nothing. Raises InvalidRequest for a place that is not in the answer,
        Conflict for one beyond the log.
        """
        self._feed(tokens)
        if ended:
            self.rest()
        self.figures.replayed(len(tokens))
        next_position = max(next_position, self.start)
        if next_position > self.position:
            raise beyond(next_position, self.position)
        if text_offset > len(self._said):
            raise InvalidRequest("text_offset", f"is {text_offset}, must be at most {len(self._said)}")
        known = next_position - self.start
        return Part(
            next_position,
            tuple(tokens[known:]),
            (),
            logprobs[known * self._stride :],
            self._said[text_offset:],
            len(self._said),
        )

    def rest(self) -> Part:
        """The text that was held back, once it is known that no more tokens come; none after a stop string."""
        text = "" if self.stopped else self._text.flush()
        self._said += text
        return Part(self.position, (), (), b"", text, len(self._said))

    def _feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text that tokens complete, and how many of them belong to the answer."""
        taken = self._text.feed(tokens)
        count = taken.tokens
        self.digest = extend(self.digest, tokens[:count])
        self.position += count
        self._said += taken.text
        self.stopped = taken.stopped
        self._last = tokens[count - 1] if count else self._last
        return taken.text, count
