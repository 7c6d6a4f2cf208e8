"""An owner puts back what Redis lost, and no other owner's text is touched."""

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Conflict, InternalError, NotFound, Superseded
from outrider.store.sessions import OwnedSession, SessionLog, SessionRecord, Sessions, SessionTurn

RECORD, LOG = "outrider:{s1}:session", "outrider:{s1}:log"
TOKENS = [5, 6, 7, 8, 1, 2, 3]  # a prompt of four and an answer of three
LOGPROBS = b"aabbcc"
TURN = SessionTurn(Contract(seed=1, max_tokens=9, logprobs=0), (), answer_position=4, deadline=None)


@pytest.fixture
async def sessions(client: Redis) -> Sessions:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    await sessions.create("s1", "tenant", "target", b"digest")
    return sessions


async def _begin(sessions: Sessions, owner: str = "r1") -> OwnedSession:
    return await sessions.begin("s1", 0, owner, TURN, 0, TOKENS[:4], extend(EMPTY, TOKENS[:4]), plan=Plan(version=1))


def scripts(sessions: Sessions) -> dict[str, Any]:
    """The scripts that are run in Redis, by name: a test puts its own in place of one."""
    found: dict[str, Any] = sessions._scripts
    return found


async def _append(owned: OwnedSession, start: int, stop: int, **options: Any) -> int:
    beside = LOGPROBS[2 * (start - 4) : 2 * (stop - 4)]
    return await owned.append(start, TOKENS[start:stop], extend(EMPTY, TOKENS[:stop]), logprobs=beside, **options)


async def _dump(client: Redis) -> dict[str, Any]:
    return {key: blob for key in (RECORD, LOG) if (blob := await client.dump(key)) is not None}


async def _lose(client: Redis, dumped: dict[str, Any]) -> None:
    """Redis comes back as it was when `dumped` was taken."""
    await client.flushall()
    for key, blob in dumped.items():
        await client.restore(key, 60_000, blob)


def _timeless(record: SessionRecord) -> SessionRecord:
    return replace(record, lease=0.0, resumable=0.0)


async def test_a_session_is_restored_from_nothing_an_older_state_or_an_older_epoch(
    client: Redis, sessions: Sessions
) -> None:
    states = [{}, await _dump(client)]
    owned = await _begin(sessions)
    states.append(await _dump(client))
    await _append(owned, 4, 6, drafters=["d1"])
    states.append(await _dump(client))
    await _append(owned, 6, 7, verifier="v2")
    record = await sessions.get("s1")
    states.append({LOG: await client.dump(LOG)})  # the record alone was dropped
    for epoch, state in enumerate(states, start=2):
        await _lose(client, state)
        with pytest.raises((Conflict, NotFound)):
            await owned.append(7, [4], 1)
        await owned.restore(record, TOKENS, LOGPROBS)
        assert owned.epoch == epoch
        restored = await sessions.get("s1")
        assert _timeless(restored) == _timeless(replace(record, epoch=epoch))
        assert (restored.lease > 0, restored.resumable > 0) == (True, True)
        assert await sessions.read("s1") == SessionLog(0, tuple(TOKENS), LOGPROBS, "")
        assert 50_000 < await client.pttl(LOG) <= 60_000
    assert await owned.append(7, [4], 1, logprobs=b"dd") == 8


async def test_renewing_and_ending_notice_that_tokens_were_lost(client: Redis, sessions: Sessions) -> None:
    owned = await _begin(sessions)
    state = await _dump(client)
    await _append(owned, 4, 7)
    await _lose(client, state)
    for call in (owned.renew(), owned.release(""), owned.finish("stop", "")):
        with pytest.raises(Conflict, match="restore it"):
            await call
    assert not (await sessions.get("s1")).finished


async def test_an_ended_generation_is_restored_with_its_end(client: Redis, sessions: Sessions) -> None:
    owned = await _begin(sessions)
    await _append(owned, 4, 7)
    state = await _dump(client)
    await owned.finish("stop", "usage")
    record = await sessions.get("s1")
    for lost in (state, {}):
        await _lose(client, lost)
        await owned.restore(record, TOKENS, LOGPROBS)
        assert (await sessions.get("s1")) == replace(record, epoch=owned.epoch)
        assert await sessions.read("s1") == SessionLog(0, tuple(TOKENS), LOGPROBS, "stop")
        assert (await client.xrevrange(LOG, count=1))[0][0] == b"7-1"


async def test_a_restore_can_be_repeated_and_a_late_one_writes_nothing(client: Redis, sessions: Sessions) -> None:
    owned = await _begin(sessions)
    state = await _dump(client)
    await _append(owned, 4, 7)
    record = await sessions.get("s1")
    await _lose(client, state)
    sent: list[Any] = []
    script = scripts(sessions)["restore"]

    async def recorded(*, keys: Any, args: Any) -> Any:
        sent.append((keys, args))
        await script(keys=keys, args=args)  # its reply is lost, and the client sends it once more
        return await script(keys=keys, args=args)

    scripts(sessions)["restore"] = recorded
    await owned.restore(record, TOKENS, LOGPROBS)
    assert owned.epoch == 2
    again = OwnedSession(sessions, "s1", 1, "r1", 7)  # as if it had not received the reply
    await again.restore(record, TOKENS, LOGPROBS)
    assert again.epoch == 2
    await owned.append(7, [4], extend(EMPTY, [*TOKENS, 4]), logprobs=b"dd")
    after = await sessions.get("s1")
    keys, args = sent[0]
    assert await script(keys=keys, args=args) == [b"changed"]
    assert await sessions.get("s1") == after
    await owned.restore(await sessions.get("s1"), [*TOKENS, 4], LOGPROBS + b"dd")
    with pytest.raises(Superseded, match="epoch 3"):  # an epoch never falls, our own name on it or not
        await OwnedSession(sessions, "s1", 1, "r1", 7).restore(record, TOKENS, LOGPROBS)
    assert await script(keys=keys, args=args) == [b"changed"]


async def test_a_write_between_look_and_set_is_seen(sessions: Sessions) -> None:
    owned = await _begin(sessions)
    record = await sessions.get("s1")
    script, races = scripts(sessions)["restore"], 2

    async def raced(*, keys: Any, args: Any) -> Any:
        nonlocal races
        if races:
            races -= 1
            length = (await sessions.get("s1")).length
            held = OwnedSession(sessions, "s1", owned.epoch, "r1", length)
            await held.append(length, [TOKENS[length]], extend(EMPTY, TOKENS[: length + 1]))
        return await script(keys=keys, args=args)

    scripts(sessions)["restore"] = raced
    await owned.restore(record, TOKENS, b"")
    assert (await sessions.read("s1")).tokens == tuple(TOKENS)
    assert owned.epoch == 2


async def test_a_restore_that_is_always_overtaken_gives_up(sessions: Sessions) -> None:
    owned = await _begin(sessions)
    script = scripts(sessions)["restore"]

    async def raced(*, keys: Any, args: Any) -> Any:
        return await script(keys=keys, args=[*args[:3], "another epoch", *args[4:]])

    scripts(sessions)["restore"] = raced
    with pytest.raises(Conflict, match="try again"):
        await owned.restore(await sessions.get("s1"), TOKENS, b"")
    assert owned.epoch == 1


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("text", "6 durable tokens differ"),
        ("more", "8 durable tokens, more than our 7"),
        ("turn", "generation 1 is not ours"),
        ("generation", "generation 2 is not ours"),
        ("end", r"has ended \(cancelled\)"),
        ("earlier end", r"has ended \(stop\) with 6"),
    ],
)
async def test_a_foreign_write_during_recovery_is_a_conflict(
    client: Redis, sessions: Sessions, what: str, problem: str
) -> None:
    new = await _dump(client)
    owned = await _begin(sessions)
    begun = await _dump(client)
    owned = await sessions.acquire("s1", 1, "r2")
    await _append(owned, 4, 7)
    owned = await sessions.acquire("s1", 2, "r3")
    record = await sessions.get("s1")
    if what == "turn":  # Redis lost that r1 began, and r4 began
        await _lose(client, new)
        turn = replace(TURN, stops=("another",))
        await sessions.begin("s1", 0, "r4", turn, 0, TOKENS[:4], extend(EMPTY, TOKENS[:4]))
    else:  # Redis lost that r2 and r3 took over, and r4 did
        await _lose(client, begun)
        other = await sessions.acquire("s1", 1, "r4")
        if what == "text":
            await other.append(4, [1, 9], extend(EMPTY, [*TOKENS[:4], 1, 9]))
        elif what == "more":
            await other.append(4, [1, 2, 3, 4], extend(EMPTY, [*TOKENS, 4]))
        else:
            await other.append(4, [1, 2], extend(EMPTY, TOKENS[:6]))
            await other.finish("stop" if what == "earlier end" else "cancelled", "")
        if what == "generation":
            turn = replace(TURN, answer_position=7)
            await sessions.begin("s1", 2, "r5", turn, 6, [3], extend(EMPTY, TOKENS))
            owned.epoch = 4  # however high ours was
    before = await _dump(client)
    with pytest.raises(Conflict, match=problem):
        await owned.restore(replace(record, finished="stop"), TOKENS, b"")
    assert await _dump(client) == before


async def test_a_long_log_is_sent_in_pieces_and_restored_atomically(client: Redis, sessions: Sessions) -> None:
    turn = replace(TURN, answer_position=20_000)
    tokens = [position % 97 for position in range(30_000)]
    beside = b"".join(position.to_bytes(4, "little") for position in range(10_000))
    owned = await sessions.begin("s1", 0, "r1", turn, 0, tokens[:20_000], extend(EMPTY, tokens[:20_000]))
    record = await sessions.get("s1")
    await _lose(client, {})
    await owned.restore(record, tokens, beside)
    assert await client.xlen(LOG) == 8
    assert await sessions.read("s1") == SessionLog(0, tuple(tokens), beside, "")
    assert await sessions.read("s1", 25_000) == SessionLog(25_000, tuple(tokens[25_000:]), beside[20_000:], "")


async def test_a_session_that_cannot_be_whole_is_not_restored(sessions: Sessions) -> None:
    idle = await sessions.acquire("s1", 0, "r1")
    with pytest.raises(InternalError):
        await idle.restore(await sessions.get("s1"), TOKENS, b"")
    owned = await sessions.begin("s1", 1, "r2", TURN, 0, TOKENS[:4], 1)
    with pytest.raises(InternalError):
        await owned.restore(await sessions.get("s1"), TOKENS[:3], b"")
