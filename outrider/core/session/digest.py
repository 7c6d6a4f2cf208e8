"""The rolling digest over a session's tokens, and the digest of a tokenizer.

    d(0) = mix64(SALT);  d(n + 1) = mix64(d(n) + PHI * (token + 1))      (mod 2**64)

The rolling digest detects copies that differ by mistake; it does not protect against forgery. See docs/protocol.md,
section 2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

MASK = 2**64 - 1
PHI = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
SALT = int.from_bytes(b"outrider", "big")


def mix64(value: int) -> int:
    """The finalizer of splitmix64 (Steele et al., 2014): a bijection of 64-bit integers."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


EMPTY = mix64(SALT)


def extend(digest: int, tokens: Iterable[int]) -> int:
    """Return the digest of a text with the digest `digest` after `tokens` are appended to it."""
    for token in tokens:  # mix64, written out: a call for each token would double the time
        digest = (digest + PHI * (token + 1)) & MASK
        digest = ((digest ^ (digest >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        digest = ((digest ^ (digest >> 27)) * 0x94D049BB133111EB) & MASK
        digest ^= digest >> 31
    return digest


class Prefix(NamedTuple):
    """The first tokens of a text, and their digest."""

    length: int
    digest: int


NOTHING = Prefix(0, EMPTY)


def tokenizer_digest(tokenizer_json: bytes) -> bytes:
    """Return 16 bytes that identify a tokenizer: the beginning of the SHA-256 of its tokenizer.json, regardless of
    spacing and key order."""
    canonical = json.dumps(json.loads(tokenizer_json), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()[:16]
