"""Sessions in a real server: fenced, idempotent, and read back as they were written."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from outrider.core.contract import Contract, Plan
from outrider.core.digest import EMPTY, extend
from outrider.errors import ConfigError, Conflict, NotFound, Superseded, Unavailable
from outrider.store.client import connect, shown
from outrider.store.sessions import SessionRecord, Sessions

PROMPT = [5, 6, 7, 8]


def _record(session_id: str = "s1") -> SessionRecord:
    return SessionRecord(
        session_id=session_id,
        tenant="t",
        model="target",
        tokenizer_digest=bytes(range(16)),
        contract=Contract(seed=2**64 - 1, max_tokens=9, temperature=0.1 + 0.2, stop_ids=(0, 3)),
        answer_position=4,
        plan=Plan(version=1, depth=6),
        verifier="v1",
        drafters=("d1", "d2"),
        deadline=1_800_000_000.123456,
    )


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def sessions(client: Redis) -> Sessions:
    return Sessions(client, ttl_s=60, lease_s=5)


def _digest(tokens: list[int]) -> int:
    return extend(EMPTY, tokens)


async def test_a_record_comes_back_as_it_was_written(sessions: Sessions) -> None:
    await sessions.create(_record())
    assert await sessions.get("s1") == _record()


async def test_an_unknown_session_is_not_found(sessions: Sessions) -> None:
    with pytest.raises(NotFound, match="s9"):
        await sessions.get("s9")
    with pytest.raises(NotFound, match="s9"):
        await sessions.acquire("s9", 0, "r1")
    assert (await sessions.read("s9")).tokens == ()


async def test_acquire_raises_the_epoch_for_one_caller_only(sessions: Sessions) -> None:
    await sessions.create(_record())
    outcomes = await asyncio.gather(*(sessions.acquire("s1", 0, f"r{i}") for i in range(8)), return_exceptions=True)
    owners = [index for index, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
    assert len(owners) == 1
    assert all(isinstance(outcome, Superseded) for i, outcome in enumerate(outcomes) if i not in owners)
    record = await sessions.get("s1")
    assert (record.epoch, record.owner) == (1, f"r{owners[0]}")


async def test_acquire_repeated_after_a_lost_reply_succeeds(sessions: Sessions) -> None:
    await sessions.create(_record())
    assert (await sessions.acquire("s1", 0, "r1")).epoch == 1
    assert (await sessions.acquire("s1", 0, "r1")).epoch == 1
    assert (await sessions.get("s1")).epoch == 1


async def test_an_older_epoch_is_refused_and_told_who_owns_the_session(sessions: Sessions) -> None:
    await sessions.create(_record())
    old = await sessions.acquire("s1", 0, "r1")
    await old.append(0, PROMPT, _digest(PROMPT))
    new = await sessions.acquire("s1", 1, "r2")
    for write in (old.append(4, [1], 1), old.append(0, PROMPT, 1), old.finish("stop")):
        with pytest.raises(Superseded, match="r2 since epoch 2"):
            await write
    assert await new.append(4, [9], _digest([*PROMPT, 9])) == 5
    assert (await sessions.read("s1")).tokens == (*PROMPT, 9)


async def test_an_epoch_that_redis_lost_is_a_conflict(sessions: Sessions) -> None:
    await sessions.create(_record())
    owned = await sessions.acquire("s1", 0, "r1")
    await sessions.create(_record())  # as an older copy of the database would say
    with pytest.raises(Conflict, match="epoch 0"):
        await owned.append(0, PROMPT, 1)


async def test_identical_tokens_succeed_different_ones_and_gaps_are_conflicts(sessions: Sessions) -> None:
    await sessions.create(_record())
    owned = await sessions.acquire("s1", 0, "r1")
    assert await owned.append(0, PROMPT, _digest(PROMPT)) == 4
    assert await owned.append(4, [1, 2, 3], _digest([*PROMPT, 1, 2, 3])) == 7
    assert await owned.append(4, [1, 2, 3], _digest([*PROMPT, 1, 2, 3])) == 7
    assert await owned.append(5, [2], 99) == 7
    assert await owned.append(3, [8, 1], 99) == 7  # across two entries
    assert await owned.append(6, [3, 4], _digest([*PROMPT, 1, 2, 3, 4])) == 8  # half of it is new
    for start, tokens in ((4, [1, 2, 4]), (6, [9, 4]), (0, [6]), (3, [7, 1]), (7, [5, 5])):
        with pytest.raises(Conflict, match="differ"):
            await owned.append(start, tokens, 1)
    with pytest.raises(Conflict, match="8 durable tokens; the append would leave a gap"):
        await owned.append(9, [1], 1)
    log = await sessions.read("s1")
    assert log.tokens == (*PROMPT, 1, 2, 3, 4)
    record = await sessions.get("s1")
    assert (record.length, record.digest) == (8, _digest(list(log.tokens)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 14), st.lists(st.integers(0, 1), max_size=5), st.booleans()), max_size=25))
def test_append_agrees_with_a_list(redis_url: str, writes: list[tuple[int, list[int], bool]]) -> None:
    async def scenario() -> None:
        client = connect(redis_url)
        await client.flushall()
        sessions = Sessions(client, ttl_s=60, lease_s=5)
        await sessions.create(_record())
        owned = await sessions.acquire("s1", 0, "r1")
        model: list[int] = []
        for start, tokens, right in writes:
            ours = [(start + i) % 2 for i in range(len(tokens))] if right else tokens
            overlap = model[start : start + len(ours)]
            if start > len(model) or overlap != ours[: len(overlap)]:
                with pytest.raises(Conflict):
                    await owned.append(start, ours, 1)
                continue
            fresh = ours[len(overlap) :]
            assert await owned.append(start, ours, _digest(model + fresh)) == len(model + fresh)
            model += fresh
        assert (await sessions.read("s1")).tokens == tuple(model)
        for start in range(len(model) + 2):
            assert (await sessions.read("s1", start)).tokens == tuple(model[start:])
        await client.aclose()

    asyncio.run(scenario())


async def test_a_long_log_is_read_in_pages(sessions: Sessions) -> None:
    await sessions.create(_record())
    owned = await sessions.acquire("s1", 0, "r1")
    for position in range(2500):
        await owned.append(position, [position], 1)
    await owned.finish("length")
    log = await sessions.read("s1", 1)
    assert log.tokens == tuple(range(1, 2500))
    assert log.finished == "length"


async def test_stream_ids_carry_the_position_and_the_finish_leaves_room_for_more(
    client: Redis, sessions: Sessions
) -> None:
    await sessions.create(_record())
    owned = await sessions.acquire("s1", 0, "r1")
    await owned.append(0, PROMPT, 1)
    await owned.append(4, [1, 2], 1)
    await owned.finish("stop")
    await owned.finish("stop")
    assert (await sessions.get("s1")).finished == "stop"
    assert (await sessions.read("s1")).finished == "stop"
    await owned.append(6, [3], 1)  # the next turn
    ids = [name for name, _ in await client.xrange("outrider:{s1}:log")]
    assert ids == [b"1-0", b"5-0", b"6-1", b"7-0"]
    log = await sessions.read("s1", 6)
    assert (log.tokens, log.finished) == ((3,), "")


async def test_plan_and_drafters_change_with_an_append(sessions: Sessions) -> None:
    await sessions.create(_record())
    owned = await sessions.acquire("s1", 0, "r1")
    await owned.append(0, PROMPT, 1, plan=Plan(version=2, depth=3), drafters=["d3"])
    record = await sessions.get("s1")
    assert (record.plan, record.drafters) == (Plan(version=2, depth=3), ("d3",))


async def test_all_keys_of_a_session_expire_and_share_a_hash_tag(client: Redis, sessions: Sessions) -> None:
    await sessions.create(_record())
    assert 50_000 < await client.pttl("outrider:{s1}:session") <= 60_000
    owned = await sessions.acquire("s1", 0, "r1")
    await owned.append(0, PROMPT, 1)
    keys = await client.keys("*")
    assert sorted(keys) == [b"outrider:{s1}:log", b"outrider:{s1}:session"]
    for key in keys:
        assert 50_000 < await client.pttl(key) <= 60_000


async def test_the_lease_is_renewed_by_appends_and_given_up_at_the_end(sessions: Sessions) -> None:
    await sessions.create(_record())
    owned = await sessions.acquire("s1", 0, "r1")
    first = (await sessions.get("s1")).lease
    await asyncio.sleep(0.02)
    await owned.append(0, PROMPT, 1)
    assert (await sessions.get("s1")).lease > first
    await owned.finish("stop")
    assert (await sessions.get("s1")).lease == 0


async def test_scripts_survive_a_server_that_forgot_them(client: Redis, sessions: Sessions) -> None:
    await sessions.create(_record())
    owned = await sessions.acquire("s1", 0, "r1")
    await client.script_flush()
    assert await owned.append(0, PROMPT, 1) == 4


async def test_an_unreachable_redis_is_named_without_its_password() -> None:
    client = connect("redis://user:hunter2@127.0.0.1:1/0")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached .*REDIS_URL") as caught:
        await Sessions(client, ttl_s=1, lease_s=1).get("s1")
    assert "hunter2" not in str(caught.value)
    await client.aclose()


async def test_a_wrong_password_says_so(redis_url: str) -> None:
    client = connect(redis_url.partition("?")[0] + "?password=wrong")
    with pytest.raises(Unavailable, match="refuses our password"):
        await Sessions(client, ttl_s=1, lease_s=1).get("s1")
    await client.aclose()


def test_a_url_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="REDIS_URL"):
        connect("localhost")
    assert shown("redis://u:secret@h:1/2?password=secret") == "redis://h:1/2"
