"""The compiled engine beside what it shares with the one on torch: instruction sets, draws, pages, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider import _native
from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import Logits
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import ConfigError
from tests.engine.small_checkpoints import MODELS, SHAPES, Reference, Tree, assert_same, make_checkpoint, prompt
from tests.engine.small_checkpoints import random_tokens as random_text

SETS = _native.instruction_sets()
PAGE = 16
DRAFTER = MODELS / "drafter"


def load(
    folder: Path = DRAFTER, *, dtype: str = "float32", slots: int = 4, threads: int = 1, **options: object
) -> CpuEngine:
    return CpuEngine.load(folder, EngineSettings(dtype=dtype, slots=slots, threads=threads, **options))  # type: ignore[arg-type]


def best_of(logits: Logits, row: int) -> tuple[list[int], list[float]]:
    best = logits.best(row)
    assert best is not None
    return best.tokens.tolist(), best.scores.tolist()


def test_the_portable_instruction_set_comes_last_and_the_best_first() -> None:
    assert SETS[-1] == "portable"
    assert load().computed_by == f"compiled kernels ({SETS[0]})"


def test_what_bfloat16_costs_without_instructions_for_it_is_said() -> None:
    assert load(dtype="bfloat16", instructions="portable").computed_by.endswith("bfloat16 instructions; int8 does not")
    assert load(dtype="int8", instructions="portable").computed_by == "compiled kernels (portable)"


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_gives_the_logits_of_transformers(shape: str, instructions: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, shape)
    engine = load(folder, instructions=instructions)
    random = np.random.default_rng(1)
    text, tree = random_text(engine, random, 50), Tree.random(engine, random, 20)
    reference = Reference.load(folder)
    assert_same(engine.forward([prompt(0, text)]), reference.logits(text))
    expected = [
        reference.logits(np.concatenate([text, tree.tokens[tree.path(node)]]))[-1] for node in range(len(tree.tokens))
    ]
    assert_same(engine.forward([tree.segment(0, len(text))]), np.stack(expected))


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_every_instruction_set_rounds_alike(dtype: str, instructions: str) -> None:
    """Weights have the same bits; inputs keep more of theirs where there are no products of bfloat16."""
    text = random_text(load(), np.random.default_rng(2), 60)
    ours = load(dtype=dtype, instructions=instructions).forward([prompt(0, text)])
    exact = load().forward([prompt(0, text)])
    torchs = Reference.rounded(DRAFTER, dtype).logits(text)
    error, usual = (np.sqrt(np.mean((logits - exact) ** 2)) for logits in (ours, torchs))
    assert error < 1.1 * usual


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_tied_head_is_the_embedding_bit_for_bit(dtype: str, stored: str, tmp_path: Path) -> None:
    tied, untied = (make_checkpoint(tmp_path / name, "grouped", 128) for name in ("tied", "untied"))
    made = load_file(tied / "model.safetensors")
    weights = {name: tensor.to(getattr(torch, stored)) for name, tensor in made.items()}
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights, tied / "model.safetensors")
    save_file(weights | head, untied / "model.safetensors")
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    text = random_text(load(tied), np.random.default_rng(1), 50)
    both = [load(folder, dtype=dtype).forward([prompt(0, text)]) for folder in (tied, untied)]
    assert np.array_equal(*both)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_change_a_bit(threads: int, instructions: str) -> None:
    text = random_text(load(), np.random.default_rng(3), 150)
    chunks = [prompt(0, text[:100]), prompt(0, text[100:103], 100), prompt(0, text[103:], 103)]
    alone, together = (load(threads=count, instructions=instructions) for count in (1, threads))
    for chunk in chunks:
        assert np.array_equal(alone.forward([chunk]), together.forward([chunk]))


@settings(max_examples=40, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.5, 100.0]),
    position=st.integers(0, 60),
    best=st.sampled_from([2, 3, 8, 40]),
    instructions=st.sampled_from(SETS),
)
def test_draws_are_the_samplers(seed: int, temperature: float, position: int, best: int, instructions: str) -> None:
    engine = _drawing(instructions)
    contract = Contract(seed=seed, max_tokens=100, temperature=temperature)
    text = np.random.default_rng(seed % 2**32).integers(0, engine.vocabulary, position + 3)
    sampler = Sampler(contract, engine.vocabulary, text.tolist(), 1, compiled=False)
    logits = engine.sample([prompt(0, text, wanted=1)], [sampler.draw(restricts=engine.restricts_tokens)], best)
    row = logits.row(0).copy()
    expected, choice = sampler.choose(row), logits.choice(0)
    assert choice is not None
    assert choice.token == expected.token
    assert choice.gap == pytest.approx(expected.gap, rel=1e-12, abs=1e-12)
    scores = sampler.scores(row)
    order = np.argsort(-scores, kind="stable")[:best]
    tokens, found = best_of(logits, 0)
    assert tokens == order.tolist()
    assert found == pytest.approx(scores[order].tolist(), rel=1e-12, abs=1e-12)


ENGINES: dict[str, CpuEngine] = {}


def _drawing(instructions: str) -> CpuEngine:
    if instructions not in ENGINES:
        ENGINES[instructions] = load(instructions=instructions)
    return ENGINES[instructions]


def test_only_segments_with_a_draw_are_drawn_from() -> None:
    engine = load()
    segments = [prompt(slot, np.array([5, 6, 7]), wanted=2) for slot in range(3)]
    logits = engine.sample(segments, [None, Draw(1, 0.0), Draw(2, 1.0)], 2)
    assert [logits.choice(row) is None for row in range(6)] == [True, True, False, False, False, False]
    assert [logits.best(row) is None for row in range(6)] == [True, True, False, False, False, False]
    undrawn = engine.sample(segments, [None, None, None])
    assert undrawn.choice(5) is None
    assert np.array_equal(undrawn.row(2), logits.row(2))


@given(st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_a_verify_call_returns_the_tokens_along_the_chosen_path_alone(seed: int, temperature: float) -> None:
    engine, random = _drawing(SETS[0]), np.random.default_rng(seed)
    text, draw = random_text(engine, random, 9), Draw(seed, temperature)
    engine.forward([prompt(0, text[:-1])])
    chosen = [int(text[-1])]
    for _ in range(4):  # the tokens that it chooses without a tree, row by row
        tokens = np.array([text[-1], *chosen[1:]], np.int64)
        choice = engine.sample([Segment(0, 8, tokens, 8 + np.arange(len(tokens)), None, 1)], [draw], 2).choice(0)
        assert choice is not None
        chosen.append(choice.token)
    # A tree with that path, and beside it at each place other tokens, some with the same ones below them.
    tokens, parents, on_path = [chosen[0]], [-1], [0]
    for depth in range(1, 4):
        above = on_path[-1]
        for token in random.permutation([chosen[depth], *random.integers(0, engine.vocabulary, 2)]).tolist():
            if token != chosen[depth] or len(on_path) == depth:
                if token == chosen[depth]:
                    on_path.append(len(tokens))
                tokens.append(token)
                parents.append(above)
        stranger = next((row for row in range(1, len(tokens)) if row not in on_path), None)
        if stranger is not None:
            tokens.append(chosen[min(3, depth + 1)])
            parents.append(stranger)
    mask, positions = np.eye(len(tokens), dtype=np.bool_), np.full(len(tokens), 8)
    for row in range(1, len(tokens)):
        mask[row] |= mask[parents[row]]
        positions[row] = positions[parents[row]] + 1
    logits = engine.sample([Segment(0, 8, np.array(tokens), positions, mask, len(tokens))], [draw])
    choices = [logits.choice(row) for row in range(len(tokens))]
    assert [row for row, choice in enumerate(choices) if choice is not None] == sorted(on_path)
    assert [choices[row].token for row in on_path] == chosen[1:]  # type: ignore[union-attr]


@pytest.mark.parametrize("instructions", SETS)
def test_the_lowest_id_wins_a_tie(instructions: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 0.0  # all logits are 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    logits = load(folder, instructions=instructions).sample([prompt(0, np.array([9]))], [Draw(0, 0.0)], 6)
    assert best_of(logits, 0) == ([0, 1, 2, 3, 4, 5], [0.0] * 6)
    choice = logits.choice(0)
    assert choice is not None
    assert (choice.token, choice.gap) == (0, 0.0)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8")])
def test_a_copy_shares_pages_until_one_of_them_is_written(dtype: str, kv_dtype: str) -> None:
    engine = load(slots=8, dtype=dtype, kv_dtype=kv_dtype)
    random = np.random.default_rng(5)
    text = random_text(engine, random, 5 * PAGE + 3)
    engine.forward([prompt(0, text, wanted=0)])
    alone = engine.kv_bytes_taken
    page = alone // 6
    for slot in range(1, 8):
        engine.copy(0, slot, len(text))
    assert engine.kv_bytes_taken == alone  # the last page too, which is not full
    more = random_text(engine, random, 3)
    fresh = engine.forward([prompt(7, more, len(text))])
    other = engine.forward([prompt(3, more[::-1].copy(), len(text))])
    assert np.array_equal(engine.forward([prompt(0, more, len(text))]), fresh)
    whole = load(dtype=dtype, kv_dtype=kv_dtype).forward([prompt(0, np.concatenate([text, more]))])
    assert np.array_equal(whole[len(text) :], fresh)
    assert not np.array_equal(other, fresh)
    assert engine.kv_bytes_taken == alone + 3 * page  # of 7, 3 and 0
    before = engine.forward([prompt(5, more[:1], len(text))])
    engine.forward([prompt(2, more[:PAGE], 0)])  # over pages that the others see
    assert np.array_equal(engine.forward([prompt(5, more[:1], len(text))]), before)
    engine.move(4, np.array([70, 3]), np.array([1, 40]))
    assert np.array_equal(engine.forward([prompt(5, more[:1], len(text))]), before)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("int8", "auto"), ("float32", "int8")])
def test_a_kv_memory_bound_holds_and_released_pages_are_reused(dtype: str, kv_dtype: str) -> None:
    bound = load(slots=1, dtype=dtype, kv_dtype=kv_dtype).kv_bytes * 2
    engine, free = (load(slots=8, dtype=dtype, kv_dtype=kv_dtype, kv_memory=memory) for memory in (bound, None))
    assert engine.kv_bytes <= bound < free.kv_bytes
    assert free.memory(0, 0, 100) is None
    page = engine.kv_bytes // (engine.memory(0, 0, 0) or (0, 0))[1]
    random = np.random.default_rng(7)
    text = random_text(engine, random, 5 * PAGE + 3)
    assert engine.memory(0, 0, len(text)) == (6, bound // page)
    engine.forward([prompt(0, text, wanted=0)])
    assert engine.memory(0, len(text), len(text) + PAGE) == (1, bound // page - 6)
    engine.copy(0, 1, len(text))
    assert engine.memory(1, len(text), len(text) + PAGE) == (2, bound // page - 6)  # one of its own for the shared one
    engine.release(0, 2 * PAGE + 1)
    assert engine.memory(0, 0, 0) == (0, bound // page - 6)  # another slot has them, too
    engine.release(1, 0)
    assert engine.memory(0, 0, 0) == (0, bound // page - 3)
    for slot in range(2, 8):
        engine.forward([prompt(slot, random_text(engine, random, 300), wanted=0)])
        engine.release(slot, 0)
    expected = free.forward([prompt(0, text[: 2 * PAGE], wanted=1)])
    assert np.array_equal(engine.forward([prompt(0, text[2 * PAGE - 1 : 2 * PAGE], 2 * PAGE - 1)]), expected)
    engine.forward([prompt(slot, random_text(engine, random, 400), wanted=0) for slot in range(6)])
    with pytest.raises(RuntimeError, match="no page of KV is free"):
        engine.forward([prompt(7, random_text(engine, random, 400), wanted=0)])
    with pytest.raises(
        ConfigError, match=r"kv_memory: 1000 bytes are too few .* give at least \d+, or a shorter context"
    ):
        load(kv_memory=1000)


def test_kv_of_a_model_that_is_not_in_float32_takes_half() -> None:
    whole = load().kv_bytes
    assert [load(dtype=dtype).kv_bytes for dtype in ("bfloat16", "int8", "int4")] == [whole // 2] * 3


def test_kv_in_int8_takes_a_byte_a_number_and_8_a_head() -> None:
    engine, usual = (load(dtype="bfloat16", kv_dtype=kind) for kind in ("int8", "auto"))
    config = read_config(DRAFTER)
    heads = config.layers * config.kv_heads
    rows = usual.kv_bytes // (heads * 4 * config.head_dim)
    assert engine.kv_bytes == rows * heads * (2 * config.head_dim + 8)
    assert (engine.types, usual.types) == ("bfloat16/kv-int8", "bfloat16")
    memory = usual.kv_bytes // 3
    tokens, fewer = (load(kv_dtype=kind, dtype="bfloat16", kv_memory=memory).kv_tokens for kind in ("int8", "auto"))
    assert tokens / fewer == pytest.approx(4 * config.head_dim / (2 * config.head_dim + 8), rel=0.02)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kv_in_int8_moves_logits_by_a_fiftieth(shape: str, instructions: str, tmp_path: Path) -> None:
    """And every instruction set has the same codes: its logits are the portable ones but for rounding."""
    folder = make_checkpoint(tmp_path, shape)
    text = random_text(load(folder), np.random.default_rng(8), 90)
    exact = load(folder).forward([prompt(0, text)])
    found = load(folder, kv_dtype="int8", instructions=instructions).forward([prompt(0, text)])
    portable = load(folder, kv_dtype="int8", instructions="portable").forward([prompt(0, text)])
    scale = exact.std()
    assert 0 < np.sqrt(np.mean((found - exact) ** 2)) < 0.025 * scale
    assert np.sqrt(np.mean((found - portable) ** 2)) < 0.003 * scale


def test_slots_that_take_one_another_s_rows_never_run_out_of_pages() -> None:
    engine = load(slots=3, rows=40)
    random = np.random.default_rng(6)
    for _ in range(300):
        source, target = random.integers(0, 3, 2)
        engine.forward([prompt(int(source), random.integers(0, 4000, int(random.integers(1, 40))), wanted=0)])
        engine.copy(int(source), int(target), int(random.integers(0, 41)))
        assert engine.kv_bytes_taken <= engine.kv_bytes


@settings(max_examples=150, derandomize=True, database=None)
@given(st.data())
def test_the_engine_refuses_exactly_the_segments_that_the_check_refuses(data: st.DataObject) -> None:
    engine = _drawing(SETS[0])
    count = data.draw(st.integers(0, 4))
    number = st.sampled_from([-(2**62), -1, 0, 1, 3, 4095, 4096, 2**31, 2**62])
    tokens = np.array([data.draw(number) for _ in range(count)], np.int64)
    positions = np.array([data.draw(number) for _ in range(data.draw(st.integers(0, 4)))], np.int64)
    shape = data.draw(st.sampled_from([None, (count, count), (count, count + 2), (count, max(0, count - 1)), (1, 1)]))
    mask = (
        None
        if shape is None
        else np.array(
            data.draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])), np.bool_
        ).reshape(shape)
    )
    segment = Segment(
        data.draw(st.sampled_from([-1, 0, 3, 4, 2**40])),
        data.draw(number),
        tokens,
        positions,
        mask,
        data.draw(st.sampled_from([None, -1, 0, 1, 5, 2**40])),
    )
    refusal = refused_by(lambda: engine.check_segments([segment]))
    assert refused_by(lambda: engine.forward([segment])) == refusal
    if not refusal:
        assert engine.forward([segment]).shape == (segment.outputs, engine.vocabulary)


def refused_by(call: Callable[[], object]) -> str:
    """The text of the error that a call raises; empty where it accepts its arguments."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, 0, np.array([1], np.int32), np.array([0])),  # type: ignore[arg-type]
        Segment(0, 0, np.array([1.0]), np.array([0])),  # type: ignore[arg-type]
        Segment(0, 0, np.array([[1]]), np.array([0])),
        Segment(0, 0, np.array([1]), np.array([0]), np.ones((1, 1), np.uint8)),  # type: ignore[arg-type]
        Segment(0, 0, np.arange(6)[::2], np.arange(3)),
        "no segment",
    ],
)
def test_arrays_of_another_kind_are_errors(segment: Segment) -> None:
    with pytest.raises((ValueError, AttributeError, BufferError)):
        native_model().run([segment], [], 0, False, np.empty((3, 4096), np.float32), np.empty(0), np.empty(0), None)


def native_model() -> Any:
    """The part of an engine that is not Python."""
    return load()._model


def test_a_buffer_that_is_too_small_is_not_written() -> None:
    model, segment = native_model(), prompt(0, np.array([1, 2]))
    tokens, scores = np.empty((2, 2), np.int64), np.empty((2, 2))
    with pytest.raises(ValueError, match="a buffer of 8192 items"):
        model.run([segment], [None], 0, False, np.empty(8191, np.float32), tokens, scores, None)
    with pytest.raises(ValueError, match="a buffer of 4 items"):
        model.run([segment], [Draw(1, 1.0)], 2, False, np.empty(8192, np.float32), tokens[:1], scores, None)
    frozen = np.empty(8192, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        model.run([segment], [None], 0, False, frozen, tokens, scores, None)


@pytest.mark.parametrize("change", [{"slots": 0}, {"rows": 1}])
def test_an_engine_without_slots_or_rows_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="an engine needs a slot and two rows"):
        load(**change)  # type: ignore[arg-type]


def test_instructions_that_the_processor_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="this processor has no abacus"):
        load(instructions="abacus")
