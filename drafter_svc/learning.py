"""How a drafter that learns keeps up: it looks for new versions of its model, drafts with the latest good one, and
says so when that agrees with the target less than the one before."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drafter_svc.grower import Grower
from outrider.core.agreement import Seen, worse
from outrider.engine.card import read_card, weights_digest
from outrider.engine.checkpoint import read_tokenizer_digest
from outrider.engine.engine import Engine
from outrider.engine.loading import outline
from outrider.engine.threads import briefly
from outrider.errors import OutriderError, TokenizerMismatch
from outrider.store.versions import Published, Version, Versions
from outrider.telemetry.metrics import watch

LOOK_S = 1.0  # between two looks for a new version
VERDICT_S = 5.0  # that who trains the drafter has, to decide about a version that is doubted
AGAIN_S = 60.0  # after which one that could not be used is tried once more: its folder may be there by then
FIRST_LOOK = 512  # places after which a version is compared with the one before; then at twice as many, and so on

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Own:
    """What a drafter is, that its versions must be as well."""

    folder: Path  # of version 0
    tokenizer_digest: bytes
    vocabulary: int
    context: int
    trained_for: str  # digest of the target that its card names; "": any


class Learner:
    """One drafter's. `run` it beside the grower."""

    def __init__(self, grower: Grower, versions: Versions, own: Own, load: Callable[[Path], Engine]) -> None:
        self.number = 0  # of the version that it drafts with
        self.swaps = self.rollbacks = 0
        self._grower = grower
        self._versions = versions
        self._own = own
        self._load = load
        self._refused: dict[Version, float] = {}  # and until when
        self._seen, self._before = Seen(), Seen()  # of this version, and of the one before it
        self._counted = grower.agreement()
        self._next_look = FIRST_LOOK
        self._doubted: dict[int, float] = {}  # versions, and since when we know
        watch("outrider.version", lambda: self.number)
        watch("outrider.version.swaps", lambda: self.swaps)
        watch("outrider.version.rollbacks", lambda: self.rollbacks)

    async def run(self) -> None:
        """Until cancelled. While Redis is away everything stays as it is."""
        while True:
            try:
                await self.look()
            except OutriderError as error:
                log.debug("%s", error)  # the next time
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Once: what is published, whether it is good, and which to draft with."""
        self._count()
        published = await self._versions.read()
        await self._judge(published)
        if published.known:
            await self._follow(published)

    def _count(self) -> None:
        counts = self._grower.agreement()
        for heat, (agreed, judged) in counts.items():
            before_agreed, before = self._counted.get(heat, (0, 0))
            if judged > before:
                self._seen.add(heat, agreed - before_agreed, judged - before)
        self._counted = counts

    async def _judge(self, published: Published) -> None:
        """Doubts the present version where there is reason to, and withdraws what nobody decides about."""
        if self.number in published.cleared:
            self._before = Seen()  # it is the traffic that has changed: what was before is no measure any more
        if self.number and self._seen.judged >= self._next_look:
            self._next_look *= 2
            if why := worse(self._seen, self._before):
                log.warning("version %d is doubted: %s", self.number, why)
                await self._versions.doubt(self.number, why)
        now = time.monotonic()
        self._doubted = {number: self._doubted.get(number, now) for number in published.in_question}
        for number, since in self._doubted.items():
            if now - since > VERDICT_S and await self._versions.withdraw(number, published.doubted[number]):
                log.warning("version %d is withdrawn, as nobody has decided about it in time", number)

    async def _follow(self, published: Published) -> None:
        """Drafts with the latest good version that can be used here; where there is none, with what it began with."""
        for version in published.good:
            if version.number == self.number:
                return
            if time.monotonic() < self._refused.get(version, 0.0):
                continue
            try:
                await self._swap(version.number, partial(self._checked, version))
            except OutriderError as error:
                level = logging.DEBUG if version in self._refused else logging.WARNING
                log.log(level, "version %d is not used: %s", version.number, error)
                self._refused[version] = time.monotonic() + AGAIN_S
            else:
                return
        if self.number:
            await self._swap(0, partial(self._load, self._own.folder))

    async def _swap(self, number: int, load: Callable[[], Engine]) -> None:
        """Loads while the loop goes on, and has it take what was loaded. Raises what loading does."""
        began = time.monotonic()
        engine = await asyncio.to_thread(briefly, load)
        self._count()
        back, was = number < self.number, self.number
        self._grower.renew(engine)
        self.number = number
        self.swaps += 1
        self.rollbacks += back
        log.log(
            logging.WARNING if back else logging.INFO,
            "%s version %d, loaded in %.2f s; version %d agreed at %.1f %% of %.0f places",
            "back to" if back else "drafts with",
            number,
            time.monotonic() - began,
            was,
            100.0 * self._seen.share,
            self._seen.judged,
        )
        self._before = Seen() if back else self._seen
        self._seen, self._next_look = Seen(), FIRST_LOOK

    def _checked(self, version: Version) -> Engine:
        """Its engine. Raises CheckpointError, and TokenizerMismatch for a version that is not one of this drafter's."""
        folder, own = Path(version.folder), self._own
        shape, digest = outline(folder), read_tokenizer_digest(folder)
        card = read_card(folder)
        for what, theirs, mine in (
            ("tokenizer", digest, own.tokenizer_digest),
            ("vocabulary", shape.vocabulary, own.vocabulary),
            ("context", shape.context, own.context),
            ("weights", weights_digest(folder), version.weights),
            ("target", (card.target_digest if card else "") or own.trained_for, own.trained_for or None),
        ):
            if mine is not None and theirs != mine:
                raise TokenizerMismatch(
                    f"{folder}: is no version of this drafter: its {what} is another one; publish it under the name of "
                    "the drafter that it was made from"
                )
        return self._load(folder)
