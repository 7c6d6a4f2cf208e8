"""The response as it grows: positions, digest, text and usage. No network, no store."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from outrider.core.answers.answer_reader import PLAIN_FORM, ModelForm
from outrider.core.sampling.logprobs import stride
from outrider.core.session.contract import Contract, FinishReason
from outrider.core.session.decoding import PromptScores, ReceivedCommit
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Conflict, InternalError, InvalidRequest
from outrider.limits.fair_turns import LoopTurns
from router.counters.usage_stats import UsageStats
from router.text.detokenizer import AnswerText

REPLAY_TOKENS = 64  # tokens in one part that comes from the log; each part takes about half a millisecond
NO_SCORE = struct.pack("<f", math.nan)  # log-probability of a prompt's first token, which follows none


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """What the response took of one commit, or a part of the prompt with its log-probabilities."""

    position: int  # position of the first token
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # one for each token; empty for tokens from the log
    logprobs: bytes  # as the log holds them; empty unless the contract asks for them
    text: str  # the text that these tokens completed
    text_offset: int  # characters of the response so far, this text included
    ranks: tuple[
        int, ...
    ] = ()  # of the prompt: each token's rank, 0 for the first one; empty for the response's tokens

    @property
    def replayed(self) -> bool:
        """Whether its tokens come from the log."""
        return len(self.tokens) > len(self.gaps)


def unsent_parts(parts: Iterable[ResponsePart], next_position: int, text_offset: int) -> Iterator[ResponsePart]:
    """Yield what a client lacks of a response's parts if it has everything before `next_position` and `text_offset`."""
    for part in parts:
        known = min(max(0, next_position - part.position), len(part.tokens))
        text = part.text[max(0, text_offset - part.text_offset + len(part.text)) :]
        if known < len(part.tokens) or text:
            logprobs = part.logprobs[known * (len(part.logprobs) // max(1, len(part.tokens))) :]
            position = max(next_position, part.position)
            yield ResponsePart(position, part.tokens[known:], part.gaps[known:], logprobs, text, part.text_offset)


def position_beyond_log(next_position: int, length: int) -> Conflict:
    """Return the error for a client that has more tokens than the log."""
    return Conflict(
        f"next_position: is {next_position}, but the log ends at {length}: Redis lost tokens that were "
        "sent already (docs/protocol.md, Durability); generate anew"
    )


class Response:
    """One response. The verifier's commits go in; parts to log and to send come out.

    Where the contract wants the prompt's log-probabilities, `scored` is the position up to which parts with them were
    made; they go out before the response's own.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        contract: Contract,
        text: AnswerText,
        usage: UsageStats,
        form: ModelForm = PLAIN_FORM,
    ) -> None:
        """`form`: in which the model writes its answer."""
        self.form = form
        self.start = self.position = len(prompt)  # positions of the first token and of the next one
        self.digest = extend(EMPTY, prompt)
        self.usage = usage
        self.stopped = False  # by a stop string; later tokens do not belong to the response
        self._contract = contract
        self._stride = 0 if contract.logprobs is None else stride(contract.logprobs)
        self._text = text
        self.text_offset = 0  # characters of the response that are complete
        self._last: int | None = None  # the response's last token
        self.scored = self.start if contract.prompt_logprobs is None else 0
        self._prompt_stride = stride(contract.prompt_logprobs or 0)

    @property
    def reason(self) -> FinishReason | None:
        """Why the response has ended by its contract; None while it has not."""
        if self.stopped or self._last in self._contract.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.position - self.start >= self._contract.max_tokens else None

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still wanted."""
        return self.scored < self.start

    def first_token(self, prompt: Sequence[int]) -> ResponsePart:
        """Return the part of the prompt's first token, which has no log-probability."""
        empty = bytes(self._prompt_stride - len(NO_SCORE))
        return self._prompt_part(prompt[:1], NO_SCORE + empty, (0,))

    def add_scores(self, scores: PromptScores, prompt: Sequence[int]) -> list[ResponsePart]:
        """Add log-probabilities of the prompt. Raises InternalError when they do not continue those before."""
        count, size = len(scores.ranks), self._prompt_stride
        if scores.position != self.scored or count > self.start - self.scored or len(scores.logprobs) != count * size:
            raise InternalError(
                f"the verifier sent {len(scores.logprobs)} bytes of log-probabilities for {count} tokens of the prompt "
                f"from position {scores.position}, not {self.scored}, on"
            )
        parts = []
        for first in range(0, count, REPLAY_TOKENS):
            ranks = scores.ranks[first : first + REPLAY_TOKENS]
            tokens = prompt[self.scored : self.scored + len(ranks)]
            parts.append(self._prompt_part(tokens, scores.logprobs[first * size : (first + len(ranks)) * size], ranks))
        return parts

    def _prompt_part(self, tokens: Sequence[int], logprobs: bytes, ranks: tuple[int, ...]) -> ResponsePart:
        position = self.scored
        self.scored += len(ranks)
        return ResponsePart(position, tuple(tokens), (), logprobs, "", 0, ranks)

    @property
    def stop(self) -> str:
        """The stop string that ended the response; empty: none did."""
        return self._text.stop if self.stopped else ""

    def add_commit(self, commit: ReceivedCommit) -> ResponsePart:
        """Add a commit. Raises InternalError when it does not continue this response."""
        if self.scoring:
            raise InternalError("the verifier committed before it sent the prompt's log-probabilities; is it older?")
        if commit.position != self.position:
            raise InternalError(f"the verifier committed at position {commit.position}, not {self.position}")
        if len(commit.logprobs) != self._stride * len(commit.tokens):
            raise InternalError(f"the verifier sent {len(commit.logprobs)} bytes of log-probabilities")
        text, count = self._feed(commit.tokens)
        if count == len(commit.tokens) and self.digest != commit.digest:
            raise InternalError("the verifier's copy of the session is not the router's: digests differ")
        self.usage.observe(commit.report, count)
        logprobs = commit.logprobs[: count * self._stride]
        return ResponsePart(
            commit.position, commit.tokens[:count], commit.gaps[:count], logprobs, text, self.text_offset
        )

    async def replay(self, tokens: Sequence[int], logprobs: bytes, turns: LoopTurns, tenant: str) -> list[ResponsePart]:
        """Add tokens from the log behind those added so far, in small parts, each in a turn of the tenant."""
        parts = []
        for first in range(0, len(tokens), REPLAY_TOKENS):
            chunk = tuple(tokens[first : first + REPLAY_TOKENS])
            chunk_logprobs = logprobs[first * self._stride : (first + len(chunk)) * self._stride]
            parts.append(await turns.run(tenant, self._replay_part, chunk, chunk_logprobs))
        return parts

    def _replay_part(self, tokens: tuple[int, ...], logprobs: bytes) -> ResponsePart:
        position = self.position
        text, _ = self._feed(tokens)
        self.usage.add_replayed(len(tokens))
        return ResponsePart(position, tokens, (), logprobs, text, self.text_offset)

    def check_reached(self, next_position: int, text_offset: int) -> None:
        """Raise InvalidRequest for a text offset outside the response, Conflict for a position beyond the log."""
        if next_position > self.position:
            raise position_beyond_log(next_position, self.position)
        if text_offset > self.text_offset:
            raise InvalidRequest("text_offset", f"is {text_offset}, must be at most {self.text_offset}")

    def flush(self) -> ResponsePart:
        """Return the text that was held back, once no more tokens come; empty after a stop string."""
        text = "" if self.stopped else self._text.flush()
        self.text_offset += len(text)
        return ResponsePart(self.position, (), (), b"", text, self.text_offset)

    def _feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Add tokens. Return the text that they complete, and how many of them belong to the response."""
        piece = self._text.feed(tokens)
        count = piece.tokens
        self.digest = extend(self.digest, tokens[:count])
        self.usage.reasoning_tokens = self._text.reasoning.tokens
        self.position += count
        self.text_offset += len(piece.text)
        self.stopped = piece.stopped
        self._last = tokens[count - 1] if count else self._last
        return piece.text, count
