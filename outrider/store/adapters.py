"""The adapters that requests may name. Each has an owner: the tenant that may name it, or ALL.

outrider:{adapters}:OWNER   hash: an adapter's name -> its description (JSON); without :OWNER where callers need no key
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.core.session.contract import Adapter
from outrider.errors import Overloaded
from outrider.store.names import NAME, check_name
from outrider.store.redis.client import Client, decoding, load_object, redis_errors

MOST = 1024  # adapters of an owner
ALL = "*"  # the owner of what all tenants may name

_ADAPTERS = "outrider:{adapters}"


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """The stored description of an adapter. Raises InvalidRequest for a wrong name, folder or digest."""

    name: str
    model: str
    adapter: Adapter
    rank: int
    parameters: int

    def __post_init__(self) -> None:
        check_name("name", self.name)


class NamedAdapters:
    """All adapters by owner and name. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis

    async def add(self, owner: str, named: NamedAdapter) -> None:
        """Store an adapter, in place of the owner's of the same name. Raises Overloaded when there are too many."""
        values = {
            "model": named.model,
            "folder": named.adapter.folder,
            "digest": named.adapter.digest,
            "rank": named.rank,
            "parameters": named.parameters,
        }
        with redis_errors(self._redis):
            known: Any = await self._redis.hget(_key(owner), named.name)
            count: Any = await self._redis.hlen(_key(owner))
            if known is None and count >= MOST:
                raise Overloaded(f"there are {MOST} adapters, the most that there can be; unload some")
            await self._redis.hset(_key(owner), named.name, json.dumps(values))

    async def remove(self, owner: str, name: str) -> bool:
        """Delete an owner's adapter. Return whether there was one."""
        with redis_errors(self._redis):
            return bool(await self._redis.hdel(_key(owner), name))

    async def find(self, owner: str, name: str) -> NamedAdapter | None:
        """Return the owner's adapter of that name; None: there is none."""
        if not NAME.fullmatch(name):
            return None
        with redis_errors(self._redis):
            blob: Any = await self._redis.hget(_key(owner), name)
        return None if blob is None else _load(name, blob)

    async def listed(self, owner: str) -> list[NamedAdapter]:
        """Return all adapters of an owner, by name."""
        with redis_errors(self._redis):
            entries: Any = await self._redis.hgetall(_key(owner))
        return sorted((_load(name.decode(), blob) for name, blob in entries.items()), key=lambda it: it.name)


def _key(owner: str) -> str:
    return f"{_ADAPTERS}:{owner}" if owner else _ADAPTERS


def _load(name: str, blob: bytes) -> NamedAdapter:
    values = load_object(blob, what := "an adapter's entry")
    with decoding(what):
        adapter = Adapter(str(values["folder"]), str(values["digest"]))
        return NamedAdapter(name, str(values["model"]), adapter, int(values["rank"]), int(values["parameters"]))
