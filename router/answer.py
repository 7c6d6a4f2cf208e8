"""The answer as it grows: positions, digest, text and figures. No network, no store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.core.contract import Contract
from outrider.core.digest import EMPTY, extend
from outrider.core.logprobs import stride
from outrider.errors import Conflict, InternalError, InvalidRequest
from router.decoding import Commit
from router.text import AnswerText
from router.usage import Figures

RECALLED = 64  # tokens of a part that comes from the log: each costs the event loop about a millisecond


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


def after(parts: Iterable[Part], next_position: int, text_offset: int) -> Iterator[Part]:
    """What a client lacks of an answer's parts that has all before that position and that offset of the text."""
    for part in parts:
        known = min(max(0, next_position - part.position), len(part.tokens))
        text = part.text[max(0, text_offset - part.text_offset + len(part.text)) :]
        if known < len(part.tokens) or text:
            logprobs = part.logprobs[known * (len(part.logprobs) // max(1, len(part.tokens))) :]
            position = max(next_position, part.position)
            yield Part(position, part.tokens[known:], part.gaps[known:], logprobs, text, part.text_offset)


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

    async def recall(self, tokens: Sequence[int], logprobs: bytes) -> list[Part]:
        """Takes tokens that the log holds behind those taken so far, a few at a time: other sessions do not wait."""
        parts = []
        for first in range(0, len(tokens), RECALLED):
            some, position = tuple(tokens[first : first + RECALLED]), self.position
            text, _ = self._feed(some)
            self.figures.replayed(len(some))
            beside = logprobs[first * self._stride : (first + len(some)) * self._stride]
            parts.append(Part(position, some, (), beside, text, self.text_offset))
            await asyncio.sleep(0)
        return parts

    def check_reached(self, next_position: int, text_offset: int) -> None:
        """Raises InvalidRequest for a text offset that is not in the answer, Conflict for a position beyond the log."""
        if next_position > self.position:
            raise beyond(next_position, self.position)
        if text_offset > self.text_offset:
            raise InvalidRequest("text_offset", f"is {text_offset}, must be at most {self.text_offset}")

    @property
    def text_offset(self) -> int:
        """Characters of the answer that are complete."""
        return len(self._said)

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
