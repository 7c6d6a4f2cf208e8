"""What a drafter says after a path: its candidates and their chances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from bench.trees.lessons import Learned, chances_of, noised_row
from bench.trees.paths import Path, Rows
from outrider.core.construction.growing import Scored
from outrider.core.continuations import Source
from outrider.core.contract import Contract
from outrider.core.growth import candidates
from outrider.core.repeats import Hint, Repeats
from outrider.core.sampler import Sampler

WIDTH = 16  # most children of a node, where a construction does not want fewer


class Scores(Protocol):
    """Candidates with the logarithms of their chances, best first, as they stand after any path below a root."""

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """One list for each path; a model takes one pass for all."""
        ...


class ModelScores:
    """By log q, and the noise where it is shared; what that is worth was fitted, and what it is worth more where the
    text repeats itself."""

    def __init__(
        self, rows: Rows, sampler: Sampler, learned: Learned, hints: Mapping[Path, Hint], *, shared: bool
    ) -> None:
        self._rows = rows
        self._weigh = sampler.scores if shared else sampler.log_weights
        self._learned = learned
        self._hints = hints
        self._known: dict[Path, Scored] = {}

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Missing rows in one pass."""
        self._known.update((path, []) for path in paths if len(path) >= self._rows.depth)
        missing = [path for path in paths if path not in self._known]
        self._rows.fetch(missing)
        for path in missing:
            row = candidates(self._weigh(self._rows.after(path), path))
            fits = self._learned.below[len(path)] if self._learned.below else self._learned.fits
            self._known[path] = fits.edges(row, WIDTH, self._hints.get(path))
        return [self._known[path] for path in paths]


def hints_of(text: Sequence[int], depth: int) -> dict[Path, Hint]:
    """What followed the last time, after each path along it."""
    found = Repeats(text).find(depth)
    if found is None:
        return {}
    tokens = tuple(found.tokens)
    return {tokens[:at]: Hint(token, found.length + at) for at, token in enumerate(tokens)}


class NoisedScores:
    """What a source without a model says, and at the root also what the noise of one draw says, as lookups have it."""

    def __init__(self, source: Scores, text: Sequence[int], contract: Contract, learned: Learned) -> None:
        self._source = source
        self._text = text
        self._contract = contract
        self._learned = learned
        self._root: Scored | None = None

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """The noise is asked once."""
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
    """What followed the latest longest match in the session's own text: one candidate, along one path."""

    def __init__(self, text: Sequence[int], learned: Learned, depth: int) -> None:
        found = Repeats(text).find(depth)
        self._tokens = tuple(found.tokens) if found else ()
        self._length = found.length if found else 0
        self._learned = learned

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Nothing where the path is another one."""
        return [self._row(path) for path in paths]

    def _row(self, path: Path) -> Scored:
        if path != self._tokens[: len(path)] or len(path) >= len(self._tokens):
            return []
        return [(self._tokens[len(path)], math.log(self._learned.fits.repeats.chance(self._length + len(path))))]


class SourceScores:
    """What a source finds for the text with the path behind it; chances are corrected by what they were worth."""

    def __init__(self, source: Source, text: Sequence[int], learned: Learned) -> None:
        self._source = source
        self._text = list(text)
        self._learned = learned
        self._known: dict[Path, Scored] = {}

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        """Looked up once each."""
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
