"""Tokens to text, piece by piece: characters are never split, and stop strings are found across pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from tokenizers import Tokenizer

from outrider.core.answers.reasoning import ReasoningCounter
from outrider.core.marks import begun_mark

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are not a character, or not yet
_CONTEXT = 5  # tokens of the prompt in front of the first piece when it is decoded
_LONGEST_HOLD = 64  # tokens; a character has at most four bytes, so a longer sequence is none


class Detokenizer:
    """One response's text, token by token: the pieces together are what decoding all tokens at once gives.

    A token that ends inside a character gives no text until the character is complete. Special tokens and `silent` ones
    have no text, but for those `shown`. Each piece is decoded together with the one before it, because some decoders
    treat a text's first token differently; the response's first piece follows the prompt's end.

    The stream of the tokenizers library (`DecodeStream`) has neither a bound for what it holds back nor a flush.

    Bytes that are no characters may come out as more or fewer replacement characters than at once if more than 64
    tokens in a row leave the text undecided.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        silent: Iterable[int] = (),
        shown: Collection[int] | None = (),
    ) -> None:
        """`silent`: tokens without text; `shown`: special tokens that have text; None: all have."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        special = [token for token, added_token in added.items() if added_token.special]
        self._silent = {*silent, *(token for token in special if shown is not None and token not in shown)}
        self._settled = [token for token in prompt[-_CONTEXT:] if token not in self._silent]
        self._settled_text = self._decode(self._settled)
        # If the prompt ends inside a character, this part stays in the prompt.
        if self._settled_text.endswith(REPLACEMENT):
            self._settled, self._settled_text = [], ""
        self._open: list[int] = []  # tokens whose text is still held back

    def feed(self, token: int) -> str:
        """Return the text that this token completes."""
        if token in self._silent:
            return ""
        self._open.append(token)
        text = self._decode(self._settled + self._open)
        if text.endswith(REPLACEMENT) and len(self._open) < _LONGEST_HOLD:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """Return the text of the tokens that are held back, at the end of the response."""
        return self._release(self._decode(self._settled + self._open))

    def _release(self, text: str) -> str:
        piece = text[len(self._settled_text) :]
        self._settled, self._open = self._open, []
        self._settled_text = self._decode(self._settled)
        return piece


class StopStrings:
    """End a text at the first stop string; holds back text that may become one."""

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`included`: the text ends behind the stop string, not before it."""
        self.found = ""  # the stop string that ended the text
        self._included = included
        self._stops = stops
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Return the text that can be emitted, and whether it ends there because a stop string is complete."""
        self._held += piece
        found = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        cut, self.found = min(found, default=(len(self._held) - self._undecided(), ""))
        cut += len(self.found) if self._included else 0
        text, self._held = self._held[:cut], self._held[cut:]
        return text, bool(found)

    def flush(self) -> str:
        """Return the text that was held back, at the end of a response that no stop string ended."""
        text, self._held = self._held, ""
        return text

    def _undecided(self) -> int:
        """Return the length of the longest suffix of the held text that begins a stop string."""
        return max((begun_mark(self._held, stop) for stop in self._stops), default=0)


class TextPiece(NamedTuple):
    """What a response took of some tokens."""

    text: str  # text that the tokens complete
    tokens: int  # number of tokens in the response: all, or those up to the end of a stop string
    stopped: bool  # whether a stop string is complete


class AnswerText:
    """The text of one response. Where it stops does not depend on how the tokens are split into commits.

    A stop string counts if all of it is text of tokens behind the first `unstopped` ones.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        *,
        unstopped: int = 0,
        reasoning: str = "",
        include_stop: bool = False,
    ) -> None:
        self.reasoning = ReasoningCounter(reasoning)
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, included=include_stop)
        self._unstopped = unstopped

    @property
    def stop(self) -> str:
        """The stop string that ended the text; empty: none did."""
        return self._stops.found

    def feed(self, tokens: Sequence[int]) -> TextPiece:
        """Add tokens up to the first that completes a stop string."""
        pieces: list[str] = []
        for count, token in enumerate(tokens, 1):
            piece, stopped = self._detokenizer.feed(token), False
            self.reasoning.add(piece)
            if self._unstopped:
                self._unstopped -= 1
            else:
                piece, stopped = self._stops.feed(piece)
            pieces.append(piece)
            if stopped:
                return TextPiece("".join(pieces), count, True)
        return TextPiece("".join(pieces), len(tokens), False)

    def flush(self) -> str:
        """Return the rest of the text, if no stop string ended it."""
        piece, stopped = self._stops.feed(self._detokenizer.flush())
        return piece if stopped else piece + self._stops.flush()
