"""Heads away from their target draft what their network computes after a text's true features, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter_svc.sessions.eagle_session import EagleSampledSession, EagleTopKSession
from drafter_svc.sessions.session import DrafterSession
from outrider.core.construction.expansion import DrafterFits
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import FeatureRows, MirrorSnapshot
from outrider.core.tree.token_tree import TokenTree
from outrider.engine.gpu.eagle.fed_eagle import FedEagle
from outrider.engine.heads.config import Kind
from outrider.engine.heads.eagle_engine import EagleEngine
from outrider.engine.heads.embeddings import read_target_embeddings
from outrider.engine.interface.logits import HostLogits, logits_rows
from outrider.engine.kv.kv_slots import KvSlots
from tests.engine.gpu.taped import DEVICE, taped
from tests.engine.small_checkpoints import make_checkpoint
from tests.engine.taught import random_heads
from tests.engine.test_heads import decoded

PLAN = Plan(version=1, depth=5, width=3, nodes=10)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"))


class Text:
    """A text of the target, with features as if the target had generated it: of each token, after fusing."""

    def __init__(self, vocabulary: int, width: int, count: int) -> None:
        random = np.random.default_rng(count)
        self.tokens: list[int] = random.integers(0, vocabulary, count).tolist()
        self.fused = torch.from_numpy(random.normal(size=(count, width)).astype(np.float32)).to(torch.bfloat16)

    def rows(self, start: int, stop: int) -> FeatureRows:
        """As they come with tokens [start, stop)."""
        return self.fused[start - 1 : stop - 1].view(torch.int16).numpy().view(np.uint16)


Loading = Callable[[Path, Path], EagleEngine | FedEagle]


def on_cpu(folder: Path, target: Path) -> EagleEngine:
    return EagleEngine.load(folder, target, precise=True, slots=2, threads=1)


def on_device(folder: Path, target: Path) -> FedEagle:
    engine = FedEagle.load_heads(folder, target, device=DEVICE, precise=True, slots=2)
    taped(engine)
    return engine


@pytest.fixture(params=[on_cpu, on_device])
def loading(request: pytest.FixtureRequest) -> Loading:
    chosen: Loading = request.param
    return chosen


class Rig:
    """A drafter's engine, slots, and one session at a time."""

    def __init__(self, kind: Kind, small: Path, folder: Path, loading: Loading) -> None:
        self.shape, self.network = random_heads(kind, small, folder)
        self.ends = read_target_embeddings(small, torch.float32)
        self.engine = loading(folder, small)
        self.slots = KvSlots(2)
        self.fits = DrafterFits()
        self.compared = 0

    def text(self, count: int) -> Text:
        return Text(self.shape.vocabulary, self.shape.width, count)

    def begin(self, text: Text, count: int, first: int = 1, rule: str = "shared-noise") -> None:
        """A session over the first `count` tokens; features come with those from `first` on."""
        self.known = first
        tokens = tuple(text.tokens[:count])
        place = self.slots.acquire(tokens, "")
        if place.source is not None:
            self.engine.copy(place.source, place.slot, place.cached)
        snapshot = MirrorSnapshot(
            tokens, extend(EMPTY, tokens), Contract(seed=4, max_tokens=200, rule=rule), PLAN, 400, epoch=1
        )
        kind = EagleTopKSession if rule == "shared-noise" else EagleSampledSession
        self.session: DrafterSession = kind(snapshot, place.slot, self.shape.vocabulary, cached=place.cached)
        self.engine.feed(place.slot, first, text.rows(first, count), restart=True)
        self.cached = place.cached
        self.upstream = TokenTree(tokens)

    def end(self) -> None:
        self.slots.release(self.session.slot, self.session.tokens[: self.session.cached], "")

    def commit(self, text: Text, count: int) -> None:
        """Commit `count` further tokens."""
        start = len(self.session.tokens)
        new = text.tokens[start : start + count]
        assert self.session.commit(new) is None
        self.engine.feed(self.session.slot, start, text.rows(start, start + count), restart=False)
        self.upstream.commit(new)
        self.session.learn(self.fits)
        self.upstream.graft(1, self.session.refill(self.fits))

    def grow(self, text: Text, levels: int) -> None:
        for _ in range(levels):
            chosen = self.session.next_segment(self.fits, chunk=8, limit=4, context=200, rows=self.engine.rows)
            if chosen is None:
                return
            segment, nodes = chosen
            logits = self.engine.forward([segment])
            assert len(logits) == len(nodes)
            for node, row in zip(nodes, logits, strict=True):
                self.check(text, self.session.tree.path(node), row)
            self.session.advance(segment, nodes)
            rows = logits_rows(HostLogits(logits), 0, len(nodes))
            assert self.upstream.graft(1, self.session.expand(nodes, rows, self.fits)).dropped == []
        self.session.tree.check_integrity()

    def check(self, text: Text, path: Sequence[int], row: np.ndarray) -> None:
        """Against the network from the beginning: the known text with its true features, and behind it the path."""
        tokens = self.session.tokens[self.known - 1 :]
        features: Tensor = text.fused[self.known - 1 : self.known - 1 + len(tokens)].float()
        with torch.no_grad():
            expected = decoded(self.shape, entered(self.network), self.ends, tokens, features, path).numpy()
        assert np.abs(row - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())
        self.compared += 1


def entered(network: torch.nn.Module) -> torch.nn.Module:
    """The network, for features that are fused already."""
    network.enter = lambda features: features  # type: ignore[assignment]
    return network


@pytest.mark.parametrize("rule", ["shared-noise", "recursive-rejection"])
@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_every_level_after_every_commit_continues_from_true_features(
    kind: Kind, rule: str, small: Path, tmp_path: Path, loading: Loading
) -> None:
    rig = Rig(kind, small, tmp_path, loading)
    text = rig.text(120)
    rig.begin(text, 20, rule=rule)
    for count in (1, 3, 1, 9, 2, 1):
        rig.grow(text, 6)
        drafted = rig.session.tree.best_first(depth=2, width=9)
        liked = next((node.token for _, node in drafted), None)
        if liked is not None:  # the target commits what was drafted
            text.tokens[len(rig.session.tokens)] = liked
        rig.commit(text, count)
    rig.grow(text, 9)
    assert rig.compared > 40


def test_no_row_attends_to_rows_without_features(small: Path, tmp_path: Path, loading: Loading) -> None:
    """A long text of which the end alone came with features: also where a warm slot holds some of its beginning."""
    rig = Rig("eagle-3", small, tmp_path, loading)
    text = rig.text(120)
    rig.begin(text, 60, first=41)
    rig.grow(text, 20)
    rig.commit(text, 2)
    rig.grow(text, 3)
    assert rig.compared > 15
    rig.end()
    rig.begin(text, 80, first=75)  # rows 62 to 74 are missing in between
    assert rig.cached == 62
    rig.grow(text, 8)
    rig.commit(text, 2)
    rig.grow(text, 3)


def test_a_warm_prefix_is_continued_in_its_slot_and_in_another(small: Path, tmp_path: Path, loading: Loading) -> None:
    rig = Rig("eagle-3", small, tmp_path, loading)
    text = rig.text(120)
    rig.begin(text, 60)
    rig.grow(text, 12)
    rig.end()
    other = rig.text(90)
    other.tokens[:30], other.fused[:30] = text.tokens[:30], text.fused[:30]
    rig.begin(other, 50)
    assert (rig.session.slot, rig.cached) == (1, 30)
    rig.grow(other, 8)
    rig.end()
    rig.begin(text, 70)
    assert (rig.session.slot, rig.cached) == (0, 60)
    rig.grow(text, 8)
    assert rig.compared > 30


def test_drafts_below_a_commit_stay_at_the_upstream_and_are_judged_anew(
    small: Path, tmp_path: Path, loading: Loading
) -> None:
    rig = Rig("eagle", small, tmp_path, loading)
    text = rig.text(40)
    rig.begin(text, 20)
    rig.grow(text, 6)
    best = next(node for _, node in rig.session.tree.best_first(depth=1, width=9) if node.children)
    kept = dict(best.children)
    text.tokens[20] = best.token
    rig.commit(text, 1)
    assert rig.session.cached == 20
    assert rig.session.tree.root.children.keys() == kept.keys() == rig.upstream.root.children.keys()
    rig.grow(text, 1)
    for token, child in rig.session.tree.root.children.items():
        if token in kept:
            assert abs(rig.upstream.root.children[token].edge - child.edge) < 0.1
