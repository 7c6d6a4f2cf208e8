"""A pool of n-grams that occur in a text, or were guessed for it, and the tree of tokens that they propose.

The probability of a proposed token is learned from the target's tokens, by the token's class (`GramKind`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.core.proposers.ngram_tree import Branch
from outrider.core.stats import FadingRatio

FIRST_TOKENS = 1024  # first tokens of n-grams that the pool keeps, the latest ones
OF_EACH = 8  # n-grams with the same first token that the pool keeps, the latest ones

PRIOR = 4.0  # observations that the initial probabilities count as
INITIAL_CHANCES = (0.4, 0.15, 0.08)  # initial probability of a proposed token by its rank


class Gram(NamedTuple):
    """The tokens of an n-gram after one of its tokens."""

    tokens: tuple[int, ...]
    position: int  # position of that one token, actual or guessed, at the n-gram's latest occurrence
    in_text: bool  # whether the n-gram occurs in the text


class Pool:
    """The latest n-grams of one session, by their first token."""

    def __init__(self) -> None:
        self._grams: OrderedDict[int, OrderedDict[tuple[int, ...], tuple[int, bool]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._grams.values()))

    def add(self, position: int, tokens: Sequence[int], *, in_text: bool) -> None:
        """Add an n-gram that begins at `position` in the text, or was guessed to begin there."""
        first, rest = tokens[0], tuple(tokens[1:])
        grams = self._grams.setdefault(first, OrderedDict())
        self._grams.move_to_end(first)
        _, before = grams.pop(rest, (0, False))
        grams[rest] = position, in_text or before
        if len(grams) > OF_EACH:
            grams.popitem(last=False)
        if len(self._grams) > FIRST_TOKENS:
            self._grams.popitem(last=False)

    def after(self, token: int) -> Iterator[Gram]:
        """Yield the n-grams that begin with `token`, without it, the latest first."""
        for rest, (position, in_text) in reversed(self._grams.get(token, {}).items()):
            yield Gram(rest, position, in_text)


class GramKind(NamedTuple):
    """The class of a token that n-grams propose."""

    here: bool  # whether one of these n-grams was guessed for exactly this position
    in_text: bool  # whether one of these n-grams occurs in the text
    deep: bool  # whether the token follows another proposed token
    rank: int  # 0: from the latest n-gram that proposes a token here; at most len(INITIAL_CHANCES) - 1


NOTHING_SEEN = FadingRatio()


class GramFit:
    """The probability that a proposed token is the target's, by its class; for one temperature bucket."""

    def __init__(self) -> None:
        self._rates: dict[GramKind, FadingRatio] = {}

    def chance(self, kind: GramKind) -> float:
        """Return the probability that a token of this class is the target's if its parent is."""
        rate = self._rates.get(kind, NOTHING_SEEN)
        return (rate.hits + PRIOR * INITIAL_CHANCES[kind.rank]) / (rate.attempts + PRIOR)

    def observe(self, kind: GramKind, hit: bool) -> None:
        """Record whether a token of this class was the target's."""
        if kind not in self._rates:
            self._rates[kind] = FadingRatio()
        self._rates[kind].observe(hit)


class FollowingTokens:
    """A trie of the tokens that follow a token in a pool's n-grams. Where an n-gram ends, others continue it.

    Nodes are built on demand, so a trie is valid only until the pool changes.
    """

    def __init__(self, pool: Pool, fit: GramFit, token: int, position: int, above: Sequence[Gram] = ()) -> None:
        """`above` are the n-grams that propose `token` after the token before it."""
        self._pool = pool
        self._fit = fit
        self._token = token
        self._position = position
        self._above = above
        self._next: dict[int, tuple[GramKind, FollowingTokens]] | None = None

    def children(self) -> list[Branch]:
        """Return the tokens that may follow."""
        chances = [self._fit.chance(kind) for kind, _ in self._opened().values()]
        total = max(1.0, sum(chances))
        branches = zip(self._opened().items(), chances, strict=True)
        return [Branch(token, chance / total, below) for (token, (_, below)), chance in branches]

    def reach(self, tokens: Sequence[int], floor: float) -> int:
        """Return how many of `tokens` the trie proposes with path scores of at least `floor`."""
        score, below = 1.0, self
        for depth, token in enumerate(tokens):
            score *= next((branch.chance for branch in below.children() if branch.token == token), 0.0)
            if score < floor or token not in below._opened():
                return depth
            below = below._opened()[token][1]
        return len(tokens)

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn that the target chose `tokens`."""
        below = self
        for chosen in tokens:
            for token, (kind, _) in below._opened().items():
                self._fit.observe(kind, token == chosen)
            if chosen not in below._opened():
                return
            below = below._opened()[chosen][1]

    def _opened(self) -> dict[int, tuple[GramKind, FollowingTokens]]:
        if self._next is None:
            self._next = self._open()
        return self._next

    def _open(self) -> dict[int, tuple[GramKind, FollowingTokens]]:
        found: dict[int, list[Gram]] = {}
        going_on = (Gram(gram.tokens[1:], gram.position + 1, gram.in_text) for gram in self._above)
        for gram in (*going_on, *self._pool.after(self._token)):
            if gram.tokens:
                found.setdefault(gram.tokens[0], []).append(gram)
        opened = {}
        for rank, (token, grams) in enumerate(found.items()):
            here = self._position in [gram.position for gram in grams]
            in_text = True in [gram.in_text for gram in grams]
            below = FollowingTokens(self._pool, self._fit, token, self._position + 1, grams)
            opened[token] = GramKind(here, in_text, bool(self._above), min(rank, len(INITIAL_CHANCES) - 1)), below
        return opened


class GramFits(NamedTuple):
    """The calibration of n-grams, shared by sessions of one temperature bucket."""

    all: GramFit
    text_only: GramFit  # with only the text's own n-grams

    @classmethod
    def unknown(cls) -> GramFits:
        """Return a calibration without observations."""
        return cls(GramFit(), GramFit())
