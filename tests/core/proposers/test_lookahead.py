"""The window is the paper's, its iteration ends in the text itself, and its chances are what came true."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.proposers.lookahead import COLUMNS, LENGTH, Lookahead, LookaheadWindow
from outrider.core.proposers.ngram_pool import FIRST_TOKENS, OF_EACH, GramFits, Pool
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.core.session.digest import mix64

Model = Callable[[Sequence[int]], int]  # the text so far -> the token after it
VOCABULARY = 8

shapes = st.tuples(st.integers(2, 6), st.integers(2, 5))  # columns, length
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=3, max_size=24)


def whole(text: Sequence[int]) -> int:
    """A model that looks at everything, and at the position."""
    return mix64(hash(tuple(text)) & (2**64 - 1)) % VOCABULARY


def short(text: Sequence[int]) -> int:
    """A model that looks at the last token and at the position, as shared noise does."""
    return mix64(text[-1] * 1000 + len(text)) % VOCABULARY


class SlowWindow:
    """The paper's picture: a grid of guesses by (level, position), each level one position further than the one before.

    A guess of level k at position p was chosen after the text, the first level's guesses up to p - k, and the guesses
    of the levels 1 .. k - 1 on the diagonal that ends at it.
    """

    def __init__(self, columns: int, length: int) -> None:
        self.columns, self.length = columns, length
        self.grid: dict[tuple[int, int], int] = {}

    def step(self, text: Sequence[int], model: Model, first: int) -> dict[int, tuple[int, ...]]:
        """One pass over the window, whose missing first guesses are `first`. Return the n-grams by position."""
        root = len(text) - 1
        starts = range(root, root + self.columns)
        self.grid = {(level, at): token for (level, at), token in self.grid.items() if at - level in starts}
        for start in starts:
            self.grid.setdefault((0, start), first)
        self.grid[0, root] = text[-1]
        trunk = [self.grid[0, start] for start in starts]
        grams = {}
        for start in starts:
            diagonal = [self.grid[0, start]]
            while (len(diagonal), start + len(diagonal)) in self.grid:
                diagonal.append(self.grid[len(diagonal), start + len(diagonal)])
            context = [*text[:-1], *trunk[: start - root], *diagonal]
            grams[start] = (*diagonal, model(context))
        moved: dict[tuple[int, int], int] = {}
        for start, gram in grams.items():  # a whole diagonal loses its first guess, and the others move a level down
            if len(gram) == self.length:
                moved |= {(level, start + 1 + level): token for level, token in enumerate(gram[1:])}
        for start, gram in grams.items():
            if len(gram) < self.length and (0, start) not in moved:
                moved |= {(level, start + level): token for level, token in enumerate(gram)}
        self.grid = moved
        return grams


@given(shapes, texts, st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, VOCABULARY - 1))
def test_the_window_is_the_paper_s(shape: tuple[int, int], text: list[int], steps: list[int], first: int) -> None:
    window, slow = LookaheadWindow(*shape), SlowWindow(*shape)
    text = list(text)
    for committed in steps:
        root = len(text) - 1
        rows = window.rows(root, text[-1], lambda position, before: first)
        assert rows == window.rows(root, text[-1], lambda position, before: -1)  # a second call gives the same rows
        assert len(rows.tokens) <= shape[0] * (shape[1] - 1) - 1
        assert len(rows.ends) == shape[0]
        assert all(parent < row for row, parent in enumerate(rows.parents))
        assert rows.depth == max(len(rows.path(row)) for row in (-1, *range(len(rows.tokens))))
        chosen = [whole([*text, *rows.path(end)]) for end in rows.ends]
        assert window.advance(chosen) == slow.step(text, whole, first)
        for _ in range(committed):
            text.append(whole(text))


def iterate(model: Model, text: list[int], steps: int, lookahead: Lookahead) -> list[int]:
    """Lets a window run beside a text that a model goes on with. Return how many tokens each step accepted."""
    lookahead.extend(text)
    accepted = []
    for _ in range(steps):
        proposal = lookahead.propose(16, 8)
        committed = [model(text)]
        below = -1
        while True:
            found = (
                node
                for node, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True))
                if parent == below and token == committed[-1]
            )
            if (node := next(found, None)) is None:
                break
            below = node
            committed.append(model([*text, *committed]))
        rows = lookahead.rows()
        lookahead.advance([model([*text, *rows.path(end)]) for end in rows.ends])
        text += committed
        lookahead.extend(committed)
        accepted.append(len(committed) - 1)
    return accepted


@pytest.mark.parametrize("length", [2, 3, 4])
def test_the_iteration_ends_in_the_text_itself_where_a_guess_s_context_is_soon_right(length: int) -> None:
    """The model's token depends on the position, so no token before it is of use."""
    accepted = iterate(short, [1, 2, 3], 400, Lookahead(GramFits.unknown(), 6, length))
    alone = iterate(short, [1, 2, 3], 400, Lookahead(GramFits.unknown(), 1, 2))
    assert sum(accepted[200:]) > sum(alone[200:]) + 50


def test_above_temperature_zero_the_noise_of_a_guess_s_position_decides() -> None:
    """Logits that never change: all doubt is the noise's, so guesses are right and the text is of no use."""
    logits = np.random.default_rng(0).normal(size=64).astype(np.float32)
    contract = Contract(seed=5, max_tokens=1000, temperature=0.8)

    def model(text: Sequence[int]) -> int:
        return Sampler(contract, len(logits), text, 0).choose(logits).token

    ahead = iterate(model, [1, 2, 3], 60, Lookahead(GramFits.unknown()))
    alone = iterate(model, [1, 2, 3], 60, Lookahead(GramFits.unknown(), 1, 2))
    assert sum(ahead[30:]) > 1.5 * 30
    assert sum(alone[30:]) < 0.3 * 30


@given(texts, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5))
def test_lookahead_proposes_a_tree_of_n_grams_with_chances(text: list[int], guesses: list[int]) -> None:
    lookahead = Lookahead(GramFits.unknown())
    iterate(lambda text: guesses[len(text) % len(guesses)], list(text), 6, lookahead)
    proposal = lookahead.propose(12, 5)
    assert len(proposal.tokens) <= 12
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        assert parent < node
        children.setdefault(parent, []).append(node)
    for nodes in children.values():
        assert sum(proposal.chances[node] for node in nodes) <= 1.0 + 1e-9
        assert len({proposal.tokens[node] for node in nodes}) == len(nodes)


def test_lookahead_chances_follow_the_tokens_that_the_target_chose() -> None:
    """N-grams that are always right come to be trusted; those that are always wrong do not."""
    right, wrong = Lookahead(GramFits.unknown()), Lookahead(GramFits.unknown())
    for lookahead, step in ((right, 0), (wrong, 1)):
        for turn in range(60):
            lookahead.extend([1])
            lookahead.extend([2 + step * turn])
        lookahead.extend([1])
    assert right.propose(1, 1).chances[0] > 0.9
    assert wrong.propose(1, 1).chances[0] < 0.1


def test_a_text_that_repeats_itself_is_followed_without_any_guess() -> None:
    lookahead = Lookahead(GramFits.unknown())
    for _ in range(40):
        lookahead.extend([5, 6, 7])
    assert lookahead.propose(7, 7).tokens == (5, 6, 7, 5, 6, 7, 5)
    assert lookahead.reaches([5, 6, 7, 1], 0.1) == (3, 3)
    assert lookahead.reaches([4], 0.0) == (0, 0)


def test_the_pool_is_bounded_and_keeps_the_latest() -> None:
    pool = Pool()
    for position in range(2 * FIRST_TOKENS * OF_EACH):
        pool.add(position, (position // (2 * OF_EACH), position), in_text=False)
    assert len(pool) == FIRST_TOKENS * OF_EACH
    pool.add(7, (1, 2, 3), in_text=True)
    pool.add(9, (1, 2, 3), in_text=False)  # it stays marked as part of the text
    assert next(pool.after(1)) == ((2, 3), 9, True)
    assert len(list(pool.after(FIRST_TOKENS - 1))) == OF_EACH


def test_a_pass_is_charged_for_a_whole_window() -> None:
    lookahead = Lookahead(GramFits.unknown())
    lookahead.extend([1, 2, 3])
    for _ in range(2 * LENGTH):
        rows = lookahead.rows()
        lookahead.advance([0] * len(rows.ends))
        lookahead.extend([0])
    assert len(lookahead.rows().tokens) == COLUMNS * (LENGTH - 1) - 1
