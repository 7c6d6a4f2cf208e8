"""The rolling digest over a session's tokens, and the digest of a tokenizer.

    d(0) = mix64(SALT);  d(n + 1) = mix64(d(n) + PHI * (token + 1))      (mod 2**64)

The rolling digest detects copies that differ by mistake; it does not protect against forgery. See docs/protocol.md,
section 2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
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


def tokenizer_digest(tokenizer_json: bytes) -> bytes:
    """Return 16 bytes that identify the vocabulary of a tokenizer.json: see `parsed_tokenizer_digest`."""
    return parsed_tokenizer_digest(json.loads(tokenizer_json))


def parsed_tokenizer_digest(tokenizer: object) -> bytes:
    """Return 16 bytes that identify the vocabulary of a parsed tokenizer.json: see `pieces_digest`. Without one, they
    are of the JSON itself."""
    pieces = tokenizer_pieces(tokenizer)
    return former_tokenizer_digest(tokenizer) if pieces is None else pieces_digest(pieces)


def former_tokenizer_digest(tokenizer: object) -> bytes:
    """Return what identified a tokenizer before its vocabulary did: 16 bytes of its JSON, regardless of spacing and key
    order. The cards of speculators that were trained then have it."""
    canonical = json.dumps(tokenizer, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()[:_DIGEST_BYTES]


def pieces_digest(pieces: Mapping[int, str]) -> bytes:
    """Return 16 bytes that identify a vocabulary: the tokens by their ids. SentencePiece's mark is a space in them,
    which some formats write instead."""
    ids = sorted(pieces)
    vocabulary = json.dumps([ids, [pieces[id_] for id_ in ids]], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(vocabulary.replace("\u2581", " ").encode("utf-8", "surrogatepass")).digest()[:_DIGEST_BYTES]


def pieces_difference(ours: Mapping[int, str], theirs: Mapping[int, str]) -> str:
    """Return what differs between two vocabularies, for people: the first id that is not one token in both."""
    for id_ in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(id_), theirs.get(id_)
        if one is None or other is None:
            return f"id {id_} is {one or other!r:.60} in {'the second' if one is None else 'the first'} alone"
        if one.replace("\u2581", " ") != other.replace("\u2581", " "):
            return f"id {id_} is {one!r:.60} and {other!r:.60}"
    return ""


def tokenizer_pieces(tokenizer: object) -> dict[int, str] | None:
    """Return the tokens of a tokenizer by their ids, from the content of its tokenizer.json; None if it has none."""
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = tokenizer.get("added_tokens") if isinstance(tokenizer, dict) else None
    try:
        if isinstance(vocabulary, list):  # with scores, in the order of ids
            pieces = {id_: str(entry[0]) for id_, entry in enumerate(vocabulary)}
        elif isinstance(vocabulary, dict):
            pieces = {int(id_): piece for piece, id_ in vocabulary.items()}
        else:
            return None
        return pieces | {int(token["id"]): str(token["content"]) for token in added or ()}
    except (TypeError, ValueError, KeyError, IndexError):
        return None
