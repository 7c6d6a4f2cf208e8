"""What a verifier drafts by itself, without a model and without a round trip."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.calibration import Calibration
from outrider.core.growth import floor_score
from outrider.core.lookup import Lookup, grow
from outrider.core.tree import TokenTree

SENDER = 0  # its key in the tree; drafters' begin at 1
CHUNK = 512  # tokens that are read on at a time: a few milliseconds, beside a step that reads a prompt's chunk


class OwnDrafts:
    """One session's. Reads on as the session goes on; a text that it has not read to its end it says nothing of."""

    def __init__(self, lookup: Lookup, calibration: Calibration) -> None:
        self.calibration = calibration
        self._lookup = lookup
        self._read = 0
        self._named = 0

    def read(self, tokens: Sequence[int]) -> bool:
        """Reads on in the session's tokens. Returns whether it has read all."""
        part = tokens[self._read : self._read + CHUNK]
        if part:
            self._lookup.extend(part)
            self._read += len(part)
        return self._read == len(tokens)

    def grow(self, tree: TokenTree, *, nodes: int, depth: int, width: int, price: float) -> None:
        """Adds what may follow to the tree, as far as it is worth verifying."""
        room = tree.capacity - tree.size
        judge = self.calibration.corrected
        for node, claimed in grow(
            tree, self._lookup, nodes=nodes, depth=depth, width=width, floor=floor_score(price), room=room, judge=judge
        ):
            node.claim = SENDER, claimed
            self._named += 1
            tree.name(node, SENDER, self._named)

    def finish(self, answer: Sequence[int]) -> None:
        """The session has ended with this answer."""
        self._lookup.finish(answer)
