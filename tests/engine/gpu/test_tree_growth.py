"""Levels that the device grows by itself are the best nodes of the tree, and what passes of the same rows compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.core.sampling.noise import Draw, generation_base
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.gpu import DeviceEngine
from outrider.engine.gpu.tree_growth import MOST_TREES
from outrider.engine.growth import CHILDREN, LEVEL_ROWS, MOST_LEVELS, GrownLevel, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import BestTokens, Logits
from outrider.engine.interface.masks import path_mask
from outrider.engine.interface.settings import EngineSettings
from tests.engine.gpu.taped import DEVICE, taped
from tests.engine.small_checkpoints import MODELS, prompt

SLOTS = MOST_TREES + 1
HELD = 208  # rows of a slot: on a CPU attention copies all of them for each row


@pytest.fixture(scope="module")
def engines() -> list[DeviceEngine]:
    """One grows trees, taped; the other runs the same rows level by level."""
    found = [
        DeviceEngine.load(MODELS / "target", EngineSettings(device=DEVICE, dtype="float32", slots=SLOTS, rows=HELD))
        for _ in range(2)
    ]
    taped(found[0])
    return found


class Grown:
    """A text with a tree on it that was grown; each row's path and candidates."""

    def __init__(self, segment: Segment, growth: Growth) -> None:
        self.segment, self.growth = segment, growth
        end, count = segment.prefix + segment.span, len(segment.tokens)
        self.rows: list[tuple[int, int, list[int]] | None] = []  # token, position, columns of its path, itself included
        for row in range(count - segment.outputs, count)[:LEVEL_ROWS]:
            seen = segment.seen[row, growth.base - segment.prefix :]
            columns = np.flatnonzero(seen).tolist()
            self.rows.append((int(segment.tokens[row]), int(segment.positions[row]), columns))
        self.rows += [None] * (LEVEL_ROWS - len(self.rows))
        self.columns = end - growth.base
        self.best: list[BestTokens | None] = []

    def add(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        for number, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            if parent < 0:
                self.rows.append(None)
                continue
            above = self.rows[parent]
            assert above is not None
            self.rows.append((token, above[1] + 1, [*above[2], self.columns + number]))
        self.columns += LEVEL_ROWS

    def level_segment(self) -> Segment:
        """The rows of the last level."""
        level = self.rows[-LEVEL_ROWS:]
        rows = [it or (0, 0, [self.columns - LEVEL_ROWS + at]) for at, it in enumerate(level)]
        return Segment(
            self.segment.slot,
            self.growth.base,
            np.array([token for token, _, _ in rows]),
            np.array([position for _, position, _ in rows]),
            path_mask([columns for _, _, columns in rows], self.columns),
            None,
            self.segment.adapter,
        )

    def expected_level(self) -> list[tuple[float, int, int]]:
        """Log scores, parents and tokens of the next level, by the candidates of all rows so far."""
        scores = {number: float(score) for number, score in enumerate(self.growth.log_scores[:LEVEL_ROWS])}
        taken: set[tuple[int, int]] = set()
        found: list[tuple[float, int, int]] = []
        for level in range(len(self.best) // LEVEL_ROWS):
            waiting = []
            for number in range((level + 1) * LEVEL_ROWS):
                row, best = self.rows[number], self.best[number]
                if row is None or best is None or row[1] >= self.growth.last or not np.isfinite(best.scores[0]):
                    continue
                relative = np.exp((best.scores - best.scores[0]) / self.growth.scale)
                for token, share in zip(best.tokens[: self.growth.width], relative / relative.sum(), strict=False):
                    score = scores[number] + float(np.log(share)) if share else -np.inf
                    if score >= self.growth.log_floor and (number, int(token)) not in taken:
                        waiting.append((score, number, int(token)))
            found = sorted(waiting, reverse=True)[:LEVEL_ROWS]
            for at, (score, number, token) in enumerate(found, (level + 1) * LEVEL_ROWS):
                scores[at] = score
                taken.add((number, token))
        return found


def rows_of(logits: Logits, first: int, count: int) -> list[BestTokens | None]:
    return [logits.best(first + index) for index in range(count)]


def check(
    engines: Sequence[DeviceEngine],
    segments: Sequence[Segment],
    draws: Sequence[Draw | None],
    growths: Sequence[Growth | None],
    levels: int,
) -> list[GrownLevel]:
    """Grow the trees of a pass, and compare each level with what the other engine computes of the same rows."""
    logits, grown = engines[0].grow(segments, draws, growths, levels)
    expected = engines[1].sample(segments, draws, 64)
    trees, first = [], 0
    for segment, growth in zip(segments, growths, strict=True):
        mine, theirs = (rows_of(it, first, segment.outputs) for it in (logits, expected))
        for one, other in zip(mine, theirs, strict=True):
            assert_same_best(one, other)
        if growth is not None:
            tree = Grown(segment, growth)
            tree.best = [*mine, *[None] * LEVEL_ROWS][:LEVEL_ROWS]
            trees.append(tree)
        first += segment.outputs
    kept = [draw for draw, growth in zip(draws, growths, strict=True) if growth is not None]
    assert len(grown) == levels
    for level in grown:
        for tree, parents, tokens in zip(trees, level.parents.tolist(), level.tokens.tolist(), strict=True):
            wanted = tree.expected_level()
            assert [parent for parent in parents if parent >= 0] == [parent for _, parent, _ in wanted]
            assert [token for token, parent in zip(tokens, parents, strict=True) if parent >= 0] == [
                token for _, _, token in wanted
            ]
            tree.add(parents, tokens)
        again = engines[1].sample([tree.level_segment() for tree in trees], kept, 64)
        for number, tree in enumerate(trees):
            found = [
                BestTokens(*pair) for pair in zip(level.best.tokens[number], level.best.scores[number], strict=True)
            ]
            for at, (one, other) in enumerate(zip(found, rows_of(again, number * LEVEL_ROWS, LEVEL_ROWS), strict=True)):
                if tree.rows[len(tree.rows) - LEVEL_ROWS + at] is not None:
                    assert_same_best(one, other)
            tree.best += found
    return grown


def assert_same_best(one: BestTokens | None, other: BestTokens | None) -> None:
    if one is None or other is None or np.isnan(one.scores[0]):  # the host decides
        assert other is None or np.isnan(other.scores[0])
        assert one is None or np.isnan(one.scores[0])
        return
    assert one.tokens[0] == other.tokens[0]
    assert np.allclose(one.scores, other.scores, atol=2e-4)


def text(engine: DeviceEngine, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, engine.unpadded_vocabulary, count)


def growth_of(base: int, *, count: int = 1, last: int = 10**6, **changes: Any) -> Growth:
    given = {"scale": 0.7, "width": 4, "log_floor": float(np.log(0.001))}
    return Growth(base, np.log(np.linspace(1.0, 0.2, count)), last=last, **{**given, **changes})


def test_trees_grow_on_texts_of_several_lengths(engines: list[DeviceEngine]) -> None:
    texts = [text(engines[0], count, count) for count in (9, 64, 120)]
    segments = [prompt(slot, tokens, wanted=1) for slot, tokens in enumerate(texts)]
    draws = [Draw(generation_base(slot, 0), temperature) for slot, temperature in enumerate((0.0, 1.0, 0.6))]
    growths = [
        growth_of(9, last=10, width=3),  # two levels deep, then there is nothing more
        growth_of(64, width=CHILDREN, log_floor=-50.0),
        growth_of(120, width=1),  # a chain
    ]
    grown = check(engines, segments, draws, growths, 4)
    assert (grown[-1].parents[0] == -1).all()
    assert all((level.parents[1] >= 0).all() for level in grown)
    assert all((level.parents[2] >= 0).sum() <= 1 for level in grown)


def test_a_tree_continues_from_rows_grown_by_another_call(engines: list[DeviceEngine]) -> None:
    """The frontier is of several depths, and sees rows of earlier levels; a segment beside it only reads a prompt."""
    slot, tokens = 4, text(engines[0], 40, 4)
    draw, growth = Draw(generation_base(4, 1), 0.8), growth_of(40)
    (level,) = check(engines, [prompt(slot, tokens, wanted=1)], [draw], [growth], 1)
    assert (level.parents[0, :3] == 0).all()
    tree = Grown(prompt(slot, tokens, wanted=1), growth)
    tree.add(level.parents[0].tolist(), level.tokens[0].tolist())
    best = level.best.tokens[0]
    new = [(int(best[0, 0]), 8), (int(best[1, 0]), 9), (int(best[1, 1]), 9)]
    paths = [(tree.rows[parent] or (0, 0, []))[2] for _, parent in new]
    frontier = Segment(
        slot,
        40,
        np.array([token for token, _ in new]),
        np.array([41, 41, 41]),
        path_mask([[*path, LEVEL_ROWS + at] for at, path in enumerate(paths)], LEVEL_ROWS + 3),
    )
    chunk = prompt(5, text(engines[0], 33, 5), wanted=0)
    check(engines, [chunk, frontier], [None, draw], [None, growth_of(40, count=3)], 3)


@pytest.mark.extended
def test_the_maximum_number_of_trees_grows_in_one_call(engines: list[DeviceEngine]) -> None:
    segments = [prompt(slot, text(engines[0], 5 + slot % 3, slot), wanted=1) for slot in range(MOST_TREES)]
    growths = [growth_of(len(segment.tokens)) for segment in segments]
    draws = [Draw(generation_base(slot, 0), 1.0) for slot in range(MOST_TREES)]
    check(engines, segments, draws, growths, 2)


def test_trees_beyond_the_maximum_do_not_grow(engines: list[DeviceEngine]) -> None:
    segments = [prompt(slot, text(engines[0], 6, slot), wanted=1) for slot in range(SLOTS)]
    draws = [Draw(0, 0.0)] * SLOTS
    logits, grown = engines[0].grow(segments, draws, [growth_of(6)] * SLOTS, 1)
    assert not grown
    expected = engines[1].sample(segments, draws, 64)
    for index in range(SLOTS):
        assert_same_best(logits.best(index), expected.best(index))


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.5}, {"logit_bias": {7: 4.0}}], ids=str)
def test_trees_grow_under_filters_and_a_bias(engines: list[DeviceEngine], changes: dict[str, Any]) -> None:
    contract = Contract(seed=3, temperature=0.9, max_tokens=20, **changes)
    tokens = text(engines[0], 30, 8)
    sampler = Sampler(contract, engines[0].vocabulary, tokens.tolist(), 30)
    draw = sampler.draw(restricts=True)
    assert draw is not None
    assert draw.restriction is not None
    segment = prompt(3, tokens, wanted=1)
    (level, *_) = check(engines, [segment], [draw], [growth_of(30, width=CHILDREN, log_floor=-20.0)], 2)
    if changes.get("top_k"):
        assert (level.parents[0] >= 0).sum() == 3


@pytest.mark.parametrize(
    ("change", "levels"),
    [
        ({}, 0),
        ({}, MOST_LEVELS + 1),
        ({"base": 31}, 1),
        ({"width": 0}, 1),
        ({"width": CHILDREN + 1}, 1),
        ({"scale": 0.0}, 1),
        ({"log_scores": np.zeros(2)}, 1),
    ],
    ids=str,
)
def test_an_invalid_growth_is_refused_with_its_slot(
    engines: list[DeviceEngine], change: dict[str, Any], levels: int
) -> None:
    growth = replace(growth_of(30), **change)
    with pytest.raises(ValueError, match="slot 3"):
        engines[0].grow([prompt(3, text(engines[0], 30, 8), wanted=1)], [Draw(0, 0.0)], [growth], levels)


def test_a_slot_without_rows_for_the_levels_is_refused(engines: list[DeviceEngine]) -> None:
    tokens = text(engines[0], HELD - LEVEL_ROWS + 1, 1)
    with pytest.raises(ValueError, match="do not fit behind row"):
        engines[0].grow([prompt(3, tokens, wanted=1)], [Draw(0, 0.0)], [growth_of(len(tokens))], 1)


def test_a_tree_without_a_draw_is_refused(engines: list[DeviceEngine]) -> None:
    with pytest.raises(ValueError, match="grows by a draw"):
        engines[0].grow([prompt(3, text(engines[0], 30, 8), wanted=1)], [None], [growth_of(30)], 1)
