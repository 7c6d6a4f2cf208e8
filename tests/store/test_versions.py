"""The versions of a drafter are fields that are written once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from redis.asyncio import Redis

from outrider.errors import InternalError
from outrider.store.versions import KEPT_S, Version, Versions

ONE = Version(1, "/versions/00001", "ab", "target", "cd", "ef")
TWO = replace(ONE, number=2)


async def test_the_latest_that_was_not_withdrawn_is_the_good_one(client: Redis) -> None:
    versions = Versions(client, "drafter")
    assert not (await versions.read()).known
    assert await versions.publish(ONE)
    assert await versions.publish(TWO)
    assert (await versions.read()).usable == [TWO, ONE]
    assert await versions.withdraw(2, "worse")
    assert not await versions.withdraw(2, "again")
    published = await versions.read()
    assert (published.usable, published.latest, published.withdrawn) == ([ONE], 2, {2: "worse"})
    for kind in ("versions", "verdicts"):
        assert 0 < await client.ttl(f"outrider:{{{kind}}}:drafter") <= KEPT_S


async def test_a_version_number_is_given_once_and_publishing_may_be_repeated(client: Redis) -> None:
    versions = Versions(client, "drafter")
    assert await versions.publish(ONE)
    assert await versions.publish(ONE)
    assert not await versions.publish(replace(ONE, folder="/elsewhere"))
    assert (await versions.read()).usable == [ONE]


async def test_a_doubt_is_open_until_it_is_cleared_or_confirmed(client: Redis) -> None:
    versions = Versions(client, "drafter")
    for version in (ONE, TWO):
        await versions.publish(version)
        await versions.doubt(version.number, "seems worse")
    assert (await versions.read()).in_question == [1, 2]
    await versions.clear(1, "it is the traffic")
    await versions.withdraw(2, "worse")
    assert (await versions.read()).in_question == []


async def test_a_forgotten_version_keeps_its_number(client: Redis) -> None:
    versions = Versions(client, "drafter")
    for version in (ONE, TWO):
        await versions.publish(version)
    await versions.withdraw(2, "worse")
    await versions.forget(1)
    await versions.forget(2)
    published = await versions.read()
    assert (published.usable, published.latest) == ([], 2)
    assert published.known  # so that drafters go back to what they began with


async def test_drafters_versions_are_separate_and_foreign_entries_are_reported(client: Redis) -> None:
    await Versions(client, "drafter").publish(ONE)
    assert not (await Versions(client, "other").read()).known
    await client.hset("outrider:{versions}:drafter", "version:3", "{}")
    with pytest.raises(InternalError, match="database shared"):
        await Versions(client, "drafter").read()


@pytest.mark.parametrize(
    "field",
    [
        "version:2",
        "",
        "withdrawn",
        "withdrawn:",
        "withdrawn:-1",
        "withdrawn:0",
        "withdrawn:x",
        "\u0662",
        "withdrawn:\u0662",
    ],
)
async def test_a_malformed_verdict_is_skipped_and_stops_no_version(
    client: Redis, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    versions = Versions(client, "drafter")
    await versions.publish(ONE)
    await versions.publish(TWO)
    await versions.doubt(1, "worse")
    for name in (field.encode(), b"\xff", b"withdrawn:" + b"9" * 5000):
        await client.hset("outrider:{verdicts}:drafter", name, json.dumps(asdict(TWO)))
    for _ in range(3):
        published = await versions.read()
        assert (published.usable, published.in_question, published.latest) == ([TWO, ONE], [1], 2)
    assert len(caplog.records) == 1


async def test_forged_verdicts_do_not_use_up_version_numbers(client: Redis) -> None:
    versions = Versions(client, "drafter")
    await versions.publish(ONE)
    await client.hset("outrider:{verdicts}:drafter", "withdrawn:" + "9" * 18, "forged")
    await client.hset("outrider:{verdicts}:drafter", f"withdrawn:{10**9 - 1}", "forged")
    following = replace(ONE, number=(await versions.read()).latest + 1)
    assert await versions.publish(following)
    assert (await versions.read()).usable == [following, ONE]
    assert await versions.withdraw(following.number, "worse")
    assert (await versions.read()).usable == [ONE]


async def test_verdicts_of_an_older_version_beside_the_versions_still_count(client: Redis) -> None:
    versions = Versions(client, "drafter")
    await versions.publish(ONE)
    await versions.publish(TWO)
    await client.hset("outrider:{versions}:drafter", "withdrawn:2", "worse")
    assert (await versions.read()).usable == [ONE]
