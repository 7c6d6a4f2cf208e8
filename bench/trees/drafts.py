"""The candidates of a drafter after a path, with their probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from bench.trees.fitting import DrafterRates, chances_of, noised_row
from bench.trees.paths import Path, TextRows
from outrider.core.construction.expansion import candidates
from outrider.core.construction.offline import Scored
from outrider.core.construction.self_repetition import Hint, Repeats
from outrider.core.proposers.ngram_tree import ContinuationSource
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract

WIDTH = 16  # limit on the children of a node; some constructions have fewer


class Scores(Protocol):
    """Gives candidates with their log-probabilities, best first, after any path below a root."""

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Return one list for each path; a model needs one pass for all."""
        ...


class ModelScores:
    """The scores of a model: log q, plus the noise where it is shared, scaled by fitted parameters, with a fitted bonus
    where the text repeats itself."""

    def __init__(
        self, rows: TextRows, sampler: Sampler, learned: DrafterRates, hints: Mapping[Path, Hint], *, shared: bool
    ) -> None:
        self._rows = rows
        self._weigh = sampler.scores if shared else sampler.log_weights
        self._learned = learned
        self._hints = hints
        self._known: dict[Path, Scored] = {}

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Return the candidates; missing rows are computed in one pass."""
        self._known.update((path, []) for path in paths if len(path) >= self._rows.depth)
        missing = [path for path in paths if path not in self._known]
        self._rows.fetch(missing)
        for path in missing:
            row = candidates(self._weigh(self._rows.after(path), path))
            fits = self._learned.below[len(path)] if self._learned.below else self._learned.fits
            self._known[path] = fits.edges(row, WIDTH, self._hints.get(path))
        return [self._known[path] for path in paths]


def hints_of(text: Sequence[int], depth: int) -> dict[Path, Hint]:
    """Return the token that followed at the last repetition of the text's end, after each path along it."""
    found = Repeats(text).find(depth)
    if found is None:
        return {}
    tokens = tuple(found.tokens)
    return {tokens[:at]: Hint(token, found.length + at) for at, token in enumerate(tokens)}


class NoisedScores:
    """The scores of a source without a model, mixed at the root with the noise of one draw, as lookup drafters do."""

    def __init__(self, source: Scores, text: Sequence[int], contract: Contract, learned: DrafterRates) -> None:
        self._source = source
        self._text = text
        self._contract = contract
        self._learned = learned
        self._root: Scored | None = None

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Return the candidates; the mixture with the noise is computed once."""
        return [
            self._first(found) if not path else found
            for path, found in zip(paths, self._source.after(paths), strict=True)
        ]

    def _first(self, found: Scored) -> Scored:
        if self._root is None:
            self._root = found
            chances = chances_of(found)
            if self._learned.noised.wanted(chances):
                _, row = noised_row(self._text, chances, self._contract)
                mixed = self._learned.noised.mixed(chances, row, WIDTH)
                self._root = sorted(((token, math.log(chance)) for token, chance in mixed.items()), key=_falling)
        return self._root


def _falling(scored: tuple[int, float]) -> float:
    return -scored[1]


class LookupScores:
    """Prompt lookup: the continuation of the latest longest match in the session's text, one candidate on one path."""

    def __init__(self, text: Sequence[int], learned: DrafterRates, depth: int) -> None:
        found = Repeats(text).find(depth)
        self._tokens = tuple(found.tokens) if found else ()
        self._length = found.length if found else 0
        self._learned = learned

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Return the candidates; none for other paths."""
        return [self._row(path) for path in paths]

    def _row(self, path: Path) -> Scored:
        if path != self._tokens[: len(path)] or len(path) >= len(self._tokens):
            return []
        return [(self._tokens[len(path)], math.log(self._learned.fits.repeats.chance(self._length + len(path))))]


class SourceScores:
    """The candidates of a source for the text followed by a path, with calibrated probabilities."""

    def __init__(self, source: ContinuationSource, text: Sequence[int], learned: DrafterRates) -> None:
        self._source = source
        self._text = list(text)
        self._learned = learned
        self._known: dict[Path, Scored] = {}

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Return the candidates; each path is looked up once."""
        for path in paths:
            if path not in self._known:
                found = self._source.propose([*self._text, *path], WIDTH, 1)
                scored = [
                    (token, self._learned.calibration.corrected(math.log(chance)))
                    for token, chance in zip(found.tokens, found.chances, strict=True)
                    if chance > 0.0
                ]
                self._known[path] = sorted(scored, key=_falling)
        return [self._known[path] for path in paths]
