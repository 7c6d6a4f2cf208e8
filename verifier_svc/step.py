"""What a step does for each of its sessions, and what the models say after that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.contract import SHARED_NOISE
from outrider.core.filters import FloatRow
from outrider.core.logprobs import pack
from outrider.core.lookahead import NO_ROWS, Rows
from outrider.core.noise import Draw
from outrider.core.rules import VERIFY, Drawn, SeededChance, Walk
from outrider.core.sampler import Choice
from outrider.core.tree import Node
from outrider.engine.batch import Segment
from outrider.engine.logits import Logits
from verifier_svc.session import Session


@dataclass(slots=True)
class Work:
    """What one session contributes to a step."""

    session: Session
    start: int  # tokens[start : end] have no KV yet and get it now
    end: int
    nodes: list[Node] = field(default_factory=list)  # of the tree, parents before children
    parents: list[int] = field(default_factory=list)  # for each, the row it follows; row 0 is the root
    window: Rows = NO_ROWS  # of guesses, which see no node
    window_price: float = 0.0  # tokens that could have been said in its time
    window_seconds: float = 0.0  # that it took outside the pass

    @property
    def chooses(self) -> bool:
        """Whether the step commits for this session; a chunk inside a prompt does not."""
        return self.end == len(self.session.tokens)

    def add(self, node: Node, rows: dict[Node, int]) -> None:
        """Takes a node whose parent is the root or was taken; `rows` says which row each taken node has."""
        self.parents.append(rows.get(node.parent, 0) if node.parent else 0)
        self.nodes.append(node)
        rows[node] = len(self.nodes)

    @property
    def outputs(self) -> int:
        """Rows of logits that it gets: after the root, the nodes, the window's rows."""
        return 1 + len(self.nodes) + len(self.window.tokens) if self.chooses else 0

    @property
    def draw(self) -> Draw | None:
        """How its tokens are drawn, where an engine may do that: not where a rule decides otherwise."""
        session = self.session
        return session.sampler.draw if self.chooses and session.contract.rule == SHARED_NOISE else None

    def segment(self) -> Segment:
        """The rows of the packed pass: the pending tokens as a chain, then nodes and window with their ancestors.

        Only what lies on an accepted path is ever kept, so the window's keys and values are gone with the step.
        """
        session, chain, count = self.session, self.end - self.start, len(self.nodes)
        below = [node.token for node in self.nodes] + [*self.window.tokens]
        tokens = np.array(session.tokens[self.start : self.end] + below)
        positions = np.arange(self.start, self.start + len(tokens))
        mask = None
        if below:
            mask = np.tri(len(tokens), dtype=np.bool_)
            mask[chain:] = False
            follows = self.parents + [0 if parent < 0 else 1 + count + parent for parent in self.window.parents]
            for row, parent in enumerate(follows, chain):
                above = chain - 1 + parent
                positions[row] = positions[above] + 1
                mask[row] = mask[above]
                mask[row, row] = True
        return Segment(session.place.slot, session.cached, tokens, positions, mask, self.outputs)


@dataclass(slots=True)
class Step:
    """Everything that one forward pass does."""

    works: list[Work]
    price: float  # path score below which a node was not worth verifying
    rate: float = 0.0  # tokens a second that such steps are expected to say, of all sessions
    reads: int = 0  # tokens of prompts, those aside that a session commits behind
    waited: float = 0.0  # seconds it was held back on purpose
    began: float = 0.0  # when the forward pass began, by time.monotonic
    seconds: float = 0.0  # that it took
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
        return sum(work.end - work.start + len(work.nodes) + len(work.window.tokens) for work in self.works)


def kept_rows(step: Step, walks: Sequence[Walk | None], *, every: bool) -> Iterator[tuple[Work, list[int]]]:
    """Of each session that goes on, the rows among the pass's features that are of what it has committed by then.

    `every`: features are of every row; else of those whose logits were wanted, of which the last that counts is given.
    """
    first = 0
    for work, walked in zip(step.works, walks, strict=True):
        chain = work.end - work.start
        path = [] if walked is None else walked.path
        if every:
            rows = [*range(chain), *(chain - 1 + row for row in path)]
            count = chain + len(work.nodes) + len(work.window.tokens)
        else:
            rows, count = [path[-1] if path else 0] if work.chooses else [], work.outputs
        if rows and not work.session.finished:
            yield work, [first + row for row in rows]
        first += count


def make_noise(step: Step, *, draws: bool) -> None:
    """The rows that the walk may need. `draws`: the engine makes those of sessions that say how they draw."""
    for work in step.works:
        if work.chooses and not (draws and work.draw):
            length = len(work.session.tokens)
            after = [length, *(node.position + 1 for node in work.nodes), length + work.window.depth]
            for position in range(length, max(after) + 1):
                work.session.sampler.prepare(position)


class Verdicts:
    """What target and draft say after the rows of one session's part of a step."""

    def __init__(self, work: Work, logits: Logits, first: int) -> None:
        """`first`: the first of its rows among those of the step."""
        self._work = work
        self._session = work.session
        self._logits = logits
        self._first = first

    def chance(self) -> SeededChance:
        """For the rules that leave something to it: other draws for whoever owns the session, wherever it stands."""
        contract = self._session.contract
        return SeededChance(contract.seed, contract.choice, self._session.epoch, len(self._session.tokens), VERIFY)

    def choose(self, row: int) -> Choice:
        """The target's token under shared noise."""
        chosen = self._logits.choice(self._first + row)
        return chosen or self._session.sampler.choose(self._row(row), self._path(row))

    def p(self, row: int) -> FloatRow:
        """The target's distribution."""
        return self._session.sampler.probabilities(self._row(row), self._path(row))

    def q(self, row: int) -> FloatRow:
        """The distribution that the row's children were drawn from."""
        q = self._node(row).q
        assert q is not None  # a node without has no children
        return q.dense(self._session.sayable)

    def said(self, row: int, token: int) -> Choice:
        """A token that the rule chose."""
        wanted = self._session.contract.logprobs
        return Choice(token, math.nan, b"" if wanted is None else pack(self._row(row), token, wanted))

    def guesses(self) -> list[int]:
        """What the target would say after the ends of the window's chains, were they the text."""
        sampler, window, first = self._session.sampler, self._work.window, 1 + len(self._work.nodes)
        noised = self._session.rule.drawn is Drawn.FREELY  # else the text's own draws are not known beforehand
        rows = [0 if end < 0 else first + end for end in window.ends]
        return [
            int(sampler.leading(self._row(row), window.path(end), 1, noised=noised)[0][0])
            for row, end in zip(rows, window.ends, strict=True)
        ]

    def _row(self, row: int) -> NDArray[np.float32]:
        return self._logits.row(self._first + row)[: self._session.sayable]

    def _path(self, row: int) -> Sequence[int]:
        return self._session.tree.path(self._work.nodes[row - 1]) if row else ()

    def _node(self, row: int) -> Node:
        return self._work.nodes[row - 1] if row else self._session.tree.root
