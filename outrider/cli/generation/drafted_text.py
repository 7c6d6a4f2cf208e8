"""Which characters of an answer drafters guessed: what terminals colour."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.client import Chunk

DRAFTED = "green"  # the style of guessed text


class DraftedText:
    """Divides the text of an answer whose request has `logprobs=0`, so that each token comes with its bytes.

    A chunk has the tokens of a verifier's step: the drafted ones, and one that the target added.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drafted: deque[bool] = deque()  # of each character that the tokens have and the text had not yet

    def pieces(self, chunk: Chunk) -> Iterator[tuple[str, bool]]:
        """Yield the chunk's text in pieces, and whether each was drafted."""
        for number, row in enumerate(chunk.logprobs, 1):
            self._drafted.extend([number < len(chunk.logprobs)] * len(self._decoder.decode(row.text)))
        start = 0
        flags = [self._drafted.popleft() if self._drafted else False for _ in chunk.text]
        for end in range(1, len(flags) + 1):
            if end == len(flags) or flags[end] != flags[start]:
                yield chunk.text[start:end], flags[start]
                start = end
