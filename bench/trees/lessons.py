"""What drafters learn before they are measured, from texts that they are not measured on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.trees.paths import PathRows
from outrider.core.calibration import Calibration
from outrider.core.continuations import BestOf, Source
from outrider.core.contract import Contract
from outrider.core.growth import Fits, candidates
from outrider.core.repeats import Repeats
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
    calibration: Calibration = field(default_factory=Calibration)
    ranks: RankMeans = field(default_factory=RankMeans)  # of candidates, best first
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
    for place in range(text.prompt - 1, len(text.tokens) - 1):
        sampler = Sampler(contract, rows.vocabulary, text.tokens[: place + 1], text.prompt)
        token = text.tokens[place + 1]
        row = candidates((sampler.scores if shared else sampler.log_weights)(drafted[place]))
        learned.fits.observe(row, token, None)
        learned.ranks.observe([float(each == token) for each in row.tokens[:RANKS]])
        if not shared:
            p, q = sampler.probabilities(said[place]), SparseRow.of(sampler.probabilities(drafted[place]))
            learned.drawn.observe(_accepted_by_rank(p, q, SeededChance(contract.seed, place, token, DRAFT)))


def learn_lookup(texts: Sequence[Text]) -> Learned:
    """By how long the match was."""
    learned = Learned()
    for text in texts:
        repeats = Repeats(text.tokens[: text.prompt])
        for token in text.tokens[text.prompt :]:
            found = repeats.find(1)
            if found is not None:
                learned.fits.repeats.observe(found.length, found.tokens[0] == token)
            learned.ranks.observe([float(found is not None and found.tokens[0] == token)])
            repeats.extend([token])
    return learned


def learn_suffixes(texts: Sequence[Text]) -> tuple[Learned, FinishedOutputs]:
    """One text after the other, each over those before it; also gives the index of them all."""
    learned, outputs = Learned(), FinishedOutputs()
    for text in texts:
        own = session_suffixes(text.tokens[: text.prompt])
        both = BestOf([own, outputs])
        for place in range(text.prompt, len(text.tokens)):
            end, token = text.tokens[:place], text.tokens[place]
            found = both.propose(end, RANKS, 1)
            for candidate, chance in zip(found.tokens, found.chances, strict=True):
                learned.calibration.observe(math.log(max(chance, 1e-9)), candidate == token)
            learned.ranks.observe([float(candidate == token) for candidate in found.tokens])
            outputs.learn(end, token)
            own.extend([token])
        outputs.add(text.tokens)
    return learned, outputs


def session_suffixes(tokens: Sequence[int]) -> SessionSuffixes:
    """The index of a session, which has learned from each of its tokens."""
    own = SessionSuffixes()
    for token in tokens:
        own.extend([token])
    return own


def best_of(tokens: Sequence[int], outputs: FinishedOutputs) -> Source:
    """A session's own text and earlier outputs, whichever promises more."""
    return BestOf([session_suffixes(tokens), outputs])


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
