"""What many sessions write at the same moment takes few round trips, and each gets the outcome of its own write."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Conflict, Superseded, Unavailable
from outrider.store.redis import client as store
from outrider.store.redis.client import connect, ping
from outrider.store.sessions import OwnedSession, Sessions, SessionTurn
from tests.store.server import Server

PROMPT = [5, 6, 7, 8]
TURN = SessionTurn(Contract(seed=1, max_tokens=99), (), answer_position=4, deadline=None)
MANY = 64


async def begun(client: Redis, count: int = MANY) -> tuple[Sessions, list[OwnedSession]]:
    """`count` sessions with a prompt, each owned by us."""
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)

    async def one(name: str) -> OwnedSession:
        await sessions.create(name, "tenant", "target", b"digest")
        return await sessions.begin(name, 0, "r1", TURN, 0, PROMPT, extend(EMPTY, PROMPT))

    return sessions, list(await asyncio.gather(*(one(f"s{number}") for number in range(count))))


async def reads(client: Redis) -> int:
    """Times that the server has read from a connection."""
    return int((await client.info("stats"))["total_reads_processed"])


def append(owned: OwnedSession, start: int, token: int) -> Any:
    return owned.append(start, [token], 1)


async def outcomes(work: list[Any]) -> list[int | BaseException]:
    return list(await asyncio.gather(*work, return_exceptions=True))


async def test_appends_of_one_moment_take_one_round_trip(client: Redis) -> None:
    sessions, owned = await begun(client)
    await append(owned[0], 4, 0)
    before = await reads(client)
    assert await asyncio.gather(*(append(one, 4, 0) for one in owned)) == [5] * MANY
    assert await reads(client) - before <= 4  # and one for the looking; a long message may take two
    for one in owned:
        assert (await sessions.read(one.session_id)).tokens == (*PROMPT, 0)


async def test_appends_that_arrive_during_a_commit_join_the_next_one(client: Redis) -> None:
    _, owned = await begun(client)
    await append(owned[0], 4, 0)
    before = await reads(client)
    works = [asyncio.create_task(append(owned[0], 4, 0))]
    while not client.connection_pool._in_use_connections:
        await asyncio.sleep(0)
    works += [asyncio.create_task(append(one, 4, 0)) for one in owned[1:]]
    assert await asyncio.gather(*works) == [5] * MANY
    assert await reads(client) - before <= 5


async def test_appends_beside_other_writes_are_grouped_too(client: Redis) -> None:
    sessions, owned = await begun(client)
    before = await reads(client)
    writes = [append(one, 4, 0) for one in owned[:-1]]
    await asyncio.gather(*writes, owned[-1].finish("length", "{}"))
    assert await reads(client) - before <= 5
    assert (await sessions.get(owned[-1].session_id)).finished == "length"
    assert {(await sessions.get(one.session_id)).length for one in owned[:-1]} == {5}


async def test_a_sessions_appends_keep_their_order_in_a_group(client: Redis) -> None:
    sessions, owned = await begun(client)

    async def talk(one: OwnedSession) -> None:
        writes = [asyncio.create_task(append(one, 4 + index, index)) for index in range(5)]
        assert await asyncio.gather(*writes) == [5, 6, 7, 8, 9]

    await asyncio.gather(*map(talk, owned))
    for one in owned:
        assert (await sessions.read(one.session_id)).tokens == (*PROMPT, 0, 1, 2, 3, 4)


async def test_a_refused_append_leaves_the_others_of_its_group_alone(client: Redis) -> None:
    sessions, owned = await begun(client)
    await sessions.acquire("s3", 1, "somebody else")
    await append(owned[5], 4, 9)
    results = await outcomes([append(one, 4, 0) for one in owned])
    assert isinstance(results.pop(5), Conflict)
    assert isinstance(results.pop(3), Superseded)
    assert results == [5] * (MANY - 2)


async def test_a_value_that_is_of_another_kind_harms_its_session_alone(client: Redis) -> None:
    sessions, owned = await begun(client)
    await client.delete("outrider:{s3}:log")
    await client.set("outrider:{s3}:log", "no stream")
    results = await outcomes([append(one, 4, 0) for one in owned])
    assert isinstance(results.pop(3), Unavailable)
    assert results == [5] * (MANY - 1)
    assert (await sessions.get("s4")).length == 5


async def test_scripts_are_loaded_again_on_a_server_that_lost_them(client: Redis) -> None:
    _, owned = await begun(client)
    await client.script_flush()
    assert await asyncio.gather(*(append(one, 4, 0) for one in owned)) == [5] * MANY


async def test_a_write_that_is_cancelled_before_its_turn_changes_nothing_and_disturbs_no_other(client: Redis) -> None:
    sessions, owned = await begun(client)
    works = [asyncio.create_task(append(one, 4, 0)) for one in owned]
    await asyncio.sleep(0)  # all wait; none has been sent
    works[7].cancel()
    results = await outcomes(list(works))
    assert isinstance(results.pop(7), asyncio.CancelledError)
    assert results == [5] * (MANY - 1)
    assert (await sessions.get("s7")).length == 4
    assert await append(owned[7], 4, 1) == 5


async def test_a_lost_server_is_reported_to_every_writer_and_all_continue_when_it_returns(tmp_path: Path) -> None:
    with Server(tmp_path, appendfsync="always") as server:
        client = connect(server.url)
        assert isinstance(client, Redis)
        _, owned = await begun(client)
        server.kill()
        results = await outcomes([append(one, 4, 0) for one in owned])
        assert all(isinstance(result, Unavailable) for result in results)
        server.start()
        assert await asyncio.gather(*(append(one, 4, 0) for one in owned)) == [5] * MANY
        await client.aclose()


async def test_a_slow_server_is_not_reported_as_missing(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TIMEOUT_S", 1.0)
    client = connect(redis_url)
    assert isinstance(client, Redis)
    busy = [await client.connection_pool.get_connection() for _ in range(store.CONNECTIONS)]
    with pytest.raises(Unavailable, match=r"answers too slowly: in 1 s none of 32 connections was free"):
        await ping(client)
    await client.connection_pool.release(busy[0])
    await ping(client)
    await client.aclose()


async def test_a_server_killed_during_writes_loses_and_doubles_none(tmp_path: Path) -> None:
    with Server(tmp_path, appendfsync="always") as server:
        client = connect(server.url)
        assert isinstance(client, Redis)
        sessions, owned = await begun(client)
        going = True

        async def write(one: OwnedSession) -> int:
            length = len(PROMPT)
            while going:
                try:
                    length = await append(one, length, length)
                except Unavailable:
                    await asyncio.sleep(0.01)
            return length

        writers = [asyncio.create_task(write(one)) for one in owned]
        for _ in range(5):
            await asyncio.sleep(0.1)
            server.kill()
            server.start()
        await asyncio.sleep(0.1)
        going = False
        lengths = await asyncio.gather(*writers)
        for one, length in zip(owned, lengths, strict=True):
            tokens = (await sessions.read(one.session_id)).tokens
            assert tokens == (*PROMPT, *range(len(PROMPT), length))
        assert min(lengths) > len(PROMPT)
        await client.aclose()
