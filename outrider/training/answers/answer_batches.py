"""Batches of a target's texts, in an order that is a function of a seed: a training can continue at any batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.training.answers.answer_store import AnswerStore, TargetAnswer
from outrider.training.positions import Chosen, Positions

POOL = 64  # texts among which those of one length come together, because a pass is as long as its longest


class AnswerBatches:
    """Batches of about as many tokens each. Every pass over the texts has all of them once, in a new order."""

    def __init__(
        self, store: AnswerStore, texts: Sequence[int], *, window: int, batch: int, seed: int, draft_ids: Sequence[int]
    ) -> None:
        """`texts`: numbers of those to learn from; `window`: tokens of a text that are read at most; `batch`: windows
        that a batch has the tokens of; `draft_ids`: of a reduced vocabulary, ascending; empty: the whole.
        """
        self._store = store
        self._texts = np.array(texts)
        self._window = window
        self._most = batch * window
        self._seed = seed
        self._ranks = draft_ranks(draft_ids)
        self._lengths = np.minimum(store.lengths(), window)
        self._epoch = -1
        self._first = 0  # number of the first batch of the epoch
        self._plan: list[NDArray[np.int64]] = []

    def batch(self, number: int) -> Positions:
        """Return batch `number` of the infinite sequence."""
        return Positions.of(
            chosen_of(self._store.read(int(text)), self._window, self._ranks) for text in self._at(number)
        )

    def tokens(self, number: int) -> int:
        """Return the tokens that batch `number` reads."""
        return int(self._lengths[self._at(number)].sum())

    def _at(self, number: int) -> NDArray[np.int64]:
        """Return the texts of a batch."""
        if number < self._first:
            self._epoch, self._first, self._plan = -1, 0, []
        while number >= self._first + len(self._plan):
            self._first += len(self._plan)
            self._epoch += 1
            self._plan = self._planned(self._epoch)
        return self._plan[number - self._first]

    def _planned(self, epoch: int) -> list[NDArray[np.int64]]:
        random = np.random.default_rng([self._seed, epoch])
        order = self._texts[random.permutation(len(self._texts))]
        found = []
        for first in range(0, len(order), POOL):
            pool = order[first : first + POOL]
            pool = pool[np.argsort(self._lengths[pool], kind="stable")]
            while len(pool):
                # A pass is `count` texts times the longest of them, which is the last.
                widths = self._lengths[pool] * np.arange(1, len(pool) + 1)
                count = max(1, int(np.searchsorted(widths, self._most, "right")))
                found.append(pool[:count])
                pool = pool[count:]
        return [found[at] for at in random.permutation(len(found))]


def learned_and_held_out(count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Return the numbers of texts to learn from, and those of `held_out` percent of them, evenly spread."""
    each = round(100 / held_out)
    return [text for text in range(count) if text % each], [*range(0, count, each)]


def draft_ranks(draft_ids: Sequence[int]) -> NDArray[np.int64] | None:
    """Return the place of each id in a reduced vocabulary, -1 for one that it lacks: [last id + 1]. None: the whole."""
    if not draft_ids:
        return None
    ranks = np.full(draft_ids[-1] + 1, -1)
    ranks[list(draft_ids)] = np.arange(len(draft_ids))
    return ranks


def chosen_of(answer: TargetAnswer, window: int, ranks: NDArray[np.int64] | None) -> Chosen:
    """Return what a target chose in the first `window` tokens of a text, with the ids of a reduced vocabulary.

    The target's tokens that the vocabulary lacks have the log-probability -inf.
    """
    places = answer.chosen
    count = int(np.searchsorted(places, window))
    ids, logprobs = answer.ids[:count].astype(np.int64), answer.logprobs[:count].astype(np.float32)
    if ranks is not None:
        known = ids < len(ranks)
        ids = np.where(known, ranks[np.where(known, ids, 0)], -1)
        logprobs = np.where(ids >= 0, logprobs, -np.inf)
        ids = np.maximum(ids, 0)
    return Chosen(answer.tokens[:window], places[:count], ids, logprobs)


def expected_counts(store: AnswerStore) -> NDArray[np.float64]:
    """Return how often a target would have chosen each id, up to the largest that it might have: its probabilities,
    so that seldom ids are known from few texts.
    """
    counts: NDArray[np.float64] = np.zeros(1)
    for text in range(len(store)):
        it = store.read(text)
        shares = np.exp(it.logprobs.astype(np.float64)).ravel()
        more = np.bincount(it.ids.ravel(), shares, len(counts)).astype(np.float64)
        counts = more + np.pad(counts, (0, len(more) - len(counts)))
    return counts


def frequent_ids(counts: NDArray[np.float64], count: int, always: Sequence[int]) -> tuple[int, ...]:
    """Return the ids with the largest counts, ascending, with those that are in any vocabulary (FR-Spec, arXiv
    2502.14856, section 4).
    """
    weights = np.pad(counts, (0, max(0, max(always, default=0) + 1 - len(counts))))
    weights[list(always)] = np.inf
    best = np.argsort(-weights, kind="stable")[:count]
    return tuple(sorted(int(id_) for id_ in best if weights[id_] > 0))
