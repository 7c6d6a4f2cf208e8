"""A session whose grammar takes long waits for it alone, and ends where it takes too long; others decode on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from outrider.core.session.contract import Contract, Grammar, Plan
from outrider.errors import InvalidRequest, Unavailable
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.place import STEP_S, GrammarPlace, Patience
from tests.grammar.test_bounds import take_longer
from tests.loops import no_stall
from tests.verifier.test_step_loop import IN_ROUNDS, MODELS, PLAN, TEXT, loop_of
from verifier_svc.router_stream import _why_closed
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

EOS = 0
WORDS = Grammar("regex", "[a-z]{1,8}( [a-z]{1,8}){60,90}[.]")
ANSWER = 60  # tokens


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODELS / "drafter", 4096, [EOS], patience=Patience())
    yield compiler
    compiler.close()


@asynccontextmanager
async def running() -> AsyncIterator[StepScheduler]:
    """A verifier's loop that runs."""
    loop = loop_of(MODELS / "drafter")
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def opened(
    loop: StepScheduler, compiler: GrammarCompiler, name: str, grammar: Grammar | None, plan: Plan = PLAN
) -> VerifierSession:
    contract = Contract(seed=5, max_tokens=ANSWER, stop_ids=(EOS,), grammar=grammar)
    place = None if grammar is None else await compiler.open(grammar, (), name)
    return loop.sessions.open(SessionStart(name, name, 1, TEXT, len(TEXT), contract, plan, 256, grammar=place))


async def finished(loop: StepScheduler, session: VerifierSession) -> list[int]:
    async with asyncio.timeout(60):
        while not session.finished:
            await asyncio.sleep(0.005)
    loop.sessions.close(session)
    return session.tokens


def place_of(session: VerifierSession) -> GrammarPlace:
    assert isinstance(session.grammar, GrammarPlace)
    return session.grammar


async def test_a_stalled_grammar_delays_no_other_session_and_keeps_its_text(
    compiler: GrammarCompiler,
) -> None:
    async with running() as loop:
        expected = await finished(loop, await opened(loop, compiler, "undisturbed", WORDS))
        slow = await opened(loop, compiler, "slow", WORDS)
        while len(slow.tokens) < len(TEXT) + 3:
            await asyncio.sleep(0)
        pid = place_of(slow).connection.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            async with no_stall():
                stands_at = len(slow.tokens) + 8  # what is forced may still follow
                assert await finished(loop, await opened(loop, compiler, "other", WORDS)) == expected
                assert len(await finished(loop, await opened(loop, compiler, "free", None))) == len(TEXT) + ANSWER
            assert len(slow.tokens) < stands_at
            assert not slow.finished
            assert slow.ceilings.depth == 0  # no nodes of it are verified
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await finished(loop, slow) == expected


async def test_a_session_whose_grammar_takes_too_long_again_ends_as_an_invalid_request(
    compiler: GrammarCompiler,
) -> None:
    async with running() as loop:
        bad = await opened(loop, compiler, "bad", WORDS, IN_ROUNDS)
        take_longer(place_of(bad), 2 * STEP_S)
        await finished(loop, bad)
        assert len(bad.tokens) > len(TEXT)
        assert isinstance(_why_closed(bad), InvalidRequest)
        assert "takes too much time to follow" in str(_why_closed(bad))


async def test_a_session_whose_grammar_s_process_is_killed_moves(compiler: GrammarCompiler) -> None:
    async with running() as loop:
        session = await opened(loop, compiler, "moves", WORDS)
        other = await opened(loop, compiler, "other", WORDS)
        os.kill(place_of(session).connection.pid, signal.SIGKILL)
        await finished(loop, session)
        assert isinstance(_why_closed(session), InvalidRequest | Unavailable)  # whether it had something to do
        await finished(loop, other)
        assert other.tokens[-1] == EOS or len(other.tokens) == len(TEXT) + ANSWER
