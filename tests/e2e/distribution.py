"""Do tokens follow a law that is known exactly? Chi-square tests, with fixed seeds, that notice a few percent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]

LEAST_EXPECTED = 5.0  # in a cell; rarer ones are counted together


@dataclass(frozen=True, slots=True)
class Sample:
    """Texts after one prompt, and the law of each token given the tokens before it."""

    tokens: Tokens  # [texts, length]
    law: Floats  # [texts, length, vocabulary]: p
    draft: Floats  # probabilities: q, of the drafter
    joint: Floats  # [vocabulary, vocabulary]: the law of the first two tokens together


def p_values(sample: Sample, seed: int) -> Mapping[str, float]:
    """A p-value for each way of looking; all are about uniform if and only if the tokens follow the law.

    The transform u = F(x - 1) + v p(x), with v uniform, is uniform and independent over positions, whatever the
    laws are (Rosenblatt 1952; randomized for discrete laws by Brockwell 2007). F adds up tokens in any order that
    the past fixes. By q / p a bias towards what was drafted shifts u down; by p any change of temperature does;
    by id two tokens that share their noise agree.
    """
    v = np.random.default_rng(seed).random(sample.tokens.shape)
    by_draft = transform(sample, -sample.draft / sample.law, v)
    by_law = transform(sample, -sample.law, v)
    by_id = transform(sample, np.broadcast_to(np.arange(sample.law.shape[-1]), sample.law.shape), v)
    even = sample.tokens.shape[1] // 2 * 2
    pairs = np.floor(by_id[:, 0:even:2] * 10) * 10 + np.floor(by_id[:, 1:even:2] * 10)
    counts = np.zeros(sample.joint.shape, np.int64)
    np.add.at(counts, (sample.tokens[:, 0], sample.tokens[:, 1]), 1)
    return {
        "transformed, likelier drafts first": uniform(np.floor(by_draft * 100), 100),
        "transformed, likelier tokens first": uniform(np.floor(by_law * 100), 100),
        "transformed, pairs": uniform(pairs, 100),
        "the first two tokens": chi_square(counts, sample.joint),
    }


def corrected(values: Mapping[str, float]) -> float:
    """The smallest p-value, times their number (Bonferroni)."""
    return min(1.0, len(values) * min(values.values()))


def transform(sample: Sample, order: Floats | Tokens, v: Floats) -> Floats:
    """u, [texts, length]; tokens in ascending `order`, [texts, length, vocabulary]."""
    ranked = np.argsort(order, axis=-1, kind="stable")
    law = np.take_along_axis(sample.law, ranked, axis=-1)
    rank = np.argmax(ranked == sample.tokens[..., None], axis=-1)[..., None]
    own = np.take_along_axis(law, rank, axis=-1)
    below = np.take_along_axis(np.cumsum(law, axis=-1), rank, axis=-1) - own
    return np.clip((below + v[..., None] * own)[..., 0], 0.0, np.nextafter(1.0, 0.0))


def uniform(cells: Floats, count: int) -> float:
    """Return whether cell numbers 0 .. count - 1 are equally frequent."""
    counts = np.bincount(cells.astype(np.int64).ravel(), minlength=count)
    return chi_square(counts, np.full(count, 1.0 / count))


def chi_square(counts: NDArray[np.int64], law: Floats) -> float:
    """Pearson's test of counts against probabilities, both of any shape; rare cells are one."""
    counts, expected = counts.ravel(), law.ravel() * counts.sum()
    rare = expected < LEAST_EXPECTED
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(counts) - 1))
