"""Sessions that have too little memory for KV together wait for one another, and generate what they would anyway."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.config import VerifierConfig
from outrider.core.session.contract import OFF, Contract, Plan
from outrider.engine.cpu.engine import SPARE, CpuEngine
from outrider.engine.gpu import DeviceEngine
from outrider.engine.gpu.attention.page_table import PAGE_ROWS, TEXT_SPARE, pages_of
from outrider.engine.interface.engine import PAGE, SCRATCH
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import ConfigError
from tests.verifier.test_step_loop import MODELS, PLAN, TEXT, Free, draft
from verifier_svc.scheduler import StepScheduler
from verifier_svc.server import load
from verifier_svc.session import SessionStart, VerifierSession

CONTEXT = 700
MOST = 300  # tokens of an answer


def least_memory(engine: CpuEngine, more: int = 0) -> int:
    """The smallest bound for an engine of that shape, and `more` pages more. It has none yet."""
    page = engine.kv_bytes // (engine.slots * -(-engine.rows // PAGE))
    return page * (-(-(engine.rows + SCRATCH) // PAGE) + SPARE + more)


class Rig:
    """A verifier's loop over an engine, whose steps the test takes by itself."""

    def __init__(self, engine: CpuEngine | DeviceEngine) -> None:
        self.engine = engine
        self.loop = StepScheduler(engine, Free(), prefill_chunk=64, max_nodes=64, publish=lambda *_: None)

    async def step(self) -> list[VerifierSession]:
        """Takes a step. Returns the sessions that it was for."""
        return (await self.loop.step()).sessions


def bounded(pages: int | None, slots: int = 6) -> Rig:
    """A loop with room for one text and `pages` pages more; None: for all."""
    rows = CONTEXT + 256
    engine = CpuEngine.load(MODELS / "drafter", EngineSettings(dtype="float32", slots=slots, rows=rows, threads=1))
    if pages is not None:
        memory = least_memory(engine, pages)
        engine = CpuEngine.load(
            MODELS / "drafter", EngineSettings(dtype="float32", slots=slots, rows=rows, threads=1, kv_memory=memory)
        )
    engine.context = CONTEXT
    return Rig(engine)


async def finished(rig: Rig, sessions: Sequence[VerifierSession]) -> list[list[int]]:
    """Their texts when all have ended; some are drafted for. What is written is within the bound after each step."""
    for number in range(10_000):
        if all(session.finished for session in sessions):
            return [session.tokens for session in sessions]
        for session in sessions:
            if not session.finished and number % 3 == 0 and session.terms.plan.depth and not session.tree.size:
                draft(session, [1, 2, 3])
        await rig.step()
        assert rig.engine.kv_bytes_taken <= rig.engine.kv_bytes
        for session in sessions:
            if session.finished:
                rig.loop.sessions.close(session)
    raise AssertionError("they never ended")


def texts(count: int, length: int = 40) -> list[list[int]]:
    dice = np.random.default_rng(1)
    return [[*TEXT, *dice.integers(1, 4000, length).tolist()] for _ in range(count)]


def begun(rig: Rig, name: str, prompt: Sequence[int], *, plan: Plan = OFF, most: int = 30) -> VerifierSession:
    contract = Contract(seed=5, max_tokens=most)
    return rig.loop.sessions.open(SessionStart(name, "", 1, prompt, len(prompt), contract, plan, 4096))


def open_all(rig: Rig, prompts: Sequence[Sequence[int]]) -> list[VerifierSession]:
    return [
        begun(rig, f"s{number}", text, most=MOST, plan=PLAN if number % 2 else OFF)
        for number, text in enumerate(prompts)
    ]


async def test_texts_are_equal_with_kv_memory_for_all_sessions_or_hardly_one() -> None:
    prompts = texts(6)
    free = bounded(None)
    expected = await finished(free, open_all(free, prompts))
    for pages in (0, 20):
        rig = bounded(pages)
        assert await finished(rig, open_all(rig, prompts)) == expected
        assert rig.loop.choice.memory.preempted > 0
        rig.loop.stop()
    assert free.loop.choice.memory.preempted == 0
    free.loop.stop()


@pytest.mark.extended
async def test_sessions_on_a_device_wait_for_one_another_too() -> None:
    def on_device(kv_memory: int | None) -> Rig:
        engine = DeviceEngine.load(
            MODELS / "drafter",
            EngineSettings(device="cpu", dtype="float32", slots=8, rows=180 + SCRATCH, kv_memory=kv_memory),
        )
        engine.context = 180
        assert (engine.memory(0, 0, 1) is None) is (kv_memory is None)
        return Rig(engine)

    prompts = texts(8)
    free = on_device(None)
    expected = await finished(free, [begun(free, f"s{number}", text, most=120) for number, text in enumerate(prompts)])
    pages = pages_of(180 + 2 * SCRATCH) + TEXT_SPARE
    rig = on_device(pages * free.engine.kv_bytes // (8 * pages_of(180 + SCRATCH) + 1))
    sessions = [begun(rig, f"s{number}", text, most=120, plan=PLAN) for number, text in enumerate(prompts)]
    assert await finished(rig, sessions) == expected
    assert rig.loop.choice.memory.preempted > 0
    assert (free.loop.choice.memory.preempted, rig.engine.kv_tokens) == (0, pages * PAGE_ROWS)
    for stopped in (free, rig):
        stopped.loop.stop()


async def test_the_first_in_line_is_never_preempted() -> None:
    rig = bounded(0)
    first, *others = open_all(rig, texts(6))
    while not first.finished:
        assert first in await rig.step() or first.unread > 1
        assert first.cached or first.unread > 1
    assert min(other.cached for other in others) == 0 < rig.loop.choice.memory.preempted
    rig.loop.stop()


async def test_a_prompt_that_does_not_fit_is_not_begun_and_neither_is_the_one_behind_it() -> None:
    rig = bounded(0)
    first = begun(rig, "first", texts(1, 640)[0])
    while first.unread > 1:
        await rig.step()
    long, short = (begun(rig, name, texts(2, size)[1]) for name, size in (("long", 630), ("short", 3)))
    for _ in range(10):
        assert await rig.step() == [first]
    assert (long.cached, short.cached) == (len(TEXT), len(TEXT))  # what they share with the first
    rig.loop.sessions.close(first)
    assert long in await rig.step()  # what has ended makes room
    assert rig.loop.choice.memory.preempted == 0
    rig.loop.stop()


async def test_no_session_shares_rows_of_a_preempted_one() -> None:
    prompts = texts(6)
    free, rig = bounded(None, 7), bounded(0, 7)
    (expected,) = await finished(free, [begun(free, "last", prompts[-1])])
    sessions = open_all(rig, prompts)
    while not rig.loop.choice.memory.preempted:
        await rig.step()
    last = begun(rig, "last", prompts[-1])  # as the one that was preempted
    assert sessions[-1].cached == 0
    assert last.cached < len(prompts[-1]) - 1
    for session in sessions:
        rig.loop.sessions.close(session)
    assert await finished(rig, [last]) == [expected]
    free.loop.stop()
    rig.loop.stop()


async def test_rows_shared_by_sessions_count_once() -> None:
    rig = bounded(0, slots=8)
    prompt = texts(1, 250)[0]
    first = begun(rig, "first", prompt)
    while first.unread > 1:
        await rig.step()
    alone = rig.engine.kv_bytes_taken
    others = [begun(rig, f"other {number}", [*prompt, number]) for number in range(7)]
    assert {first, *others} == {*await rig.step()}
    assert rig.engine.kv_bytes_taken < 1.6 * alone
    assert rig.loop.choice.memory.preempted == 0
    rig.loop.stop()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_memory": "1MiB"}, "kv_memory: 1048576 bytes are too few for one text"),
        ({"kv_memory": "1GiB", "backend": "transformers"}, "kv_memory: the model runs through transformers, which"),
    ],
    ids=str,
)
def test_a_bound_that_cannot_be_kept_is_refused_with_the_reason(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(VerifierConfig(model=MODELS / "target", **change))  # type: ignore[arg-type]
