"""What was acknowledged survives the server's death, a full disk and full memory; what was lost can be put back."""

import asyncio
import signal
import time
from contextlib import suppress
from os import kill
from pathlib import Path

import pytest
from redis.asyncio import Redis

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Conflict, Unavailable
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.store.sessions import OwnedSession, SessionRecord, Sessions, SessionTurn
from tests.full_disk import small_disk

TURN = SessionTurn(Contract(seed=1, max_tokens=9), (), answer_position=4, deadline=None)
PIECE = 512  # tokens


class Writer:
    """Writes a session piece by piece and remembers what was acknowledged."""

    def __init__(self, url: str) -> None:
        client = connect(url)
        assert isinstance(client, Redis)
        self.client = client
        self.sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
        self.tokens: list[int] = []
        self.digest = EMPTY

    async def begin(self) -> None:
        await self.sessions.create("s1", "tenant", "target", b"digest")
        fresh = [7] * 4
        self.owned = await self.sessions.begin("s1", 0, "r1", TURN, 0, fresh, extend(EMPTY, fresh))
        self.acknowledged(fresh)

    async def write(self, pieces: int) -> None:
        for _ in range(pieces):
            fresh = [len(self.tokens) + i for i in range(PIECE)]
            await self.owned.append(len(self.tokens), fresh, extend(self.digest, fresh))
            self.acknowledged(fresh)

    async def again(self, url: str) -> "Writer":
        """The same owner on another connection."""
        other = Writer(url)
        other.owned = OwnedSession(other.sessions, "s1", self.owned.epoch, "r1", len(self.tokens))
        other.acknowledged(self.tokens)
        await self.client.aclose()
        return other

    async def held(self) -> tuple[SessionRecord, list[int]]:
        """What Redis has, checked to be whole in itself."""
        record, log = await self.sessions.get("s1"), await self.sessions.read("s1")
        assert record.length == len(log.tokens)
        assert record.digest == extend(EMPTY, log.tokens)
        return record, list(log.tokens)

    async def flushed(self) -> None:
        """Waits until the server handed all it wrote to the kernel: behind a sync that takes long it does not wait."""
        while (await self.client.info("persistence"))["aof_buffer_length"]:
            await asyncio.sleep(0.01)

    def acknowledged(self, fresh: list[int]) -> None:
        self.tokens = self.tokens + fresh
        self.digest = extend(self.digest, fresh)


async def test_a_killed_server_restarts_with_its_log(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        writer = Writer(server.url)
        await writer.begin()
        await writer.write(3)
        await writer.flushed()
        kill(server.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await writer.write(1)
    with EmbeddedRedis(tmp_path) as server:
        writer = await writer.again(server.url)
        assert (await writer.held())[1] == writer.tokens
        await writer.write(1)
        await writer.client.aclose()


def _cut_off(data: Path, size: int) -> None:
    """What a crash of the whole machine may do to a file that is synced once a second."""
    (file,) = data.rglob("*.aof")
    with file.open("r+b") as aof:
        aof.truncate(file.stat().st_size - size)


async def test_writes_that_a_server_lost_are_restored_by_their_owner(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        writer = Writer(server.url)
        await writer.begin()
        await writer.write(3)
        record, _ = await writer.held()
        await writer.flushed()
        kill(server.pid, signal.SIGKILL)
    _cut_off(tmp_path, PIECE * 4)  # in the middle of the last append
    with EmbeddedRedis(tmp_path) as server:
        writer = await writer.again(server.url)
        assert (await writer.held())[1] == writer.tokens[:-PIECE]
        with pytest.raises(Conflict, match="restore it"):
            await writer.owned.renew()
        await writer.owned.restore(record, writer.tokens, b"")
        assert (await writer.held())[1] == writer.tokens
        assert writer.owned.epoch == 2
        await writer.write(1)
        await writer.client.aclose()


async def test_a_full_disk_refuses_writes_and_loses_no_accepted_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as data:
        ballast = data / "ballast"
        ballast.write_bytes(bytes(100_000))
        with EmbeddedRedis(data) as server:
            writer = Writer(server.url)
            await writer.begin()
            with pytest.raises(Unavailable, match=r"cannot write to its disk; make room .*redis\.data"):
                await writer.write(1000)
            assert len(writer.tokens) > 10 * PIECE
            assert (await writer.held())[1] == writer.tokens  # the refused one left nothing behind
            ballast.unlink()
            until = time.monotonic() + 10
            while time.monotonic() < until:  # the server tries again once a second
                with suppress(Unavailable):
                    await writer.write(1)
                    break
                await asyncio.sleep(0.02)
            await writer.flushed()
            kill(server.pid, signal.SIGKILL)
        with EmbeddedRedis(data) as server:
            writer = await writer.again(server.url)
            assert (await writer.held())[1] == writer.tokens
            await writer.client.aclose()


async def test_full_memory_refuses_writes_whole(redis_url: str) -> None:
    writer = Writer(redis_url)
    await writer.begin()
    await writer.write(2)
    used = (await writer.client.info("memory"))["used_memory"]
    await writer.client.config_set("maxmemory", used + 200_000)
    try:
        with pytest.raises(Unavailable, match="is full; raise its maxmemory or lower session_ttl_s"):
            await writer.write(1000)
        record, tokens = await writer.held()
        assert tokens == writer.tokens
        await writer.client.config_set("maxmemory", 1)
        for call in (
            writer.owned.finish("stop", ""),
            writer.owned.restore(record, writer.tokens, b""),
            writer.sessions.acquire("s1", 1, "r2"),
            writer.sessions.create("s2", "t", "m", b""),
            writer.sessions.claim("t", "key", b"", "s1"),
        ):
            with pytest.raises(Unavailable, match="is full"):
                await call
        assert await writer.held() == (record, tokens)
    finally:
        await writer.client.config_set("maxmemory", 0)
        await writer.client.aclose()
