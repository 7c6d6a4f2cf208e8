"""The drafter's loop never stands still for a session's text, and looks repetitions up once it has read it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafter_svc.mirrored_sessions import ScheduledSession
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.committed_window import settled_prefix
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import HostLogits, Logits
from tests.loops import no_stall

SESSIONS = 4
LONG = 32_000
VOCABULARY = 512
FOLLOWED = 300  # no model here would propose it


class Engine(SimpleNamespace):
    """Stands where a model does: takes no time, has no opinion, and notes which slots run what follows a text."""

    def __init__(self, context: int) -> None:
        super().__init__(
            slots=SESSIONS,
            context=context,
            rows=LONG + 1000,
            unpadded_vocabulary=VOCABULARY,
            fed_width=0,
            samples_tokens=False,
            rewinds=True,
            grows_trees=False,
            heartbeat_s=None,
            following=set(),
        )

    def sample(self, segments: Sequence[Segment], *_: object) -> Logits:
        self.following.update(
            segment.slot for segment in segments if FOLLOWED in segment.tokens[max(0, LONG - segment.prefix) :]
        )
        return HostLogits(np.zeros((sum(segment.wanted for segment in segments), VOCABULARY), np.float32))

    def release(self, slot: int, rows: int) -> None:
        """Nothing is let go."""

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        """There is enough for all."""
        return None

    def close(self) -> None:
        """Nothing is held."""


def at_rest(member: ScheduledSession) -> bool:
    """Return whether it has read all of its text, and has nothing to run."""
    return member.session is not None and not member.session.behind and member.next is None


def found(member: ScheduledSession, engine: Engine) -> bool:
    """Return whether its tree has the repetition, or the model has run it: then it proposes other tokens."""
    assert member.session is not None
    return FOLLOWED in member.session.tree.root.children or member.session.slot in engine.following


@pytest.mark.parametrize("context", [LONG // 2, LONG + 1000], ids=["idle", "beside passes"])
async def test_texts_of_32000_random_tokens_stall_no_loop_and_repetitions_are_found(context: int) -> None:
    """Each ends as it begins. Where the text is longer than the model's context there is no pass to read beside."""
    lost: list[int] = []
    engine: Any = Engine(context)
    scheduler = DraftScheduler(
        engine, level_nodes=8, prefill_chunk=128, send=lambda *_: None, resync=lambda key: lost.append(key.number)
    )
    chance = random.Random(7)
    texts = [chance.choices(range(2**17), k=LONG - 3) for _ in range(SESSIONS)]
    terms = Contract(seed=1, max_tokens=99), Plan(version=1, depth=6, width=3, nodes=8), 400
    snapshots = []
    for text in texts:
        text[3] = FOLLOWED  # the first three
        tokens = (*text, *text[:3])
        known = settled_prefix(tokens)
        snapshots.append(MirrorSnapshot(tokens, extend(known.digest, tokens[known.length :]), *terms, known=known))
    async with no_stall():
        running = asyncio.create_task(scheduler.run())
        for number, snapshot in enumerate(snapshots):
            scheduler.opened(Attachment(f"{number}", "", 1, b"", number), snapshot)
        async with asyncio.timeout(10):
            while not running.done() and not all(map(at_rest, scheduler.members.values())):
                await asyncio.sleep(0.005)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert not lost
    assert all(found(member, engine) for member in scheduler.members.values())
