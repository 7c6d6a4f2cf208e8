"""EAGLE heads beside a target on a device draft what heads draft that keep all features, whatever becomes of slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.sampling.noise import Draw
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.gpu import DeviceEagleDrafts, DeviceEngine
from outrider.engine.gpu.attention.kv_memory import page_bytes
from outrider.engine.gpu.attention.page_table import pages_of
from outrider.engine.gpu.eagle import eagle_drafts
from outrider.engine.gpu.eagle.eagle_model import SPARE_PAGES
from outrider.engine.growth import LEVEL_ROWS, Growth
from outrider.engine.heads.config import Kind
from outrider.engine.heads.loading import load_speculator
from outrider.engine.heads.speculator import HeadNodes, HeadRoot, Speculator
from outrider.engine.interface.settings import EngineSettings
from tests.engine.gpu.taped import DEVICE, taped
from tests.engine.small_checkpoints import MODELS, make_checkpoint
from tests.engine.taught import random_heads, target_with_heads
from tests.engine.test_heads import Case, add, draft_trees, on_device, open_slot

GREEDY = Draw(0, 0.0)
SLOTS = 4
KEPT, AT_ONCE = 24, 10  # rows, in place of hundreds

Text = tuple[list[int], Tensor]  # tokens, and the features of each


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_drafts, "KEPT_ROWS", KEPT)
    monkeypatch.setattr(eagle_drafts, "READ_AT_ONCE", AT_ONCE)


class Twice:
    """Texts in the slots of heads on the device, and of heads on a CPU that keep all features."""

    def __init__(self, kind: Kind, target: Path, folder: Path, seed: int) -> None:
        shape, _ = random_heads(kind, target, folder)
        engine = target_with_heads(target, folder, slots=SLOTS, rows=256)
        assert engine.speculator is not None
        self.both: list[Speculator] = [
            engine.speculator,
            load_speculator(folder, target, precise=True, slots=SLOTS, context=200),
        ]
        self.random = np.random.default_rng(seed)
        self.vocabulary, self.width = shape.vocabulary, shape.width * shape.features.parts
        self.texts: list[Text] = [([], torch.empty(0, self.width))] * SLOTS
        self.added = [0] * SLOTS  # rows of each slot with features

    def more(self, text: Text, tokens: list[int]) -> Text:
        features = self.random.normal(size=(len(tokens), self.width)).astype(np.float32)
        return [*text[0], *tokens], torch.cat([text[1], torch.from_numpy(features)])

    def open(self, slot: int, source: int | None, rows: int) -> None:
        """Begin a text with the first rows of a slot; where features of the last are gone, it goes on as that did."""
        tokens, features = self.texts[slot if source is None else source]
        device = self.both[0]
        assert isinstance(device, DeviceEagleDrafts)
        kept = device._texts[slot if source is None else source].first < rows
        following = 7 if kept or not rows else tokens[rows]
        for it in self.both:
            open_slot(it, slot, source, rows)
        self.texts[slot] = self.more((tokens[:rows], features[:rows]), [following])
        self.added[slot] = rows

    def extend(self, slot: int, count: int) -> None:
        """The target reads a text up to its last token, and commits some more."""
        new = self.random.integers(0, self.vocabulary, count).tolist()
        self.texts[slot] = self.more(self.texts[slot], new)
        for it in self.both:
            add(it, slot, self.added[slot], self.texts[slot])
        self.added[slot] = len(self.texts[slot][0]) - 1

    def compare(self, slots: list[int]) -> None:
        """Draft a tree of three levels for some slots."""
        roots = [HeadRoot(slot, self.texts[slot][0]) for slot in slots]
        rows = [it.begin(roots)[0] for it in self.both]
        numbers = [*range(len(slots))]
        for _ in range(3):
            for one, other in zip(*rows, strict=True):
                assert one is not None
                assert other is not None
                assert np.abs(one.logits - other.logits).max() < 1e-4 * np.abs(other.logits).max()
            parents = self.random.choice(numbers, 4).tolist()
            tokens = self.random.integers(0, self.vocabulary, 4).tolist()
            nodes = [HeadNodes(*it) for it in zip(parents, tokens, strict=True)]
            numbers = [numbers[-1] + 1 + at for at in range(4)]
            rows = [[*it.expand(nodes)] for it in self.both]


@pytest.mark.usefixtures("few_features")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_drafts_are_those_of_all_features_after_any_sequence_of_slot_operations(
    kind: Kind, seed: int, small: Path, tmp_path: Path
) -> None:
    """Texts grow by one row or by many, with drafts or without; they begin as others do, and go back."""
    twice = Twice(kind, small, tmp_path, seed)
    random = twice.random
    for slot in range(SLOTS):
        twice.open(slot, None, 0)
    for _ in range(60):
        slot, source = random.choice(SLOTS, 2, replace=False).tolist()
        there = twice.added[slot if random.random() < 0.5 else source]
        match random.integers(5):
            case 0 if twice.added[source]:
                rows = int(random.integers(1, twice.added[source] + 1))
                twice.open(slot, source, rows)
                twice.extend(slot, 1)
            case 1 if twice.added[slot]:
                rows = int(random.integers(1, twice.added[slot] + 1))
                twice.open(slot, None, rows)
                twice.extend(slot, 1)
            case 2 if there:
                ready = [it for it in (slot, source) if twice.added[it]]
                twice.compare(ready)
            case _:
                if len(twice.texts[slot][0]) < 130:
                    twice.extend(slot, int(random.choice([1, 2, 5, 30])))
    twice.compare([slot for slot in range(SLOTS) if twice.added[slot]])


@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_levels_that_grow_are_numbered_as_nodes_are(kind: Kind, small: Path, tmp_path: Path) -> None:
    """The host goes on below them, and beside them in a slot whose tree did not grow."""
    case = Case(kind, small, tmp_path, loading=on_device)
    assert isinstance(case.speculator, DeviceEagleDrafts)
    tapes = taped(case.speculator._engine)
    texts = {slot: case.text(size) for slot, size in ((2, 17), (0, 40), (3, 9))}
    for slot, text in texts.items():
        case.open(slot, None, 0, text)
    growths = [Growth(len(it), np.zeros(1), 0.75, 4, -9.0, len(it) + 2) for it, _ in texts.values()]
    roots = [
        HeadRoot(slot, texts[slot][0], GREEDY if slot else None, growth if slot else None)
        for slot, growth in zip(texts, growths, strict=True)
    ]
    rows, grown = case.speculator.begin(roots, 2)
    assert len(grown) == 2
    assert all(row is not None for row in rows)
    known: list[tuple[int, tuple[int, ...]] | None] = [(slot, ()) for slot in texts]
    paths: dict[int, list[tuple[int, ...] | None]] = {it: [(), *[None] * (LEVEL_ROWS - 1)] for it in (2, 3)}
    for level in grown:
        for tree, (slot, found) in enumerate(paths.items()):
            for parent, token, best in level.rows(tree):
                above = found[parent] if parent >= 0 else None
                path = None if above is None else (*above, token)
                found.append(path)
                known.append(None if path is None else (slot, path))
                if path is not None:
                    expected = case.reference(*texts[slot], path).numpy()
                    assert best.tokens[0] == expected.argmax()
                    assert np.abs(best.scores[:8] - np.sort(expected)[::-1][:8]).max() < 1e-3
    numbers = [number for number, it in enumerate(known) if it is not None]
    assert len(numbers) > 3 + 2 * LEVEL_ROWS
    nodes = [HeadNodes(number, 5) for number in (*numbers[-9:], 1)]
    for node, row in zip(nodes, case.speculator.expand(nodes), strict=True):
        above = known[node.parent]
        assert above is not None
        slot, path = above
        expected = case.reference(*texts[slot], (*path, 5)).numpy()
        assert (row.best is None) == (slot == 0)
        assert np.abs(row.logits - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())
    tapes.check_that_the_host_reads_nothing()


def test_a_long_text_is_read_while_its_features_exist(tmp_path: Path) -> None:
    """In chunks of a prompt, one of more rows than are taken over at once, then row by row without drafts."""
    case = Case("eagle-3", MODELS / "target", tmp_path, loading=on_device)
    text = case.text(1000)
    open_slot(case.speculator, 1, None, 0)
    ends = [100, 700, 701, *range(702, 996, 3), 999]
    for start, stop in zip([0, *ends], ends, strict=False):
        add(case.speculator, 1, start, text, stop)
    draft_trees(case, {1: text}, levels=2)


def test_a_text_that_is_not_read_yet_gets_no_drafts(small: Path, tmp_path: Path) -> None:
    case = Case("eagle", small, tmp_path, loading=on_device)
    text, other = case.text(12), case.text(9)
    for slot, it in ((0, text), (1, other)):
        open_slot(case.speculator, slot, None, 0)
        add(case.speculator, slot, 0, it, 8)
    assert case.speculator.begin([HeadRoot(0, text[0])]) == ([None], [])
    (first, second), _ = case.speculator.begin([HeadRoot(0, text[0]), HeadRoot(1, other[0])])
    assert first is None
    assert second is not None
    (row,) = case.speculator.expand([HeadNodes(1, 4)])
    expected = case.reference(*other, (4,)).numpy()
    assert np.abs(row.logits - expected).max() < 1e-4 * np.abs(expected).max()
    with pytest.raises(ValueError, match=r"rows \[8, 9\) of a text have no features"):
        add(case.speculator, 0, 9, text)


def test_memory_for_kv_is_that_of_the_target_and_of_its_heads(small: Path, tmp_path: Path) -> None:
    random_heads("eagle", small, tmp_path)
    page = page_bytes(read_config(small), torch.float32)
    memory = 40 * page
    bounded = target_with_heads(small, tmp_path, slots=8, kv_memory=memory)
    speculator, model = bounded.speculator, bounded.eagle
    assert isinstance(speculator, DeviceEagleDrafts)
    assert model is not None
    pages = bounded.kv.table.pages
    assert pages == memory // (page + model.page_bytes) < 40
    assert speculator._engine.kv.table.pages == min(8 * pages_of(bounded.rows), pages + 8 * SPARE_PAGES)
    assert model.weights.embedding is bounded.passes.model.weights.embedding


def test_heads_need_a_target_that_was_loaded_with_heads(small: Path) -> None:
    with pytest.raises(ValueError, match="the target was loaded without heads"):
        DeviceEagleDrafts(DeviceEngine.load(small, EngineSettings(device=DEVICE, dtype="float32", slots=1)))
