"""Drafting on the verifier itself, without a draft model and without a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.core.construction.expansion import floor_score
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.trial_gate import TrialGate
from outrider.core.proposers.lookahead import Lookahead
from outrider.core.proposers.lookup import Lookup, Lookups, fits, grow
from outrider.core.proposers.ngram_pool import GramFits
from outrider.core.sampling.grammar import GrammarState
from outrider.core.session.contract import Contract
from outrider.core.stats import Ema
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree

SENDER = 0  # the proposer's key in the tree; drafters' keys begin at 1
CHUNK = 512  # tokens that all proposers together read beside a step; takes a few milliseconds
ALWAYS = 16  # tokens that each may read in any case: about as many as a step commits for a session

EMA_WEIGHT = 0.1  # weight of the latest step in an average


class ReadAllowance:
    """Tokens that proposers may still read beside the present step."""

    def __init__(self) -> None:
        self.left = CHUNK


class NgramProposer:
    """Proposes for one session. It reads the session's tokens as they come, and proposes only when it has read all of
    them.
    """

    def __init__(self, lookup: Lookup, calibration: Calibration, allowance: ReadAllowance, *, public: bool) -> None:
        """`public`: everybody may see what it proposes, also what is not accepted."""
        self.public = public
        self.calibration = calibration
        self._allowance = allowance
        self.read_to = 0  # tokens that it has read
        self._lookup = lookup
        self._last_id = 0

    def read(self, tokens: Sequence[int]) -> bool:
        """Read more of the session's tokens, within the allowance. Return whether it has read all."""
        part = tokens[self.read_to : self.read_to + max(ALWAYS, self._allowance.left)]
        if part:
            self._allowance.left -= len(part)
            self._lookup.extend(part)
            self.read_to += len(part)
        return self.read_to == len(tokens)

    def grow(
        self,
        tree: TokenTree,
        *,
        nodes: int,
        depth: int,
        width: int,
        vocabulary: int,
        min_path_score: float,
        grammar: GrammarState | None = None,
    ) -> None:
        """Add likely continuations that are worth verifying to the tree; only ids below `vocabulary`, and such as the
        `grammar` allows."""
        self.make_room(tree)
        room = tree.capacity - tree.size
        corrected = self.calibration.corrected
        for node, claimed in grow(
            tree,
            self._lookup,
            nodes=nodes,
            depth=depth,
            width=width,
            vocabulary=vocabulary,
            floor=floor_score(min_path_score),
            room=room,
            calibrate=corrected,
            grammar=grammar,
        ):
            node.claim = SENDER, claimed
            self._last_id += 1
            tree.ids.name(node, SENDER, self._last_id)

    def make_room(self, tree: TokenTree) -> None:
        """Prepare the tree for new proposals."""

    def finish(self, answer: Sequence[int]) -> None:
        """Take the answer of the session, which has ended."""
        self._lookup.finish(answer)


class LookaheadProposer(NgramProposer):
    """Proposes for one session, with a lookahead window in the passes while that pays."""

    def __init__(
        self, lookahead: Lookahead, calibration: Calibration, allowance: ReadAllowance, trial_gate: TrialGate
    ) -> None:
        super().__init__(lookahead, calibration, allowance, public=True)
        self.lookahead = lookahead
        self.trial_gate = trial_gate
        self.seconds = Ema(EMA_WEIGHT)  # average seconds that its window takes of a step outside the pass

    def make_room(self, tree: TokenTree) -> None:
        """Remove its earlier nodes: new ones are better than those it proposed before."""
        prune(tree, tree.root, SENDER)


def prune(tree: TokenTree, node: Node, sender: int) -> bool:
    """Remove subtrees that only `sender` has drafted. Return whether the node has no children left."""
    for child in list(node.children.values()):
        if prune(tree, child, sender) and tree.ids.origins(child) == {sender}:
            tree.remove(child)
    return not node.children


class NgramProposers:
    """Makes the n-gram proposers of a verifier's sessions, and holds what they learn and share."""

    def __init__(self, lookups: Lookups | None = None, *, ahead: bool = False, public: bool = False) -> None:
        """`lookups`: propose what followed before, by these; `ahead`: propose by lookahead instead; `public`: everybody
        may see what is proposed, also what is not accepted."""
        self._lookups = lookups
        self._public = public
        self._ahead = ahead
        self._allowance = ReadAllowance()
        self._calibration = Calibration()
        self._shared = {greedy: (GramFits.unknown(), Calibration(), TrialGate()) for greedy in (False, True)}

    def estimates(self) -> dict[str, Any]:
        """Return how far proposals are to be trusted, and what lookahead brings."""
        return {
            "calibration": self._calibration.estimates(),
            "lookahead": {
                "greedy" if greedy else "sampled": {"calibration": calibration.estimates(), **gate.estimates()}
                for greedy, (_, calibration, gate) in self._shared.items()
            }
            if self._ahead
            else {},
        }

    def renew_allowance(self) -> None:
        """Renews the read allowance after a step."""
        self._allowance.left = CHUNK

    def begin(self, tenant: str, contract: Contract) -> NgramProposer | None:
        """Return a proposer for a session without tokens; None: there is none, or the rule does not take it."""
        if not fits(contract):
            return None
        if self._ahead:
            known, calibration, trial_gate = contract.own_or_shared(self._shared[contract.greedy])
            return LookaheadProposer(Lookahead(known), calibration, self._allowance, trial_gate)
        if self._lookups is None:
            return None
        lookup, calibration = self._lookups.begin(tenant, contract), contract.own_or_shared(self._calibration)
        return NgramProposer(lookup, calibration, self._allowance, public=self._public)
