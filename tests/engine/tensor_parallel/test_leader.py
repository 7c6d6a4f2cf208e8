"""Several ranks compute what one does: trees, chunks, many sessions, KV that moves; they notice when one is gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.engine.checkpoints.checkpoint import ModelConfig, read_config
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.tensor_parallel.rank_messages import (
    AdapterPiece,
    DropAdapter,
    KvChange,
    decode,
    encode,
)
from outrider.engine.tensor_parallel.sharding import Shard, degrees
from outrider.errors import ConfigError
from tests.engine.conftest import OnTorch
from tests.engine.ranked import LOADING, Connected, growth, ranked
from tests.engine.small_checkpoints import MODELS, Tree, assert_same, make_checkpoint, prompt, random_tokens

SHAPES = ("grouped", "one-kv-head-llama3", "untied-wide-heads", "biased", "narrow-heads", "mistral", "qwen2", "qwen3")
FFN = 96  # of random checkpoints: four ranks can share it


WAYS: list[tuple[Connected, int]] = [("sockets", 2), ("sockets", 4), ("torch", 2), ("torch", 4)]


def load_alone(by: Connected, folder: Path) -> Engine:
    """The whole model in one process, on the engine that such ranks have."""
    return (CpuEngine if by == "sockets" else OnTorch).load(folder, EngineSettings(**LOADING))


@pytest.fixture(scope="class", params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """The reference target on that many ranks, and on one."""
    by, of = request.param
    with ranked(of, MODELS / "target", by=by) as ranks, ranks.lead(MODELS / "target") as leader:
        yield leader, load_alone(by, MODELS / "target")


@pytest.mark.parametrize(("by", "of"), WAYS)
def test_shares_of_every_shape_add_up(by: Connected, of: int, tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / shape, shape, FFN) for shape in SHAPES]
    with ranked(of, *folders, by=by) as ranks:
        for folder in folders:
            alone = load_alone(by, folder)
            with ranks.lead(folder) as leader:
                assert leader.parameters == alone.parameters
                assert leader.weight_bytes <= (1 / of + 0.1) * alone.weight_bytes
                tokens = random_tokens(alone, np.random.default_rng(1), 60)
                assert_same(leader.forward([prompt(0, tokens)]), alone.forward([prompt(0, tokens)]))


class TestTheReferenceTarget:
    def test_trees_of_many_sessions_and_chunks_in_one_pass(self, pair: tuple[Engine, Engine]) -> None:
        """The same steps on both: chunks of a prompt beside trees, accepted paths moved up, a prefix copied."""
        random = np.random.default_rng(5)
        texts = [random_tokens(pair[1], random, int(random.integers(2, 90))) for _ in range(6)]
        trees = [Tree.random(pair[1], random, int(random.integers(1, 12))) for _ in texts]
        long = random_tokens(pair[1], random, 300)

        def steps(engine: Engine) -> Iterator[np.ndarray]:
            for slot, text in enumerate(texts):
                engine.forward([prompt(slot, text, wanted=0)])
            for chunk in range(0, 300, 100):
                beside = prompt(7, long[chunk : chunk + 100], chunk, wanted=1)
                yield engine.forward(
                    [tree.segment(slot, len(text)) for slot, (tree, text) in enumerate(zip(trees, texts, strict=True))]
                    + [beside]
                )
            for slot, (tree, text) in enumerate(zip(trees, texts, strict=True)):
                path = np.array(tree.path(len(tree.parents) - 1))
                engine.move(slot, len(text) + path, len(text) + np.arange(len(path)))
                length = len(text) + len(path)
                engine.copy(slot, 6, length)
                yield engine.forward([prompt(6, np.array([1, 2]), length)])

        for ours, expected in zip(*map(steps, pair), strict=True):
            assert_same(ours, expected)

    def test_pass_costs_are_measured_over_all_ranks(self, pair: tuple[Engine, Engine]) -> None:
        assert [count for count, seconds in pair[0].measure_costs((2, 8), 64, 2) if seconds > 0] == [2, 8]


@pytest.mark.parametrize("by", ["sockets", "torch"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_freezes_is_noticed_by_all(ending: signal.Signals, by: Connected, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "grouped", FFN)
    with ranked(4, folder, by=by, timeout_s=2.0) as ranks, ranks.lead(folder) as leader:
        others = ranks.others
        leader.forward([prompt(0, np.array([1, 2, 3]))])
        leader.heartbeat()
        began = time.monotonic()
        assert others[1].pid is not None
        os.kill(others[1].pid, ending)
        with pytest.raises(RankLost, match="rank 0 of 4 has lost another one"):
            leader.heartbeat()
        assert time.monotonic() - began < 8.0
        for process in (others[0], others[2]):
            process.join(8.0)
            assert process.exitcode == 3
        with pytest.raises(RankLost):
            leader.forward([prompt(0, np.array([1]), 3)])


@pytest.mark.parametrize("by", ["sockets", "torch"])
def test_a_group_that_is_not_complete_gives_up(by: Connected, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "grouped", FFN)
    with (
        pytest.raises(RankLost),
        ranked(2, by=by, timeout_s=2.0) as ranks,  # rank 1 has nothing to load, and goes
        ranks.lead(folder) as leader,
    ):
        leader.heartbeat()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process's memory from /proc")
def test_two_ranks_take_no_more_than_three_fifths_of_the_memory_each(tmp_path: Path) -> None:
    folder = tmp_path / "padded"
    pad_checkpoint(MODELS / "target", folder, parameters=80_000_000)
    (alone,), halves = growth(folder, 1), growth(folder, 2)
    assert max(halves) <= 0.6 * alone, (alone, halves)


def test_plans_survive_the_message() -> None:
    random = np.random.default_rng(3)
    rows = random.integers(0, 50, 9), random.integers(0, 50, 9)
    moves = KvChange("move", (3,), rows), KvChange("copy", (1, 2, 30)), KvChange("release", (4, 17))
    masked = Segment(1, 5, random.integers(0, 9, 7), random.integers(0, 9, 7), random.random((7, 11)) < 0.5, 3)
    content = random.integers(0, 256, 13).astype(np.uint8)
    of_adapters = AdapterPiece(7, 1, content, True), DropAdapter(3), AdapterPiece(8, 0, content[:0], False)
    adapted = replace(prompt(2, np.array([4, 5])), adapter=7)
    changes, segments = decode(encode([*moves, *of_adapters], [masked, adapted, prompt(3, np.array([6]))]))
    assert str(changes) == str([*moves, *of_adapters])
    assert str(segments) == str([masked, adapted, prompt(3, np.array([6]))])
    assert decode(encode((), ())) == ([], [])
    changes, segments = decode(encode(of_adapters, ()))
    assert (str(changes), segments) == (str([*of_adapters]), [])


def _target() -> ModelConfig:
    return read_config(MODELS / "target")


@pytest.mark.parametrize("of", [3, 16, 5])
def test_an_indivisible_model_is_refused_with_the_possible_numbers_of_ranks(of: int) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel: {of} ranks .* possible are 1, 2, 4, 8"):
        Shard(0, of).config(_target())


def test_every_row_of_a_weight_is_on_one_rank() -> None:
    config = _target()
    assert degrees(config) == [1, 2, 4, 8]
    for of in degrees(config):
        ids = [token for rank in range(of) for token in range(131)[Shard(rank, of).tokens(131)]]
        assert ids == list(range(131))
        heads = [range(config.kv_heads)[Shard(rank, of).kv_heads(config)] for rank in range(of)]
        assert [head for some in heads for head in some] == sorted([*range(config.kv_heads)] * max(1, of // 4))
