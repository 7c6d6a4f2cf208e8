"""Fits the statistics of drafters before they are measured, on other texts than those of the measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bench.trees.paths import PathRows, TextRows
from outrider.core.acceptance import DRAFT, SeededRandom, SparseRow
from outrider.core.acceptance.rejection import remove_token, residual
from outrider.core.construction.expansion import Candidates, DrafterFits, candidates
from outrider.core.construction.self_repetition import Hint, Repeats
from outrider.core.control.cost.calibration import Calibration
from outrider.core.proposers.ngram_tree import BestOf, ContinuationSource
from outrider.core.proposers.noise_mixture import BackgroundDistribution, Found, NoiseMixtureFit
from outrider.core.proposers.suffixes import FinishedOutputs, SessionSuffixes
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.noise import gumbel_at
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract

RANKS = 16
PRIOR = 0.5  # pseudo-observations, for ranks that were never accepted


@dataclass(slots=True)
class RankMeans:
    """How often the child of each rank is the accepted one, as plain means."""

    sums: list[float] = field(default_factory=lambda: [0.0] * RANKS)
    seen: int = 0

    def observe(self, chances: Sequence[float]) -> None:
        """Add one node, with the acceptance probability of each rank."""
        self.seen += 1
        for rank, chance in enumerate(chances[:RANKS]):
            self.sums[rank] += chance

    def rates(self) -> tuple[float, ...]:
        """Return the rates by rank, made non-increasing."""
        found: list[float] = []
        for rank, total in enumerate(self.sums):
            rate = (total + PRIOR / (rank + 2) ** 2) / (self.seen + PRIOR)
            found.append(min(rate, found[-1] if found else 1.0))
        return tuple(found)


@dataclass(slots=True)
class DrafterRates:
    """The fitted statistics of one drafter at one temperature, for one ranking of candidates."""

    fits: DrafterFits = field(default_factory=DrafterFits)
    below: list[DrafterFits] = field(
        default_factory=list
    )  # of heads, which are worth less the deeper they guess: level by level
    calibration: Calibration = field(default_factory=Calibration)
    ranks: RankMeans = field(default_factory=RankMeans)  # of candidates, best first
    noised: NoiseMixtureFit = field(default_factory=NoiseMixtureFit)  # without a model
    noised_ranks: RankMeans = field(default_factory=RankMeans)  # of candidates, best first by that
    drawn: RankMeans = field(default_factory=RankMeans)  # of children drawn one after the other, recursive rejection


@dataclass(frozen=True, slots=True)
class TargetText:
    """A text that the target generated under shared noise."""

    tokens: tuple[int, ...]
    prompt: int  # tokens of it that are the prompt


def learn_model(
    learned: DrafterRates, rows: PathRows, target: PathRows, text: TargetText, contract: Contract, *, shared: bool
) -> None:
    """Fit a model's statistics to the target's tokens in a text."""
    target_rows, drafted = target.read(text.tokens), rows.read(text.tokens)
    repeats = Repeats(text.tokens[: text.prompt])
    for place in range(text.prompt - 1, len(text.tokens) - 1):
        sampler = Sampler(contract, rows.vocabulary, text.tokens[: place + 1], text.prompt)
        token = text.tokens[place + 1]
        row = candidates((sampler.scores if shared else sampler.log_weights)(drafted[place]))
        hint = _hint(repeats)
        if hint is not None:
            learned.fits.repeats.observe(hint.length, hint.token == token)
        learned.fits.observe(row, token, hint)
        repeats.extend([token])
        learned.ranks.observe([float(each == token) for each in row.tokens[:RANKS]])
        if not shared:
            p, q = sampler.probabilities(target_rows[place]), whole_row(sampler.probabilities(drafted[place]))
            learned.drawn.observe(_accepted_by_rank(p, q, SeededRandom(contract.seed, place, token, DRAFT)))


def learn_heads(learned: DrafterRates, rows: TextRows, text: TargetText, contract: Contract) -> None:
    """Fit the statistics of heads to the target's tokens in a text, at each depth, under shared noise."""
    learned.below = learned.below or [DrafterFits() for _ in range(rows.depth)]
    rows.read(text.tokens)
    for place in range(text.prompt - 1, len(text.tokens) - rows.depth):
        sampler = Sampler(contract, rows.vocabulary, text.tokens[: place + 1], text.prompt)
        rows.root(place)
        for depth, fits in enumerate(learned.below):
            path = text.tokens[place + 1 : place + 1 + depth]
            row, token = candidates(sampler.scores(rows.after(path), path)), text.tokens[place + 1 + depth]
            fits.observe(row, token, None)
            if not depth:
                learned.ranks.observe([float(each == token) for each in row.tokens[:RANKS]])


def learn_lookup(texts: Sequence[TargetText], contracts: Sequence[Contract]) -> DrafterRates:
    """Fit prompt lookup, by the length of matches and by the noise."""
    learned = DrafterRates()
    for text, contract in zip(texts, contracts, strict=True):
        repeats = Repeats(text.tokens[: text.prompt])
        for place in range(text.prompt, len(text.tokens)):
            token = text.tokens[place]
            found = repeats.find(1)
            chances = [(found.tokens[0], math.log(learned.fits.repeats.chance(found.length)))] if found else []
            _learn_noise(learned, text, place, contract, chances)
            if found is not None:
                learned.fits.repeats.observe(found.length, found.tokens[0] == token)
            learned.ranks.observe([float(found is not None and found.tokens[0] == token)])
            repeats.extend([token])
    return learned


def learn_suffixes(texts: Sequence[TargetText], contracts: Sequence[Contract]) -> tuple[DrafterRates, FinishedOutputs]:
    """Fit suffix lookup, one text after the other, with an index of the texts before it.

    Also returns the index of all texts.
    """
    learned, outputs = DrafterRates(), FinishedOutputs()
    for text, contract in zip(texts, contracts, strict=True):
        own = session_suffixes(text.tokens[: text.prompt])
        both = BestOf([own, outputs])
        for place in range(text.prompt, len(text.tokens)):
            end, token = text.tokens[:place], text.tokens[place]
            found = both.propose(end, RANKS, 1)
            chances = [
                (candidate, learned.calibration.corrected(math.log(max(chance, 1e-9))))
                for candidate, chance in zip(found.tokens, found.chances, strict=True)
            ]
            _learn_noise(learned, text, place, contract, chances)
            for candidate, chance in zip(found.tokens, found.chances, strict=True):
                learned.calibration.observe(math.log(max(chance, 1e-9)), candidate == token)
            learned.ranks.observe([float(candidate == token) for candidate in found.tokens])
            outputs.learn(end, token)
            own.extend([token])
        outputs.add(text.tokens)
    return learned, outputs


def whole_row(q: FloatRow) -> SparseRow:
    """Return the whole q for drawing. On the wire q is cut to its likeliest 0.99, which costs the rules that compare p
    with q much at temperature 1; here they are measured at their best."""
    return SparseRow.of(q, max_tokens=len(q), mass=1.0)


def session_suffixes(tokens: Sequence[int]) -> SessionSuffixes:
    """Return the suffix index of a session with these tokens."""
    own = SessionSuffixes()
    for token in tokens:
        own.extend([token])
    return own


def best_of(tokens: Sequence[int], outputs: FinishedOutputs) -> ContinuationSource:
    """Return a source that proposes from the session's text or from earlier outputs, whichever expects more."""
    return BestOf([session_suffixes(tokens), outputs])


def chances_of(found: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return the probabilities of tokens from their log-probabilities."""
    return {token: math.exp(chance) for token, chance in found}


def noised_row(text: Sequence[int], found: Found, contract: Contract) -> tuple[BackgroundDistribution, Candidates]:
    """Return the background distribution of a text, and the candidates of the noise for its next token."""
    background = BackgroundDistribution()
    background.extend(text)
    return background, background.leading(found, partial(gumbel_at, contract.seed, contract.choice, len(text)))


def _learn_noise(
    learned: DrafterRates, text: TargetText, place: int, contract: Contract, found: Sequence[tuple[int, float]]
) -> None:
    """Fit the mixture of a source's candidates with the noise to the target's token at `place`."""
    chances, token, best = chances_of(found), text.tokens[place], [each for each, _ in found]
    if not contract.greedy and learned.noised.wanted(chances):
        background, row = noised_row(text.tokens[:place], chances, contract)
        mixed = learned.noised.mixed(chances, row, RANKS)
        best = sorted(mixed, key=lambda each: -mixed[each])
        learned.noised.observe(chances, row, token, background.frequency(token))
    learned.noised_ranks.observe([float(each == token) for each in best])


def _hint(repeats: Repeats) -> Hint | None:
    found = repeats.find(1)
    return Hint(found.tokens[0], found.length) if found else None


def _accepted_by_rank(p: np.ndarray, row: SparseRow, chance: SeededRandom) -> list[float]:
    """Return the probability that recursive rejection accepts each of the children drawn from a row, in order."""
    q, reach, found = row.dense(len(p)), 1.0, []
    for token in row.draw(RANKS, chance):
        accepted = min(1.0, float(p[token]) / float(q[token]))
        found.append(reach * accepted)
        reach *= 1.0 - accepted
        p = residual(p, q)
        remove_token(q, token)
    return found
