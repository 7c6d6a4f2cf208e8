"""The rolling digest over a session's tokens, and the digest of a tokenizer.

    d(0) = mix64(SALT);  d(n + 1) = mix64(d(n) + PHI * (token + 1))      (mod 2**64)

The rolling digest detects copies that differ by mistake; it does not protect against forgery. See docs/protocol.md,
section 2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

MASK = 2**64 - 1
PHI = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_DIGEST_BYTES = 16
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


class TokenizerContent(NamedTuple):
    """What identifies a tokenizer: what its ids stand for, and what makes ids of a text."""

    pieces: Mapping[int, str]  # tokens by id
    merges: Sequence[str]  # two tokens with a space between them, first ones first; none where pieces have scores

    @property
    def digest(self) -> bytes:
        """16 bytes. SentencePiece's mark is a space in them, which some formats write instead."""
        ids = sorted(self.pieces)
        content = [ids, [self.pieces[id_] for id_ in ids], self.merges]
        written = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("\u2581", " ")
        return hashlib.sha256(written.encode("utf-8", "surrogatepass")).digest()[:_DIGEST_BYTES]

    def difference(self, other: TokenizerContent) -> str:
        """Return what differs from another tokenizer, for people; "": nothing does."""
        for id_ in sorted(self.pieces.keys() | other.pieces.keys()):
            ours, theirs = self.pieces.get(id_), other.pieces.get(id_)
            if ours is None or theirs is None:
                return f"id {id_} is {ours or theirs!r:.60} in {'the second' if ours is None else 'the first'} alone"
            if ours.replace("\u2581", " ") != theirs.replace("\u2581", " "):
                return f"id {id_} is {ours!r:.60} and {theirs!r:.60}"
        pairs = zip_longest(self.merges, other.merges)
        found = next(((at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        return "" if found is None else "merge {} is {!r:.60} and {!r:.60}".format(*found)


def tokenizer_digest(tokenizer_json: bytes) -> bytes:
    """Return 16 bytes that identify the tokenizer of a tokenizer.json: see `parsed_tokenizer_digest`."""
    return parsed_tokenizer_digest(json.loads(tokenizer_json))


def parsed_tokenizer_digest(tokenizer: object) -> bytes:
    """Return 16 bytes that identify the tokenizer of a parsed tokenizer.json: those of its content. Without a
    vocabulary they are of the JSON itself."""
    content = tokenizer_content(tokenizer)
    return former_tokenizer_digest(tokenizer) if content is None else content.digest


def former_tokenizer_digest(tokenizer: object) -> bytes:
    """Return what identified a tokenizer before its content did: 16 bytes of its JSON, regardless of spacing and key
    order. The cards of speculators that were trained then have it."""
    canonical = json.dumps(tokenizer, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()[:_DIGEST_BYTES]


def tokenizer_content(tokenizer: object) -> TokenizerContent | None:
    """Return what identifies a tokenizer, from the content of its tokenizer.json; None if that has no vocabulary."""
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    if not isinstance(tokenizer, dict) or not isinstance(model, dict):
        return None
    vocabulary, merges = model.get("vocab"), () if model.get("byte_fallback") else model.get("merges") or ()
    try:
        if isinstance(vocabulary, list):  # with scores, in the order of ids
            pieces = {id_: str(entry[0]) for id_, entry in enumerate(vocabulary)}
        elif isinstance(vocabulary, dict):
            pieces = {int(id_): piece for piece, id_ in vocabulary.items()}
        else:
            return None
        pieces |= {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens") or ()}
        return TokenizerContent(pieces, [it if isinstance(it, str) else " ".join(it) for it in merges])
    except (TypeError, ValueError, KeyError, IndexError):
        return None
