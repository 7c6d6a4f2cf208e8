"""The step loop over a model that takes no trees: plain steps, and slots that are taken up only where they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from outrider.core.control.cost.budget import CostModel
from outrider.core.sampling.noise import Draw
from outrider.core.session.contract import Contract, Plan
from outrider.core.tree.delta import Delta
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits
from outrider.engine.loading import load_engine
from tests.engine.families import make_family
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

PLAN = Plan(version=1, depth=8, nodes=16, wait_us=500_000)
TEXT = tuple(range(1, 13))


class Gate:
    """The engine, whose passes can be held up."""

    def __init__(self, engine: Engine) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int) -> Logits:
        self.entered.set()
        assert self.open.wait(10)
        return self._engine.sample(segments, draws, best)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_family(tmp_path_factory.mktemp("mamba"), "mamba")
    return load_engine(folder, dtype="float32", slots=2, rows=128, threads=1)


def start(name: str, tokens: Sequence[int] = TEXT, most: int = 20) -> SessionStart:
    return SessionStart(name, "", 1, tokens, len(TEXT), Contract(seed=1, max_tokens=most, temperature=0.0), PLAN, 64)


async def finish(session: VerifierSession) -> list[int]:
    """The session's tokens once all are committed."""
    async with asyncio.timeout(20):
        while len(session.tokens) < session.end:
            assert await session.commits.get() is not None
    return session.tokens


def loop_over(engine: Engine | Gate) -> StepScheduler:
    cost = CostModel([(2, 0.001), (64, 0.010)])
    return StepScheduler(engine, cost, prefill_chunk=8, max_nodes=64, publish=lambda *_: None)  # type: ignore[arg-type]


async def test_an_existing_tree_is_ignored_and_not_waited_for(engine: Engine) -> None:
    loop = loop_over(engine)
    session = loop.sessions.open(start("a"))
    session.tree.graft(1, Delta(session.tree.root.position, session.tree.digest, 1, (0, 1), (5, 6), (-0.125, -0.125)))
    step, budget = loop.choice.select(loop.choice.base_works([session]), 0.0)
    assert step.works[0].nodes == []
    assert budget.nodes == 0


async def test_a_session_closed_during_a_pass_leaves_no_rows_to_the_next(engine: Engine) -> None:
    gate = Gate(engine)
    loop = loop_over(gate)
    running = asyncio.create_task(loop.run())
    expected = await finish(loop.sessions.open(start("whole")))
    first = loop.sessions.open(start("first"))
    await first.commits.get()
    gate.open.clear()
    gate.entered.clear()
    await asyncio.to_thread(gate.entered.wait, 10)
    committed = list(first.tokens)
    loop.sessions.close(first)
    second = loop.sessions.open(start("second", committed))
    gate.open.set()
    assert len(TEXT) < len(committed) < len(expected)
    assert await finish(second) == expected
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_next_turn_continues_where_the_slot_ends(engine: Engine) -> None:
    loop = loop_over(engine)
    running = asyncio.create_task(loop.run())
    expected = await finish(loop.sessions.open(start("whole")))
    half = loop.sessions.open(start("half", most=10))
    text = await finish(half)
    loop.sessions.close(half)
    rest = loop.sessions.open(start("rest", text))
    assert rest.kv_slot.cached == len(text) - 1
    assert await finish(rest) == expected
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
