"""Lookahead decoding: the target itself guesses n-grams ahead of its text, beside the steps that it does anyway.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv 2402.02057. A
*window* of guesses stands at the positions that follow the text; the target reads it in every step, and what it would
say there are the next guesses: Jacobi's iteration. Chains of guesses that followed from each other are *n-grams*; they
wait in a *pool* until the text says their first token, and are drafted then. The text's own n-grams are in the pool,
too: they cost nothing, and what the window is worth is what it adds to them.

A guess at an absolute position is the token that is best there by the target's logits and by the noise of that very
position, `argmax(log p + g)`, as the text's own token will be (DESIGN, section 2); at temperature 0, `argmax(log p)`.
So the iteration has one fixed point at every temperature, and that is the text which will be said: a guess whose
context is right is right. Above temperature 0 an n-gram is therefore worth most at the position that it was guessed
for; what it is worth there and elsewhere is learned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from outrider.core.continuations import NOTHING, Continuation, best_nodes
from outrider.core.digest import mix64
from outrider.core.ngrams import Fits, Following, Pool

# Measured: docs/performance.md, "Looking ahead".
COLUMNS = 6  # W: positions at which the window's chains begin
LENGTH = 2  # N: tokens of an n-gram
SAID_LENGTH = 4  # tokens of the text's own n-grams
RECENT = 64  # tokens of the text's end from which first guesses are taken

LEAST = 0.02  # path score below which nothing is proposed: hardly any row is worth so little
NO_TOKEN = -1  # is followed by nothing


class Rows(NamedTuple):
    """What a pass computes for a window: a tree of tokens below the text's last one, parents before children."""

    tokens: tuple[int, ...]  # [rows]
    parents: tuple[int, ...]  # [rows] the row that each follows; -1: the text's last token
    ends: tuple[int, ...]  # [columns] the row after which each chain goes on; -1 likewise

    def path(self, row: int) -> list[int]:
        """The tokens behind the text, down to the row's own."""
        path: list[int] = []
        while row >= 0:
            path.append(self.tokens[row])
            row = self.parents[row]
        return path[::-1]

    @property
    def depth(self) -> int:
        """The longest path to a chain's end."""
        return max((len(self.path(end)) for end in self.ends), default=0)


NO_ROWS = Rows((), (), ())


class Window:
    """Chains of guesses, one for each of the next positions, beginning with the text's last one.

    A chain begins with the guess for its position (the text's last token is no guess). Its further tokens are what the
    target said behind the *trunk*, the first tokens of the chains before it, and the chain so far. So a pass computes
    the trunk, and from each of its tokens the rest of the chain: the paper's two-dimensional window, of at most
    `columns * (length - 1) - 1` rows. A chain that has become `length` tokens long loses its first one, and stands one
    position on; with chains of two tokens the window is the trunk alone, and the iteration Jacobi's own.
    """

    def __init__(self, columns: int, length: int) -> None:
        self._columns = columns
        self._length = length
        self._chains: dict[int, list[int]] = {}  # by position, ascending

    def rows(self, root: int, token: int, guess: Callable[[int, int], int]) -> Rows:
        """Moves the window to the text's last token, at position `root`, and lays it out.

        `guess` says what a chain begins with at a position that the window did not hold, by that and the token before.
        """
        chains = [[token, *self._chains.get(root, [token])[1:]]]
        for start in range(root + 1, root + self._columns):
            chains.append(self._chains.get(start) or [guess(start, chains[-1][0])])
        self._chains = dict(enumerate(chains, root))
        tokens = [chain[0] for chain in chains[1:]]
        parents = list(range(-1, len(tokens) - 1))
        ends: list[int] = []
        for column, chain in enumerate(chains):
            end = column - 1
            for further in chain[1:]:
                tokens.append(further)
                parents.append(end)
                end = len(tokens) - 1
            ends.append(end)
        return Rows(tuple(tokens), tuple(parents), tuple(ends))

    def advance(self, said: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """The target says these tokens [columns] after the chains' ends. Returns n-grams by where they begin."""
        grams: dict[int, tuple[int, ...]] = {}
        moved: dict[int, list[int]] = {}
        for (start, chain), token in zip(self._chains.items(), said, strict=True):
            gram = grams[start] = (*chain, token)
            if len(gram) < self._length:
                moved.setdefault(start, [*gram])  # unless a whole one has come there
            else:
                moved[start + 1] = [*gram[1:]]
        self._chains = moved
        return grams


class Lookahead:
    """One session's window and pool, and what they propose (an `outrider.core.lookup.Lookup`)."""

    def __init__(self, fits: Fits, columns: int = COLUMNS, length: int = LENGTH) -> None:
        self._fits = fits
        self._window = Window(columns, length)
        self._pool = Pool()
        self._said = Pool()  # the text's own n-grams alone
        self._new: dict[int, tuple[int, ...]] = {}  # n-grams that were guessed since the text went on
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._last = -1  # position of the text's last token
        self._follow()

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on. Of what comes a few tokens at a time it learns."""
        if not tokens:
            return
        if self._recent and len(tokens) <= RECENT:
            self._following.learn(tokens)
            self._following_said.learn(tokens)
        for position, guessed in self._new.items():
            self._pool.add(position, guessed, said=False)
        self._new = {}
        for token in tokens:
            self._recent.append(token)
            self._last += 1
            said = tuple(islice(self._recent, max(0, len(self._recent) - SAID_LENGTH), None))
            for pool in (self._pool, self._said):
                pool.add(self._last + 1 - len(said), said, said=True)
        self._follow()

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """What the pool's n-grams say after the text's last token; nothing after a path."""
        return NOTHING if path else best_nodes(self._following, nodes, depth, 1, LEAST)

    def finish(self, output: Sequence[int]) -> None:
        """Nothing of it is kept."""

    def rows(self) -> Rows:
        """The window behind the text, which must not be empty. Asked again, it says the same."""
        return self._window.rows(self._last, self._recent[-1], self._guess)

    def advance(self, said: Sequence[int]) -> None:
        """The target says these tokens [columns] after the ends of the rows. Comes before the text goes on."""
        self._new = self._window.advance(said)

    def reaches(self, tokens: Sequence[int], floor: float) -> tuple[int, int]:
        """How many of the tokens that are said now were proposed with path scores of at least `floor`: with the guesses
        so far, and if there were the text's own n-grams alone."""
        return self._following.reach(tokens, floor), self._following_said.reach(tokens, floor)

    def _follow(self) -> None:
        """What follows now, by all n-grams and by the text's own."""
        token = self._recent[-1] if self._recent else NO_TOKEN
        self._following = Following(self._pool, self._fits.all, token, self._last)
        self._following_said = Following(self._said, self._fits.said, token, self._last)

    def _guess(self, position: int, before: int) -> int:
        """What followed the token before it the last time, else some token of the text's end."""
        known = next(self._pool.after(before), None)
        return known.tokens[0] if known and known.tokens else self._recent[mix64(position) % len(self._recent)]
