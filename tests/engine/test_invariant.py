"""The compiled engine: the same bits, whatever the pass held beside a token and however its KV came to be there.

The reference is the engine itself, one token at a time in a slot of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.config import KvType
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings
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

REFERENCE, SESSION, SCRATCH = 0, 3, 6  # slots; the others belong to neighbours
SLOTS = 7
TEXT = 226  # tokens of the reference text
Bits = NDArray[np.float32]
Dtype = Literal["float32", "bfloat16"]


def load(folder: Path, dtype: Dtype, kv_dtype: KvType = "auto", threads: int = 1) -> CpuEngine:
    settings = EngineSettings(dtype=dtype, kv_dtype=kv_dtype, slots=SLOTS, rows=TEXT + 300, threads=threads)
    return CpuEngine.load(folder, settings)


class Bench:
    """An engine, and the logits of one text, decoded token by token in a slot that nothing else writes to."""

    def __init__(self, folder: Path, dtype: Dtype, kv_dtype: KvType = "auto") -> None:
        self.folder, self.dtype, self.kv_dtype = folder, dtype, kv_dtype
        self.engine = load(folder, dtype, kv_dtype)
        self.text = random_tokens(self.engine, np.random.default_rng(11), TEXT)
        rows = [self.engine.forward([prompt(REFERENCE, self.text[at : at + 1], at)])[0] for at in range(TEXT)]
        self.logits: Bits = np.array(rows)

    def neighbours(self, random: np.random.Generator) -> list[Segment]:
        """What other sessions bring to a pass: anything, or nothing."""
        slots = [slot for slot in (1, 2, 4, 5) if random.random() < 0.4]
        segments = []
        for slot in slots:
            prefix = int(random.integers(1, TEXT))
            if random.random() < 0.5:
                segments.append(prompt(slot, random_tokens(self.engine, random, int(random.integers(1, 50))), prefix))
            else:
                segments.append(Tree.random(self.engine, random, int(random.integers(1, 40))).segment(slot, prefix))
        return segments

    def forward(self, segment: Segment, random: np.random.Generator) -> Bits:
        """The segment's logits, out of a pass with random neighbours."""
        segments = self.neighbours(random)
        at = int(random.integers(0, len(segments) + 1))
        segments.insert(at, segment)
        start = sum(other.outputs for other in segments[:at])
        return self.engine.forward(segments)[start : start + segment.outputs]

    def prefill(self, length: int, random: np.random.Generator) -> None:
        """Reads the text into the session's slot in chunks of any size; every row must have the reference's bits."""
        start = 0
        while start < length:
            size = min(length - start, int(random.choice([1, 2, 3, 8, 31, 64, 127, TEXT])))
            got = self.forward(prompt(SESSION, self.text[start : start + size], start), random)
            assert np.array_equal(got, self.logits[start : start + size])
            start += size

    def path_logits(self, tree: Tree, prefix: int) -> Bits:
        """The logits of every node, each decoded alone behind its ancestors: [nodes, vocabulary]."""
        self.engine.copy(REFERENCE, SCRATCH, prefix)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        logits = np.empty((len(tree.parents), self.engine.vocabulary), np.float32)
        waiting = [(node, prefix) for node in children.get(-1, [])]
        while waiting:  # depth first: the rows of a node's ancestors are still theirs
            node, row = waiting.pop()
            logits[node] = self.engine.forward([prompt(SCRATCH, tree.tokens[node : node + 1], row)])[0]
            waiting += [(child, row + 1) for child in children.get(node, [])]
        return logits


def grown(engine: CpuEngine, random: np.random.Generator, nodes: int, depth: float) -> Tree:
    """A tree in which a node's parent is the one before it with probability `depth`, else any."""
    parents = [node - 1 if random.random() < depth else int(random.integers(-1, node)) for node in range(nodes)]
    return Tree(parents, random_tokens(engine, random, nodes))


def tree_in_levels(bench: Bench, tree: Tree, prefix: int, random: np.random.Generator) -> tuple[Bits, list[int]]:
    """The tree's logits when some nodes come later than others, with dead rows between; and each node's row."""
    logits = np.empty((len(tree.parents), bench.engine.vocabulary), np.float32)
    rows: list[int] = []
    used = start = 0
    while start < len(tree.parents):
        stop = min(len(tree.parents), start + int(random.integers(1, 12)))
        used += int(random.integers(0, 9))
        nodes = list(range(start, stop))
        rows += [used + at for at in range(len(nodes))]
        used += len(nodes)
        mask = np.zeros((len(nodes), used), np.bool_)
        for at, node in enumerate(nodes):
            mask[at, [rows[ancestor] for ancestor in tree.path(node)]] = True
        segment = Segment(SESSION, prefix, tree.tokens[start:stop], prefix - 1 + tree.depths()[start:stop], mask)
        logits[start:stop] = bench.forward(segment, random)
        start = stop
    return logits, [prefix + row for row in rows]


DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
KINDS: tuple[tuple[Dtype, KvType], ...] = (("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"))
VARIANTS = [(shape, *KINDS[index % 3]) for index, shape in enumerate(SHAPES)]
VARIANTS += [("grouped", "bfloat16", "auto"), ("qwen3", "float32", "auto"), ("grouped", "bfloat16", "int8")]


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    shape, dtype, kv_dtype = request.param
    return Bench(make_checkpoint(tmp_path_factory.mktemp(shape), shape), dtype, kv_dtype)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make_checkpoint(tmp_path_factory.mktemp("plain")), "float32")


@pytest.fixture
def two_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)  # the number is the process's, and other engines count on theirs


@settings(max_examples=6, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(1, TEXT),
    nodes=st.integers(1, 40),
    depth=st.sampled_from([0.0, 0.5, 0.95]),
    at_once=st.booleans(),
)
def test_a_tokens_bits_do_not_depend_on_batch_tree_chunks_or_rows(
    bench: Bench, seed: int, length: int, nodes: int, depth: float, at_once: bool
) -> None:
    random = np.random.default_rng(seed)
    bench.prefill(length, random)
    tree = grown(bench.engine, random, nodes, depth)
    expected = bench.path_logits(tree, length)
    if at_once:
        logits = bench.forward(tree.segment(SESSION, length), random)
        rows = list(range(length, length + nodes))
    else:
        logits, rows = tree_in_levels(bench, tree, length, random)
    assert np.array_equal(logits, expected)
    path = tree.path(nodes - 1)
    bench.engine.move(SESSION, np.array([rows[node] for node in path]), length + np.arange(len(path)))
    probe = random_tokens(bench.engine, random, 2)
    after = bench.forward(prompt(SESSION, probe, length + len(path)), random)
    bench.engine.copy(REFERENCE, SCRATCH, length)
    alone = [*tree.tokens[path], *probe]
    for at, token in enumerate(alone):
        last = bench.engine.forward([prompt(SCRATCH, np.array([token]), length + at)])[0]
    assert np.array_equal(after[-1], last)


@pytest.mark.parametrize("depth", [0.0, 0.6, 0.98])
def test_a_tree_over_more_rows_than_one_product_keeps_its_bits(plain: Bench, depth: float) -> None:
    random = np.random.default_rng(21)
    length = 108
    plain.engine.copy(REFERENCE, SESSION, length)
    tree = grown(plain.engine, random, 150, depth)
    expected = plain.path_logits(tree, length)
    assert np.array_equal(plain.forward(tree.segment(SESSION, length), random), expected)
    logits, _ = tree_in_levels(plain, tree, length, random)
    assert np.array_equal(logits, expected)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
def test_hundreds_of_rows_on_two_threads_have_the_bits_of_few(
    dtype: Dtype, kv_dtype: KvType, two_threads: None
) -> None:
    """Threads cut large tensors where it suits them, in the middle of a row too."""
    engine = load(MODELS / "drafter", dtype, kv_dtype, threads=2)
    random = np.random.default_rng(22)
    texts = [random_tokens(engine, random, count) for count in (120, 90, 100)]
    together = engine.forward([prompt(slot, text) for slot, text in enumerate(texts)])
    pieces = [
        engine.forward([prompt(SESSION, text[start : start + 29], start)])
        for text in texts
        for start in range(0, len(text), 29)
    ]
    assert np.array_equal(together, np.concatenate(pieces))


def test_invariant_logits_equal_those_of_transformers(bench: Bench) -> None:
    """In bfloat16 they are no further from them than torch's products of bfloat16, whose results are rounded, too.

    KV in int8 moves them by a fortieth of their deviation: heads are small here.
    """
    expected = Reference.load(bench.folder).logits(bench.text)
    if bench.kv_dtype == "int8":
        usual = load(bench.folder, bench.dtype).forward([prompt(0, bench.text)])
        error = np.sqrt(np.mean((bench.logits - usual) ** 2)) / expected.std()
        assert 0 < error < 0.03
    elif bench.dtype == "float32":
        assert_same(bench.logits, expected)
    else:
        torchs = Reference.rounded(bench.folder, bench.dtype).logits(bench.text)
        ours, usual = (np.sqrt(np.mean((logits - expected) ** 2)) for logits in (bench.logits, torchs))
        assert ours <= 1.1 * usual
