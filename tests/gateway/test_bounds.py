"""What the gateway holds for its callers is bounded, and for callers without a key it is next to nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from outrider.client import AsyncClient
from outrider.errors import OutriderError, Overloaded, Unauthenticated, Unavailable
from outrider.gateway import keys, limits
from outrider.gateway.keys import KeyCheck
from outrider.gateway.transport import connections
from outrider.limits import slow_refusals
from outrider.limits.tenant_shares import TenantShares
from outrider.store.api_keys import Keys
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.router.rig import until

BODY = json.dumps({"model": "target", "prompt": "x", "max_tokens": 1}).encode()
LARGE = 2**22  # bytes of a body that is announced
ANNOUNCED = {"length": f"content-length: {LARGE}", "chunks": "transfer-encoding: chunked"}


class Raw:
    """A connection on which a test sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send_head(self, key: str, *fields: str) -> None:
        lines = (
            "POST /v1/completions HTTP/1.1",
            "host: x",
            f"authorization: Bearer {key}",
            "content-type: application/json",
            *fields,
        )
        self.writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())

    async def status(self) -> int:
        """The status of the next answer, whose head and body are read."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        length = next((line for line in head.lower().splitlines() if line.startswith("content-length:")), ":0")
        await self._reader.readexactly(int(length.partition(":")[2]))
        return int(head.split()[1])

    async def ended(self) -> None:
        """Return when the gateway has closed the connection."""
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                while await self._reader.read(1024):
                    pass


@asynccontextmanager
async def connected(harness: GatewayHarness) -> AsyncIterator[Raw]:
    host, _, port = harness.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("announced", ANNOUNCED)
async def test_no_byte_of_a_body_is_read_before_its_key_is_accepted(redis_url: str, announced: str) -> None:
    """A server sends 100 (Continue) when it begins to read. The client sends no byte of a body."""
    async with gateway_harness(redis_url, auth="keys") as harness:
        good, _ = await Keys(harness.rig.client).add("one")
        for key, status in (("outrider_wrong", 401), ("", 401), ("two words", 401), (good, 100)):
            async with connected(harness) as raw:
                raw.send_head(key, ANNOUNCED[announced], "expect: 100-continue")
                assert await raw.status() == status


@pytest.mark.parametrize("key", ["outrider_wrong", None])
async def test_many_requests_with_one_key_check_it_once_at_the_router(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    calls = 0
    check = AsyncClient.check_key

    async def counted(client: AsyncClient, api_key: str, **options: Any) -> str:
        nonlocal calls
        calls += 1
        return await check(client, api_key, **options)

    monkeypatch.setattr(AsyncClient, "check_key", counted)
    monkeypatch.setattr(keys, "VERDICT_S", 3600.0)
    async with gateway_harness(redis_url, auth="keys") as harness:
        bearer = key or (await Keys(harness.rig.client).add("one"))[0]
        async with httpx.AsyncClient(base_url=harness.url, headers={"authorization": f"Bearer {bearer}"}) as web:
            answers = [await asyncio.gather(*(web.get("/v1/models") for _ in range(8))) for _ in range(2)]
    assert {answer.status_code for some in answers for answer in some} == {401 if key else 200}
    assert calls == 1


async def test_a_key_that_is_revoked_is_refused_when_its_verdict_has_expired(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "VERDICT_S", 0.0)
    async with gateway_harness(redis_url, auth="keys") as harness:
        stored = Keys(harness.rig.client)
        secret, key = await stored.add("one")
        async with httpx.AsyncClient(base_url=harness.url, headers={"authorization": f"Bearer {secret}"}) as web:
            assert (await web.get("/v1/models")).status_code == 200
            await stored.revoke(key.key_id)
            while (await web.get("/v1/models")).status_code != 401:  # the router remembers it for a moment
                await asyncio.sleep(0.05)


async def test_checks_of_a_key_take_nothing_from_its_tenants_rate(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "VERDICT_S", 0.0)  # each request has its key checked
    async with gateway_harness(redis_url, auth="keys", tenant_requests_per_s=0.001) as harness:
        secret, _ = await Keys(harness.rig.client).add("one")
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=harness.url, headers=headers) as web:
            assert (await web.get("/v1/models")).status_code == 200
            assert (await web.post("/v1/completions", content=BODY)).status_code == 200
            refused = await web.get("/v1/models")  # two requests of a kind are more than the rate allows
            assert refused.status_code == 429
            assert "(tenant_requests_per_s)" in refused.json()["error"]["message"]


class ScriptedRouter:
    """Accepts the keys in `accepted`, while `answers` is set."""

    def __init__(self, *accepted: str) -> None:
        self.accepted = set(accepted)
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: OutriderError | None = None
        self.calls: list[str] = []

    async def check_key(self, key: str, *, timeout: float) -> str:
        self.calls.append(key)
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        if key not in self.accepted:
            raise Unauthenticated("no")
        return "one"


async def test_unknown_keys_neither_displace_accepted_keys_nor_use_up_their_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "MAX_VERDICTS", 2)
    monkeypatch.setattr(keys, "MAX_CHECKS", 2)
    monkeypatch.setattr(keys, "VERDICT_S", 3600.0)
    router = ScriptedRouter("good", "stale")
    checks = KeyCheck(router)  # type: ignore[arg-type]
    await checks.check("good")
    for number in range(5):
        with pytest.raises(Unauthenticated):
            await checks.check(f"bad {number}")
    await checks.check("good")
    assert router.calls.count("good") == 1
    with pytest.raises(Unauthenticated):
        await checks.check("bad 0")
    assert router.calls.count("bad 0") == 2  # of refused keys only the last two are remembered

    monkeypatch.setattr(keys, "VERDICT_S", -1.0)
    await checks.check("stale")
    router.answers.clear()
    waiting = [asyncio.create_task(checks.check(f"new {number}")) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.check("one more")
    stale = asyncio.create_task(checks.check("stale"))
    await asyncio.sleep(0)
    router.answers.set()
    await stale
    assert all(isinstance(error, Unauthenticated) for error in await asyncio.gather(*waiting, return_exceptions=True))


async def test_a_router_that_is_away_is_no_verdict() -> None:
    router = ScriptedRouter("good")
    checks = KeyCheck(router)  # type: ignore[arg-type]
    router.error = Unavailable("away")
    with pytest.raises(Unavailable):
        await checks.check("good")
    router.error = None
    await checks.check("good")


async def test_a_body_that_does_not_arrive_in_time_is_refused(redis_url: str) -> None:
    async with gateway_harness(redis_url, gateway={"body_s": 0.1}) as harness, connected(harness) as raw:
        raw.send_head("any", f"content-length: {len(BODY)}")
        raw.writer.write(BODY[:1])
        assert await raw.status() == 408


async def test_an_answer_may_take_longer_than_its_request(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    async with gateway_harness(redis_url, gateway={"body_s": 0.1}) as harness:
        harness.verifier.pace_s = 0.4
        async with connected(harness) as raw:
            raw.send_head("any", f"content-length: {len(BODY)}")
            raw.writer.write(BODY)
            assert await raw.status() == 200


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[TenantShares]:
    """What the test's gateways hold."""
    made: list[TenantShares] = []

    class Noted(TenantShares):
        def __init__(self, most: int, what: str, *, least: int = 0) -> None:
            super().__init__(most, what, least=least)
            if what == "bytes":
                made.append(self)

    monkeypatch.setattr(limits, "TenantShares", Noted)
    return made


async def test_the_bodies_of_all_requests_together_are_bounded(redis_url: str, totals: list[TenantShares]) -> None:
    most, typed = 2 * len(BODY), {"content-type": "application/json"}
    async with (
        gateway_harness(redis_url, gateway={"max_total_bytes": most}) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
    ):
        async with connected(harness) as raw:
            raw.send_head("any", f"content-length: {most}")
            raw.writer.write(bytes(len(BODY) + 1))
            await until(lambda: totals[0].held == len(BODY) + 1)
            answer = await web.post("/v1/completions", content=BODY, headers=typed)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        await until(lambda: totals[0].held == 0)
        assert (await web.post("/v1/completions", content=BODY, headers=typed)).status_code == 200


async def test_a_tenants_bodies_leave_capacity_for_other_tenants(redis_url: str, totals: list[TenantShares]) -> None:
    most = 8 * len(BODY)
    async with gateway_harness(redis_url, auth="keys", gateway={"max_total_bytes": most}) as harness:
        stored = Keys(harness.rig.client)
        taker, other = [(await stored.add(tenant))[0] for tenant in ("taker", "other")]
        also_takers, _ = await stored.add("taker")
        async with httpx.AsyncClient(base_url=harness.url) as web:

            async def answer(key: str, content: bytes = BODY) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                return await web.post("/v1/completions", content=content, headers=headers)

            too_large = await answer(taker, BODY + bytes(most // 2))
            assert (too_large.status_code, f"{most // 2} bytes" in too_large.text) == (413, True)
            several = await answer(taker, BODY.replace(b'"max_tokens"', b'"n": 4, "max_tokens"'))
            assert (several.status_code, several.json()["error"]["param"]) == (400, "n")

            async with connected(harness) as raw:
                raw.send_head(taker, f"content-length: {4 * len(BODY)}")
                raw.writer.write(BODY * 3 + BODY[1:])
                await until(lambda: totals[0].held == 4 * len(BODY) - 1)
                refused = await answer(also_takers)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert "as many bytes of this tenant" in refused.json()["error"]["message"]
                assert (await answer(other)).status_code == 200
            await until(lambda: totals[0].held == 0)
            assert (await answer(taker)).status_code == 200


def test_each_further_tenant_gets_a_share() -> None:
    held = TenantShares(64, "bytes")
    for tenant, share in (("a", 32), ("b", 16), ("c", 8), ("d", 4)):
        held.add(tenant, share)
        with pytest.raises(Overloaded, match="of this tenant as it has left"):
            held.add(tenant, 1)  # this call adds nothing
    assert held.held == 60
    held.release("a", 32)
    held.add("d", 16)
    with pytest.raises(Overloaded, match="of this tenant as it has left"):
        held.add("d", 1)

    unnamed = TenantShares(64, "bytes")
    unnamed.add("", 64)
    with pytest.raises(Overloaded, match="as many bytes as it can"):
        unnamed.add("", 1)


def test_a_share_is_one_at_least() -> None:
    held = TenantShares(3, "requests", least=1)
    for tenant in "abc":
        held.add(tenant, 1)
    with pytest.raises(Overloaded, match="as many requests as it can"):
        held.add("a", 1)
    held.release("c", 1)
    with pytest.raises(Overloaded, match="of this tenant as it has left"):
        held.add("a", 1)


async def test_a_tenants_slow_requests_leave_capacity_for_other_tenants(redis_url: str) -> None:
    async with gateway_harness(redis_url, auth="keys", gateway={"max_requests": 4}) as harness:
        stored = Keys(harness.rig.client)
        taker, other = [(await stored.add(tenant))[0] for tenant in ("taker", "other")]
        also_takers, _ = await stored.add("taker")
        async with httpx.AsyncClient(base_url=harness.url) as web:

            async def models(key: str) -> httpx.Response:
                return await web.get("/v1/models", headers={"authorization": f"Bearer {key}"})

            async with connected(harness) as one, connected(harness) as two:
                for raw, key in ((one, taker), (two, also_takers)):
                    raw.send_head(key, f"content-length: {LARGE}", "expect: 100-continue")
                    assert await raw.status() == 100  # its body is awaited
                refused = await models(also_takers)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert "as many requests of this tenant" in refused.json()["error"]["message"]
                assert (await models(other)).status_code == 200
            while (await models(taker)).status_code == 429:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("known", "status"), [(False, 401), (True, 400)], ids=["stranger", "tenant"])
async def test_a_caller_that_is_refused_repeatedly_is_refused_slowly(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, known: bool, status: int
) -> None:
    monkeypatch.setattr(slow_refusals, "QUICK_PER_S", 1e-3)  # of each caller one refusal is quick
    monkeypatch.setattr(slow_refusals, "MAX_HELD_OF_KEY", 1)
    over = asyncio.Event()
    monkeypatch.setattr(slow_refusals, "pause", over.wait)
    async with gateway_harness(redis_url, auth="keys") as harness, httpx.AsyncClient(base_url=harness.url) as web:
        stored = Keys(harness.rig.client)
        tenant, other = [(await stored.add(name))[0] for name in ("tenant", "other")]
        key = tenant if known else "outrider_wrong"

        async def refused(key: str) -> int:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            return (await web.post("/v1/completions", content=b"{}", headers=headers)).status_code

        calls = {asyncio.ensure_future(refused(key)) for _ in range(4)}
        assert [await call for call in itertools.islice(asyncio.as_completed(calls), 3)] == [status] * 3
        for _ in range(3):
            assert await refused(key) == status
        (held,) = [call for call in calls if not call.done()]
        assert await refused(other) == 400
        over.set()
        assert await held == status


async def test_a_body_counts_once_for_each_answer(redis_url: str) -> None:
    body = json.dumps({"model": "target", "prompt": "x", "max_tokens": 1, "n": 5, "user": "x" * 1000}).encode()
    typed = {"content-type": "application/json"}
    most = {"max_total_bytes": 4 * len(body)}
    async with gateway_harness(redis_url, gateway=most) as harness, httpx.AsyncClient(base_url=harness.url) as web:
        refused = await web.post("/v1/completions", content=body, headers=typed)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "must be at most 4" in refused.json()["error"]["message"]
        for _ in range(3):  # what ended is counted no longer
            fewer = body.replace(b'"n": 5', b'"n": 4')
            assert (await web.post("/v1/completions", content=fewer, headers=typed)).status_code == 200


async def test_requests_beyond_their_number_are_refused_and_health_is_not(redis_url: str) -> None:
    async with (
        gateway_harness(redis_url, gateway={"max_requests": 1}) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
    ):
        async with connected(harness) as raw:
            raw.send_head("any", f"content-length: {LARGE}", "expect: 100-continue")
            assert await raw.status() == 100
            refused = await web.get("/v1/models")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await web.get("/health")).status_code == 200
        while (await web.get("/v1/models")).status_code == 429:
            await asyncio.sleep(0.01)


async def test_connections_beyond_their_number_are_closed(redis_url: str) -> None:
    async with (
        gateway_harness(redis_url, gateway={"max_connections": 1}) as harness,
        connected(harness) as first,
        connected(harness) as second,
    ):
        await second.ended()
        first.send_head("any", f"content-length: {len(BODY)}")
        first.writer.write(BODY)
        assert await first.status() == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp"])
async def test_a_connection_without_a_request_is_closed(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    async with gateway_harness(redis_url) as harness, connected(harness) as raw:
        raw.writer.write(sent)
        await raw.ended()


async def test_a_body_that_was_refused_is_not_received_for_long(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    async with gateway_harness(redis_url, auth="keys") as harness, connected(harness) as raw:
        raw.send_head("outrider_wrong", f"content-length: {LARGE}")
        assert await raw.status() == 401
        ending = asyncio.create_task(raw.ended())
        while not ending.done():
            raw.writer.write(b" ")  # each byte would keep an idle connection alive
            await asyncio.sleep(0.01)
