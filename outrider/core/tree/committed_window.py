"""The committed tokens just before a tree's root, with their digests, against which a delta's root is checked."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.session.digest import NOTHING, Prefix, extend
from outrider.core.tree.delta import DigestMismatch
from outrider.errors import InvalidRequest

ALIAS_SPAN = 256  # positions behind the root at which a late node may still become an alias of a committed token


def settled_prefix(tokens: Sequence[int], known: Prefix = NOTHING) -> Prefix:
    """Return the prefix of `tokens`, with its digest, that a tree over them need not read.

    `known` is a shorter prefix whose digest is known; the time taken is proportional to the tokens behind it.
    """
    length = max(known.length, len(tokens) - ALIAS_SPAN - 1)
    return Prefix(length, extend(known.digest, tokens[known.length : length]))


class CommittedWindow:
    """The last `ALIAS_SPAN` + 1 committed tokens by position, and the digest of all tokens up to each of them."""

    def __init__(self, tokens: Sequence[int], known: Prefix) -> None:
        """Begin with `tokens`, of which the digest of the prefix `known` is known. The tokens in it are left out."""
        known = settled_prefix(tokens, known)
        self.last = known.length - 1  # position of the last committed token
        self.digest = known.digest  # over all committed tokens
        self._tokens: dict[int, int] = {}  # in order of position
        self._digests: dict[int, int] = {}
        for token in tokens[known.length :]:
            self.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def shortest_prefix(self) -> Prefix:
        """The shortest prefix of the committed tokens whose digest is held, to begin another window with."""
        position = next(iter(self._tokens))
        return NOTHING if position == self.last else Prefix(position + 1, self._digests[position])

    def token(self, position: int) -> int | None:
        """Return the token committed at a position, or None where it is not held."""
        return self._tokens.get(position)

    def append(self, token: int) -> None:
        """Add the next committed token."""
        self.last += 1
        self.digest = extend(self.digest, (token,))
        self._tokens[self.last] = token
        self._digests[self.last] = self.digest

    def expire(self) -> int:
        """Let go of tokens too far behind. Return the first position that is not."""
        oldest = self.last - ALIAS_SPAN
        while (position := next(iter(self._tokens))) < oldest:
            del self._tokens[position], self._digests[position]
        return oldest

    def check_root(self, position: int, digest: int) -> None:
        """Check the root under which another copy of the tree sends nodes.

        Raises InvalidRequest when nothing is committed at `position`, and DigestMismatch when the tokens up to it
        differ.
        """
        if not 0 <= position <= self.last:
            raise InvalidRequest("root_position", f"is {position}, must be 0 to {self.last}, the last committed")
        known = self._digests.get(position)
        if known is not None and known != digest:
            raise DigestMismatch(f"at position {position}")
