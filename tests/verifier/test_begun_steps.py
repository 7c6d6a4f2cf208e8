"""A verifier whose engine begins the next pass by itself commits what one does that begins each pass, and no less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.core.control.cost.budget import CostModel
from outrider.core.proposers.lookup import Lookups
from outrider.core.session.contract import OFF, Contract, Plan
from outrider.engine.following import FollowingPass
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import Logits
from outrider.engine.interface.settings import EngineSettings
from tests.e2e.tiny_models import make_tiny
from tests.engine.gpu.taped import DEVICE
from verifier_svc.proposers.ngram_proposer import NgramProposers
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

TEXT = (1, 2, 3, 1, 2, 3, 1)
LONG = 60  # tokens of an answer
TERMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "choice": 3},
    {"temperature": 1.0, "top_k": 9},
    {"temperature": 1.0, "logprobs": 2, "max_tokens": 11},
    {"temperature": 1.2, "stop_ids": (5,)},
    {"temperature": 0.9, "min_tokens": 20, "stop_ids": (3,)},
]


class Counted(DeviceEngine):
    """Notes which slots each call was for, and which it has begun."""

    calls: list[tuple[frozenset[int], frozenset[int]]]

    def sample(self, segments: Sequence[Segment], *more: Any) -> Logits:
        self.calls.append((frozenset(it.slot for it in segments), frozenset()))
        return super().sample(segments, *more)

    def run_on(
        self, segments: Sequence[Segment], draws: Any, following: FollowingPass
    ) -> tuple[Logits, frozenset[int]]:
        logits, begun = super().run_on(segments, draws, following)
        self.calls.append((frozenset(it.slot for it in segments), begun))
        return logits, begun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=2, width=32)


class Rig:
    """A loop over an engine, and the sessions that were opened."""

    def __init__(self, folder: Path, *, runs_on: bool, ngram: bool = False, slots: int = 8) -> None:
        self.engine = Counted.load(folder, EngineSettings(device=DEVICE, dtype="float32", slots=slots))
        self.engine.begins_next_pass, self.engine.calls = runs_on, []  # type: ignore[attr-defined]
        cost = CostModel([(1, 0.010), (64, 0.011)])
        proposers = NgramProposers(Lookups("suffix", None)) if ngram else None
        self.loop = StepScheduler(
            self.engine, cost, prefill_chunk=16, max_nodes=64, publish=lambda *_: None, ngram_proposers=proposers
        )
        self.running = asyncio.create_task(self.loop.run())

    @property
    def calls(self) -> list[tuple[frozenset[int], frozenset[int]]]:
        return self.engine.calls  # type: ignore[attr-defined, no-any-return]

    def open(self, number: int, *, plan: Plan = OFF, window: int = 1000, **terms: Any) -> VerifierSession:
        contract = Contract(**{"seed": number, "max_tokens": LONG, **terms})
        start = SessionStart(f"s{number}", "", 1, TEXT, len(TEXT), contract, plan, window)
        return self.loop.sessions.open(start)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


async def all_texts(folder: Path, *, runs_on: bool) -> tuple[list[list[int]], Rig]:
    rig = Rig(folder, runs_on=runs_on)
    sessions = [rig.open(number, **terms) for number, terms in enumerate(TERMS)]
    await rig.until(lambda: all(session.finished for session in sessions))
    await rig.close()
    return [session.tokens for session in sessions], rig


async def test_texts_equal_those_of_passes_that_the_host_begins(folder: Path) -> None:
    expected, theirs = await all_texts(folder, runs_on=False)
    texts, ours = await all_texts(folder, runs_on=True)
    assert texts == expected
    assert len(ours.calls) <= len(theirs.calls) + 1
    pairs = [*zip(ours.calls, ours.calls[1:], strict=False)]
    assert sum(bool(begun) for _, begun in ours.calls) > LONG - 25
    assert all(slots <= begun for (_, begun), (slots, _) in pairs if begun)  # what was begun is what follows


async def test_a_session_that_opens_waits_for_one_step_at_most(folder: Path) -> None:
    rig = Rig(folder, runs_on=True)
    first = rig.open(0, temperature=0.0)
    await rig.until(lambda: len(first.tokens) > len(TEXT) + 5)
    before = len(rig.calls)
    second = rig.open(1, temperature=1.0)
    await rig.until(lambda: second.cached > 0)
    assert len(rig.calls) - before <= 2  # the one that runs, and one that was begun
    await rig.until(lambda: first.finished and second.finished)
    await rig.close()
    assert any(len(begun) == 2 for _, begun in rig.calls)


async def test_a_session_that_can_continue_waits_for_one_step_at_most(folder: Path) -> None:
    """Its router had not logged its tokens for a while."""
    rig = Rig(folder, runs_on=True)
    first, second = rig.open(0, temperature=0.0, max_tokens=200), rig.open(1, temperature=1.0, window=9)
    await rig.until(lambda: not second.ready and len(first.tokens) > len(second.tokens) + 5)
    before, held = len(rig.calls), len(second.tokens)
    second.commits.acknowledge(held)
    rig.loop.wake()
    await rig.until(lambda: len(second.tokens) > held)
    assert len(rig.calls) - before <= 3
    await rig.close()


async def test_the_slot_of_a_closed_session_is_reused_at_once(folder: Path) -> None:
    rig = Rig(folder, runs_on=True, slots=2)
    first, second = rig.open(0, temperature=0.0), rig.open(1, temperature=0.7)
    await rig.until(lambda: len(second.tokens) > len(TEXT) + 9)
    rig.loop.sessions.close(second)
    third = rig.open(2, temperature=0.7)
    await rig.until(lambda: first.finished and third.finished)
    await rig.close()
    alone = Rig(folder, runs_on=False)
    expected = [alone.open(0, temperature=0.0), alone.open(2, temperature=0.7)]
    await alone.until(lambda: all(session.finished for session in expected))
    await alone.close()
    assert [first.tokens, third.tokens] == [session.tokens for session in expected]


async def test_no_pass_is_begun_when_the_next_step_may_have_nodes(folder: Path) -> None:
    rig = Rig(folder, runs_on=True, ngram=True)
    session = rig.open(0, temperature=0.0, plan=Plan(version=1, depth=8, nodes=16, wait_us=0))
    await rig.until(lambda: session.finished)
    await rig.close()
    assert not any(begun for _, begun in rig.calls)


async def test_a_draining_verifier_begins_no_further_step(folder: Path) -> None:
    rig = Rig(folder, runs_on=True)
    session = rig.open(0, temperature=0.0, max_tokens=200)
    await rig.until(lambda: len(session.tokens) > len(TEXT) + 5)
    drained = asyncio.Event()
    rig.loop.sessions.begin_drain(drained.set)
    async with asyncio.timeout(10):
        await drained.wait()
    committed = len(session.tokens)
    await asyncio.sleep(0.05)
    assert session.commits.moved
    assert len(session.tokens) == committed
    await rig.close()


@pytest.mark.parametrize("apart", [False, True])
async def test_each_step_is_learned_from_once_including_the_last_before_a_rest(
    apart: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[float] = []  # seconds of the pass
    rig = Rig(folder, runs_on=True)
    monkeypatch.setattr(rig.loop.learning.metrics, "record_pass", lambda rows, seconds, waited: learned.append(seconds))
    rig.engine.frees_host = apart
    for number in range(2):
        session = rig.open(number, temperature=0.0, max_tokens=20)
        await rig.until(lambda session=session: session.finished)  # type: ignore[misc]
        await rig.until(lambda: len(learned) == len(rig.calls))
    assert len({*learned}) == len(learned)
    await rig.close()
