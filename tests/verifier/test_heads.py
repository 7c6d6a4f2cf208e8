"""With heads on the target a verifier says exactly what it says without; good ones are accepted, bad ones let rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.core.budget import CostModel
from outrider.core.contract import OFF, Contract, Plan
from outrider.core.worth import Worth
from outrider.engine.heads.loading import check_heads, load_speculator
from outrider.engine.heads.shape import KINDS, Kind
from outrider.engine.native import NativeEngine
from tests.e2e.tiny import CONTEXT, make_tiny
from tests.engine.taught import random_heads, taught_heads
from verifier_svc.levels import HeadDrafting
from verifier_svc.loop import StepLoop
from verifier_svc.session import Commit, Session, Start

PLAN = Plan(version=1, depth=8, nodes=16, width=4, wait_us=0)
FREE = CostModel([(2, 1000.0), (64, 1000.1)])  # a step takes so long that levels cost nothing beside it
TEXT = (1, 2, 3, 1, 2, 3, 1, 5)
TERMS: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "presence_penalty": 0.5, "min_tokens": 20, "stop_ids": (3,)},
    {"temperature": 0.0, "rule": "target-match"},
)


class Always(Worth):
    """A judge that every round pleases."""

    def takes(self, price: float, *, trial: bool) -> bool:
        return True


class Cluster:
    """A verifier's loop over a tiny target, with heads or without."""

    def __init__(self, target: Path, heads: Path | None, cost: CostModel = FREE, slots: int = 4) -> None:
        features = None if heads is None else check_heads(heads, target).features
        self.engine = NativeEngine.load(target, dtype="float32", slots=slots, threads=1, features=features)
        drafting = None
        if heads is not None and features is not None:
            speculator = load_speculator(heads, target, precise=True, slots=slots, context=CONTEXT)
            drafting = HeadDrafting(speculator, self.engine.hidden, every=features.every)
        self.loop = StepLoop(self.engine, cost, prefill_chunk=4, max_nodes=64, publish=lambda *_: None, heads=drafting)

    def open(self, number: int, plan: Plan = PLAN, text: Sequence[int] = TEXT, most: int = 60, **terms: Any) -> Session:
        contract = Contract(seed=number, max_tokens=most, **terms)
        return self.loop.open(Start(f"s{number}", "", 1, text, len(text), contract, plan, 64))

    async def __aenter__(self) -> Cluster:
        self.running = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running  # raises what ended it before


async def commits_of(session: Session) -> list[Commit]:
    found: list[Commit] = []
    while not found or not found[-1].last:
        async with asyncio.timeout(20):
            commit = await session.commits.get()
        assert commit is not None
        session.tree.check_integrity()
        found.append(commit)
    return found


async def said(target: Path, heads: Path | None, plan: Plan = PLAN) -> tuple[list[list[int]], list[int]]:
    """What four sessions at once say, and how much of it was accepted."""
    async with Cluster(target, heads) as cluster:
        sessions = [cluster.open(number, plan, **terms) for number, terms in enumerate(TERMS)]
        for session in sessions:
            if session.heads is not None:
                session.heads.worth = Always()
        commits = [await commits_of(session) for session in sessions]
    return [s.tokens for s in sessions], [sum(commit.report.accepted for commit in each) for each in commits]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=3, width=96)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return asyncio.run(said(target, None, OFF))[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_random_heads_change_nothing(kind: Kind, target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    random_heads(kind, target, tmp_path, own_head=True)
    texts, accepted = await said(target, tmp_path)
    assert texts == plain
    assert sum(accepted) > 0  # of sixteen tokens some guesses are right


@pytest.mark.parametrize("kind", KINDS)
async def test_heads_that_know_the_text_are_accepted(
    kind: Kind, target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    taught_heads(kind, target, tmp_path, plain[0])
    texts, accepted = await said(target, tmp_path)
    assert texts == plain
    said_greedily = len(plain[0]) - len(TEXT)
    steps = said_greedily - accepted[0]
    assert said_greedily / steps > 1.5
