"""What a verifier drafts by itself, without a model of its own and without a round trip."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.calibration import Calibration
from outrider.core.contract import Contract
from outrider.core.growth import floor_score
from outrider.core.lookahead import Lookahead
from outrider.core.lookup import Lookup, Lookups, fits, grow
from outrider.core.ngrams import Fits
from outrider.core.tree import Node, TokenTree
from outrider.core.worth import Worth

SENDER = 0  # its key in the tree; drafters' begin at 1
CHUNK = 512  # tokens that all sessions together read on beside a step: a few milliseconds
ALWAYS = 16  # of these, what a session may read in any case: about as many as a step commits for it


class Allowance:
    """Tokens that sessions may still read on in, beside this step."""

    def __init__(self) -> None:
        self.left = CHUNK


class OwnDrafts:
    """One session's. Reads on as the session goes on; a text that it has not read to its end it says nothing of."""

    def __init__(self, lookup: Lookup, calibration: Calibration, allowance: Allowance) -> None:
        self.calibration = calibration
        self._allowance = allowance
        self.read_to = 0  # tokens that it has read
        self._lookup = lookup
        self._named = 0

    def read(self, tokens: Sequence[int]) -> bool:
        """Reads on in the session's tokens. Returns whether it has read all."""
        part = tokens[self.read_to : self.read_to + max(ALWAYS, self._allowance.left)]
        if part:
            self._allowance.left -= len(part)
            self._lookup.extend(part)
            self.read_to += len(part)
        return self.read_to == len(tokens)

    def grow(self, tree: TokenTree, *, nodes: int, depth: int, width: int, vocabulary: int, price: float) -> None:
        """Adds what may follow to the tree, as far as it is worth verifying; only ids below `vocabulary`."""
        room = tree.capacity - tree.size
        judge = self.calibration.corrected
        for node, claimed in grow(
            tree,
            self._lookup,
            nodes=nodes,
            depth=depth,
            width=width,
            vocabulary=vocabulary,
            floor=floor_score(price),
            room=room,
            judge=judge,
        ):
            node.claim = SENDER, claimed
            self._named += 1
            tree.name(node, SENDER, self._named)

    def finish(self, answer: Sequence[int]) -> None:
        """The session has ended with this answer."""
        self._lookup.finish(answer)


class LookaheadDrafts(OwnDrafts):
    """One session's whose window goes along in passes while that is worth it."""

    def __init__(self, lookahead: Lookahead, calibration: Calibration, allowance: Allowance, worth: Worth) -> None:
        super().__init__(lookahead, calibration, allowance)
        self.lookahead = lookahead
        self.worth = worth
        self.seconds = 0.0  # of a step that its window took outside the pass, on average

    def grow(self, tree: TokenTree, *, nodes: int, depth: int, width: int, vocabulary: int, price: float) -> None:
        """Likewise, anew: what it said of a place before is worth less than what it says of it now."""
        prune(tree, tree.root, SENDER)
        super().grow(tree, nodes=nodes, depth=depth, width=width, vocabulary=vocabulary, price=price)


def prune(tree: TokenTree, node: Node, sender: int) -> bool:
    """Removes the subtrees below a node that nobody but `sender` sent anything of. Returns whether nothing is left
    below it."""
    for child in list(node.children.values()):
        if prune(tree, child, sender) and tree.origins(child) == {sender}:
            tree.remove(child)
    return not node.children


class OwnDrafting:
    """Begins the own drafts of a verifier's sessions; what they learn and share is here."""

    def __init__(self, lookups: Lookups | None = None, *, ahead: bool = False) -> None:
        """By looking up what followed before, or by looking ahead."""
        self._lookups = lookups
        self._ahead = ahead
        self._allowance = Allowance()
        self._calibration = Calibration()
        self._heats = {greedy: (Fits.unknown(), Calibration(), Worth()) for greedy in (False, True)}

    def stepped(self) -> None:
        """A step is done: sessions may read on."""
        self._allowance.left = CHUNK

    def begin(self, tenant: str, contract: Contract) -> OwnDrafts | None:
        """For a session that has no tokens yet; None: nothing is drafted, or its rule does not take it."""
        if not fits(contract):
            return None
        if self._ahead:
            known, calibration, worth = self._heats[contract.greedy]
            return LookaheadDrafts(Lookahead(known), calibration, self._allowance, worth)
        if self._lookups is None:
            return None
        return OwnDrafts(self._lookups.begin(tenant, contract), self._calibration, self._allowance)
