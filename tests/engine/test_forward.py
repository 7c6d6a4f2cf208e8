"""The packed forward computes what `transformers` computes, however the rows are packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings
from tests.engine.conftest import EngineClass, OnTorch, Pair
from tests.engine.small_checkpoints import (
    MODELS,
    SHAPES,
    Reference,
    Tree,
    assert_same,
    make_checkpoint,
    prompt,
    random_tokens,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers_for_every_shape(
    shape: str, engine_class: EngineClass, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, shape)
    engine = engine_class.load(folder, EngineSettings(dtype="float32", slots=1, threads=1))
    tokens = random_tokens(engine, np.random.default_rng(1), 150)
    assert_same(engine.forward([prompt(0, tokens)]), Reference.load(folder).logits(tokens))


def test_a_machine_without_prepacked_linears_gets_equal_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "biased")
    prepacked = OnTorch.load(folder, EngineSettings(dtype="float32", slots=1, threads=1))
    monkeypatch.setattr("outrider.engine.torch_layers.linear.can_prepack", lambda dtype: False)
    plain = OnTorch.load(folder, EngineSettings(dtype="float32", slots=1, threads=1))
    tokens = random_tokens(plain, np.random.default_rng(3), 40)
    assert_same(plain.forward([prompt(0, tokens)]), prepacked.forward([prompt(0, tokens)]))


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_a_real_model_errs_no_more_than_transformers_does(name: str, engine_class: EngineClass) -> None:
    engine = engine_class.load(MODELS / name, EngineSettings(dtype="float32", slots=1, threads=1))
    tokens = random_tokens(engine, np.random.default_rng(2), 120)
    exact = Reference.load(MODELS / name, torch.float64).logits(tokens)
    reference = Reference.load(MODELS / name).logits(tokens)
    ours = engine.forward([prompt(0, tokens)])
    assert_same(ours, reference)
    assert np.sqrt(np.mean((ours - exact) ** 2)) <= 2 * np.sqrt(np.mean((reference - exact) ** 2))


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_equals_one_forward_for_each_path(pair: Pair, seed: int) -> None:
    engine, reference = pair
    random = np.random.default_rng(seed)
    history = random_tokens(engine, random, int(random.integers(1, 40)))
    tree = Tree.random(engine, random, int(random.integers(1, 20)))
    engine.forward([prompt(3, history, wanted=0)])
    logits = engine.forward([tree.segment(3, len(history))])
    for node in range(len(tree.parents)):
        text = np.concatenate([history, tree.tokens[tree.path(node)]])
        assert_same(logits[node], reference.logits(text)[-1])


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_grown_level_by_level_over_scattered_rows_equals_its_paths(pair: Pair, seed: int) -> None:
    """Segments with m > n: each level reads the scratch rows of those before it, dead ones between them."""
    engine, reference = pair
    random = np.random.default_rng(100 + seed)
    history = random_tokens(engine, random, 17)
    engine.forward([prompt(0, history, wanted=0)])
    tree = Tree.random(engine, random, 14)
    depths = tree.depths()
    rows: dict[int, int] = {}  # node -> scratch row, counted from the prefix
    used = 0
    for depth in range(1, depths.max() + 1):
        level = [node for node in range(14) if depths[node] == depth]
        used += int(random.integers(0, 3))  # rows of nodes that died
        rows.update({node: used + at for at, node in enumerate(level)})
        used += len(level)
        mask = np.zeros((len(level), used), np.bool_)
        for at, node in enumerate(level):
            mask[at, [rows[ancestor] for ancestor in tree.path(node)]] = True
        positions = np.full(len(level), len(history) - 1 + depth)
        logits = engine.forward([Segment(0, len(history), tree.tokens[level], positions, mask)])
        for at, node in enumerate(level):
            text = np.concatenate([history, tree.tokens[tree.path(node)]])
            assert_same(logits[at], reference.logits(text)[-1])


@pytest.mark.parametrize("seed", range(6))
def test_many_sessions_in_one_pass_equal_each_session_alone(pair: Pair, seed: int) -> None:
    """Prompts, single tokens and trees of very different lengths, in any order of slots."""
    engine, reference = pair
    random = np.random.default_rng(200 + seed)
    slots = random.permutation(engine.slots)[: int(random.integers(2, engine.slots + 1))]
    texts, segments, expected = [], [], []
    for slot in slots:
        history = random_tokens(engine, random, int(random.choice([1, 5, 60, 150])))
        tree = Tree.random(engine, random, int(random.choice([1, 1, 3, 8, 20])))
        segment = tree.segment(int(slot), len(history))
        wanted = int(random.integers(slot == slots[0], len(tree.parents) + 1))
        texts.append(history)
        segments.append(Segment(segment.slot, segment.prefix, segment.tokens, segment.positions, segment.mask, wanted))
        paths = [tree.tokens[tree.path(node)] for node in range(len(tree.parents) - wanted, len(tree.parents))]
        expected += [reference.logits(np.concatenate([history, path]))[-1] for path in paths]
    prefills = [prompt(int(slot), text, wanted=0) for slot, text in zip(slots, texts, strict=True)]
    assert engine.forward(prefills).shape == (0, engine.vocabulary)
    assert_same(engine.forward(segments), np.array(expected))


def test_a_prompt_in_chunks_equals_the_whole_prompt(pair: Pair) -> None:
    engine, reference = pair
    random = np.random.default_rng(5)
    tokens = random_tokens(engine, random, 201)
    start, logits = 0, []
    for size in (1, 2, 37, 64, 1, 96):
        logits.append(engine.forward([prompt(1, tokens[start : start + size], start)]))
        start += size
    assert start == len(tokens)
    assert_same(np.concatenate(logits), reference.logits(tokens))


@pytest.mark.parametrize("seed", range(2))
def test_kv_after_many_commits_and_rollbacks_equals_a_fresh_prefill(pair: Pair, seed: int) -> None:
    engine, reference = pair
    random = np.random.default_rng(300 + seed)
    text = random_tokens(engine, random, 9)
    engine.forward([prompt(2, text, wanted=0)])
    for _ in range(25):
        tree = Tree.random(engine, random, int(random.integers(1, 12)))
        engine.forward([tree.segment(2, len(text))])
        path = tree.path(int(random.integers(-1, len(tree.parents))))  # -1: nothing is accepted
        engine.move(2, len(text) + np.array(path, np.int64), len(text) + np.arange(len(path)))
        text = np.concatenate([text, tree.tokens[path]])
    probe = random_tokens(engine, random, 2)
    after = engine.forward([prompt(2, probe, len(text))])
    whole = np.concatenate([text, probe])
    assert_same(after, reference.logits(whole)[-2:])
    assert_same(after, engine.forward([prompt(5, whole, wanted=2)]))


def test_overlapping_rows_are_all_read_before_any_is_written(small: Pair) -> None:
    engine, _ = small
    random = np.random.default_rng(6)
    tokens = random_tokens(engine, random, 12)
    engine.forward([prompt(0, tokens)])
    there = np.array([3, 4, 5, 6, 7])
    engine.move(0, there, there + 1)
    engine.move(0, there + 1, there)
    engine.move(0, np.array([10, 11]), np.array([11, 10]))
    engine.move(0, np.array([11, 10]), np.array([10, 11]))
    engine.forward([prompt(0, tokens[8:9], 8, wanted=0)])  # the first move wrote over this one
    probe = random_tokens(engine, random, 1)
    assert_same(engine.forward([prompt(0, probe, 12)]), engine.forward([prompt(1, np.append(tokens, probe), wanted=1)]))


def test_a_session_never_sees_earlier_rows_of_its_slot(small: Pair) -> None:
    engine, _ = small
    random = np.random.default_rng(7)
    for slot in range(engine.slots):
        engine.forward([prompt(slot, random_tokens(engine, random, 250), wanted=0)])
    tokens = random_tokens(engine, random, 30)
    fresh = engine.forward([prompt(0, tokens)])
    together = engine.forward([prompt(1, tokens), prompt(3, tokens[:7])])
    assert_same(together[:30], fresh)
    assert_same(together[30:], fresh[:7])


def test_a_token_with_bf16_weights_differs_from_transformers_by_rounding_only(engine_class: EngineClass) -> None:
    """bfloat16 has 8 bits: each of a layer's four matrix products rounds its inputs by up to 2**-9.

    Our residual stream is float32, so we must be closer to float32 than transformers in bfloat16 is, and within
    the 0.125 by which bfloat16 passes of different shapes were seen to differ there.
    """
    engine = engine_class.load(MODELS / "target", EngineSettings(dtype="bfloat16", slots=1, threads=1))
    tokens = random_tokens(engine, np.random.default_rng(8), 120)
    exact = Reference.load(MODELS / "target").logits(tokens)
    rounded = Reference.load(MODELS / "target", torch.bfloat16).logits(tokens)
    ours = engine.forward([prompt(0, tokens)])
    assert np.abs(ours - exact).max() < 0.125
    assert np.sqrt(np.mean((ours - exact) ** 2)) < np.sqrt(np.mean((rounded - exact) ** 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_without_context_gives_equal_bits_in_passes_of_every_size(dtype: str) -> None:
    """Linears are bitwise invariant, a single row included; attention over one key is exact.

    Those of oneDNN are not: with Intel's AMX its bfloat16 rounds otherwise from 33 rows on.
    """
    engine = CpuEngine.load(MODELS / "drafter", EngineSettings(dtype=dtype, slots=1, threads=1))  # type: ignore[arg-type]
    alone = engine.forward([prompt(0, np.array([65]))])
    for rows in (2, 3, 7, 8, 31, 33, 64, 130):
        tokens = np.arange(rows) * 3
        tokens[0] = 65
        mask = np.eye(rows, dtype=np.bool_)
        together = engine.forward([Segment(0, 0, tokens, np.zeros(rows, np.int64), mask)])
        assert (together[0] == alone[0]).all(), rows
