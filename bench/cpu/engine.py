"""An engine that costs nothing: its tokens and the drafter's are scripted, so that what is measured is everything else.

The target's token at a position is drawn from a table by the position alone. A drafter's likeliest token is that one at
a share of all positions (`acceptance`), and at others none of its candidates is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.logprobs import ScoredTokens, score
from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Choice
from outrider.engine.checkpoints.checkpoint import read_config, read_tokenizer_digest
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import SCRATCH, Engine, Traits
from outrider.engine.interface.logits import BestTokens, Logits

SEED = 2024
FIRST_ID = 300  # lower ones may be bytes and special tokens
GAP = 1.0  # of every choice
FALL = 1.0  # of a candidate's score below the one before it


class ScriptedEngine(Engine):
    """Chooses scripted tokens. `pass_s`: seconds that a pass sleeps, in which it takes no processor."""

    def __init__(
        self, folder: Path, *, slots: int, rows: int | None, acceptance: float, drafts: bool, pass_s: float
    ) -> None:
        """`drafts`: the engine is a drafter's; otherwise it is the target's."""
        config = read_config(folder)
        rows = config.context + SCRATCH if rows is None else rows
        super().__init__(
            Traits(
                vocabulary=config.vocabulary,
                context=config.context,
                positions=max(rows, config.context),
                rows=rows,
                slots=slots,
                parameters=1,
                dtype="bfloat16",
                numerics="invariant",
                tokenizer_digest=read_tokenizer_digest(folder),
                eos_ids=config.eos_ids,
                weight_bytes=0,
                kv_bytes=0,
                unpadded_vocabulary=config.unpadded_vocabulary,
                samples_tokens=True,
                computed_by="a script",
            )
        )
        random = np.random.default_rng(SEED)
        usable = np.arange(FIRST_ID, config.unpadded_vocabulary or config.vocabulary)
        self._target = random.choice(usable, self.positions + 1)
        hits = random.random(self.positions + 1) < acceptance
        # No token of a miss is the target's at the same position: they are drawn from elsewhere in the table.
        self._drafted = np.where(hits, self._target, np.roll(self._target, 1))
        self._others = random.permutation(usable)
        self._drafts = drafts
        self._pass_s = pass_s
        self._ended = time.perf_counter()
        self.between: list[float] = []  # seconds from each pass to the next one

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        return np.zeros((sum(segment.outputs for segment in segments), self.vocabulary), np.float32)

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        self.between.append(time.perf_counter() - self._ended)
        if self._pass_s:
            time.sleep(self._pass_s)
        wanted = [segment.positions[len(segment.positions) - segment.outputs :] + 1 for segment in segments]
        after = np.concatenate(wanted)
        self._ended = time.perf_counter()
        return _ScriptedLogits(self, (self._drafted if self._drafts else self._target)[after], self._others, best)

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        pass

    def copy(self, source: int, target: int, rows: int) -> None:
        pass

    def _try(self, segment: Segment) -> None:
        self.sample([segment], [None])


class _ScriptedLogits:
    def __init__(self, engine: Engine, tokens: NDArray[np.int64], others: NDArray[np.int64], best: int) -> None:
        """`tokens`: [rows]; `others`: that fill a row's candidates."""
        self.vocabulary = engine.vocabulary
        self._tokens = tokens
        self._others = others
        self._best = max(2, best)
        self._scores = -FALL * np.arange(self._best, dtype=np.float64)

    def row(self, index: int) -> NDArray[np.float32]:
        row = np.zeros(self.vocabulary, np.float32)
        row[self._tokens[index]] = GAP
        return row

    def choice(self, index: int) -> Choice | None:
        return Choice(int(self._tokens[index]), GAP)

    def best(self, index: int) -> BestTokens | None:
        token = self._tokens[index]
        begin = int(token) % (len(self._others) - self._best - 1)
        others = self._others[begin : begin + self._best]
        return BestTokens(np.concatenate([[token], others[others != token]])[: self._best], self._scores)

    def score(self, rows: Sequence[int], tokens: Sequence[int], alternatives: int) -> ScoredTokens:
        return score(map(self.row, rows), tokens, alternatives)
