"""What a contract's grammar forces is verified without a drafter, and changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.core.session.contract import OFF, Contract, Grammar, Plan
from outrider.grammar.compiler import GrammarCompiler
from tests.verifier.test_step_loop import MODELS, PLAN, TEXT, loop_of, stepped
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

EOS = 0
GRAMMAR = Grammar("regex", "The quick brown fox jumps over the lazy (dog|cat)[.!] Then it sleeps for [0-9] hours[.]")


@pytest.fixture
def loop() -> Iterator[StepScheduler]:
    loop = loop_of(MODELS / "drafter")
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODELS / "drafter", 4096, [EOS])


def opened(
    loop: StepScheduler, compiler: GrammarCompiler, plan: Plan, rule: str, temperature: float
) -> VerifierSession:
    contract = Contract(seed=5, max_tokens=60, stop_ids=(EOS,), grammar=GRAMMAR, rule=rule, temperature=temperature)
    start = SessionStart("s", "", 1, TEXT, len(TEXT), contract, plan, 256, grammar=compiler.start(GRAMMAR))
    return loop.sessions.open(start)


async def steps(loop: StepScheduler, session: VerifierSession) -> int:
    count = 0
    while not session.finished:
        await stepped(loop, session)
        count += 1
    loop.sessions.close(session)
    return count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_forced_tokens_take_few_steps(loop: StepScheduler, compiler: GrammarCompiler, temperature: float) -> None:
    plain = opened(loop, compiler, OFF, "shared-noise", temperature)
    taken = await steps(loop, plain)
    ours = opened(loop, compiler, replace(PLAN, depth=16), "shared-noise", temperature)
    fewer = await steps(loop, ours)
    assert ours.tokens == plain.tokens
    assert ours.tokens[-1] == EOS
    assert taken == len(ours.tokens) - len(TEXT)
    assert fewer < 0.6 * taken


async def test_no_token_is_forced_on_a_rule_that_compares_distributions(
    loop: StepScheduler, compiler: GrammarCompiler
) -> None:
    session = opened(loop, compiler, PLAN, "speculative-sampling", 1.0)
    await stepped(loop, session)
    assert not session.tree.size
    assert session.tokens[-1] != EOS
    loop.sessions.close(session)
