"""What a hostile tenant can do to another one: nothing that the other would read in its answers, or find missing.

How long the other's first tokens take meanwhile is measured by `python -m tests.chaos --scenario hostile`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.hostile.attacks import ATTACKS, CONTROL
from tests.hostile.callers import BOUNDS, CALLERS, Besieged, besieged

SECONDS = 1.0
SIZE = 0.25  # share of the attack's callers

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def target() -> AsyncIterator[Besieged]:
    async with besieged(lambda name, line: print(name, line)) as running:
        yield running


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != CONTROL])
async def test_an_attack_changes_no_answer_of_another_tenant_reads_nothing_and_takes_bounded_memory(
    target: Besieged, name: str
) -> None:
    measured, outcome = await target.attack(name, SECONDS, SIZE)
    assert outcome.begun
    assert measured.failures == []
    assert len(measured.first_tokens) >= CALLERS
    assert outcome.leaks == []
    assert await target.claimed(outcome.begun if name == "claims" else 0) == []
    assert {process: size for process, size in measured.memory.items() if size > BOUNDS[process]} == {}
    assert measured.memory.keys() >= BOUNDS.keys() - {"template", "grammars"}
