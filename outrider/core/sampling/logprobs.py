"""The encoding of log-probabilities on the wire and in the token log: a fixed number of bytes for each token.

A token's entry has 4 + 8n bytes, little-endian: its own log-probability (float32), then n times a token id (uint32) and
its log-probability (float32), most likely first. All are the raw model's: at temperature 1, before any filter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.compiled import log_total
from outrider.core.sampling.filters import FloatRow

_ENTRY = np.dtype([("id", "<u4"), ("logprob", "<f4")])


class LogprobEntry(NamedTuple):
    """The log-probabilities at one position."""

    logprob: float  # of the committed token
    top_ids: list[int]  # the most likely tokens, most likely first
    top_logprobs: list[float]  # their log-probabilities


class ScoredTokens(NamedTuple):
    """Log-probabilities of given tokens."""

    logprobs: bytes  # an entry for each
    ranks: tuple[int, ...]  # of each among all tokens; 1: the likeliest one


def stride(alternatives: int) -> int:
    """Return the size of one token's entry in bytes."""
    return 4 + 8 * alternatives


def pack(logits: NDArray[np.float32], token: int, alternatives: int) -> bytes:
    """Return the entry of `token`, committed after a row of logits [vocabulary].

    The entry has `alternatives` alternatives; where the vocabulary is smaller, the rest has log-probability -inf.
    """
    best, scores, total = log_total(logits, min(alternatives, logits.size))
    return packed(float(logits[token]), best, scores, total, alternatives)


def score(rows: Iterable[NDArray[np.float32]], tokens: Sequence[int], alternatives: int) -> ScoredTokens:
    """Return the entries of tokens, one after each row of logits [vocabulary], and their ranks."""
    entries, ranks = bytearray(), []
    for row, token in zip(rows, tokens, strict=True):
        entries += pack(row, token, alternatives)
        ranks.append(int(np.count_nonzero(row > row[token])) + 1)
    return ScoredTokens(bytes(entries), tuple(ranks))


def packed(logit: float, best: NDArray[np.int64], scores: FloatRow, total: float, alternatives: int) -> bytes:
    """Return the entry of a token with this logit. `best`, `scores`: the likeliest tokens and their logits.

    `total`: the logarithm of the sum of exp(logits).
    """
    top = np.zeros(alternatives, _ENTRY)
    top["logprob"] = -np.inf
    top["id"][: best.size] = best
    top["logprob"][: best.size] = scores - total
    return np.float32(logit - total).tobytes() + top.tobytes()


def narrowed(blob: bytes, held: int, wanted: int | None) -> bytes:
    """Return the entries with only the first `wanted` of their `held` alternatives; no bytes where `wanted` is None."""
    if wanted is None:
        return b""
    entries = np.frombuffer(blob, np.uint8).reshape(-1, stride(held))
    return entries[:, : stride(wanted)].tobytes()


def alternatives(blob: bytes, held: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the ids of all entries' alternatives, and their log-probabilities: [tokens, held] each."""
    entries = np.frombuffer(blob, np.uint8).reshape(-1, stride(held))
    top = np.ascontiguousarray(entries[:, 4:]).view(_ENTRY)
    return top["id"].astype(np.int64), top["logprob"].astype(np.float32)


def unpack(blob: bytes, alternatives: int) -> list[LogprobEntry]:
    """Return the entries of several tokens. Raises ValueError when `blob` is not a whole number of entries."""
    size = stride(alternatives)
    if len(blob) % size:
        raise ValueError(f"{len(blob)} bytes are not a whole number of entries of {size}")
    rows = np.frombuffer(blob, np.dtype([("logprob", "<f4"), ("top", _ENTRY, (alternatives,))]))
    columns = rows["logprob"].tolist(), rows["top"]["id"].tolist(), rows["top"]["logprob"].tolist()
    return [*map(LogprobEntry, *columns)]
