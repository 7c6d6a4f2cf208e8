"""What engines have in common whose passes differ by roundings: sessions and trees equal one forward for each path.

Modules with a fixture `pair` of an engine of six slots and its reference import these tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from tests.engine.small_checkpoints import Reference, Tree, assert_same, prompt, random_tokens

__all__ = [
    "test_a_prompt_in_chunks_equals_the_whole_prompt",
    "test_a_tree_grown_level_by_level_over_scattered_rows_equals_its_paths",
    "test_kv_after_commits_rollbacks_and_a_copy_equals_a_fresh_prefill",
    "test_sessions_with_trees_in_one_pass_equal_one_forward_for_each_path",
]


def assert_alike(ours: NDArray[np.floating], expected: NDArray[np.floating], slack: float = 4.0) -> None:
    """As `assert_same`, but the model's own passes of different shapes differ by a few roundings more."""
    assert_same(ours / slack, expected / slack)


def test_sessions_with_trees_in_one_pass_equal_one_forward_for_each_path(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    random = np.random.default_rng(1)
    segments, expected = [], []
    for slot, (length, nodes) in zip((5, 0, 2, 3), ((33, 9), (1, 1), (12, 20), (40, 5)), strict=True):
        history, tree = random_tokens(engine, random, length), Tree.random(engine, random, nodes)
        engine.forward([prompt(slot, history, wanted=0)])
        segments.append(tree.segment(slot, length))
        expected += [
            reference.logits(np.concatenate([history, tree.tokens[tree.path(node)]]))[-1] for node in range(nodes)
        ]
    chunk = random_tokens(engine, random, 50)
    segments.append(prompt(1, chunk, wanted=2))
    expected += [*reference.logits(chunk)[-2:]]
    assert_alike(engine.forward(segments), np.array(expected), reference.slack)


def test_a_prompt_in_chunks_equals_the_whole_prompt(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    tokens = random_tokens(engine, np.random.default_rng(2), 60)
    start, logits = 0, []
    for size in (1, 2, 19, 37, 1):
        logits.append(engine.forward([prompt(1, tokens[start : start + size], start)]))
        start += size
    assert_alike(np.concatenate(logits), reference.logits(tokens), reference.slack)


def test_kv_after_commits_rollbacks_and_a_copy_equals_a_fresh_prefill(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    random = np.random.default_rng(3)
    text = random_tokens(engine, random, 9)
    engine.forward([prompt(2, text, wanted=0)])
    for step in range(12):
        tree = Tree.random(engine, random, int(random.integers(1, 12)))
        engine.forward([tree.segment(2, len(text))])
        path = tree.path(int(random.integers(-1, len(tree.parents))))
        engine.move(2, len(text) + np.array(path, np.int64), len(text) + np.arange(len(path)))
        text = np.concatenate([text, tree.tokens[path]])
        if step == 6:
            engine.copy(2, 4, len(text))
            copied = text
    last = random_tokens(engine, random, 3)
    for slot, held in ((2, text), (4, copied)):
        found = engine.forward([prompt(slot, last, len(held))])
        assert_alike(found, reference.logits(np.concatenate([held, last]))[-3:], reference.slack)


def test_a_tree_grown_level_by_level_over_scattered_rows_equals_its_paths(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    history, nodes = random_tokens(engine, np.random.default_rng(4), 17), np.array([3, 5, 7, 11])
    engine.forward([prompt(0, history, wanted=0)])
    at = np.array([17, 17])
    engine.forward([Segment(0, 17, nodes[:2], at, np.eye(2, dtype=np.bool_))])
    mask = np.array([[True, False, True, False], [False, True, False, True]])  # each behind another of the first two
    found = engine.forward([Segment(0, 17, nodes[2:], at + 1, mask)])
    expected = [reference.logits([*history, nodes[branch], nodes[2 + branch]])[-1] for branch in (0, 1)]
    assert_alike(found, np.array(expected), reference.slack)
