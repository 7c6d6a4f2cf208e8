"""The answer as it grows: positions, digest, text and figures. No network, no store."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.digest import EMPTY, extend
from outrider.errors import InternalError
from router.decoding import Commit
from router.text import AnswerText
from router.usage import Figures


@dataclass(frozen=True, slots=True)
class Part:
    """What the answer took of one commit."""

    position: int  # of the first token
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # one for each token
    text: str  # that is complete now
    text_offset: int  # characters of the answer so far, these included
    stopped: bool  # by a stop string; nothing after it belongs to the answer


class Answer:
    """One answer. Commits go in as the verifier sends them, parts come out as they are to be logged and sent."""

    def __init__(self, prompt: tuple[int, ...], text: AnswerText, figures: Figures) -> None:
        self.position = len(prompt)  # of the next token
        self.digest = extend(EMPTY, prompt)
        self.figures = figures
        self._text = text
        self._sent = 0  # characters

    def take(self, commit: Commit) -> Part:
        """Adds a commit. Raises InternalError when it does not continue this answer."""
        if commit.position != self.position:
            raise InternalError(f"the verifier committed at position {commit.position}, not {self.position}")
        taken = self._text.feed(commit.tokens)
        tokens = commit.tokens[: taken.tokens]
        self.digest = extend(self.digest, tokens)
        if len(tokens) == len(commit.tokens) and self.digest != commit.digest:
            raise InternalError("the verifier's copy of the session is not the router's: digests differ")
        self.position += len(tokens)
        self._sent += len(taken.text)
        self.figures.observe(commit.report, len(tokens))
        return Part(commit.position, tokens, commit.gaps[: len(tokens)], taken.text, self._sent, taken.stopped)

    def rest(self) -> Part:
        """The text that was held back, once it is known that no more tokens come."""
        text = self._text.flush()
        self._sent += len(text)
        return Part(self.position, (), (), text, self._sent, False)
