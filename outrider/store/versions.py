"""Versions of a drafter that learns: which there are, and which are not to be used.

    outrider:{versions}:DRAFTER   hash: `version:N` -> it (JSON); `doubted:N`, `cleared:N`, `withdrawn:N` -> why

A version's number only grows, and each field is written once, so nothing here needs a lock: the one to be used is the
latest that was not withdrawn. Whoever drafts with a version may doubt it, because it agrees with the target less than
the one before did. Who trains drafters judges by texts that both have not seen, and clears or withdraws it; where
nobody does in time, whoever drafts withdraws it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.errors import InternalError
from outrider.store.client import Client, loads, ours, translated

KEPT_S = 30 * 24 * 3600  # how long versions are known after the last of them

_KEY = "outrider:{versions}:"


@dataclass(frozen=True, slots=True)
class Version:
    """One, as it was published."""

    number: int  # from 1; 0 is what the drafter's own folder holds
    folder: str  # where its checkpoint is, for everybody who drafts with it
    weights: str  # digest of that, as outrider.engine.card has it
    target: str  # name of the model whose texts it learned from
    target_weights: str  # digest of that one; "": not known
    tokenizer_digest: str  # in hexadecimal


@dataclass(frozen=True, slots=True)
class Published:
    """What is known of a drafter's versions."""

    versions: Mapping[int, Version] = field(default_factory=dict)
    doubted: Mapping[int, str] = field(default_factory=dict)  # and why
    cleared: Mapping[int, str] = field(default_factory=dict)
    withdrawn: Mapping[int, str] = field(default_factory=dict)

    @property
    def good(self) -> list[Version]:
        """Those that were not withdrawn, latest first."""
        return [self.versions[number] for number in sorted(self.versions, reverse=True) if number not in self.withdrawn]

    @property
    def latest(self) -> int:
        """The highest number that was given; 0: none."""
        return max([0, *self.versions, *self.withdrawn])

    @property
    def known(self) -> bool:
        """Whether anything is. What Redis has forgotten is no reason to change anything."""
        return bool(self.versions or self.withdrawn)

    @property
    def in_question(self) -> list[int]:
        """Versions that are doubted, and about which nobody has decided."""
        return [number for number in self.doubted if number not in self.cleared and number not in self.withdrawn]


class Versions:
    """Those of one drafter, by the name of its model. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client, drafter: str) -> None:
        self._redis = redis
        self._key = _KEY + drafter

    async def read(self) -> Published:
        """What is known. Raises InternalError for what is not what is written here."""
        with translated(self._redis):
            fields: Any = await self._redis.hgetall(self._key)
        found: dict[str, dict[int, Any]] = {"version": {}, "doubted": {}, "cleared": {}, "withdrawn": {}}
        for name, blob in fields.items():
            with ours(f"{self._key}"):
                kind, _, number = name.decode().partition(":")
                found[kind][int(number)] = (
                    Version(**loads(blob, "a version")) if kind == "version" else blob.decode(errors="replace")
                )
        return Published(found["version"], found["doubted"], found["cleared"], found["withdrawn"])

    async def publish(self, version: Version) -> bool:
        """Lists a version, from now on. False when there is one of that number."""
        with translated(self._redis):
            new: Any = await self._redis.hsetnx(self._key, f"version:{version.number}", json.dumps(asdict(version)))
            await self._redis.expire(self._key, KEPT_S)
            held: Any = await self._redis.hget(self._key, f"version:{version.number}")
        return bool(new) or (held is not None and json.loads(held) == asdict(version))  # a reply may have been lost

    async def doubt(self, number: int, why: str) -> None:
        """Says that a version seems to be worse than the one before."""
        await self._note("doubted", number, why)

    async def clear(self, number: int, why: str) -> None:
        """Says that it is not."""
        await self._note("cleared", number, why)

    async def withdraw(self, number: int, why: str) -> bool:
        """Has nobody use a version any more. False when somebody else has done so."""
        return await self._note("withdrawn", number, why)

    async def forget(self, number: int) -> None:
        """Takes an old version off the list. That it was withdrawn stays known."""
        if number < 1:
            raise InternalError(f"version {number} is not one that was published")
        with translated(self._redis):
            await self._redis.hdel(self._key, f"version:{number}", f"doubted:{number}", f"cleared:{number}")

    async def _note(self, what: str, number: int, why: str) -> bool:
        with translated(self._redis):
            return bool(await self._redis.hsetnx(self._key, f"{what}:{number}", why))
