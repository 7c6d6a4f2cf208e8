"""Log-probabilities as the router sends them: a fortieth of what Python's objects of them take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from outrider.wire import inference as wire


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the raw model's, at temperature 1 and before any filter."""

    logprob: float  # of the committed token
    top: tuple[tuple[int, float], ...]  # the likeliest token ids with their log-probabilities, likeliest first
    text: bytes = b""  # of the token, in UTF-8; it may be a part of a character
    top_texts: tuple[bytes, ...] = ()  # of the likeliest tokens


class LogprobRows(Sequence[TokenLogprobs]):
    """The log-probabilities of several tokens. Each is decoded when it is read."""

    __slots__ = ("rows",)

    def __init__(self, rows: Iterable[bytes] = ()) -> None:
        """`rows`: a serialized TokenLogprobs of the wire for each token."""
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobRows: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobRows:
        return LogprobRows(self.rows[index]) if isinstance(index, slice) else _decoded(self.rows[index])

    def __eq__(self, other: object) -> bool:
        """Return whether all rows are the same; `other` may be any sequence of them."""
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"LogprobRows({[*self]})"


NO_ROWS = LogprobRows()


def _decoded(row: bytes) -> TokenLogprobs:
    entry = wire.TokenLogprobs.FromString(row)
    top = tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return TokenLogprobs(entry.logprob, top, entry.text, tuple(entry.top_texts))
