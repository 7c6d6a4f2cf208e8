"""The adapters that requests may name.

outrider:{adapters}   hash: an adapter's name -> its description (JSON)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.core.session.contract import Adapter
from outrider.errors import NotFound, Overloaded
from outrider.store.client import Client, decoding, load_object, redis_errors
from outrider.store.names import NAME, check_name

MOST = 1024  # adapters of all models together

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
    """All adapters by name. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis

    async def add(self, named: NamedAdapter) -> None:
        """Store an adapter, in place of one of the same name. Raises Overloaded when there are too many."""
        values = {
            "model": named.model,
            "folder": named.adapter.folder,
            "digest": named.adapter.digest,
            "rank": named.rank,
            "parameters": named.parameters,
        }
        with redis_errors(self._redis):
            known: Any = await self._redis.hget(_ADAPTERS, named.name)
            count: Any = await self._redis.hlen(_ADAPTERS)
            if known is None and count >= MOST:
                raise Overloaded(f"there are {MOST} adapters, the most that there can be; unload some")
            await self._redis.hset(_ADAPTERS, named.name, json.dumps(values))

    async def remove(self, name: str) -> None:
        """Delete an adapter. Raises NotFound."""
        with redis_errors(self._redis):
            removed: Any = await self._redis.hdel(_ADAPTERS, name)
        if not removed:
            raise NotFound(f"there is no adapter {name[:80]!r}")

    async def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter of that name; None: there is none."""
        if not NAME.fullmatch(name):
            return None
        with redis_errors(self._redis):
            blob: Any = await self._redis.hget(_ADAPTERS, name)
        return None if blob is None else _load(name, blob)

    async def listed(self) -> list[NamedAdapter]:
        """Return all adapters, by name."""
        with redis_errors(self._redis):
            entries: Any = await self._redis.hgetall(_ADAPTERS)
        return sorted((_load(name.decode(), blob) for name, blob in entries.items()), key=lambda it: it.name)


def _load(name: str, blob: bytes) -> NamedAdapter:
    values = load_object(blob, what := "an adapter's entry")
    with decoding(what):
        adapter = Adapter(str(values["folder"]), str(values["digest"]))
        return NamedAdapter(name, str(values["model"]), adapter, int(values["rank"]), int(values["parameters"]))
