"""Versions of a drafter that is trained online: which exist, and which are not to be used.

    outrider:{versions}:DRAFTER   hash: `version:N` -> it (JSON)
    outrider:{verdicts}:DRAFTER   hash: `doubted:N`, `cleared:N`, `withdrawn:N` -> why

The verdicts are apart because drafters write them: a drafter's user in Redis cannot publish a version. (Older versions
of Outrider wrote them beside the versions, where they still count.)

Version numbers only grow, and each field is written once, so no lock is needed: the version to use is the latest that
was not withdrawn. A drafter may doubt its version when it agrees with the target less than the one before did. The
trainer judges both by texts that neither was trained on, and clears or withdraws the doubted version; if no trainer
does so in time, the drafter withdraws it.
"""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.errors import InternalError
from outrider.store.redis.client import Client, decoding, load_object, redis_errors

KEPT_S = 30 * 24 * 3600  # how long versions are kept after the latest one

_KEY = "outrider:{versions}:"
_VERDICTS = "outrider:{verdicts}:"
_VERDICT = re.compile(r"(doubted|cleared|withdrawn):([1-9][0-9]{0,17})")  # a field
_MAX_FOREIGN = 10**9  # a withdrawal alone takes no number above this, so that later ones still have their verdicts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """A version as it was published."""

    number: int  # from 1; 0 is the checkpoint in the drafter's own folder
    folder: str  # folder of its checkpoint; all drafters read this one
    weights: str  # digest of the checkpoint (outrider.engine.checkpoints.model_card)
    target: str  # name of the target that it was trained on
    target_weights: str  # digest of the target's weights; "": not known
    tokenizer_digest: str  # in hexadecimal


@dataclass(frozen=True, slots=True)
class PublishedVersions:
    """The known versions of a drafter."""

    versions: Mapping[int, Version] = field(default_factory=dict)
    doubted: Mapping[int, str] = field(default_factory=dict)  # by number; the value is the reason
    cleared: Mapping[int, str] = field(default_factory=dict)
    withdrawn: Mapping[int, str] = field(default_factory=dict)

    @property
    def usable(self) -> list[Version]:
        """Versions that were not withdrawn, latest first."""
        return [self.versions[number] for number in sorted(self.versions, reverse=True) if number not in self.withdrawn]

    @property
    def latest(self) -> int:
        """The highest number so far; 0: none."""
        return max([0, *self.versions, *(number for number in self.withdrawn if number < _MAX_FOREIGN)])

    @property
    def known(self) -> bool:
        """Whether any version is known. If Redis forgot them all, drafters keep what they use."""
        return bool(self.versions or self.withdrawn)

    @property
    def in_question(self) -> list[int]:
        """Versions that are doubted and neither cleared nor withdrawn."""
        return [number for number in self.doubted if number not in self.cleared and number not in self.withdrawn]


class Versions:
    """The versions of one drafter, by the name of its model. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client, drafter: str) -> None:
        self._redis = redis
        self._key = _KEY + drafter
        self._verdicts = _VERDICTS + drafter
        self._skipped: set[bytes] = set()  # fields that are no verdicts, as last read

    async def read(self) -> PublishedVersions:
        """Return the known versions. Raises InternalError for a malformed version; malformed verdicts, which any
        drafter may write, are skipped and logged."""
        with redis_errors(self._redis):
            versions: Any = await self._redis.hgetall(self._key)
            verdicts: Any = await self._redis.hgetall(self._verdicts)
        found: dict[str, dict[int, Any]] = {"doubted": {}, "cleared": {}, "withdrawn": {}}
        skipped = set[bytes]()
        for name, blob in verdicts.items():
            if verdict := _VERDICT.fullmatch(name.decode(errors="replace")):
                found[verdict[1]][int(verdict[2])] = blob.decode(errors="replace")
            else:
                skipped.add(name)
        if skipped - self._skipped:
            log.warning("skipped fields of %s that are no verdicts: %s", self._verdicts, reprlib.repr(skipped))
        self._skipped = skipped
        found["version"] = {}
        for name, blob in versions.items():
            with decoding(self._key):
                kind, _, number = name.decode().partition(":")
                text = blob.decode(errors="replace")
                found[kind][int(number)] = Version(**load_object(blob, "a version")) if kind == "version" else text
        return PublishedVersions(found["version"], found["doubted"], found["cleared"], found["withdrawn"])

    async def publish(self, version: Version) -> bool:
        """Add a version. Return False if another one has that number."""
        with redis_errors(self._redis):
            new: Any = await self._redis.hsetnx(self._key, f"version:{version.number}", json.dumps(asdict(version)))
            await self._redis.expire(self._key, KEPT_S)
            await self._redis.expire(self._verdicts, KEPT_S)
            held: Any = await self._redis.hget(self._key, f"version:{version.number}")
        return bool(new) or (
            held is not None and json.loads(held) == asdict(version)
        )  # True also if the first reply was lost

    async def doubt(self, number: int, why: str) -> None:
        """Mark a version as seemingly worse than the one before."""
        await self._write_once("doubted", number, why)

    async def clear(self, number: int, why: str) -> None:
        """Mark a doubted version as good."""
        await self._write_once("cleared", number, why)

    async def withdraw(self, number: int, why: str) -> bool:
        """Mark a version as not to be used any more. Return False if it was withdrawn already."""
        return await self._write_once("withdrawn", number, why)

    async def forget(self, number: int) -> None:
        """Remove an old version. Its withdrawal stays known."""
        if number < 1:
            raise InternalError(f"version {number} is not one that was published")
        with redis_errors(self._redis):
            for key in (self._key, self._verdicts):
                await self._redis.hdel(key, f"version:{number}", f"doubted:{number}", f"cleared:{number}")

    async def _write_once(self, what: str, number: int, why: str) -> bool:
        with redis_errors(self._redis):
            new: Any = await self._redis.hsetnx(self._verdicts, f"{what}:{number}", why)
            await self._redis.expire(self._verdicts, KEPT_S)
        return bool(new)
