"""A step's work for each session, its packed batch, and the target's verdicts on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.acceptance import VERIFY, ChildSampling, SeededRandom, Walk
from outrider.core.proposers.lookahead import NO_ROWS, WindowRows
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.grammar import GrammarDelayed
from outrider.core.sampling.logprobs import pack
from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import SHARED_NOISE, StepReport
from outrider.core.session.decoding import PromptScores
from outrider.core.tree.node import Node
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Traits
from outrider.engine.interface.logits import Logits
from outrider.engine.interface.masks import tree_mask
from verifier_svc.session import VerifierSession
from verifier_svc.tracing import StepFigures


@dataclass(slots=True)
class SessionWork:
    """What one session contributes to a step."""

    session: VerifierSession
    start: int  # tokens[start : end] have no KV yet and get it now
    end: int
    nodes: list[Node] = field(default_factory=list)  # of the tree, parents before children
    parents: list[int] = field(default_factory=list)  # for each, the row it follows; row 0 is the root
    window: WindowRows = NO_ROWS  # of guesses, which see no node
    window_cost_tokens: float = 0.0  # tokens that could be committed in the time of its rows
    window_seconds: float = 0.0  # spent on it outside the pass
    expected: float = 1.0  # tokens that it should commit, by the calibrated scores of its nodes
    scored: int = 0  # its last rows of which each gives the log-probability of the prompt's next token
    scores: PromptScores | None = None  # these
    delayed: bool = False  # the step commits nothing for it: what its grammar allows was not known in time

    @property
    def chooses(self) -> bool:
        """Whether the step commits for this session; a chunk inside a prompt does not."""
        return self.end == len(self.session.tokens)

    @property
    def goes_on(self) -> bool:
        """Whether its next step is the row of the token that this one chooses, and nothing else, as far as is known."""
        session = self.session
        alone = not (self.nodes or self.window.tokens or session.proposes or session.awaited)
        return alone and self.chooses and self.end - self.start == 1

    def add(self, node: Node, score: float, rows: dict[Node, int]) -> None:
        """Add a node with its path score, whose parent is the root or was added before; `rows` maps each added node to
        its row."""
        self.parents.append(rows.get(node.parent, 0) if node.parent else 0)
        self.nodes.append(node)
        self.expected += score
        rows[node] = len(self.nodes)

    @property
    def outputs(self) -> int:
        """Number of logit rows: one after the root, one for each node, one for each row of the window; or those of a
        prompt's chunk whose log-probabilities are wanted."""
        return 1 + len(self.nodes) + len(self.window.tokens) if self.chooses else self.scored

    def draw(self, engine: Traits) -> Draw | None:
        """Return how an engine draws the session's tokens; None where it cannot, or another rule than shared noise
        decides."""
        session = self.session
        if not (engine.samples_tokens and self.chooses and session.contract.rule == SHARED_NOISE):
            return None
        return session.sampler.draw(restricts=engine.restricts_tokens, penalizes=engine.restricts_tokens)

    def segment(self) -> Segment:
        """Return the rows of the packed pass: the pending tokens as a chain, then nodes and window with their
        ancestors.

        Only rows on an accepted path are kept, so the window's keys and values are gone after the step.
        """
        session, chain, count = self.session, self.end - self.start, len(self.nodes)
        below = [node.token for node in self.nodes] + [*self.window.tokens]
        tokens = np.array(session.tokens[self.start : self.end] + below)
        positions = np.arange(self.start, self.start + len(tokens))
        mask = None
        if below:
            follows = self.parents + [0 if parent < 0 else 1 + count + parent for parent in self.window.parents]
            mask = tree_mask(chain, [chain - 1 + parent for parent in follows])
            positions = self.start + mask.sum(axis=1) - 1
        return Segment(session.kv_slot.slot, session.cached, tokens, positions, mask, self.outputs, session.adapter)


@dataclass(slots=True)
class StepBatch:
    """The work of one forward pass."""

    works: list[SessionWork]
    min_path_score: float  # path score below which a node was not worth verifying
    rate: float = 0.0  # tokens a second that such steps are expected to commit, over all sessions
    prompt_tokens: int = 0  # prompt tokens, without each decoding session's last one
    waited: float = 0.0  # seconds the step was held back on purpose
    began: float = 0.0  # when the forward pass began, by time.monotonic
    seconds: float = 0.0  # duration of the forward pass
    back_to_back: bool = False  # the scheduler was not idle since the previous pass
    begun: bool = False  # the engine began it behind the pass before
    since_last: float = 0.0  # seconds from the commits of the step before to those of this one
    rows: int = field(init=False)  # of the pass

    def __post_init__(self) -> None:
        self.rows = sum(work.end - work.start + len(work.nodes) + len(work.window.tokens) for work in self.works)

    def score(self, logits: Logits) -> None:
        """Compute the log-probabilities that are wanted of prompts. Takes time in proportion to their rows."""
        first = 0
        for work in self.works:
            if work.scored:
                work.scores = prompt_scores(work, logits, first)
            first += work.outputs

    @property
    def sessions(self) -> list[VerifierSession]:
        """The sessions of this step."""
        return [work.session for work in self.works]

    @property
    def figures(self) -> StepFigures:
        """What the spans of all sessions have in common."""
        return StepFigures(self.began, self.seconds, self.waited, self.rows, len(self.works), self.min_path_score)


def kept_rows(
    step: StepBatch, walks: Sequence[Walk | None], *, every: bool
) -> Iterator[tuple[SessionWork, Walk | None, list[int]]]:
    """For each session that goes on, yield its walk, and the pass's feature rows that belong to committed tokens.

    `every`: the pass gives features of every row; otherwise only of rows with logits, and the last committed row is
    given.
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
        if rows and not work.session.finished and not work.delayed:
            yield work, walked, [first + row for row in rows]
        first += count


def prompt_scores(work: SessionWork, logits: Logits, first: int) -> PromptScores:
    """Return the log-probabilities of the prompt's tokens behind the work's scored rows. `first`: that of these rows in
    the logits."""
    session, position = work.session, work.end + 1 - work.scored
    alternatives = session.contract.prompt_logprobs
    assert alternatives is not None  # else no row is scored
    tokens = session.tokens[position : work.end + 1]
    return PromptScores(position, *logits.score(range(first, first + work.scored), tokens, alternatives))


def until_stop(choices: Sequence[Choice], stop_ids: Collection[int]) -> Sequence[Choice]:
    """Return the choices up to the first stop token, which is the last of them."""
    for count, choice in enumerate(choices, 1):
        if choice.token in stop_ids:
            return choices[:count]
    return choices


def step_report(
    step: StepBatch, work: SessionWork, path: Sequence[Node], now: float, rates: tuple[int, int]
) -> StepReport:
    """Return what a step reports of one session, whose accepted nodes are `path`, before the session commits.

    `rates`: thousandths of a token a second of all sessions without and with drafts, where drafters rest.
    """
    session, root = work.session, work.session.tree.root.position
    first, level = session.arrivals.times
    return StepReport(
        verified=len(work.nodes),
        accepted=len(path),
        verified_depth=max((node.position for node in work.nodes), default=root) - root,
        waited_us=int(step.waited * 1e6),
        forward_us=int(step.seconds * 1e6),
        wire_bytes=session.wire_bytes,
        plan_version=session.terms.plan.version,
        drafters=len(session.subscriptions),
        elapsed_us=int((now - session.terms.committed_at) * 1e6) if session.terms.committed_at else 0,
        rows=step.rows,
        sessions=len(step.works),
        first_us=int(first * 1e6),
        level_us=int(level * 1e6),
        ranks=bytes(map(_rank, path)),
        resting=session.terms.resting,
        plain_rate=rates[0],
        drafted_rate=rates[1],
    )


def make_noise(step: StepBatch, draws: Sequence[Draw | None]) -> None:
    """Prepare the noise that the walk may need. `draws`: of the works whose tokens the engine draws itself."""
    for work, draw in zip(step.works, draws, strict=True):
        if work.chooses and draw is None:
            length = len(work.session.tokens)
            after = [length, *(node.position + 1 for node in work.nodes), length + work.window.depth]
            for position in range(length, max(after) + 1):
                work.session.sampler.prepare(position)


def make_masks(step: StepBatch) -> None:
    """Have computed what grammars allow after the root, and along the likeliest path of the nodes that are verified."""
    for work in step.works:
        grammar = work.session.grammar
        if grammar is None or not work.chooses:
            continue
        path: tuple[int, ...] = ()
        paths, last = [path], 0
        for row, (parent, node) in enumerate(zip(work.parents, work.nodes, strict=True), 1):
            if parent == last:  # of a parent's children the one with the best score is the first
                path, last = (*path, node.token), row
                paths.append(path)
        grammar.prefetch(paths)


class StepVerdicts:
    """The target's and the draft's distributions after the rows of one session's part of a step."""

    def __init__(self, work: SessionWork, logits: Logits, first: int) -> None:
        """`first`: the session's first row among the step's rows."""
        self._work = work
        self._session = work.session
        self._logits = logits
        self._first = first

    def random_source(self) -> SeededRandom:
        """Return the random source for rules that need one: another one for each owner (epoch) and position.

        Where the draws are the tokens, each position has one draw. Drafters know the seed; if a draw depended on where
        the steps before it ended, they could choose among several by what they send.
        """
        contract, committed = self._session.contract, len(self._session.tokens)
        if self._session.rule.child_sampling is ChildSampling.SAMPLED:
            return SeededRandom(contract.seed, contract.choice, self._session.epoch, committed, VERIFY)
        source = SeededRandom(contract.seed, contract.choice, self._session.epoch, VERIFY)
        source.skip(committed)
        return source

    def choose(self, row: int) -> Choice:
        """Return the target's token after a row, under shared noise."""
        chosen = self._logits.choice(self._first + row)
        return chosen or self._session.sampler.choose(self._row(row), self._path(row))

    def p(self, row: int) -> FloatRow:
        """Return the target's distribution after a row."""
        return self._session.sampler.probabilities(self._row(row), self._path(row))

    def q(self, row: int) -> FloatRow:
        """Return the draft distribution that the row's children were drawn from."""
        q = self._node(row).q
        assert q is not None  # a node without q has no children
        return q.dense(self._session.unpadded_vocabulary)

    def choice_of(self, row: int, token: int) -> Choice:
        """Return a token that the rule chose as a Choice, with its logprobs if the contract wants them."""
        wanted = self._session.contract.logprobs
        return Choice(token, math.nan, b"" if wanted is None else pack(self._row(row), token, wanted))

    def guesses(self) -> list[int]:
        """Return the token that the target would choose after the end of each of the window's chains."""
        sampler, window, first = self._session.sampler, self._work.window, 1 + len(self._work.nodes)
        # Other rules' draws are not known beforehand.
        noised = self._session.rule.child_sampling is ChildSampling.FREELY
        rows = [0 if end < 0 else first + end for end in window.ends]
        try:
            return [
                int(sampler.leading(self._row(row), window.path(end), 1, noised=noised)[0][0])
                for row, end in zip(rows, window.ends, strict=True)
            ]
        except GrammarDelayed:
            return [int(self._row(row).argmax()) for row in rows]

    def _row(self, row: int) -> NDArray[np.float32]:
        return self._logits.row(self._first + row)[: self._session.unpadded_vocabulary]

    def _path(self, row: int) -> Sequence[int]:
        return self._session.tree.path(self._work.nodes[row - 1]) if row else ()

    def _node(self, row: int) -> Node:
        return self._work.nodes[row - 1] if row else self._session.tree.root


def _rank(node: Node) -> int:
    """Return how many siblings of the node have a better score, at most 255: the report has a byte for it."""
    assert node.parent is not None
    return min(255, sum(sibling.edge > node.edge for sibling in node.parent.children.values()))
