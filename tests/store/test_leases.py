"""The index of leases in a real server: what it holds, what it costs, and what becomes of an entry that is due."""

import pytest
from redis.asyncio import Redis

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import InternalError
from outrider.store.sessions import OwnedSession, Sessions, SessionTurn

INDEX = "outrider:{leases}"
TURN = SessionTurn(Contract(seed=1, max_tokens=9), (), answer_position=2, deadline=None)


@pytest.fixture
def sessions(client: Redis) -> Sessions:
    return Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)


async def begin(sessions: Sessions, session_id: str = "s1") -> OwnedSession:
    await sessions.create(session_id, "tenant", "target", b"digest")
    return await sessions.begin(session_id, 0, "r1", TURN, 0, [5, 6], extend(EMPTY, [5, 6]))


async def end_ms(client: Redis, session_id: str = "s1") -> int | None:
    score = await client.zscore(INDEX, session_id)
    return None if score is None else int(score)


async def now_ms(client: Redis) -> int:
    seconds, microseconds = await client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def make_due(client: Redis, *session_ids: str) -> None:
    await client.zadd(INDEX, dict.fromkeys(session_ids, 1))


async def calls(client: Redis) -> dict[str, int]:
    """Commands since the last CONFIG RESETSTAT, those inside scripts included."""
    stats = await client.info("commandstats")
    return {name.removeprefix("cmdstat_"): figures["calls"] for name, figures in stats.items()}


async def test_a_generation_is_listed_by_its_end_which_appends_do_not_move(client: Redis, sessions: Sessions) -> None:
    before = await now_ms(client)
    owned = await begin(sessions)
    first = await end_ms(client)
    assert first is not None
    assert before + 25_000 <= first <= await now_ms(client) + 25_000
    await owned.append(2, [2], extend(EMPTY, [5, 6, 2]))
    await owned.renew()  # the server has both scripts by now
    await client.config_resetstat()
    for position in range(3, 8):
        await owned.append(position, [position], extend(EMPTY, [5, 6, *range(2, position + 1)]))
    await owned.renew()
    sent = await calls(client)
    assert sent["evalsha"] == 6
    assert not sent.keys() & {"zadd", "zrem", "zscore"}
    assert await end_ms(client) == first


async def test_a_due_entry_moves_to_its_records_end_or_is_removed_with_its_generation(
    client: Redis, sessions: Sessions
) -> None:
    owned = [await begin(sessions, name) for name in ("runs", "ended", "closed")]
    await owned[1].finish("stop", "")
    await sessions.close("closed")
    await make_due(client, "runs", "ended", "closed", "expired")
    due = await sessions.leases.due()
    assert {lease.session_id for lease in due} == {"runs", "ended", "closed", "expired"}
    assert [await sessions.left_behind(lease) for lease in due] == [False] * 4
    assert await end_ms(client, "runs") == round((await sessions.get("runs")).resumable * 1000)
    assert await client.zcard(INDEX) == 1
    assert not await sessions.leases.due()


async def test_an_abandoned_generation_stays_due_until_it_is_ended(client: Redis, sessions: Sessions) -> None:
    await begin(sessions)
    await client.hset("outrider:{s1}:session", mapping={"lease": 1, "resumable": 1})
    await make_due(client, "s1")
    for _ in range(2):
        (lease,) = await sessions.leases.due()
        assert await sessions.left_behind(lease)
    assert await sessions.abandon(lease)
    assert await end_ms(client) is None
    assert (await sessions.get("s1")).finished == "abandoned"


async def test_a_look_from_before_a_new_generation_does_not_remove_its_entry(client: Redis, sessions: Sessions) -> None:
    owned = await begin(sessions)
    await owned.finish("stop", "")
    await make_due(client, "s1")
    (seen,) = await sessions.leases.due()
    await sessions.begin("s1", 1, "r2", TURN, 2, [1], 1)
    listed = await end_ms(client)
    await sessions.leases.move(seen, 0)
    await sessions.leases.move(seen, 5)
    assert await end_ms(client) == listed


async def test_unchanged_entries_of_ended_generations_are_removed_together(client: Redis, sessions: Sessions) -> None:
    names = [f"s{number}" for number in range(600)]
    for owned in [await begin(sessions, name) for name in names]:
        await owned.finish("stop", "")
        await owned.finish("stop", "")
    again = await sessions.begin("s1", 1, "r2", TURN, 2, [1], 1)
    await sessions.leases.remove_ended()  # its last look saw only the generation before
    assert await client.zrange(INDEX, 0, -1) == [b"s1"]
    await again.finish("stop", "")
    await client.config_resetstat()
    await sessions.leases.remove_ended()
    await sessions.leases.remove_ended()
    assert (await calls(client))["evalsha"] == 1
    assert not await client.exists(INDEX)


async def test_an_unlisted_running_generation_is_listed_when_found(client: Redis, sessions: Sessions) -> None:
    owned = [await begin(sessions, name) for name in ("runs", "ended")]
    await owned[1].finish("stop", "")
    await client.delete(INDEX)
    for name in ("runs", "ended", "unknown"):
        await sessions.list_lease(name)
    assert await client.zrange(INDEX, 0, -1) == [b"runs"]
    assert await end_ms(client, "runs") == round((await sessions.get("runs")).resumable * 1000)
    await make_due(client, "runs")
    await sessions.list_lease("runs")
    assert await end_ms(client, "runs") == 1  # an entry that is there stays


async def test_a_restored_session_is_listed_again(client: Redis, sessions: Sessions) -> None:
    owned = await begin(sessions)
    record = await sessions.get("s1")
    await client.flushdb()
    await owned.restore(record, [5, 6], b"")
    assert await end_ms(client) is not None


async def test_only_one_scan_runs_and_the_next_one_begins_an_hour_later(client: Redis, sessions: Sessions) -> None:
    assert await sessions.leases.begin_scan()
    assert not await sessions.leases.begin_scan()
    assert 0 < await client.pttl(f"{INDEX}:scanned") <= 300_000  # the one that began may die
    await sessions.leases.end_scan()
    assert not await sessions.leases.begin_scan()
    assert 3_500_000 < await client.pttl(f"{INDEX}:scanned") <= 3_600_000


async def test_a_foreign_entry_is_named(client: Redis, sessions: Sessions) -> None:
    await client.zadd(INDEX, {b"\xff": 1})
    with pytest.raises(InternalError, match="the index of leases in Redis is not what Outrider writes"):
        await sessions.leases.due()
