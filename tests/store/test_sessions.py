"""Sessions in a real server: fenced, idempotent, and read back as they were written."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from outrider.core.session.contract import OFF, Adapter, Contract, Grammar, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.protocol import Origin
from outrider.errors import (
    Busy,
    ConfigError,
    Conflict,
    InternalError,
    InvalidRequest,
    NotFound,
    Superseded,
    Unavailable,
)
from outrider.store.leases import Lease
from outrider.store.redis.client import address_of, connect, redacted
from outrider.store.sessions import OwnedSession, SessionLog, SessionRecord, Sessions, SessionTurn
from outrider.store.tickets import list_key

PROMPT = [5, 6, 7, 8]
CONTRACT = Contract(
    seed=2**64 - 1,
    max_tokens=9,
    temperature=0.1 + 0.2,
    stop_ids=(0, 3),
    grammar=Grammar("regex", "[ab]*"),
    adapter=Adapter("sql", "0d" * 16),
    logprobs=1,
)
TURN = SessionTurn(CONTRACT, ("\n\n", "ü\0"), answer_position=4, deadline=1_800_000_000.123456)
PLAN = Plan(version=1, depth=6)
NEW = SessionRecord("s1", "tenant", "target", bytes(range(240, 256)))


@pytest.fixture
async def sessions(client: Redis) -> Sessions:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    assert await sessions.create(NEW.session_id, NEW.tenant, NEW.model, NEW.tokenizer_digest)
    return sessions


async def test_an_abandoned_generation_is_ended_once_and_its_owner_is_refused(
    client: Redis, sessions: Sessions
) -> None:
    owned, lease = await _begin(sessions), Lease("s1", 0)
    assert not await sessions.abandon(lease)  # its owner is alive
    await owned.release("usage")
    assert not await sessions.abandon(lease)  # it can be resumed
    assert not await sessions.left_behind(lease)
    await _ago(client, 30)
    assert await sessions.left_behind(lease)
    assert not (await sessions.get("s1")).finished
    assert sorted(await asyncio.gather(*(sessions.abandon(lease) for _ in range(4)))) == [False, False, False, True]
    record = await sessions.get("s1")
    assert (record.finished, record.epoch, record.usage, record.lease) == ("abandoned", 2, "usage", 0)
    assert (await sessions.read("s1")).finished == "abandoned"
    with pytest.raises(Superseded):
        await owned.append(4, [9], _digest(*PROMPT, 9))
    await sessions.begin("s1", 2, "r2", TURN, 4, [1], _digest(*PROMPT, 1))
    assert not await sessions.abandon(lease)


async def test_listing_finds_all_sessions_and_no_other_keys(client: Redis, sessions: Sessions) -> None:
    await sessions.create("s2", "", "target", b"")
    await sessions.claim("", "key", b"", "s2/1")
    await list_key(client, b"k" * 32, time.time())
    await _begin(sessions)
    assert sorted([name async for name in sessions.ids()]) == ["s1", "s2"]


def _digest(*tokens: int) -> int:
    return extend(EMPTY, tokens)


async def _begin(sessions: Sessions, owner: str = "r1", expected: int = 0) -> OwnedSession:
    return await sessions.begin("s1", expected, owner, TURN, 0, PROMPT, _digest(*PROMPT), plan=PLAN, verifier="v1")


async def _ago(client: Redis, seconds: float) -> None:
    """Lets a session's times lie in the past, as if they had passed."""
    for field in ("lease", "resumable"):
        value: Any = await client.hget("outrider:{s1}:session", field)
        if int(value):
            await client.hset("outrider:{s1}:session", field, str(int(value) - round(seconds * 1000)))


async def test_a_new_session_is_empty_and_unowned_and_created_once(sessions: Sessions) -> None:
    assert await sessions.get("s1") == NEW
    await _begin(sessions)
    assert not await sessions.create("s1", "other", "other", b"")
    assert (await sessions.get("s1")).tenant == "tenant"


async def test_an_unknown_session_is_not_found(sessions: Sessions) -> None:
    for call in (
        sessions.get("s9"),
        sessions.read("s9"),
        sessions.acquire("s9", 0, "r1"),
        sessions.begin("s9", 0, "r1", TURN, 0, PROMPT, 1),
    ):
        with pytest.raises(NotFound, match="s9"):
            await call


async def test_begin_fixes_the_turn_and_makes_its_caller_the_owner(client: Redis, sessions: Sessions) -> None:
    owned = await _begin(sessions)
    seconds, micros = await client.time()
    record = await sessions.get("s1")
    assert record == replace(
        NEW,
        generation=1,
        turn=TURN,
        plan=PLAN,
        verifier="v1",
        epoch=1,
        owner="r1",
        lease=record.lease,
        resumable=record.resumable,
        length=4,
        digest=_digest(*PROMPT),
    )
    assert record.running
    assert record.lease - (seconds + micros / 1e6) == pytest.approx(5, abs=1)
    assert record.resumable == pytest.approx(record.lease + 20, abs=0.002)
    assert owned.epoch == 1
    assert await sessions.read("s1") == SessionLog(0, tuple(PROMPT), b"", "")


async def test_one_of_many_concurrent_begins_and_acquires_succeeds(sessions: Sessions) -> None:
    calls = [_begin(sessions, f"b{i}") for i in range(4)] + [sessions.acquire("s1", 0, f"a{i}") for i in range(4)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    owners = [outcome.owner for outcome in outcomes if isinstance(outcome, OwnedSession)]
    assert len(owners) == 1
    assert sum(isinstance(outcome, Superseded) for outcome in outcomes) == 7
    record = await sessions.get("s1")
    assert (record.epoch, record.owner) == (1, owners[0])


async def test_a_begin_or_acquire_repeated_after_a_lost_reply_changes_nothing(
    client: Redis, sessions: Sessions
) -> None:
    assert (await _begin(sessions)).epoch == (await _begin(sessions)).epoch == 1
    assert (await sessions.acquire("s1", 1, "r2")).epoch == (await sessions.acquire("s1", 1, "r2")).epoch == 2
    record = await sessions.get("s1")
    assert (record.epoch, record.generation, record.length) == (2, 1, 4)
    assert await client.xlen("outrider:{s1}:log") == 1


async def test_turns_follow_one_another_each_under_its_own_epoch(client: Redis, sessions: Sessions) -> None:
    first = await _begin(sessions)
    await first.append(4, [1, 2], _digest(*PROMPT, 1, 2), drafters=["d1"])
    await first.finish("stop", "usage 1")
    assert (await sessions.get("s1")).usage == "usage 1"
    turn = replace(TURN, answer_position=7, deadline=None)
    second = await sessions.begin("s1", 1, "r2", turn, 6, [3], _digest(*PROMPT, 1, 2, 3))
    record = await sessions.get("s1")
    assert (record.generation, record.epoch, record.finished, record.usage) == (2, 2, "", "")
    assert (record.turn, record.plan, record.verifier, record.drafters) == (turn, OFF, "v1", ())
    await second.finish("length", "usage 2")
    third = await sessions.begin("s1", 2, "r3", replace(TURN, answer_position=7), 7, [], 0)
    assert await sessions.read("s1") == SessionLog(0, (*PROMPT, 1, 2, 3), b"", "")
    await third.finish("stop", "")
    assert (await sessions.read("s1", 5)) == SessionLog(5, (2, 3), b"", "stop")
    ids = [name for name, _ in await client.xrange("outrider:{s1}:log")]
    assert ids == [b"1-0", b"5-0", b"6-1", b"7-0", b"7-2", b"7-3"]


async def test_a_second_generation_is_refused_while_the_first_is_owned_or_can_be_resumed(
    client: Redis, sessions: Sessions
) -> None:
    owned = await _begin(sessions)
    await owned.append(4, [1], _digest(*PROMPT, 1))

    async def next_turn(owner: str, expected: int = 1) -> OwnedSession:
        turn = replace(TURN, answer_position=6)
        return await sessions.begin("s1", expected, owner, turn, 5, [2], _digest(*PROMPT, 1, 2))

    with pytest.raises(Busy, match="resume it, cancel it, or wait"):
        await next_turn("r2")
    await _ago(client, 6)  # the lease is over
    with pytest.raises(Busy):
        await next_turn("r2")
    await owned.release("so far")
    with pytest.raises(Busy):
        await next_turn("r2")
    await _ago(client, 21)
    assert (await next_turn("r2")).epoch == 2
    assert (await client.xrange("outrider:{s1}:log", "5-1", "5-1"))[0][1] == {b"finish": b"abandoned"}
    assert (await sessions.read("s1")).tokens == (*PROMPT, 1, 2)


async def test_begin_refuses_a_gap_and_a_log_that_went_on(sessions: Sessions) -> None:
    owned = await _begin(sessions)
    await owned.append(4, [1], 1)
    await owned.finish("stop", "")
    for start in (4, 6):
        with pytest.raises(Conflict, match="5 durable tokens"):
            await sessions.begin("s1", 1, "r2", TURN, start, [9], 1)
    with pytest.raises(InvalidRequest, match="prompt"):
        await sessions.begin("s1", 1, "r2", TURN, 0, [], 1)
    assert (await sessions.get("s1")).epoch == 1


async def test_an_older_epoch_is_refused_with_the_name_of_the_owner(sessions: Sessions) -> None:
    old = await _begin(sessions)
    new = await sessions.acquire("s1", 1, "r2")
    for write in (
        old.append(4, [1], 1),
        old.append(0, PROMPT, 1),
        old.renew(),
        old.release(""),
        old.finish("stop", ""),
        old.restore(await sessions.get("s1"), PROMPT, b""),
    ):
        with pytest.raises(Superseded, match="r2 since epoch 2"):
            await write
    assert await new.append(4, [9], _digest(*PROMPT, 9)) == 5
    assert (await sessions.read("s1")).tokens == (*PROMPT, 9)


async def test_an_equal_epoch_of_another_owner_is_refused(client: Redis, sessions: Sessions) -> None:
    before = await client.dump("outrider:{s1}:session")
    lost = await _begin(sessions, "r1")
    await client.flushall()
    await client.restore("outrider:{s1}:session", 60_000, before)  # Redis lost that r1 began
    await _begin(sessions, "r2")
    for write in (
        lost.append(4, [1], 1),
        lost.finish("stop", ""),
        lost.restore(await sessions.get("s1"), [*PROMPT, 1], b""),
    ):
        with pytest.raises(Superseded, match="r2 since epoch 1"):
            await write


async def test_an_append_of_identical_tokens_succeeds_and_different_tokens_or_gaps_conflict(sessions: Sessions) -> None:
    owned = await _begin(sessions)
    assert await owned.append(4, [1, 2, 3], _digest(*PROMPT, 1, 2, 3)) == 7
    assert await owned.append(4, [1, 2, 3], _digest(*PROMPT, 1, 2, 3)) == 7
    assert await owned.append(5, [2], 99) == 7
    assert await owned.append(3, [8, 1], 99) == 7  # across two entries
    assert await owned.append(6, [3, 4], _digest(*PROMPT, 1, 2, 3, 4)) == 8  # half of it is new
    for start, tokens in ((4, [1, 2, 4]), (6, [9, 4]), (0, [6]), (3, [7, 1]), (7, [5, 5])):
        with pytest.raises(Conflict, match="8 durable tokens are not"):
            await owned.append(start, tokens, 1)
    with pytest.raises(Conflict, match="8 durable tokens, fewer"):
        await owned.append(9, [1], 1)
    log = await sessions.read("s1")
    assert log.tokens == (*PROMPT, 1, 2, 3, 4)
    record = await sessions.get("s1")
    assert (record.length, record.digest) == (8, _digest(*log.tokens))


async def test_an_ended_generation_takes_no_tokens_but_repetitions(sessions: Sessions) -> None:
    owned = await _begin(sessions)
    await owned.append(4, [1], 1)
    await owned.finish("stop", "usage")
    await owned.finish("length", "another")
    assert await owned.append(4, [1], 1) == 5
    with pytest.raises(Conflict, match=r"has ended \(stop\)"):
        await owned.append(5, [2], 1)
    record = await sessions.get("s1")
    assert (record.finished, record.usage, record.lease, record.resumable) == ("stop", "usage", 0, 0)


async def test_log_probabilities_are_read_back_with_their_tokens(sessions: Sessions) -> None:
    owned = await _begin(sessions)
    await owned.append(4, [1, 2], 1, logprobs=b"aaabbb")
    await owned.append(5, [2, 3, 4], 1, logprobs=b"bbbcccddd")  # one of them is new only in part
    assert await sessions.read("s1") == SessionLog(0, (*PROMPT, 1, 2, 3, 4), b"aaabbbcccddd", "")
    assert await sessions.read("s1", 6) == SessionLog(6, (3, 4), b"cccddd", "")
    await owned.finish("stop", "")
    await sessions.begin("s1", 1, "r2", replace(TURN, answer_position=8), 8, [], 1)
    assert (await sessions.read("s1", 4)).logprobs == b""  # an earlier answer's are not the latest one's
    with pytest.raises(InternalError, match="not the same for each"):
        await owned.append(8, [1, 2], 1, logprobs=b"abc")


async def test_a_long_log_is_read_in_pages_as_a_consistent_snapshot(sessions: Sessions, client: Redis) -> None:
    owned = await _begin(sessions)
    for position in range(4, 2500):
        await owned.append(position, [position], 1)
    page, appended = client.xrange, False

    async def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal appended
        if not appended:
            appended = True
            await owned.append(2500, [0], 1)
            await owned.finish("length", "")
        return await page(*arguments, **options)

    client.xrange = slow
    assert await sessions.read("s1", 5) == SessionLog(5, tuple(range(5, 2500)), b"", "")
    assert await sessions.read("s1", 2400) == SessionLog(2400, (*range(2400, 2500), 0), b"", "length")


async def test_a_log_deleted_while_it_is_read_is_not_taken_for_a_short_one(sessions: Sessions, client: Redis) -> None:
    await _begin(sessions)
    await client.delete("outrider:{s1}:log")
    with pytest.raises(Unavailable, match="try again"):
        await sessions.read("s1")


async def test_leases_are_renewed_until_released_and_no_late_call_revives_them(
    client: Redis, sessions: Sessions
) -> None:
    owned = await _begin(sessions)
    for renewing in (owned.renew(), owned.append(4, [1], 1), owned.append(4, [1], 1)):
        await _ago(client, 2)
        before = await sessions.get("s1")
        await renewing
        after = await sessions.get("s1")
        assert after.lease > before.lease + 1
        assert after.resumable > before.resumable + 1
    await owned.release("so far")
    released = await sessions.get("s1")
    assert (released.lease, released.usage) == (0, "so far")
    assert 19 < released.resumable - after.lease + 5 < 21
    await _ago(client, 2)
    late = replace(released, resumable=pytest.approx(released.resumable - 2, abs=0.01))
    for repeated in (owned.release("so far"), owned.renew(), owned.append(4, [1], 1)):
        await repeated
        assert await sessions.get("s1") == late
    await sessions.acquire("s1", 1, "r2")
    assert (await sessions.get("s1")).lease > 0


async def test_a_change_of_plan_that_arrives_late_does_not_undo_a_newer_one(sessions: Sessions) -> None:
    owned = await _begin(sessions)
    began, other = Origin(1, "a" * 64, "bfloat16"), Origin(1, "", "")
    await owned.append(4, [1], 1, plan=Plan(version=2, depth=3), verifier="v2", origin=began, drafters=["d1"])
    await owned.append(5, [2], 1, plan=Plan(version=3, depth=5), drafters=["d2", "d3"])
    await owned.append(4, [1], 1, plan=Plan(version=2, depth=3), verifier="v1", origin=other, drafters=["d1"])
    record = await sessions.get("s1")
    assert (record.plan, record.verifier, record.drafters) == (Plan(version=3, depth=5), "v2", ("d2", "d3"))
    assert record.origin == began
    await owned.append(6, [], 1, drafters=[])
    assert (await sessions.get("s1")).drafters == ()


async def test_a_closed_session_refuses_every_owner_and_leaves_a_tombstone_only(
    client: Redis, sessions: Sessions
) -> None:
    owned = await _begin(sessions)
    await owned.append(4, [1], 1, drafters=["d1"])
    record = await sessions.get("s1")
    await sessions.close("s1")
    await sessions.close("s1")
    await sessions.close("unknown")
    for write in (
        owned.append(5, [1], 1),
        owned.append(4, [1], 1),
        owned.renew(),
        owned.release(""),
        owned.finish("stop", ""),
        owned.restore(record, [*PROMPT, 1], b""),
    ):
        with pytest.raises(Superseded, match="closed"):
            await write
    for call in (sessions.acquire("s1", 2, "r2"), _begin(sessions, "r2", 2), sessions.read("s1")):
        with pytest.raises(NotFound):
            await call
    assert not await sessions.create("s1", "t", "m", b"")
    assert await sessions.get("s1") == replace(NEW, epoch=2, generation=1, finished="cancelled", closed=True)
    assert await client.keys("*{s1}*") == [b"outrider:{s1}:session"]
    assert 55_000 < await client.pttl("outrider:{s1}:session") <= 60_000


async def test_the_sweep_of_time_drops_record_and_log_together(client: Redis) -> None:
    sessions = Sessions(client, ttl_s=1.0, lease_s=5, resume_ttl_s=5)
    await sessions.create("s1", "t", "m", b"")
    await _begin(sessions)
    async with asyncio.timeout(10):
        while keys := await client.keys("*{s1}*"):
            assert len(keys) == 2
            await asyncio.sleep(0.02)


async def test_all_keys_of_a_session_expire_together_in_one_slot(client: Redis, sessions: Sessions) -> None:
    await _begin(sessions)
    keys = await client.keys("*{s1}*")
    assert sorted(keys) == [b"outrider:{s1}:log", b"outrider:{s1}:session"]
    assert {key_slot(key) for key in keys} == {key_slot(b"s1")}
    for key in keys:
        assert 50_000 < await client.pttl(key) <= 60_000
        await client.pexpire(key, 1000)
    await (await sessions.acquire("s1", 1, "r2")).renew()
    for key in keys:
        assert 50_000 < await client.pttl(key) <= 60_000


async def test_an_idempotency_key_is_held_by_the_first_and_by_its_request(client: Redis, sessions: Sessions) -> None:
    claims = [sessions.claim("tenant", "secret", b"request", f"s{i}") for i in range(8)]
    holders = set(await asyncio.gather(*claims))
    assert len(holders) == 1
    holder = holders.pop()
    assert await sessions.claim("tenant", "secret", b"request", "later") == holder
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        await sessions.claim("tenant", "secret", b"another request", "s1")
    assert await sessions.claim("another tenant", "secret", b"request", "s10") == "s10"
    assert await sessions.claim('tenant", "', "secret", b"request", "s11") == "s11"
    keys = await client.keys("outrider:idempotency:*")
    assert len(keys) == 3
    for key in keys:
        assert b"secret" not in key
        assert b"secret" not in await client.get(key)
        assert 50_000 < await client.pttl(key) <= 60_000


async def test_scripts_are_loaded_again_on_a_server_that_lost_them(client: Redis, sessions: Sessions) -> None:
    owned = await _begin(sessions)
    await client.script_flush()
    assert await owned.append(4, [1], 1) == 5


async def test_an_unreachable_redis_is_named_without_its_password() -> None:
    for scheme in ("redis", "redis+cluster"):
        client = connect(f"{scheme}://user:hunter2@127.0.0.1:1/0")
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be .*REDIS_URL") as caught:
            await Sessions(client, ttl_s=1, lease_s=1, resume_ttl_s=1).get("s1")
        assert "hunter2" not in str(caught.value)
        assert address_of(client) == "127.0.0.1:1"
        await client.aclose()


async def test_a_wrong_password_is_reported(redis_url: str) -> None:
    client = connect(redis_url.partition("?")[0] + "?password=wrong")
    with pytest.raises(Unavailable, match="refuses our password"):
        await Sessions(client, ttl_s=1, lease_s=1, resume_ttl_s=1).get("s1")
    await client.aclose()


def test_a_malformed_url_is_a_config_error() -> None:
    for url in ("localhost", "redis+cluster://h:1/2", "redis+cluster:///path", "unix+cluster:///path"):
        with pytest.raises(ConfigError, match="REDIS_URL"):
            connect(url)
    assert redacted("redis://u:secret@h:1/2?password=secret") == "redis://h:1/2"
    assert redacted("rediss+cluster://u:secret@h:1") == "rediss+cluster://h:1"
