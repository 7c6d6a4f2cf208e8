"""10. The log."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import NamedTuple

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.crc import key_slot

import outrider
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Conflict, NotFound, Superseded
from outrider.fleet.cluster import LocalCluster
from outrider.store.redis.client import connect
from outrider.store.sessions import Sessions
from tests.e2e.mini_router import described
from tests.e2e.protocol.peers import idle

pytestmark = pytest.mark.asyncio(loop_scope="session")

WINDOW = 64  # the router's default


class Read(NamedTuple):
    """A session as a stranger reads it who knows the page alone."""

    record: dict[str, str]
    tokens: list[int]
    beside: list[tuple[int, bytes]]  # position of an entry, and its log-probabilities
    ends: dict[str, str]  # id of an entry that ends a generation, and the reason


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def redis(cluster: LocalCluster) -> AsyncIterator[Redis]:
    async with aclosing(connect(cluster.redis_url)) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def client(cluster: LocalCluster) -> AsyncIterator[outrider.AsyncClient]:
    async with outrider.AsyncClient(cluster.router_address) as sdk:
        yield sdk


async def read(redis: Redis, session: str) -> Read:
    hashed = await redis.hgetall(f"outrider:{{{session}}}:session")
    record = {name.decode(): value.decode(errors="replace") for name, value in hashed.items()}
    tokens: list[int] = []
    beside, ends = [], {}
    for raw, fields in await redis.xrange(f"outrider:{{{session}}}:log"):
        name = raw.decode()
        if b"finish" in fields:
            assert int(name.partition("-")[0]) == len(tokens)
            ends[name] = fields[b"finish"].decode()
            continue
        assert name == f"{len(tokens) + 1}-0"
        if b"l" in fields:
            beside.append((len(tokens), fields[b"l"]))
        tokens += struct.unpack(f"<{len(fields[b't']) // 4}I", fields[b"t"])
    return Read(record, tokens, beside, ends)


async def test_the_log_is_never_behind_the_tokens_that_a_client_received(
    redis: Redis, client: outrider.AsyncClient, prompts: list[str]
) -> None:
    seen: list[int] = []
    stream = client.stream(prompts[0], seed=4, max_tokens=60, ignore_eos=True, timeout=60)
    chunks = 0
    async for chunk in stream:
        chunks += 1
        seen += chunk.token_ids
        there = await read(redis, stream.session_id)
        prompt = chunk.next_position - len(seen)
        assert len(there.tokens) >= chunk.next_position
        assert there.tokens[prompt : chunk.next_position] == seen
        assert int(there.record["length"]) >= chunk.next_position
    assert chunks > 10


async def test_the_redis_stream_has_tokens_by_position_their_log_probabilities_and_ends(
    redis: Redis, client: outrider.AsyncClient
) -> None:
    session = (await client.create_session()).session_id
    options = {"session": session, "temperature": 0, "ignore_eos": True, "timeout": 60}
    first = await client.generate([5, 6, 7], max_tokens=9, **options)  # type: ignore[arg-type]
    second = await client.generate([8], max_tokens=5, logprobs=2, **options)  # type: ignore[arg-type]
    there = await read(redis, session)
    assert there.tokens == [5, 6, 7, *first.token_ids, 8, *second.token_ids]
    assert there.ends == {"12-1": "length", "18-2": "length"}
    assert int(there.record["digest"]) == extend(EMPTY, there.tokens)
    assert (there.record["length"], there.record["generation"], there.record["closed"]) == ("18", "2", "")
    entries = b"".join(blob for position, blob in there.beside if position >= 13)
    assert there.beside[0][0] == 13
    assert len(entries) == 5 * (4 + 2 * 8)
    for number, entry in enumerate(second.logprobs):
        logprob, *top = struct.unpack_from("<fIfIf", entries, number * 20)
        assert logprob == pytest.approx(entry.logprob)
        assert list(zip(top[::2], top[1::2], strict=True)) == [pytest.approx(pair) for pair in entry.top]
    keys = {key.decode() async for key in redis.scan_iter(f"*{session}*")}
    assert keys == {f"outrider:{{{session}}}:session", f"outrider:{{{session}}}:log"}
    assert len({key_slot(key.encode()) for key in keys}) == 1
    assert min([await redis.pttl(key) for key in keys]) > 0


async def test_an_owner_that_lost_its_epoch_appends_nothing_and_reports_that(
    redis: Redis, client: outrider.AsyncClient, prompts: list[str]
) -> None:
    options = {"seed": 5, "max_tokens": 400, "ignore_eos": True, "timeout": 60, "speculation": "off"}
    whole = await client.generate(prompts[1], **options)  # type: ignore[arg-type]
    stream = client.stream(prompts[1], **options)  # type: ignore[arg-type]
    chunks = aiter(stream)
    for _ in range(3):
        await anext(chunks)
    sessions = Sessions(redis, ttl_s=60, lease_s=10, resume_ttl_s=60)
    epoch = (await sessions.get(stream.session_id)).epoch
    owned = await sessions.acquire(stream.session_id, epoch, "somebody else")
    with pytest.raises(Superseded):
        await sessions.acquire(stream.session_id, epoch, "a third")
    before = await read(redis, stream.session_id)
    with pytest.raises(Superseded):
        async for _ in chunks:
            pass
    after = await read(redis, stream.session_id)
    assert before.tokens == after.tokens
    assert (int(after.record["epoch"]), after.record["owner"]) == (epoch + 1, "somebody else")
    await owned.release("")
    resumed = client.resume(stream.session_id, timeout=60)
    assert "".join([chunk.text async for chunk in resumed]) == whole.text


async def test_an_append_that_agrees_with_the_log_may_be_repeated_and_no_other(
    redis: Redis, client: outrider.AsyncClient
) -> None:
    answer = await client.generate([9, 9, 9], temperature=0, max_tokens=4, ignore_eos=True, timeout=60)
    sessions = Sessions(redis, ttl_s=60, lease_s=10, resume_ttl_s=60)
    record = await sessions.get(answer.session_id)
    assert record.turn is not None
    owned = await sessions.begin(answer.session_id, record.epoch, "test", record.turn, 7, [1], 0)
    tokens = [9, 9, 9, *answer.token_ids, 1, 2, 3]
    digest = extend(EMPTY, tokens)
    for start in (8, 8, 5, 0):  # again, and in other pieces
        assert await owned.append(start, tokens[start:], digest) == 10
    for start, others in ((10, [4]), (9, [3])):
        assert await owned.append(start, others, digest) >= 10
    for start, others in ((9, [4]), (8, [2, 4, 4])):
        with pytest.raises(Conflict):
            await owned.append(start, others, digest)
    with pytest.raises(Conflict):
        await owned.append(13, [5], digest)
    assert (await read(redis, answer.session_id)).tokens == [*tokens, 4]
    for _ in range(2):
        await owned.finish("length", "")
    with pytest.raises(Conflict):
        await owned.append(11, [5], digest)
    for _ in range(2):
        await client.close_session(answer.session_id)
    with pytest.raises(Superseded):  # a tombstone
        await owned.append(0, tokens, digest)
    with pytest.raises(NotFound):
        await client.get_session(answer.session_id)
    assert (await read(redis, answer.session_id)).tokens == []


async def test_a_pause_of_the_log_pauses_the_generation_at_the_window(
    redis: Redis, client: outrider.AsyncClient, cluster: LocalCluster, prompts: list[str]
) -> None:
    verifier = cluster.processes["verifier-0"].address
    await idle(verifier)
    options = {"seed": 6, "max_tokens": 160, "ignore_eos": True, "timeout": 60, "speculation": "off"}
    whole = await client.generate(prompts[2], **options)  # type: ignore[arg-type]
    stream = client.stream(prompts[2], **options)  # type: ignore[arg-type]
    chunks = aiter(stream)
    text = (await anext(chunks)).text
    await redis.client_pause(1600, all=False)
    steps = (await described(verifier)).steps
    await asyncio.sleep(0.6)
    assert (await described(verifier)).steps <= steps + WINDOW + 1
    async for chunk in chunks:
        text += chunk.text
    assert text == whole.text
