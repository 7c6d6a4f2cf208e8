"""How a router finds generations that were left behind: it looks at what is due, however many sessions there are."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.store.records import SessionRecord, dump
from outrider.store.sessions import Sessions, SessionTurn
from router.sessions import maintenance

INDEX = "outrider:{leases}"
IDLE = 10_000
TURN = SessionTurn(Contract(seed=1, max_tokens=9), (), answer_position=2, deadline=None)


@pytest.fixture
def sessions(client: Redis, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.setattr(maintenance, "SWEEP_PAUSE_S", 0.0)
    return Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)


async def leave_behind(client: Redis, sessions: Sessions, *session_ids: str) -> None:
    """Generations whose owner died long ago."""
    for name in session_ids:
        await sessions.create(name, "tenant", "target", b"digest")
        await sessions.begin(name, 0, "r1", TURN, 0, [5, 6], extend(EMPTY, [5, 6]))
        await client.hset(f"outrider:{{{name}}}:session", mapping={"lease": 1, "resumable": 1})
        await client.zadd(INDEX, {name: 1})


async def keep_idle(client: Redis, count: int) -> None:
    """Sessions without a generation that runs."""
    fields = dump(SessionRecord("", "tenant", "target", b"digest"))
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.hset(f"outrider:{{idle-{number}}}:session", mapping=fields)
    await pipeline.execute()


async def cost(client: Redis, sessions: Sessions, before: frozenset[str]) -> tuple[frozenset[str], int]:
    """A sweep, and the commands that Redis ran for it, those inside scripts included."""
    await client.config_resetstat()
    found = await maintenance.sweep_once(sessions, before)
    stats = await client.info("commandstats")
    assert "cmdstat_scan" not in stats
    return found, sum(figures["calls"] for figures in stats.values())


async def test_the_cost_of_a_sweep_depends_on_due_sessions_alone(client: Redis, sessions: Sessions) -> None:
    await maintenance.sweep_once(sessions, ())  # the first of a cluster scans
    nothing, idle = await cost(client, sessions, frozenset())
    await keep_idle(client, IDLE)
    assert await cost(client, sessions, nothing) == (frozenset(), idle)
    orphans = [f"orphan-{number}" for number in range(20)]
    await leave_behind(client, sessions, *orphans)
    found, looking = await cost(client, sessions, nothing)
    assert found == set(orphans)
    assert looking <= idle + 8 * len(orphans)
    found, ending = await cost(client, sessions, found)
    assert not found
    assert ending <= idle + 12 * len(orphans)
    assert {(await sessions.get(name)).finished for name in orphans} == {"abandoned"}
    assert await cost(client, sessions, found) == (frozenset(), idle)


async def test_a_lost_index_is_rebuilt_without_orphans(client: Redis, sessions: Sessions) -> None:
    await keep_idle(client, 50)
    await leave_behind(client, sessions, "s1")
    await client.delete(INDEX, f"{INDEX}:scanned")
    found = await maintenance.sweep_once(sessions, ())
    assert found == {"s1"}
    assert not await maintenance.sweep_once(sessions, found)
    assert (await sessions.get("s1")).finished == "abandoned"


async def test_an_entry_that_was_never_written_is_found_by_the_next_scan(client: Redis, sessions: Sessions) -> None:
    await maintenance.sweep_once(sessions, ())
    await leave_behind(client, sessions, "s1")
    await client.zrem(INDEX, "s1")  # its router died between the two writes
    assert not await maintenance.sweep_once(sessions, ())
    await client.delete(f"{INDEX}:scanned")  # an hour later
    assert await maintenance.sweep_once(sessions, ()) == {"s1"}
