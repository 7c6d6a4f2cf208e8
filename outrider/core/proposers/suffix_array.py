"""The suffix array of a text that is larger than memory: the start positions of all suffixes, in the suffixes' order.

Suffixes are compared only by their first `COMPARED` tokens, and suffixes that agree in these are sorted by position. A
search for a match of at most `COMPARED` tokens gives the same result, and long repetitions do not slow the sorting.
Instead of doubling prefixes over the whole text (Manber and Myers, 1993), the suffixes are split into parts by their
first token, then by the next one where a part is still too large, and each part is sorted in memory, some tokens at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

COMPARED = 32  # tokens
PART = 2**21  # suffixes that are sorted at once; each takes some 80 bytes during the sort
BLOCK = 2**22  # tokens that are read at once

Tokens = NDArray[np.uint16] | NDArray[np.uint32]  # in memory, or memory-mapped


def sorted_suffixes(tokens: Tokens, stop: int, *, part: int = PART) -> Iterator[NDArray[np.uint32]]:
    """Yield, part by part, the positions of all tokens below `stop`, in the order of the suffixes that begin there.

    `tokens` has at most 2**32 entries: [n]. Beyond its end the text counts as continued with its last token.
    """
    counts = np.zeros(stop, dtype=np.int64)
    for block in _blocks(tokens):
        counts += np.bincount(block, minlength=stop)[:stop]
    for low, high in _ranges(counts, part):
        found = [
            np.flatnonzero((block >= low) & (block < high)) + index * BLOCK
            for index, block in enumerate(_blocks(tokens))
        ]
        yield from _sorted_parts(tokens, np.concatenate(found), 1, part)


def _blocks(tokens: Tokens) -> Iterator[Tokens]:
    for first in range(0, len(tokens), BLOCK):
        yield tokens[first : first + BLOCK]


def _ranges(counts: NDArray[np.int64], max_count: int) -> Iterator[tuple[int, int]]:
    """Split the token ids into ranges [low, high) with at most `max_count` occurrences each, or of a single id."""
    low = 0
    while low < len(counts):
        total = np.cumsum(counts[low:])
        high = low + max(1, int(np.searchsorted(total, max_count, side="right")))
        if total[high - low - 1]:
            yield low, high
        low = high


def _sorted_parts(tokens: Tokens, found: NDArray[np.int64], agreed: int, part: int) -> Iterator[NDArray[np.uint32]]:
    """Yield the suffixes at the positions `found`, in order. If they are more than `part`, they agree in their first
    `agreed` tokens."""
    if len(found) <= part or agreed == COMPARED:
        yield _sorted(tokens, found)
        return
    following = _at(tokens, found + agreed)
    for low, high in _ranges(np.bincount(following), part):
        yield from _sorted_parts(tokens, found[(following >= low) & (following < high)], agreed + 1, part)


def _sorted(tokens: Tokens, found: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Sort by some tokens, then suffixes that still agree by the next ones, and at the end by position."""
    groups = np.zeros(len(found), dtype=np.int64)  # index of the first suffix that agrees with this one so far
    tied = np.arange(len(found))  # indices of those that agree with others
    at_once = 8 // tokens.itemsize
    for passed in range(0, COMPARED + at_once, at_once):
        if not tied.size:
            break
        keys = _words(tokens, found[tied] + passed, at_once) if passed < COMPARED else found[tied].astype(np.uint64)
        if passed:
            ranks = np.unique(keys, return_inverse=True)[1]
            keys = (groups[tied] << 32 | ranks).astype(np.uint64)
        order = np.argsort(keys)
        keys = keys[order]
        found[tied] = found[tied][order]
        first = np.concatenate([[True], keys[1:] != keys[:-1]])
        groups[tied] = tied[first][np.cumsum(first) - 1]
        alone = first & np.concatenate([first[1:], [True]])
        tied = tied[~alone]
    return found.astype(np.uint32)


def _words(tokens: Tokens, positions: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """Return, for each position, `count` tokens from there as one number with the same order: [positions]."""
    words = np.zeros(len(positions), dtype=np.uint64)
    for step in range(count):
        words = words << np.uint64(8 * tokens.itemsize) | _at(tokens, positions + step)
    return words


def _at(tokens: Tokens, positions: NDArray[np.int64]) -> Tokens:
    return tokens[np.minimum(positions, len(tokens) - 1)]
