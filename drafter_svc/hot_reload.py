"""Keeps the model of a drafter that learns up to date: it looks for new versions, drafts with the latest good one, and
reports a version that agrees with the target less than the previous one did.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drafter_svc.scheduler import DraftScheduler
from outrider.core.control.drafters.version_comparison import AgreementCounts, worse
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.engine.checkpoints.model_card import read_card, weights_digest
from outrider.engine.interface.engine import Engine
from outrider.engine.loading import outline
from outrider.engine.threads import run_in_short_lived_thread
from outrider.errors import OutriderError, TokenizerMismatch
from outrider.store.versions import PublishedVersions, Version, Versions
from outrider.telemetry.metrics import register_metric

POLL_S = 1.0  # between two reads of the published versions
VERDICT_S = 5.0  # time that the trainer has to decide about a doubted version
RETRY_S = 60.0  # until a version that could not be used is tried again: its folder may exist by then
FIRST_COMPARISON = 512  # tokens after which a version is compared with the previous one; then twice as many, and so on

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequiredShape:
    """What the versions of a drafter must have in common with it."""

    folder: Path  # of version 0
    tokenizer_digest: bytes
    vocabulary: int
    context: int
    trained_for: str  # digest of the target that its model card names; "": any


class HotReload:
    """Reloads one drafter's model. `run` it beside the scheduler."""

    def __init__(
        self, scheduler: DraftScheduler, versions: Versions, required: RequiredShape, load: Callable[[Path], Engine]
    ) -> None:
        self.number = 0  # of the version in use
        self.swaps = self.rollbacks = 0
        self._scheduler = scheduler
        self._versions = versions
        self._required = required
        self._load = load
        self._refused: dict[Version, float] = {}  # with the time until which each is refused
        self._current = AgreementCounts()  # of the version in use
        self._previous = AgreementCounts()  # of the previous version
        self._last_counts = scheduler.fits.agreement()
        self._next_comparison = FIRST_COMPARISON
        self._doubted: dict[int, float] = {}  # versions, and since when their doubt is known
        register_metric("outrider.version", lambda: self.number)
        register_metric("outrider.version.swaps", lambda: self.swaps)
        register_metric("outrider.version.rollbacks", lambda: self.rollbacks)

    async def run(self) -> None:
        """Look for versions until cancelled. While Redis is unreachable nothing changes."""
        while True:
            try:
                await self.poll()
            except OutriderError as error:
                log.debug("%s", error)  # tried again next time
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Read what is published, compare the present version with the last one, and draft with the latest good one."""
        self._count()
        published = await self._versions.read()
        await self._compare_versions(published)
        if published.known:
            await self._follow(published)

    def _count(self) -> None:
        counts = self._scheduler.fits.agreement()
        for bucket, (agreed, compared) in counts.items():
            last_agreed, last_compared = self._last_counts.get(bucket, (0, 0))
            if compared > last_compared:
                self._current.add(bucket, agreed - last_agreed, compared - last_compared)
        self._last_counts = counts

    async def _compare_versions(self, published: PublishedVersions) -> None:
        """Doubts the present version if its agreement is worse; withdraws doubted ones without a timely decision."""
        if self.number in published.cleared:
            self._previous = AgreementCounts()  # the traffic has changed, so earlier agreement is no measure
        if self.number and self._current.compared >= self._next_comparison:
            self._next_comparison *= 2
            if reason := worse(self._current, self._previous):
                log.warning("version %d is doubted: %s", self.number, reason)
                await self._versions.doubt(self.number, reason)
        now = time.monotonic()
        self._doubted = {number: self._doubted.get(number, now) for number in published.in_question}
        for number, since in self._doubted.items():
            if now - since > VERDICT_S and await self._versions.withdraw(number, published.doubted[number]):
                log.warning("version %d is withdrawn: the trainer did not decide about it in time", number)

    async def _follow(self, published: PublishedVersions) -> None:
        """Drafts with the latest good version that can be used here, or with version 0 if there is none."""
        for version in published.usable:
            if version.number == self.number:
                return
            if time.monotonic() < self._refused.get(version, 0.0):
                continue
            try:
                await self._swap(version.number, partial(self._checked, version))
            except OutriderError as error:
                level = logging.DEBUG if version in self._refused else logging.WARNING
                log.log(level, "version %d is not used: %s", version.number, error)
                self._refused[version] = time.monotonic() + RETRY_S
            else:
                return
        if self.number:
            await self._swap(0, partial(self._load, self._required.folder))

    async def _swap(self, number: int, load: Callable[[], Engine]) -> None:
        """Load an engine while the scheduler goes on, and have the scheduler use it. Raises as loading does."""
        began = time.monotonic()
        engine = await asyncio.to_thread(run_in_short_lived_thread, load)
        self._count()
        back, previous = number < self.number, self.number
        self._scheduler.members.replace_engine(engine)
        self.number = number
        self.swaps += 1
        self.rollbacks += back
        log.log(
            logging.WARNING if back else logging.INFO,
            "%s version %d, loaded in %.2f s; version %d agreed at %.1f %% of %.0f places",
            "back to" if back else "drafts with",
            number,
            time.monotonic() - began,
            previous,
            100.0 * self._current.share,
            self._current.compared,
        )
        self._previous = AgreementCounts() if back else self._current
        self._current, self._next_comparison = AgreementCounts(), FIRST_COMPARISON

    def _checked(self, version: Version) -> Engine:
        """Return a version's engine. Raises CheckpointError, and TokenizerMismatch for another drafter's version."""
        folder, required = Path(version.folder), self._required
        shape, digest = outline(folder), read_tokenizer_digest(folder)
        card = read_card(folder)
        for what, value, required_value in (
            ("tokenizer", digest, required.tokenizer_digest),
            ("vocabulary", shape.vocabulary, required.vocabulary),
            ("context", shape.context, required.context),
            ("weights", weights_digest(folder), version.weights),
            ("target", (card.target_digest if card else "") or required.trained_for, required.trained_for or None),
        ):
            if required_value is not None and value != required_value:
                raise TokenizerMismatch(
                    f"{folder}: is not a version of this drafter: its {what} differs; publish it under the name of "
                    "the drafter that it was made from"
                )
        return self._load(folder)
