"""What drafters learn before they are measured, from texts that they are not measured on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bench.trees.paths import PathRows, Rows
from outrider.core.calibration import Calibration
from outrider.core.continuations import BestOf, Source
from outrider.core.contract import Contract
from outrider.core.filters import FloatRow
from outrider.core.growth import Candidates, Fits, candidates
from outrider.core.noise import gumbel_at
from outrider.core.noised import Background, Found, NoisedFit
from outrider.core.repeats import Hint, Repeats
from outrider.core.rules import DRAFT, SeededChance, SparseRow
from outrider.core.rules.rejection import uncovered, without
from outrider.core.sampler import Sampler
from outrider.core.suffixes import FinishedOutputs, SessionSuffixes

RANKS = 16
PRIOR = 0.5  # observations' worth of a rank that was never right


@dataclass(slots=True)
class RankMeans:
    """How often the child of each rank is the accepted one: plain means."""

    sums: list[float] = field(default_factory=lambda: [0.0] * RANKS)
    seen: int = 0

    def observe(self, chances: Sequence[float]) -> None:
        """Of one node: the chance of each rank."""
        self.seen += 1
        for rank, chance in enumerate(chances[:RANKS]):
            self.sums[rank] += chance

    def rates(self) -> tuple[float, ...]:
        """Falling."""
        found: list[float] = []
        for rank, total in enumerate(self.sums):
            rate = (total + PRIOR / (rank + 2) ** 2) / (self.seen + PRIOR)
            found.append(min(rate, found[-1] if found else 1.0))
        return tuple(found)


@dataclass(slots=True)
class Learned:
    """Of one drafter at one temperature, under one way to rank candidates."""

    fits: Fits = field(default_factory=Fits)
    below: list[Fits] = field(
        default_factory=list
    )  # of heads, which are worth less the deeper they guess: level by level
    calibration: Calibration = field(default_factory=Calibration)
    ranks: RankMeans = field(default_factory=RankMeans)  # of candidates, best first
    noised: NoisedFit = field(default_factory=NoisedFit)  # without a model
    noised_ranks: RankMeans = field(default_factory=RankMeans)  # of candidates, best first by that
    drawn: RankMeans = field(default_factory=RankMeans)  # of children drawn one after the other, recursive rejection


@dataclass(frozen=True, slots=True)
class Text:
    """A target's own text under shared noise."""

    tokens: tuple[int, ...]
    prompt: int  # tokens of it that are the prompt


def learn_model(
    learned: Learned, rows: PathRows, target: PathRows, text: Text, contract: Contract, *, shared: bool
) -> None:
    """By what the target said after each token of a text."""
    said, drafted = target.read(text.tokens), rows.read(text.tokens)
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
            p, q = sampler.probabilities(said[place]), whole_row(sampler.probabilities(drafted[place]))
            learned.drawn.observe(_accepted_by_rank(p, q, SeededChance(contract.seed, place, token, DRAFT)))


def learn_heads(learned: Learned, rows: Rows, text: Text, contract: Contract) -> None:
    """By what the target said after each token of a text, at each depth below it, under shared noise."""
    learned.below = learned.below or [Fits() for _ in range(rows.depth)]
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


def learn_lookup(texts: Sequence[Text], contracts: Sequence[Contract]) -> Learned:
    """By how long the match was, and by the noise."""
    learned = Learned()
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


def learn_suffixes(texts: Sequence[Text], contracts: Sequence[Contract]) -> tuple[Learned, FinishedOutputs]:
    """One text after the other, each over those before it; also gives the index of them all."""
    learned, outputs = Learned(), FinishedOutputs()
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
    """What is drawn from: q itself. The wire's is cut to its likeliest 0.99, which costs the rules that hold p
    against q much at temperature 1; they are measured at their best."""
    return SparseRow.of(q, most=len(q), mass=1.0)


def session_suffixes(tokens: Sequence[int]) -> SessionSuffixes:
    """The index of a session, which has learned from each of its tokens."""
    own = SessionSuffixes()
    for token in tokens:
        own.extend([token])
    return own


def best_of(tokens: Sequence[int], outputs: FinishedOutputs) -> Source:
    """A session's own text and earlier outputs, whichever promises more."""
    return BestOf([session_suffixes(tokens), outputs])


def chances_of(found: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Tokens and their chances, from the logarithms of these."""
    return {token: math.exp(chance) for token, chance in found}


def noised_row(text: Sequence[int], found: Found, contract: Contract) -> tuple[Background, Candidates]:
    """How often a text says its tokens, and what the noise says of the one after it."""
    said = Background()
    said.extend(text)
    return said, said.leading(found, partial(gumbel_at, contract.seed, contract.choice, len(text)))


def _learn_noise(
    learned: Learned, text: Text, place: int, contract: Contract, found: Sequence[tuple[int, float]]
) -> None:
    """What the noise says of what a source found, by what the target then said at `place`."""
    chances, token, best = chances_of(found), text.tokens[place], [each for each, _ in found]
    if not contract.greedy and learned.noised.wanted(chances):
        said, row = noised_row(text.tokens[:place], chances, contract)
        mixed = learned.noised.mixed(chances, row, RANKS)
        best = sorted(mixed, key=lambda each: -mixed[each])
        learned.noised.observe(chances, row, token, said.usual(token))
    learned.noised_ranks.observe([float(each == token) for each in best])


def _hint(repeats: Repeats) -> Hint | None:
    found = repeats.find(1)
    return Hint(found.tokens[0], found.length) if found else None


def _accepted_by_rank(p: np.ndarray, row: SparseRow, chance: SeededChance) -> list[float]:
    """The chance that recursive rejection accepts each of the children drawn from a row, in order."""
    q, reach, found = row.dense(len(p)), 1.0, []
    for token in row.draw(RANKS, chance):
        accepted = min(1.0, float(p[token]) / float(q[token]))
        found.append(reach * accepted)
        reach *= 1.0 - accepted
        p = uncovered(p, q)
        without(q, token)
    return found
