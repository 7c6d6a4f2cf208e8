"""A pool of n-grams that a text says, or was guessed to say, and what they say after a token: a tree with chances.

The chances are learned from what the target said, by what is known of a token that n-grams propose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.core.continuations import Branch

FIRST_TOKENS = 1024  # of which the pool knows n-grams, the latest
OF_EACH = 8  # n-grams that it keeps of one first token, the latest

MEMORY = 0.98  # weight of the past at each observation
PRIOR = 4.0  # observations' worth of trust in what is said before anything was seen
USUAL = (0.4, 0.15, 0.08)  # chance of a proposed token by its rank, before anything was seen


class Gram(NamedTuple):
    """What an n-gram says after one of its tokens."""

    tokens: tuple[int, ...]
    position: int  # at which that token stands, or was guessed to stand the last time
    said: bool  # whether the text has said it


class Pool:
    """The latest n-grams of one session, by their first token."""

    def __init__(self) -> None:
        self._grams: OrderedDict[int, OrderedDict[tuple[int, ...], tuple[int, bool]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._grams.values()))

    def add(self, position: int, tokens: Sequence[int], *, said: bool) -> None:
        """The text says an n-gram from this position on, or it was guessed to."""
        first, rest = tokens[0], tuple(tokens[1:])
        grams = self._grams.setdefault(first, OrderedDict())
        self._grams.move_to_end(first)
        _, before = grams.pop(rest, (0, False))
        grams[rest] = position, said or before
        if len(grams) > OF_EACH:
            grams.popitem(last=False)
        if len(self._grams) > FIRST_TOKENS:
            self._grams.popitem(last=False)

    def after(self, token: int) -> Iterator[Gram]:
        """What those that begin with a token say after it, the latest first."""
        for rest, (position, said) in reversed(self._grams.get(token, {}).items()):
            yield Gram(rest, position, said)


class Kind(NamedTuple):
    """What is known of a token that n-grams propose."""

    here: bool  # whether one of them was guessed for this very place
    said: bool  # whether the text has said one of them
    deep: bool  # whether it follows another one that they propose
    rank: int  # 0: of the latest of those that propose a token here; len(USUAL) - 1 at the most


class GramFit:
    """How often such tokens are the target's, learned from what it said. For one class of temperatures."""

    def __init__(self) -> None:
        self._hits: dict[Kind, float] = {}
        self._seen: dict[Kind, float] = {}

    def chance(self, kind: Kind) -> float:
        """That a token is the target's if the one before it is."""
        hits = self._hits.get(kind, 0.0) + PRIOR * USUAL[kind.rank]
        return hits / (self._seen.get(kind, 0.0) + PRIOR)

    def observe(self, kind: Kind, hit: bool) -> None:
        """One was, or was not."""
        self._hits[kind] = MEMORY * self._hits.get(kind, 0.0) + hit
        self._seen[kind] = MEMORY * self._seen.get(kind, 0.0) + 1.0


class Following:
    """A trie of what a pool's n-grams say after a token; where one ends, those that begin there go on.

    Opened as far as it is looked into, so it does not outlive a change of the pool.
    """

    def __init__(self, pool: Pool, fit: GramFit, token: int, position: int, above: Sequence[Gram] = ()) -> None:
        """`above`: n-grams that say the token next, after the one before it."""
        self._pool = pool
        self._fit = fit
        self._token = token
        self._position = position
        self._above = above
        self._next: dict[int, tuple[Kind, Following]] | None = None

    def children(self) -> list[Branch]:
        """What may come next."""
        chances = [self._fit.chance(kind) for kind, _ in self._opened().values()]
        total = max(1.0, sum(chances))
        branches = zip(self._opened().items(), chances, strict=True)
        return [Branch(token, chance / total, below) for (token, (_, below)), chance in branches]

    def reach(self, tokens: Sequence[int], floor: float) -> int:
        """How many of these tokens it proposes with path scores of at least `floor`."""
        score, below = 1.0, self
        for depth, token in enumerate(tokens):
            score *= next((branch.chance for branch in below.children() if branch.token == token), 0.0)
            if score < floor or token not in below._opened():
                return depth
            below = below._opened()[token][1]
        return len(tokens)

    def learn(self, tokens: Sequence[int]) -> None:
        """The target said these tokens."""
        below = self
        for said in tokens:
            for token, (kind, _) in below._opened().items():
                self._fit.observe(kind, token == said)
            if said not in below._opened():
                return
            below = below._opened()[said][1]

    def _opened(self) -> dict[int, tuple[Kind, Following]]:
        if self._next is None:
            self._next = self._open()
        return self._next

    def _open(self) -> dict[int, tuple[Kind, Following]]:
        found: dict[int, list[Gram]] = {}
        going_on = (Gram(gram.tokens[1:], gram.position + 1, gram.said) for gram in self._above)
        for gram in (*going_on, *self._pool.after(self._token)):
            if gram.tokens:
                found.setdefault(gram.tokens[0], []).append(gram)
        opened = {}
        for rank, (token, grams) in enumerate(found.items()):
            here = self._position in [gram.position for gram in grams]
            said = True in [gram.said for gram in grams]
            below = Following(self._pool, self._fit, token, self._position + 1, grams)
            opened[token] = Kind(here, said, bool(self._above), min(rank, len(USUAL) - 1)), below
        return opened


class Fits(NamedTuple):
    """What n-grams are worth, to sessions of one class of temperatures."""

    all: GramFit
    said: GramFit  # where there are none but the text's own

    @classmethod
    def unknown(cls) -> Fits:
        """Nothing is known yet."""
        return cls(GramFit(), GramFit())
