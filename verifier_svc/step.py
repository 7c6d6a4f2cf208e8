"""What a step does for each of its sessions, and what the models say after that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.filters import FloatRow
from outrider.core.logprobs import pack
from outrider.core.rules import VERIFY, SeededChance
from outrider.core.sampler import Choice
from outrider.core.tree import Node
from outrider.engine.batch import Segment
from verifier_svc.session import Session


@dataclass(slots=True)
class Work:
    """What one session contributes to a step."""

    session: Session
    start: int  # tokens[start : end] have no KV yet and get it now
    end: int
    nodes: list[Node] = field(default_factory=list)  # of the tree, parents before children
    parents: list[int] = field(default_factory=list)  # for each, the row it follows; row 0 is the root

    @property
    def chooses(self) -> bool:
        """Whether the step commits for this session; a chunk inside a prompt does not."""
        return self.end == len(self.session.tokens)

    def add(self, node: Node, rows: dict[Node, int]) -> None:
        """Takes a node whose parent is the root or was taken; `rows` says which row each taken node has."""
        self.parents.append(rows.get(node.parent, 0) if node.parent else 0)
        self.nodes.append(node)
        rows[node] = len(self.nodes)

    def segment(self) -> Segment:
        """The rows of the packed pass: the pending tokens as a chain, then the nodes with their ancestors."""
        session, chain, count = self.session, self.end - self.start, len(self.nodes)
        tokens = np.array(session.tokens[self.start : self.end] + [node.token for node in self.nodes])
        positions = np.arange(self.start, self.start + chain + count)
        mask = None
        if count:
            positions[chain:] = [node.position for node in self.nodes]
            mask = np.tri(chain + count, dtype=np.bool_)
            mask[chain:] = False
            for row, parent in enumerate(self.parents, chain):
                mask[row] = mask[chain - 1 + parent]
                mask[row, row] = True
        return Segment(session.place.slot, session.cached, tokens, positions, mask, count + 1 if self.chooses else 0)


@dataclass(slots=True)
class Step:
    """Everything that one forward pass does."""

    works: list[Work]
    price: float  # path score below which a node was not worth verifying
    reads: int = 0  # tokens of prompts, those aside that a session commits behind
    waited: float = 0.0  # seconds it was held back on purpose
    seconds: float = 0.0  # that the forward pass took
    follows: bool = False  # the loop was not idle since the pass before

    @property
    def decodes(self) -> bool:
        """Whether it reads no prompt; a prompt's chunk is not held back."""
        return all(work.chooses for work in self.works)

    @property
    def sessions(self) -> list[Session]:
        """Whom it serves."""
        return [work.session for work in self.works]

    @property
    def tokens(self) -> int:
        """Rows of the pass."""
        return sum(work.end - work.start + len(work.nodes) for work in self.works)


def make_noise(step: Step) -> None:
    """The rows that the walk may need."""
    for work in step.works:
        if work.chooses:
            root = len(work.session.tokens)
            for position in range(root, max((node.position + 2 for node in work.nodes), default=root + 1)):
                work.session.sampler.prepare(position)


class Verdicts:
    """What target and draft say after the rows of one session's part of a step."""

    def __init__(self, work: Work, logits: NDArray[np.float32]) -> None:
        self._work = work
        self._session = work.session
        self._logits = logits  # [1 + nodes, vocabulary]

    def chance(self) -> SeededChance:
        """For the rules that leave something to it: other draws for whoever owns the session, wherever it stands."""
        contract = self._session.contract
        return SeededChance(contract.seed, contract.choice, self._session.epoch, len(self._session.tokens), VERIFY)

    def choose(self, row: int) -> Choice:
        """The target's token under shared noise."""
        return self._session.sampler.choose(self._logits[row], self._path(row))

    def p(self, row: int) -> FloatRow:
        """The target's distribution."""
        return self._session.sampler.probabilities(self._logits[row], self._path(row))

    def q(self, row: int) -> FloatRow:
        """The distribution that the row's children were drawn from."""
        q = self._node(row).q
        assert q is not None  # a node without has no children
        return q.dense(self._logits.shape[1])

    def said(self, row: int, token: int) -> Choice:
        """A token that the rule chose."""
        wanted = self._session.contract.logprobs
        return Choice(token, math.nan, b"" if wanted is None else pack(self._logits[row], token, wanted))

    def _path(self, row: int) -> Sequence[int]:
        return self._session.tree.path(self._work.nodes[row - 1]) if row else ()

    def _node(self, row: int) -> Node:
        return self._work.nodes[row - 1] if row else self._session.tree.root
