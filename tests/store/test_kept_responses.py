"""Conversations that later requests continue: found by their tenants alone, bounded, counted, and dropped in time."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import InvalidRequest, NotFound, Overloaded
from outrider.store.kept_responses import MOST_BYTES, KeptResponses
from outrider.store.redis.client import Client
from outrider.store.tenant_storage import TenantStorage


def kept(client: Client, ttl_s: float = 60.0, size: int | None = None) -> KeptResponses:
    return KeptResponses(client, ttl_s, TenantStorage(client, ttl_s, sessions=None, size=size))


async def test_what_was_kept_is_found_by_its_tenant_alone_until_it_expires(client: Client) -> None:
    responses = kept(client, ttl_s=0.3)
    await responses.keep("a", "resp_1", b"[1]")
    await responses.keep("a", "resp_1", b"[2]")  # a call that is repeated
    assert await responses.find("a", "resp_1") == b"[2]"
    for tenant, name in (("b", "resp_1"), ("a", "resp_2"), ("", "aresp_1")):
        with pytest.raises(NotFound):
            await responses.find(tenant, name)
    await asyncio.sleep(0.35)
    with pytest.raises(NotFound, match="may have expired"):
        await responses.find("a", "resp_1")


async def test_a_tenant_keeps_no_more_than_it_may(client: Client) -> None:
    responses = kept(client, size=4096)
    await responses.keep("a", "one", b"x" * 2000)
    with pytest.raises(Overloaded, match="tenant_stored_bytes"):
        await responses.keep("a", "two", b"x" * 2000)
    with pytest.raises(NotFound):
        await responses.find("a", "two")
    await responses.keep("b", "two", b"x" * 2000)


async def test_one_conversation_is_bounded_and_so_is_its_name(client: Client) -> None:
    responses = kept(client)
    with pytest.raises(InvalidRequest, match=f"at most {MOST_BYTES}"):
        await responses.keep("a", "one", b"x" * (MOST_BYTES + 1))
    for name in ("", "x" * 129):
        with pytest.raises(InvalidRequest, match="1 to 128 characters"):
            await responses.find("a", name)
