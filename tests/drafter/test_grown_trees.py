"""A drafter whose engine grows several levels in one call drafts the trees of one that is called for each level."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drafter_svc.scheduler as scheduling
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.sessions.topk_session import TopKSession
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.construction.expansion import CANDIDATES
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta
from outrider.engine.gpu import DeviceEngine
from outrider.engine.growth import GrownLevel
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import Logits
from outrider.engine.interface.settings import EngineSettings
from tests.e2e.tiny_models import make_tiny
from tests.engine.gpu.taped import DEVICE

TEXT = (1, 2, 3, 1, 2, 3, 1)
PLAN = Plan(version=1, depth=6, width=3, nodes=64)
KEY = Attachment("s", "", 1, b"", 1)


class Counted(DeviceEngine):
    """Counts calls and the levels that they grew."""

    calls = grown = 0

    def sample(self, *arguments: Any) -> Logits:
        self.calls += 1
        return super().sample(*arguments)

    def grow(self, *arguments: Any) -> tuple[Logits, list[GrownLevel]]:
        logits, levels = super().grow(*arguments)
        self.calls, self.grown = self.calls + 1, self.grown + len(levels)
        return logits, levels


class Rig:
    """A drafter's loop over one session, and what it sends."""

    def __init__(self, engine: Counted, contract: Contract) -> None:
        self.sent: list[Delta] = []
        self.at_rest = asyncio.Event()
        self.scheduler = DraftScheduler(engine, level_nodes=8, prefill_chunk=64, send=self._receive, resync=self._lost)
        self.tokens = TEXT
        self.scheduler.opened(KEY, MirrorSnapshot(TEXT, extend(EMPTY, TEXT), contract, PLAN, 10_000))

    @property
    def session(self) -> TopKSession:
        session = self.scheduler.members[KEY].session
        assert isinstance(session, TopKSession)
        return session

    async def rest(self) -> dict[tuple[int, ...], float]:
        """Return all nodes, once nothing is left to draft: the edges of their paths."""
        async with asyncio.timeout(20):
            await self.at_rest.wait()
        self.at_rest.clear()
        tree = self.session.tree
        return {tuple(tree.path(node)): node.edge for level in tree.levels() for node in level}

    def commit(self, tokens: Sequence[int]) -> None:
        digest = extend(self.session.tree.digest, tokens)
        update = MirrorUpdate(len(self.tokens), tuple(tokens), digest, None, SentTerms(), 10_000, ())
        self.tokens = (*self.tokens, *tokens)
        self.scheduler.updated(KEY, update)

    def _receive(self, key: Attachment, delta: Delta, version: int, exhausted: bool) -> None:
        self.sent.append(delta)
        if exhausted:
            self.at_rest.set()

    def _lost(self, key: Attachment) -> None:
        raise AssertionError("the mirror drifted")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path, layers=2, width=32)


def load(folder: Path, *, grows: bool = True) -> Counted:
    engine = Counted.load(folder, EngineSettings(device=DEVICE, dtype="float32", slots=2))
    engine.grows_trees = grows
    return engine  # type: ignore[return-value]


async def trees(engine: Counted, contract: Contract) -> list[dict[tuple[int, ...], float]]:
    """The trees of three roots: after the best path of two nodes and another token, and after the best node."""
    rig = Rig(engine, contract)
    running = asyncio.create_task(rig.scheduler.run())
    found = []
    for nodes, other in ((2, (5,)), (1, ()), (0, ())):
        found.append(await rig.rest())
        best = [node for _, node in rig.session.tree.best_first(depth=nodes, width=1)]
        if nodes:
            rig.commit([*rig.session.tree.path(best[-1]), *other])
    check_candidates(engine, rig)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return found


def check_candidates(engine: Counted, rig: Rig) -> None:
    """What each node's children were chosen from is what the model computes of the node's path alone."""
    session = rig.session
    rows = session._rows
    assert len(rows) > 10
    draw = session.draw(engine)
    for node, row in rows.items():
        tokens = np.array([*rig.tokens, *session.tree.path(node)])
        alone = Segment(1, 0, tokens, np.arange(len(tokens)), None, 1)
        best = DeviceEngine.sample(engine, [alone], [draw], CANDIDATES).best(0)
        assert best is not None
        assert row.tokens[:3].tolist() == best.tokens[:3].tolist()
        assert row.scores[:3] == pytest.approx(best.scores[:3], abs=1e-3)


@pytest.mark.parametrize(
    "terms",
    [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5, "logit_bias": {3: 2.0}}],
    ids=str,
)
async def test_trees_grown_by_the_engine_equal_trees_grown_by_the_session(
    terms: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "GROWN_S", 10.0)  # a CPU's levels are slow
    contract = Contract(seed=7, max_tokens=200, **terms)
    ours, theirs = load(folder), load(folder, grows=False)
    found, expected = await trees(ours, contract), await trees(theirs, contract)
    assert [tree.keys() for tree in found] == [tree.keys() for tree in expected]
    first, other = found[0], expected[0]  # later ones differ in when their scores were fitted
    assert [first[path] for path in other] == pytest.approx([*other.values()], abs=0.07)  # a step of the wire's code
    assert ours.grown > 4
    assert ours.calls < 0.6 * theirs.calls
