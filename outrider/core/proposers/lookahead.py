"""Lookahead decoding: the target itself guesses n-grams ahead of its text, in the passes that it runs anyway.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv 2402.02057. A
*window* of guesses covers the positions that follow the text. Every pass reads the window, and the tokens that the
target chooses there are the next guesses: Jacobi iteration. A chain of guesses that followed from each other is an
*n-gram*; n-grams stay in a *pool* and are proposed when the text contains their first token. The text's own n-grams are
in the pool, too; they cost nothing, so the value of the window is what it adds to them.

A guess at an absolute position is the best token there by the target's logits and by the shared noise of that position,
`argmax(log p + g)`, like the text's own token (docs/protocol.md, section 3); at temperature 0, `argmax(log p)`. So the
iteration has one fixed point at every temperature, the text that will be committed: a guess with the right context is
right. Above temperature 0 an n-gram is therefore most reliable at the position for which it was guessed; how reliable
it is there and elsewhere is learned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from outrider.core.proposers.ngram_pool import FollowingTokens, GramFits, Pool
from outrider.core.proposers.ngram_tree import NOTHING, Continuation, best_nodes
from outrider.core.session.digest import mix64

# Measurements: docs/performance.md, "Looking ahead".
COLUMNS = 6  # W: positions at which the window's chains begin
LENGTH = 2  # N: tokens of an n-gram
TEXT_LENGTH = 4  # tokens of the text's own n-grams
RECENT = 64  # tokens at the text's end from which initial guesses are taken

MIN_SCORE = 0.02  # path score below which no node is proposed, because hardly any step verifies such a node
NO_TOKEN = -1  # stands for the last token of an empty text; nothing follows it


class WindowRows(NamedTuple):
    """The rows that a pass computes for a window: a tree below the text's last token, parents before children."""

    tokens: tuple[int, ...]  # [rows]
    parents: tuple[int, ...]  # [rows] the parent row of each row; -1: the text's last token
    ends: tuple[int, ...]  # [columns] the last row of each chain; -1: the text's last token

    def path(self, row: int) -> list[int]:
        """Return the tokens after the text, down to the row's own."""
        path: list[int] = []
        while row >= 0:
            path.append(self.tokens[row])
            row = self.parents[row]
        return path[::-1]

    @property
    def depth(self) -> int:
        """The length of the longest path to a chain's end."""
        return max((len(self.path(end)) for end in self.ends), default=0)


NO_ROWS = WindowRows((), (), ())


class LookaheadWindow:
    """Chains of guesses, one for each position from the text's last one on.

    A chain begins with the guess for its position (the text's last token is no guess). Its further tokens are those
    that the target chose after the *trunk* (the first tokens of the chains before it) and the chain so far. So a pass
    computes the trunk, and from each of its tokens the rest of the chain: the paper's two-dimensional window, of at
    most `columns * (length - 1) - 1` rows. A chain that has reached `length` tokens loses its first one and moves on by
    one position; with chains of two tokens the window is only the trunk, and the iteration is plain Jacobi iteration.
    """

    def __init__(self, columns: int, length: int) -> None:
        self._columns = columns
        self._length = length
        self._chains: dict[int, list[int]] = {}  # by first position, ascending

    def rows(self, root: int, token: int, guess: Callable[[int, int], int]) -> WindowRows:
        """Move the window to the text's last token, at position `root`, and return its rows.

        `guess` returns the first token of a new chain, from the chain's position and the token before it.
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
        return WindowRows(tuple(tokens), tuple(parents), tuple(ends))

    def advance(self, chosen: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Append the tokens [columns] that the target chose after the chains' ends. Return the n-grams by their first
        positions."""
        grams: dict[int, tuple[int, ...]] = {}
        moved: dict[int, list[int]] = {}
        for (start, chain), token in zip(self._chains.items(), chosen, strict=True):
            gram = grams[start] = (*chain, token)
            if len(gram) < self._length:
                moved.setdefault(start, [*gram])  # unless a complete chain has moved there
            else:
                moved[start + 1] = [*gram[1:]]
        self._chains = moved
        return grams


class Lookahead:
    """One session's window and pool, which propose tokens (an `outrider.core.proposers.lookup.Lookup`)."""

    def __init__(self, fits: GramFits, columns: int = COLUMNS, length: int = LENGTH) -> None:
        self._fits = fits
        self._window = LookaheadWindow(columns, length)
        self._pool = Pool()
        self._text_pool = Pool()  # only the text's own n-grams
        self._new: dict[int, tuple[int, ...]] = {}  # n-grams guessed since the last `extend`, by first position
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._last = -1  # position of the text's last token
        self._follow()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. At most RECENT tokens at a time are also learned from."""
        if not tokens:
            return
        if self._recent and len(tokens) <= RECENT:
            self._following.learn(tokens)
            self._following_text.learn(tokens)
        for position, guessed in self._new.items():
            self._pool.add(position, guessed, in_text=False)
        self._new = {}
        for token in tokens:
            self._recent.append(token)
            self._last += 1
            gram = tuple(islice(self._recent, max(0, len(self._recent) - TEXT_LENGTH), None))
            for pool in (self._pool, self._text_pool):
                pool.add(self._last + 1 - len(gram), gram, in_text=True)
        self._follow()

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """Propose the tokens that follow the text's last one in the pool's n-grams; nothing below a path."""
        return NOTHING if path else best_nodes(self._following, nodes, depth, 1, MIN_SCORE)

    def finish(self, output: Sequence[int]) -> None:
        """Do nothing: no answer is kept."""

    def rows(self) -> WindowRows:
        """Return the window's rows after the text, which must not be empty. A repeated call returns the same rows."""
        return self._window.rows(self._last, self._recent[-1], self._guess)

    def advance(self, chosen: Sequence[int]) -> None:
        """Append the tokens [columns] that the target chose after the chains' ends. Call it before `extend`."""
        self._new = self._window.advance(chosen)

    def reaches(self, tokens: Sequence[int], floor: float) -> tuple[int, int]:
        """Return how many of the tokens chosen now were proposed with path scores of at least `floor`: with all
        n-grams, and with only the text's own."""
        return self._following.reach(tokens, floor), self._following_text.reach(tokens, floor)

    def _follow(self) -> None:
        """Build the tries of what follows the text's last token: by all n-grams, and by the text's own."""
        token = self._recent[-1] if self._recent else NO_TOKEN
        self._following = FollowingTokens(self._pool, self._fits.all, token, self._last)
        self._following_text = FollowingTokens(self._text_pool, self._fits.text_only, token, self._last)

    def _guess(self, position: int, before: int) -> int:
        """Return the token that followed `before` the last time, else some token of the text's end."""
        known = next(self._pool.after(before), None)
        return known.tokens[0] if known and known.tokens else self._recent[mix64(position) % len(self._recent)]
