"""Levels of trees that the device grows by itself: the host sends what it knows of all levels before the first.

Rows, pages, places of keys and noise keys' bases of a level do not depend on what the model proposes. Its tokens do,
and with them positions, noise keys and what each row sees. They are chosen here, on the device, from the candidates of
all rows so far, and written to where the recorded layers read them.

Source: the best nodes of the whole tree by path score, a level at a time: EAGLE-2 (Li et al., arXiv 2406.16858),
section 4.1; across levels as in OPT-Tree (Wang et al., arXiv 2406.17276).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.noise import Draw
from outrider.core.session.digest import PHI
from outrider.engine.gpu.attention.tree_attention import TREE_COLUMNS, TREE_WORDS, AttentionPlan, pack_masks
from outrider.engine.gpu.passes.cuda_graphs import Replay
from outrider.engine.gpu.passes.input_buffers import OutputInputs, Outputs, RowInputs
from outrider.engine.gpu.passes.packing import OUTPUTS, round_up
from outrider.engine.gpu.passes.pass_runner import PassRunner
from outrider.engine.gpu.passes.row_states import RowStates
from outrider.engine.gpu.passes.staging import FLOAT, INTEGER, SMALL, Staging, placed
from outrider.engine.gpu.sampling.restricted_rows import RestrictedRow
from outrider.engine.gpu.sampling.restrictions import OUTPUTS as RESTRICTED
from outrider.engine.gpu.sampling.sampling import mixed, signed
from outrider.engine.growth import CHILDREN, LEVEL_ROWS, MOST_LEVELS, GrownLevel, Growth
from outrider.engine.heads.fed_texts import written_rows
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import BestTokens

LEVELS = tuple(count for count in OUTPUTS if count % LEVEL_ROWS == 0)  # rows of a level, with padding
MOST_TREES = LEVELS[-1] // LEVEL_ROWS  # most trees that grow in one call
_LEVELS = MOST_LEVELS + 1  # with the first
_KEY_STEP = signed(PHI)

ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True, slots=True)
class GrowingTree:
    """A tree that grows, with the segment of its first level."""

    segment: Segment
    draw: Draw
    growth: Growth
    first_output: int  # of the segment, among those of the call

    @property
    def first_column(self) -> int:
        """The column of the first row of its second level, behind the rows that all see."""
        return self.segment.prefix + self.segment.span - self.growth.base

    @classmethod
    def of(
        cls, segments: Sequence[Segment], draws: Sequence[Draw | None], growths: Sequence[Growth | None]
    ) -> list[GrowingTree]:
        """Return the trees of a call. Raises ValueError for one whose tokens are not to be chosen."""
        found, first = [], 0
        for segment, draw, growth in zip(segments, draws, growths, strict=True):
            if growth is not None:
                if draw is None:
                    raise ValueError(f"segment of slot {segment.slot}: a tree grows by a draw")
                found.append(cls(segment, draw, growth, first))
            first += segment.outputs
        return found

    def check(self, levels: int, rows: int) -> None:
        """Raise ValueError for what does not fit a slot of `rows` rows."""
        growth, end = self.growth, self.segment.prefix + self.segment.span
        if not 1 <= levels <= MOST_LEVELS or end + levels * LEVEL_ROWS > rows:
            raise ValueError(f"segment of slot {self.segment.slot}: {levels} levels do not fit behind row {end}")
        if not self.segment.prefix <= growth.base <= end or self.first_column + levels * LEVEL_ROWS > TREE_COLUMNS:
            raise ValueError(f"segment of slot {self.segment.slot}: a tree on row {growth.base} does not fit")
        if len(growth.log_scores) != self.segment.outputs or not 1 <= growth.width <= CHILDREN or growth.scale <= 0.0:
            raise ValueError(f"segment of slot {self.segment.slot}: {growth}")

    def later(self, levels: int) -> Segment:
        """Return the segment of the rows of each further level. What they see is written on the device."""
        growth, nothing = self.growth, np.zeros(LEVEL_ROWS, np.int64)
        mask = np.zeros((LEVEL_ROWS, self.first_column + levels * LEVEL_ROWS), np.bool_)
        return Segment(self.segment.slot, growth.base, nothing, nothing, mask, None, self.segment.adapter)


class _Given(NamedTuple, Generic[ArrayT]):
    """What the host sends: of each row of the first level, then of each tree."""

    outputs: ArrayT  # [rows] int64, where the row's candidates are among those of the call
    log_scores: ArrayT  # [rows] float64; -inf: there is no row
    positions: ArrayT  # [rows] int64
    sees: ArrayT  # [rows, TREE_WORDS] int32
    places: ArrayT  # [levels, rows] int64, of each further level
    scales: ArrayT  # [trees] float64
    widths: ArrayT  # [trees] int64
    log_floors: ArrayT  # [trees] float64
    last: ArrayT  # [trees] int64
    columns: ArrayT  # [trees] int64, see `GrowingTree.first_column`
    bases: ArrayT  # [trees] int64, of noise keys
    states: ArrayT  # [levels with the first, rows] int64, numbers of the states that the rows compute


class TreeGrowth:
    """The buffers of trees that grow, and what chooses their nodes, recorded by the number of rows of a level."""

    def __init__(self, candidates: int, passes: PassRunner) -> None:
        """`candidates`: of each row."""
        device = passes.runtime.device
        self._passes = passes
        self._states = passes.states
        self.candidates = candidates
        rows, trees = MOST_TREES * LEVEL_ROWS, MOST_TREES
        fields = [
            *placed(
                [
                    (INTEGER, (rows,)),
                    (FLOAT, (rows,)),
                    (INTEGER, (rows,)),
                    (SMALL, (rows, TREE_WORDS)),
                    (INTEGER, (MOST_LEVELS, rows)),
                    (FLOAT, (trees,)),
                    (INTEGER, (trees,)),
                    (FLOAT, (trees,)),
                    *((INTEGER, (trees,)) for _ in range(3)),
                    (INTEGER, (_LEVELS, rows)),
                ]
            )
        ]
        self._staging = Staging(fields[-1].stop, device)
        self._host = _Given[NDArray[Any]](*map(self._staging.array, fields))
        self._given = _Given[Tensor](*map(self._staging.tensor, fields))
        self._stop = fields[-1].stop
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        per_level = LEVEL_ROWS * CHILDREN
        self._level = zeros(1)  # the level whose rows were run last
        self._log_scores = torch.zeros(rows, dtype=torch.float64, device=device)  # of those rows
        self._waiting = torch.zeros(trees, _LEVELS * per_level, dtype=torch.float64, device=device)
        self._tokens = zeros(trees, _LEVELS * per_level)  # of nodes that wait; by row and rank
        self._positions = zeros(trees, _LEVELS * LEVEL_ROWS)  # of all rows
        self._sees = torch.zeros(trees, _LEVELS * LEVEL_ROWS, TREE_WORDS, dtype=torch.int32, device=device)
        self._run = zeros(rows, 2)  # of the last level: numbers of the rows before, and tokens
        self._per_row = torch.arange(LEVEL_ROWS, device=device)
        self._per_child = torch.arange(per_level, device=device)
        self._words = torch.arange(TREE_WORDS, device=device)
        self._choices = torch.zeros(rows, 2 * candidates, dtype=torch.float64, device=device)  # of the last level
        self._replays: dict[int, Replay] = {}  # by rows

    @staticmethod
    def rows_of(trees: int) -> int:
        """Return the number of rows of a level, with padding."""
        return round_up(trees * LEVEL_ROWS, LEVELS)

    @staticmethod
    def outputs_of(trees: Sequence[GrowingTree]) -> Outputs:
        """Return the outputs of each further level: all of its rows. Noise keys are written on the device."""
        count = len(trees) * LEVEL_ROWS
        rows, draws = np.arange(count), [tree.draw for tree in trees]
        restricted: list[RestrictedRow | None] = []
        if any(draw.restriction is not None for draw in draws):
            for tree in trees:
                given, after = tree.draw.restriction, int(tree.segment.positions[-1]) + 1
                row = None if given is None else RestrictedRow(given, tree.segment.slot, after, None)
                restricted += [row] * LEVEL_ROWS
        temperatures = np.repeat([draw.temperature for draw in draws], LEVEL_ROWS)
        return Outputs(rows, rows, np.ones(count, np.bool_), np.zeros(count, np.int64), temperatures, tuple(restricted))

    def run(self, trees: Sequence[GrowingTree], levels: int, choices: Tensor | None) -> list[Tensor]:
        """Begin to run further levels behind a call. `choices`: the candidates of its rows, None if they are not one
        part. Return what `add` returns of each level; nothing where the trees cannot grow together.
        """
        if choices is None or not trees or not self.fits(trees):
            return []
        passes, outputs = self._passes, self.outputs_of(trees)
        with passes.runtime.computing():
            adapted = any(tree.segment.adapter is not None for tree in trees)
            layers = passes.layers(self.rows_of(len(trees)), adapted=adapted)
            head = passes.choice.head(outputs, self.candidates)
            assert head is not None
            assert head.choices is not None
            choose = self.choose(layers.plan)
            passes.send(layers, [tree.later(levels) for tree in trees], outputs)
            passes.choice.send(outputs, self.candidates)
            self.send(trees, levels)
            self.begin(choices, layers.plan.rows)
            results = []
            for _ in range(levels):
                choose()
                layers.replay()
                head.replay()
                results.append(self.add(head.choices))
        return results

    @staticmethod
    def fits(trees: Sequence[GrowingTree]) -> bool:
        """Return whether the trees can grow in one call."""
        restricted = any(tree.draw.restriction is not None for tree in trees)
        return len(trees) * LEVEL_ROWS <= (RESTRICTED if restricted else LEVELS[-1])

    def send(self, trees: Sequence[GrowingTree], levels: int) -> None:
        """Begin to copy what the device needs to know of all levels."""
        self._staging.wait()
        host = self._host
        host.log_scores.fill(-np.inf)
        host.outputs.fill(0)
        host.scales.fill(1.0)
        host.sees.fill(0)
        masks: list[tuple[int, NDArray[np.bool_]]] = []
        for index, tree in enumerate(trees):
            segment, growth = tree.segment, tree.growth
            count = min(segment.outputs, LEVEL_ROWS)
            rows = slice(index * LEVEL_ROWS, index * LEVEL_ROWS + count)
            at = slice(len(segment.tokens) - segment.outputs, len(segment.tokens) - segment.outputs + count)
            host.outputs[rows] = np.arange(tree.first_output, tree.first_output + count)
            host.log_scores[rows] = growth.log_scores[:count]
            host.positions[rows] = segment.positions[at]
            if tree.first_column:  # else the rows see nothing but what all see
                masks.append((rows.start, segment.seen[at, growth.base - segment.prefix :]))
            host.scales[index], host.widths[index] = growth.scale, growth.width
            host.log_floors[index], host.last[index] = growth.log_floor, growth.last
            host.columns[index] = tree.first_column
            host.bases[index] = np.uint64(tree.draw.base).astype(np.int64)
        if masks:
            pack_masks(masks, host.sees)
        slots = np.repeat([tree.segment.slot for tree in trees], levels * LEVEL_ROWS)
        ends = [tree.segment.prefix + tree.segment.span for tree in trees]
        cache_rows = np.concatenate([np.arange(end, end + levels * LEVEL_ROWS) for end in ends])
        found = self._passes.kv.table.places(slots, cache_rows).reshape(len(trees), levels, LEVEL_ROWS)
        host.places[:levels, : len(trees) * LEVEL_ROWS] = found.transpose(1, 0, 2).reshape(levels, -1)
        host.places[:, len(trees) * LEVEL_ROWS :] = 0
        if self._states is not None:
            self._lay_states(self._states, trees, cache_rows.reshape(len(trees), levels, LEVEL_ROWS), host.states)
        self._staging.copy((0, self._stop))

    def _lay_states(
        self, known: RowStates, trees: Sequence[GrowingTree], rows: NDArray[np.int64], states: NDArray[np.int64]
    ) -> None:
        """Write the numbers of the states of each level's rows. `rows`: of the slots, [trees, levels, LEVEL_ROWS]."""
        states.fill(known.unused)
        for index, tree in enumerate(trees):
            own = slice(index * LEVEL_ROWS, (index + 1) * LEVEL_ROWS)
            first = np.array(written_rows(tree.segment)[-tree.segment.outputs :][:LEVEL_ROWS])
            states[0, own][: len(first)] = known.numbers(tree.segment.slot, first)
            states[1 : 1 + rows.shape[1], own] = known.numbers(tree.segment.slot, rows[index])

    def begin(self, candidates: Tensor, count: int) -> None:
        """Begin with the candidates of the first level. `candidates`: of all outputs of the call; `count`: rows of a
        level, with padding.
        """
        trees, given = count // LEVEL_ROWS, self._given
        self._choices[:count] = candidates.index_select(0, given.outputs[:count])
        self._level.zero_()
        self._waiting.fill_(-torch.inf)
        self._log_scores.copy_(given.log_scores)
        self._positions[:trees, :LEVEL_ROWS] = given.positions[:count].view(trees, LEVEL_ROWS)
        self._sees[:trees, :LEVEL_ROWS] = given.sees[:count].view(trees, LEVEL_ROWS, TREE_WORDS)

    def choose(self, plan: AttentionPlan) -> Replay:
        """Return what chooses the nodes of a level from the candidates of those before, recorded at its first use."""
        if plan.rows not in self._replays:
            inputs, outputs = self._passes.inputs.rows(plan), self._passes.inputs.outputs(plan.rows)
            self._level.zero_()
            self._replays[plan.rows] = self._passes.runtime.record(lambda: self._choose(plan.rows, inputs, outputs))
        return self._replays[plan.rows]

    def add(self, choices: Tensor) -> Tensor:
        """Take over the candidates of a level. Return a copy of them, behind what its rows are: their parents' numbers
        and their tokens: [rows, 2 + 2 * candidates] float64.
        """
        self._choices[: len(choices)] = choices
        return torch.cat([self._run[: len(choices)].double(), choices], 1)

    def _choose(self, count: int, inputs: RowInputs[Tensor], outputs: OutputInputs[Tensor]) -> None:
        trees, given, level, choices = count // LEVEL_ROWS, self._given, self._level, self._choices[:count]
        waiting, tokens = self._waiting[:trees], self._tokens[:trees]
        positions, sees = self._positions[:trees], self._sees[:trees]

        # The children of the last level's rows begin to wait.
        log_scores = self._log_scores[:count].view(trees, LEVEL_ROWS)
        held = positions.gather(1, (level * LEVEL_ROWS + self._per_row).expand(trees, -1))
        grows = held < given.last[:trees, None]
        children = _shares(choices[:, self.candidates :], given.scales[:trees]).view(trees, LEVEL_ROWS, -1)
        children = children[:, :, :CHILDREN] + log_scores[:, :, None]
        rank = self._per_child[:CHILDREN]
        wanted = (rank < given.widths[:trees, None, None]) & (children >= given.log_floors[:trees, None, None])
        children = torch.where(wanted & grows[:, :, None], children, -torch.inf)
        at = level * (LEVEL_ROWS * CHILDREN) + self._per_child
        waiting.index_copy_(1, at, children.view(trees, -1))
        tokens.index_copy_(1, at, choices[:, :CHILDREN].long().view(trees, -1))

        # The best of all nodes that wait are the next level.
        best, index = waiting.topk(LEVEL_ROWS, 1)
        waiting.scatter_(1, index, -torch.inf)
        exists = torch.isfinite(best)
        parent = torch.div(index, CHILDREN, rounding_mode="floor")
        token = torch.where(exists, tokens.gather(1, index), 0)
        position = torch.where(exists, positions.gather(1, parent) + 1, 0)
        column = given.columns[:trees, None] + level * LEVEL_ROWS + self._per_row
        own = torch.where(self._words == (column >> 5)[:, :, None], (1 << (column & 31))[:, :, None], 0).int()
        seen = sees.gather(1, parent[:, :, None].expand(-1, -1, TREE_WORDS)) | own
        level += 1
        rows = level * LEVEL_ROWS + self._per_row
        positions.index_copy_(1, rows, position)
        sees.index_copy_(1, rows, seen)
        self._log_scores[:count] = best.view(-1)
        self._run[:count, 0] = torch.where(exists, parent, -1).view(-1)
        self._run[:count, 1] = token.view(-1)

        inputs.tokens[:count] = token.view(-1)
        inputs.positions[:count] = position.view(-1)
        inputs.trees[:count] = seen.view(count, -1)
        inputs.places[:count] = given.places.index_select(0, level - 1).view(-1)[:count]
        if self._states is not None:
            numbers = given.states[:, :count].reshape(_LEVELS, trees, LEVEL_ROWS).transpose(0, 1).flatten(1)
            self._states.sources[:count] = numbers.gather(1, parent).view(-1)
            self._states.targets[:count] = given.states.index_select(0, level).view(-1)[:count]
        outputs.keys[:count] = mixed(given.bases[:trees, None] + (position + 1) * _KEY_STEP).view(-1)


def grown_levels(results: Sequence[Tensor], trees: int) -> list[GrownLevel]:
    """Read the results of some levels. Here the host waits for the device."""
    levels = []
    for found in torch.stack([*results]).cpu().numpy()[:, : trees * LEVEL_ROWS] if results else ():
        run, choices = np.split(found.reshape(trees, LEVEL_ROWS, -1), [2], -1)
        tokens, scores = np.split(choices, 2, -1)
        parents, own = run.astype(np.int64).transpose(2, 0, 1)
        levels.append(GrownLevel(parents, own, BestTokens(tokens.astype(np.int64), scores)))
    return levels


def _shares(scores: Tensor, scales: Tensor) -> Tensor:
    """Return the logarithm of each candidate's share in the softmax of a row's scores; -inf where the first is not
    finite: [rows, candidates]."""
    first = scores[:, :1]
    relative = torch.where(torch.isfinite(first), scores - first, -torch.inf)
    shares = (relative / scales.repeat_interleave(LEVEL_ROWS)[:, None]).log_softmax(-1)
    return torch.where(torch.isnan(shares), -torch.inf, shares)
