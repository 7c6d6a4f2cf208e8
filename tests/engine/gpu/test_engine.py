"""The device's engine computes what the CPU's does, as recorded passes over buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.core.construction.expansion import CANDIDATES
from outrider.core.sampling.noise import Draw, generation_base
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.following import FollowingPass
from outrider.engine.gpu import DeviceEngine
from outrider.engine.gpu.passes.packing import MOST_ROWS, OUTPUTS, ROWS, packed
from outrider.engine.gpu.sampling.restrictions import OUTPUTS as RESTRICTED
from outrider.engine.gpu.tree_growth import LEVELS
from outrider.engine.growth import Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.masks import tree_mask
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import ConfigError
from tests.engine.gpu.taped import DEVICE, ON_GPU, Tapes, taped
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

SLOTS = 8
ROWS_HELD = 304  # of a slot: on a CPU attention copies all of them for each row
Both = tuple[DeviceEngine, CpuEngine]


def on_device(folder: Path, **changes: Any) -> DeviceEngine:
    return DeviceEngine.load(
        folder, EngineSettings(**{"device": DEVICE, "dtype": "float32", "slots": SLOTS, **changes})
    )


@pytest.fixture(scope="module")
def target() -> tuple[DeviceEngine, CpuEngine, Tapes]:
    device = on_device(MODELS / "target", rows=ROWS_HELD)
    native = CpuEngine.load(MODELS / "target", EngineSettings(dtype="float32", slots=SLOTS, threads=1, rows=ROWS_HELD))
    return device, native, taped(device)


@pytest.fixture
def both(target: tuple[DeviceEngine, CpuEngine, Tapes]) -> Both:
    return target[:2]


def assert_agree(both: Sequence[Engine], segments: Sequence[Segment]) -> NDArray[np.float32]:
    """Each of the two may be off by what `assert_same` allows one."""
    ours, expected = (engine.forward(segments) for engine in both)
    assert ours.shape == expected.shape
    assert ours.size
    assert np.abs(ours - expected).max() <= 2e-5 * max(1.0, float(expected.std()))
    return ours


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_behind_prompt_chunks_equal_the_cpu_engine_for_every_shape(shape: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, shape)
    both = (
        on_device(folder, rows=180),
        CpuEngine.load(folder, EngineSettings(dtype="float32", slots=SLOTS, threads=1, rows=180)),
    )
    tapes = taped(both[0])
    random = np.random.default_rng(1)
    text = random_tokens(both[1], random, 150)
    for start, end in ((0, 100), (100, 101), (101, 150)):
        assert_agree(both, [prompt(2, text[start:end], start)])
    expected = Reference.load(folder).logits(text)
    assert_same(both[0].forward([prompt(3, text)]), expected)
    for nodes in (10, 3, 10):
        assert_agree(both, [Tree.random(both[1], random, nodes).segment(2, 150), prompt(0, text[:3])])
    tapes.check_that_the_host_reads_nothing()
    assert tapes.replays >= 6
    assert (both[0].parameters, both[0].eos_ids) == (both[1].parameters, both[1].eos_ids)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(2, 6))])
def test_sessions_of_very_different_lengths_share_a_pass(both: Both, seed: int) -> None:
    random = np.random.default_rng(200 + seed)
    slots = random.permutation(SLOTS)[: int(random.integers(1, SLOTS + 1))].tolist()
    segments = []
    for slot in slots:
        history = random_tokens(both[1], random, int(random.choice([1, 5, 60, 150])))
        for engine in both:
            engine.forward([prompt(slot, history, wanted=0)])
        if random.random() < 0.3:
            count = int(random.choice([2, 63, 64, 65, 130]))
            segments.append(prompt(slot, random_tokens(both[1], random, count), len(history), wanted=count % 3))
            continue
        tree = Tree.random(both[1], random, int(random.choice([1, 1, 3, 8, 20])))
        segment = tree.segment(slot, len(history))
        wanted = int(random.integers(0, len(tree.parents) + 1))
        segments.append(Segment(slot, segment.prefix, segment.tokens, segment.positions, segment.mask, wanted))
    if any(segment.outputs for segment in segments):
        assert_agree(both, segments)
    else:
        assert both[0].forward(segments).shape == (0, both[0].vocabulary)


@pytest.mark.parametrize("seed", range(2))
def test_a_tree_grown_level_by_level_over_scattered_rows_equals_the_cpu_engine(both: Both, seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    history = random_tokens(both[1], random, 17)
    for engine in both:
        engine.forward([prompt(6, history, wanted=0)])
    tree = Tree.random(both[1], random, 14)
    depths = tree.depths()
    rows: dict[int, int] = {}
    used = 0
    for depth in range(1, depths.max() + 1):
        level = [node for node in range(14) if depths[node] == depth]
        used += int(random.integers(0, 3))  # rows of nodes that died
        rows.update({node: used + at for at, node in enumerate(level)})
        used += len(level)
        mask = np.zeros((len(level), used), np.bool_)
        for at, node in enumerate(level):
            mask[at, [rows[ancestor] for ancestor in tree.path(node)]] = True
        assert_agree(both, [Segment(6, 17, tree.tokens[level], np.full(len(level), 16 + depth), mask)])


@pytest.mark.parametrize("seed", range(2))
def test_kv_after_many_commits_and_rollbacks_equals_the_cpu_engine(both: Both, seed: int) -> None:
    random = np.random.default_rng(300 + seed)
    text = random_tokens(both[1], random, 9)
    for engine in both:
        engine.forward([prompt(2, text, wanted=0)])
    for _ in range(15):
        tree = Tree.random(both[1], random, int(random.integers(1, 12)))
        path = tree.path(int(random.integers(-1, len(tree.parents))))
        for engine in both:
            engine.forward([tree.segment(2, len(text))])
            engine.move(2, len(text) + np.array(path, np.int64), len(text) + np.arange(len(path)))
        text = np.concatenate([text, tree.tokens[path]])
    probe = random_tokens(both[1], random, 2)
    after = assert_agree(both, [prompt(2, probe, len(text))])
    assert_same(after, both[0].forward([prompt(5, np.concatenate([text, probe]), wanted=2)]))


def test_moves_that_overlap_and_copies_happen_in_order(both: Both) -> None:
    tokens = random_tokens(both[1], np.random.default_rng(6), 12)
    there = np.array([3, 4, 5, 6, 7])
    for engine in both:
        for slot in (0, 1):
            engine.forward([prompt(slot, tokens[slot:], wanted=0)])
        engine.move(0, there, there + 1)
        engine.move(1, np.array([2, 5]), np.array([5, 2]))
        engine.move(0, np.array([8, 2]), np.array([2, 8]))
        engine.copy(0, 7, 9)
        engine.move(0, np.array([0]), np.array([8]))
        engine.move(0, np.array([4]), np.array([0]))
        engine.move(0, np.array([], np.int64), np.array([], np.int64))
    for slot, prefix in ((0, 12), (1, 11), (7, 9)):
        assert_agree(both, [prompt(slot, tokens[:1], prefix)])


class Buffers:
    """What a device's engine keeps between passes."""

    def __init__(self, engine: DeviceEngine) -> None:
        self.cache, self.table = engine.kv.cache, engine.kv.table
        self.choice, self.model = engine.passes.choice, engine.passes.model
        self.staging = engine.passes.inputs._staging
        self.choices = [head.choices for head in self.choice.heads.values() if head.choices is not None]


def test_a_pass_never_sees_earlier_contents_of_its_buffers(target: tuple[DeviceEngine, CpuEngine, Tapes]) -> None:
    """Stale KV is large and finite, as any model's is; everything else that a pass fills anew is NaN."""
    device, native, _ = target
    random = np.random.default_rng(7)
    history, tree = random_tokens(native, random, 33), Tree.random(native, random, 5)
    segments = [tree.segment(3, 33), prompt(1, history[:2], 0), prompt(6, history[:1], 0)]
    for engine in (device, native):
        engine.forward([prompt(3, history, wanted=0)])
    device.sample(segments, [Draw(1, 1.0)] * 3)
    held = Buffers(device)
    with torch.inference_mode():
        page = held.table.of_slot(3, 33)[0]
        kept = held.cache[:, :, page, :, :33].clone()
        held.cache.copy_(torch.randn(held.cache.shape) * 1e3)
        held.cache[:, :, page, :, :33] = kept
        for buffer in (held.staging.device, held.staging.host):
            buffer.fill_(255)
        attention = held.model.attention
        for filled in (
            held.choice.logits,
            held.model.hidden,
            attention.accumulators,
            attention.result,
            *held.choices,
        ):
            filled.fill_(torch.nan)
    assert_agree((device, native), segments)


def test_buffers_keep_their_addresses_and_recordings_are_made_once(
    target: tuple[DeviceEngine, CpuEngine, Tapes],
) -> None:
    device, native, tapes = target
    random = np.random.default_rng(8)

    def step() -> None:
        trees = [Tree.random(native, random, int(random.integers(7, 9))) for _ in range(4)]  # 28 to 32 rows
        segments = [tree.segment(slot, 20 + slot) for slot, tree in enumerate(trees)]
        device.sample(segments, [Draw(5, 0.5)] * 4)

    def places() -> list[int]:
        held = Buffers(device)
        found = [held.cache, held.choice.logits, held.model.hidden, held.staging.device, held.staging.host]
        found += held.choices
        return [it.data_ptr() for it in found]

    step()
    before, recorded, replays = places(), len(tapes.tapes), tapes.replays
    for _ in range(5):
        step()
    assert places() == before
    assert len(tapes.tapes) == recorded
    assert tapes.replays == replays + 10  # a pass, and a choice
    tapes.check_that_the_host_reads_nothing()


@pytest.mark.parametrize("seed", range(40))
def test_passes_hold_all_rows_of_a_call_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    segments = []
    for slot in range(int(random.integers(1, 12))):
        count = int(random.choice([1, 2, 65, 700, 2048, 2049, 5000]))
        wanted = int(random.integers(0, count + 1))
        segments.append(prompt(slot, random.integers(0, 99, count), int(random.integers(0, 9)), wanted))
    passes = packed(segments)
    assert all(0 < sum(len(part.segment.tokens) for part in parts) <= MOST_ROWS for parts in passes)
    for index, segment in enumerate(segments):
        parts = [part for parts in passes for part in parts if part.call_index == index]
        if len(segment.tokens) <= MOST_ROWS:
            assert [part.segment for part in parts] == [segment]
        assert np.array_equal(np.concatenate([part.segment.tokens for part in parts]), segment.tokens)
        assert np.array_equal(np.concatenate([part.segment.positions for part in parts]), segment.positions)
        row = segment.prefix
        outputs = 0
        for part in parts:
            assert part.segment.prefix == row
            assert part.first_output == outputs
            row += len(part.segment.tokens)
            outputs += part.segment.outputs
        assert outputs == segment.outputs
    total = sum(len(segment.tokens) for segment in segments)
    assert len(passes) <= 2 * -(-total // MOST_ROWS)


@pytest.mark.parametrize(("rows", "span"), [(513, 513), (3, 600), (MOST_ROWS + 1, MOST_ROWS + 1)])
def test_a_tree_that_is_too_large_is_refused(rows: int, span: int) -> None:
    mask = np.eye(rows, span, span - rows, dtype=np.bool_)
    tree = Segment(7, 0, np.zeros(rows, np.int64), np.zeros(rows, np.int64), mask)
    with pytest.raises(
        ValueError, match=f"slot 7: a tree of {rows} rows over {span} cache rows, of at most 2048 and 512"
    ):
        packed([tree])


@pytest.mark.parametrize(("chain", "nodes", "wanted"), [(560, 20, 1), (560, 20, 12), (560, 20, 30), (561, 207, 0)])
def test_a_long_prompt_chunk_and_a_tree_behind_it_share_a_pass(
    tmp_path: Path, chain: int, nodes: int, wanted: int
) -> None:
    """The second has no branches. The last one fills its recording, and both parts end with a tile that is not full."""
    folder = make_checkpoint(tmp_path, "grouped")
    both = (
        on_device(folder, slots=1, rows=810),
        CpuEngine.load(folder, EngineSettings(dtype="float32", slots=1, threads=1, rows=810)),
    )
    random = np.random.default_rng(wanted)
    parents = [node - 1 if wanted == 12 else int(random.integers(-1, node)) for node in range(nodes)]
    mask = tree_mask(chain, [chain + parent for parent in parents])
    tokens, positions = random_tokens(both[1], random, chain + nodes), (mask.sum(1) - 1) % 250
    for engine in both:
        engine.forward([prompt(0, tokens[:30], wanted=0)])
        engine.forward([Segment(0, 30, tokens, positions, mask, wanted)])
    if wanted:
        assert_agree(both, [Segment(0, 30, tokens, positions, mask, wanted)])
    assert_agree(both, [Segment(0, 30 + chain + nodes, tokens[:1], positions[:1])])


@pytest.mark.extended
def test_a_call_with_more_rows_than_a_pass_or_head_is_divided(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "grouped")
    both = (
        on_device(folder, slots=3, rows=3000),
        CpuEngine.load(folder, EngineSettings(dtype="float32", slots=3, threads=1, rows=3000)),
    )
    random = np.random.default_rng(5)
    positions = np.arange(2500) % 200
    chain = Segment(1, 0, random_tokens(both[1], random, 2500), positions, None, 700)
    assert_agree(both, [prompt(0, random_tokens(both[1], random, 9)), chain, prompt(2, np.arange(4))])
    draws = [Draw(3, 1.0), None, Draw(4, 0.0)]
    segments = [
        prompt(0, np.arange(5), 9),
        Segment(1, 2500, np.arange(300) % 50, np.arange(300) % 200),
        prompt(2, np.array([7]), 4),
    ]
    ours, logits = both[0].sample(segments, draws), both[0].forward(segments)
    for row, chosen in enumerate(map(ours.choice, range(len(logits)))):
        assert (chosen is None) == (5 <= row < 305)
        if row == 305:
            assert chosen is not None
            assert chosen.token == logits[row].argmax()
            assert chosen.gap == pytest.approx(np.diff(np.sort(logits[row])[-2:])[0])


def test_all_row_counts_are_recorded_in_advance_and_none_later(tmp_path: Path) -> None:
    engine = on_device(make_checkpoint(tmp_path), slots=2, rows=150)
    recorder = engine.runtime.recorder
    made: list[Callable[[], None]] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        made.append(recorder.record(work))
        return made[-1]

    engine.runtime.recorder = SimpleNamespace(record=record)
    engine.record()
    recordings = len(ROWS) + 3 * len(OUTPUTS) + 3 * sum(count <= RESTRICTED for count in OUTPUTS) + len(LEVELS)
    assert len(made) == recordings
    random = np.random.default_rng(1)
    for count in (1, 3, 40, 100):
        tree = Tree.random(engine, random, count)
        for best in (0, CANDIDATES):
            engine.sample([tree.segment(0, 5), prompt(1, np.arange(2))], [Draw(1, 1.0), None], best)
            for terms in ({"top_k": 4}, {"presence_penalty": 1.0}) if best != CANDIDATES else ({"top_k": 4},):
                restricted = draw_of(Contract(seed=1, max_tokens=1, **terms), engine)
                engine.sample([tree.segment(0, 5), prompt(1, np.arange(2))], [restricted, Draw(1, 1.0)], best)
        engine.move(0, np.array([7, 8]), np.array([5, 6]))
    segments, draws = [prompt(slot, np.arange(3), wanted=1) for slot in range(2)], [Draw(1, 1.0)] * 2
    engine.grow(segments, draws, [Growth(3, np.zeros(1), 1.0, 3, -9.0, 99)] * 2, 2)
    for start in (3, 4):
        rows = [prompt(slot, np.array([1]), start) for slot in range(2)]
        engine.run_on(rows, draws, FollowingPass(lambda: True, [()] * 2))
    assert len(made) == recordings


def draw_of(contract: Contract, engine: Engine) -> Draw:
    draw = Sampler(contract, engine.vocabulary, [1], 0).draw(restricts=True, penalizes=True)
    assert draw is not None
    return draw


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_chosen_tokens_and_gaps_are_those_of_the_sampler(both: Both, temperature: float) -> None:
    """On the same logits: those that the pass left on the device."""
    random = np.random.default_rng(11)
    segments, draws, contracts = [], [], []
    for slot in range(6):
        tree = Tree.random(both[1], random, int(random.integers(1, 20)))
        segments.append(tree.segment(slot, 5))
        contracts.append(Contract(seed=slot * 77, choice=slot, max_tokens=9, temperature=temperature))
        draws.append(None if slot == 4 else draw_of(contracts[-1], both[0]))
    segments.insert(3, prompt(7, random_tokens(both[1], random, 90), 0))
    contracts.insert(3, Contract(seed=2**64 - 1, max_tokens=9, temperature=temperature))
    draws.insert(3, draw_of(contracts[3], both[0]))
    sampled = both[0].sample(segments, draws)
    row = 0
    for segment, contract, draw in zip(segments, contracts, draws, strict=True):
        for position in segment.positions:
            chosen = sampled.choice(row)
            sampler = Sampler(contract, both[0].vocabulary, [1] * (int(position) + 1), 0)
            expected = sampler.choose(sampled.row(row))
            if draw is None:
                assert chosen is None
            else:
                assert chosen is not None
                assert chosen.token == expected.token
                assert chosen.gap == pytest.approx(expected.gap, abs=1e-9)
            row += 1
    assert row > 100


@pytest.mark.parametrize(
    "terms", [{"top_p": 0.5, "temperature": 0.5, "logprobs": 3}, {"banned_ids": tuple(range(4, 200))}]
)
def test_restricted_rows_beyond_one_choice_are_chosen_in_parts(both: Both, terms: dict[str, Any]) -> None:
    random = np.random.default_rng(5)
    trees = [Tree.random(both[1], random, 50) for _ in range(3)]
    contracts = [Contract(seed=slot, max_tokens=9, **(terms if slot != 1 else {})) for slot in range(3)]
    segments = [tree.segment(slot, 5) for slot, tree in enumerate(trees)]
    sampled = both[0].sample(segments, [draw_of(contract, both[0]) for contract in contracts])
    row = left = 0
    for segment, contract in zip(segments, contracts, strict=True):
        for position in segment.positions[-segment.outputs :]:
            found = sampled.choice(row)
            expected = Sampler(contract, both[0].vocabulary, [1] * (int(position) + 1), 0).choose(sampled.row(row))
            left += found is None
            assert found is None or (found.token, len(found.logprobs)) == (expected.token, len(expected.logprobs))
            row += 1
    assert row > 2 * RESTRICTED
    assert left < row / 10


def test_tokens_under_penalties_are_those_of_the_sampler_while_texts_grow(both: Both) -> None:
    """In trees and chains; slots change their sessions, and one session has no penalties."""
    device, native = both
    random = np.random.default_rng(9)
    terms: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"frequency_penalty": 0.9, "temperature": 0.0},
        {},
        {"presence_penalty": 1.1, "top_p": 0.9, "logprobs": 2, "min_tokens": 5, "stop_ids": (3, 4)},
    ]
    total = left = 0
    for session in range(2):
        texts = [random_tokens(native, random, 12).tolist() for _ in terms]
        samplers = [
            Sampler(Contract(seed=slot, max_tokens=99, **own), device.vocabulary, text, 9)
            for slot, (own, text) in enumerate(zip(terms, texts, strict=True), session)
        ]
        for text, slot in zip(texts, range(4), strict=True):
            device.forward([prompt(slot, np.array(text[:-1]), wanted=0)])
        for _ in range(6):
            segments, paths = [], []
            for slot, text in enumerate(texts):
                tree = Tree.random(native, random, int(random.integers(1, 9)))
                mask = tree_mask(1, [1 + parent for parent in tree.parents])
                tokens = np.array([text[-1], *tree.tokens])
                positions = len(text) - 1 + np.array([0, *tree.depths()])
                segments.append(Segment(slot, len(text) - 1, tokens, positions, mask))
                paths.append([(), *(tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree.tokens)))])
            draws = [sampler.draw(restricts=True, penalizes=True) for sampler in samplers]
            assert all(draw is not None for draw in draws)
            sampled, row = device.sample(segments, draws), 0
            for sampler, text, rows in zip(samplers, texts, paths, strict=True):
                for path in rows:
                    found, expected = sampled.choice(row), sampler.choose(sampled.row(row), path)
                    total, left, row = total + 1, left + (found is None), row + 1
                    if found is not None:
                        assert found.token == expected.token
                        assert found.gap == pytest.approx(expected.gap, abs=1e-9)
                        assert len(found.logprobs) == len(expected.logprobs)
                token = sampler.choose(sampled.row(row - len(rows))).token
                sampler.extend([token])
                text.append(token)
    assert total > 150
    assert left < total / 10


def test_rows_without_a_draw_have_no_choice(both: Both) -> None:
    segments = [prompt(0, np.array([1, 2, 3]))]
    sampled = both[0].sample(segments, [None])
    assert sampled.choice(1) is None
    assert (sampled.row(1) == both[0].forward(segments)[1]).all()
    assert both[0].sample([prompt(0, np.array([1, 2]), wanted=0)], [Draw(1, 1.0)]).vocabulary == both[0].vocabulary


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [2, 8, 64, 500])
def test_the_best_tokens_of_a_row_are_those_of_the_sampler(both: Both, temperature: float, count: int) -> None:
    contract = Contract(seed=3, max_tokens=9, temperature=temperature)
    tokens = random_tokens(both[1], np.random.default_rng(12), 9)
    logits = both[0].forward([prompt(0, tokens)])
    sampled = both[0].sample([prompt(0, tokens)], [draw_of(contract, both[0])], count)
    for position in range(len(tokens)):
        scores = Sampler(contract, both[0].vocabulary, [1] * (position + 1), 0).scores(logits[position])
        order = np.argsort(-scores, kind="stable")[:count]
        best = sampled.best(position)
        assert best is not None
        assert best.tokens.tolist() == order.tolist()
        assert best.scores == pytest.approx(scores[order], abs=1e-9)


def test_bfloat16_differs_by_rounding_only() -> None:
    engine = on_device(MODELS / "target", dtype="bfloat16", rows=150)
    native = CpuEngine.load(MODELS / "target", EngineSettings(dtype="float32", slots=1, threads=1))
    tokens = random_tokens(native, np.random.default_rng(8), 120)
    difference = np.abs(engine.forward([prompt(0, tokens)]) - native.forward([prompt(0, tokens)]))
    assert difference.max() < 0.25
    assert np.sqrt((difference**2).mean()) < 0.03
    assert engine.kv_bytes < 0.51 * on_device(MODELS / "target", rows=150).kv_bytes


def test_weights_of_8_bits_differ_by_their_rounding_and_half_the_bytes_of_a_pass() -> None:
    engine, wide = (on_device(MODELS / "target", dtype=dtype, rows=150) for dtype in ("float8", "bfloat16"))
    tokens = random_tokens(wide, np.random.default_rng(8), 120)
    rounded, logits = (it.forward([prompt(0, tokens)]) for it in (engine, wide))
    difference = np.abs(rounded - logits)
    assert 0.01 < np.sqrt((difference**2).mean()) < 0.3
    assert (rounded.argmax(-1) == logits.argmax(-1)).mean() > 0.8
    head = (2 if ON_GPU else 4) * wide.vocabulary * 256
    assert engine.weight_bytes - head < 0.52 * (wide.weight_bytes - head)
    assert (engine.dtype, engine.kv_bytes) == ("float8", wide.kv_bytes)


def test_a_device_engine_of_some_layers_equals_the_cpu_engine() -> None:
    kept = {"layers": 2}
    both = (
        on_device(MODELS / "target", **kept),
        CpuEngine.load(MODELS / "target", EngineSettings(dtype="float32", slots=SLOTS, threads=1, layers=2)),
    )
    assert both[0].parameters == both[1].parameters
    assert_agree(both, [prompt(0, np.arange(20))])


def test_pass_costs_are_measured(both: Both) -> None:
    costs = both[0].measure_costs([1, 8, 2000], 64, 1)
    assert [count for count, seconds in costs if seconds > 0] == [1, 8]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "gpu"}, "device: is 'gpu'"),
        ({"device": "mps"}, "device: is 'mps'"),
        ({"dtype": "int8"}, "dtype: is int8"),
        ({"numerics": "invariant"}, f"numerics: invariant is not possible with device {DEVICE}"),
    ],
)
def test_unsupported_device_settings_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        on_device(MODELS / "drafter", **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no cuda:1 here: torch sees 0 CUDA devices"):
        on_device(MODELS / "drafter", device="cuda:1")


def test_bad_passes_are_refused_as_everywhere(both: Both) -> None:
    for bad in (prompt(8, np.array([1])), prompt(0, np.array([-1])), prompt(0, np.array([1]), ROWS_HELD)):
        with pytest.raises(ValueError, match="segment of slot"):
            both[0].forward([bad])
    with pytest.raises(ValueError, match="row outside"):
        both[0].move(0, np.array([ROWS_HELD]), np.array([0]))


def test_a_draw_has_the_generation_base_of_its_seed_and_choice() -> None:
    contract = Contract(seed=9, choice=2, max_tokens=1)
    assert Sampler(contract, 8, [1], 0).draw(restricts=True) == Draw(generation_base(9, 2), 1.0)
