"""A drafter computes with the KV of the text that it drafts for, whatever is committed, begun anew or swapped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drafter_svc.scheduler import DraftScheduler
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta
from outrider.engine import executor
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import PAGE
from outrider.engine.interface.logits import HostLogits, Logits

VOCABULARY = 8
TERMS = Contract(seed=4, max_tokens=100), Plan(version=1, depth=3, width=3, nodes=12), 4096
KEY = Attachment("s", "", 1, b"", 1)
TEXT = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 1)


class Engine(SimpleNamespace):
    """A model whose KV are the tokens themselves: a row that is seen and is not what it should be is an error."""

    def __init__(self, texts: Callable[[int], Sequence[int]], seed: int = 1) -> None:
        """`texts`: what is committed in a slot."""
        super().__init__(
            slots=2,
            context=200,
            rows=300,
            unpadded_vocabulary=VOCABULARY,
            fed_width=0,
            samples_tokens=False,
            rewinds=True,
            grows_trees=False,
            heartbeat_s=None,
        )
        self.passes = 0
        self.may_pass = threading.Event()
        self.may_pass.set()
        self._texts = texts
        self._cells = np.full((self.slots, self.rows), -1)
        self._chance = np.random.default_rng(seed)

    def sample(self, segments: Sequence[Segment], *_: object) -> Logits:
        for it in segments:
            text, cells = self._texts(it.slot), self._cells[it.slot]
            assert cells[: it.prefix].tolist() == [*text[: it.prefix]]
            end = it.prefix + it.span
            cells[end - len(it.tokens) : end] = it.tokens
            mask = np.tri(it.span, dtype=bool) if it.mask is None else it.mask
            for seen, position in zip(mask, it.positions, strict=True):
                visible = cells[it.prefix : end][seen]
                assert it.prefix + len(visible) == position + 1  # the text, and the node's own path
                assert (visible >= 0).all()
        self.passes += 1
        assert self.may_pass.wait(10)
        wanted = sum(len(it.tokens) if it.wanted is None else it.wanted for it in segments)
        return HostLogits(self._chance.normal(0.0, 1.5, (wanted, VOCABULARY)).astype(np.float32))

    def move(self, slot: int, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self._cells[slot, target] = self._cells[slot, source].copy()

    def copy(self, source: int, target: int, rows: int) -> None:
        self._cells[target, :rows] = self._cells[source, :rows]

    def release(self, slot: int, rows: int) -> None:
        """Nothing is let go."""

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        """There is enough for all."""
        return None

    def close(self) -> None:
        """Nothing is held."""


class Bounded(Engine):
    """One with memory for a number of pages; what is released is lost."""

    def __init__(self, texts: Callable[[int], Sequence[int]], pages: int) -> None:
        super().__init__(texts)
        self._pages = pages

    def sample(self, segments: Sequence[Segment], *_: object) -> Logits:
        logits = super().sample(segments)
        assert self._taken.sum() <= self._pages
        return logits

    def release(self, slot: int, rows: int) -> None:
        self._cells[slot, -(-rows // PAGE) * PAGE :] = -1

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        own = self._taken[slot, first // PAGE : -(-end // PAGE)]
        return len(own) - int(own.sum()), self._pages - int(self._taken.sum())

    @property
    def _taken(self) -> NDArray[np.bool_]:
        """Pages that hold something: [slots, pages]."""
        whole = np.pad(self._cells, ((0, 0), (0, -self.rows % PAGE)), constant_values=-1)
        return (whole.reshape(self.slots, -1, PAGE) >= 0).any(-1)


class Rig:
    """A drafter's loop, and what it sends."""

    def __init__(self) -> None:
        self.sent: list[Delta] = []
        self.ended = 0  # how often it had nothing more to send
        self.lost = 0
        self.engine = self.make_engine()
        self.scheduler = DraftScheduler(
            self.engine,  # type: ignore[arg-type]
            level_nodes=4,
            prefill_chunk=64,
            send=self._receive,
            resync=self._resync,
        )
        self.tokens = [*TEXT]

    def make_engine(self) -> Any:
        return Engine(lambda slot: self.session(slot).tokens)

    def session(self, slot: int) -> Any:
        return next(
            member.session
            for member in self.scheduler.members.values()
            if member.session and member.kv_slot.slot == slot
        )

    def open(self, text: Sequence[int] = TEXT, key: Attachment = KEY) -> None:
        self.tokens = [*text]
        self.scheduler.opened(key, MirrorSnapshot(tuple(text), extend(EMPTY, text), *TERMS))

    def commit(self, tokens: Sequence[int], credit: int = 4096) -> None:
        update = MirrorUpdate(
            position=len(self.tokens),
            tokens=tuple(tokens),
            digest=extend(EMPTY, [*self.tokens, *tokens]),
            plan=None,
            terms=SentTerms(),
            credit=credit,
            dropped=(),
        )
        self.tokens += tokens
        self.scheduler.updated(KEY, update)

    async def rest(self) -> None:
        """Until it has sent all that it will before the next commit."""
        ended = self.ended
        async with asyncio.timeout(10):
            while self.ended == ended and not self.running.done():
                await asyncio.sleep(0.001)
        if self.running.done():
            await self.running

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for it."""
        async with asyncio.timeout(10):
            while not condition() and not self.running.done():
                await asyncio.sleep(0.001)
        if self.running.done():
            await self.running

    def cached(self, key: Attachment = KEY) -> int:
        """Rows of a session that hold KV; -1: it has not begun."""
        session = self.scheduler.members[key].session
        return -1 if session is None else session.cached

    def _receive(self, key: Attachment, delta: Delta, version: int, exhausted: bool) -> None:
        self.sent.append(delta)
        self.ended += exhausted

    def _resync(self, key: Attachment) -> None:
        self.lost += 1

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.running = asyncio.create_task(self.scheduler.run())
        try:
            yield
        finally:
            self.running.cancel()


async def test_kv_rows_hold_their_own_tokens_after_any_commit() -> None:
    rig, chance = Rig(), np.random.default_rng(2)
    with rig.at_work():
        rig.open()
        for _ in range(40):
            await rig.rest()
            node, path = rig.session(0).tree.root, []
            while node.children and chance.random() < 0.8:  # a path of the tree, of any kind
                children = [*node.children.values()]
                node = children[chance.integers(len(children))]
                path.append(node.token)
            rig.commit([*path, int(chance.integers(VOCABULARY))])
        await rig.rest()
    assert rig.session(0).tokens == rig.tokens
    assert rig.lost == 0
    with suppress(asyncio.CancelledError):
        await rig.running


async def test_another_model_reads_texts_again_and_finds_nothing_of_the_one_before() -> None:
    rig = Rig()
    other = Attachment("other", "", 1, b"", 2)
    with rig.at_work():
        rig.open(TEXT[::-1], key=other)
        await rig.rest()
        rig.scheduler.closed(other)  # its KV stays in a free slot
        rig.open()
        await rig.rest()
        rig.commit([*rig.session(rig.scheduler.members[KEY].kv_slot.slot).tree.root.children][:1])
        await rig.rest()
        engine = rig.make_engine()
        rig.scheduler.members.replace_engine(engine)
        rig.commit([7])
        await rig.rest()
        rig.scheduler.closed(KEY)
        rig.open(TEXT[::-1], key=other)
        await rig.rest()
    assert engine.passes > 1
    with suppress(asyncio.CancelledError):
        await rig.running


async def test_a_session_copies_a_shared_prefix_from_a_running_session() -> None:
    rig = Rig()
    keys = [Attachment("first", "a", 1, b"", 2), Attachment("second", "a", 1, b"", 3)]
    with rig.at_work():
        rig.open([*TEXT, 7, 7], key=keys[0])
        await rig.rest()
        rig.open([*TEXT, 2], key=keys[1])
        await rig.rest()
    assert rig.scheduler.members[keys[1]].kv_slot.cached == len(TEXT)
    with suppress(asyncio.CancelledError):
        await rig.running


async def test_a_draft_for_a_session_that_ended_during_the_pass_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun anew by then, over another text."""
    monkeypatch.setattr(executor, "INLINE_S", 0.0)  # the pass takes as long as the test wants
    rig = Rig()
    with rig.at_work():
        rig.open()
        await rig.rest()
        rig.engine.may_pass.clear()
        passes = rig.engine.passes
        rig.commit([7])
        async with asyncio.timeout(10):
            while rig.engine.passes == passes:
                await asyncio.sleep(0.001)
        rig.sent.clear()
        rig.scheduler.closed(KEY)
        rig.open(TEXT[:9])
        rig.engine.may_pass.set()
        await rig.rest()
    assert {(delta.root_position, delta.root_digest) for delta in rig.sent} == {(8, extend(EMPTY, TEXT[:9]))}
    with suppress(asyncio.CancelledError):
        await rig.running


async def test_a_drifted_mirror_is_not_drafted_for() -> None:
    rig = Rig()
    with rig.at_work():
        rig.scheduler.opened(KEY, MirrorSnapshot(TEXT, extend(EMPTY, TEXT) ^ 1, *TERMS))
        async with asyncio.timeout(10):
            while not rig.lost:
                await asyncio.sleep(0.001)
        assert rig.sent == []
        rig.open()
        await rig.rest()
        rig.tokens[0] += 1  # the upstream's text is another one
        rig.sent.clear()
        rig.commit([7])
        async with asyncio.timeout(10):
            while rig.lost == 1:
                await asyncio.sleep(0.001)
        assert rig.sent == []
    with suppress(asyncio.CancelledError):
        await rig.running


async def test_sessions_draft_one_after_the_other_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rig, "make_engine", lambda rig: Bounded(lambda slot: rig.session(slot).tokens, pages=18))
    rig, other = Rig(), Attachment("other", "", 2, b"", 1)
    first, second = [index % 7 for index in range(130)], [index % 5 for index in range(140)]
    rig.open(second, other)
    rig.open(first)  # the first of them reads where there is room for one alone, and for the other's tree
    with rig.at_work():
        await rig.rest()
        for token in range(40):
            rig.commit([token % 7])
        await asyncio.sleep(0.05)
        assert (rig.cached(other), rig.cached()) == (140, 0)
        rig.scheduler.closed(other)
        await rig.until(lambda: rig.cached() == len(rig.tokens) == 170)
    assert rig.lost == 0


async def test_the_last_sessions_kv_is_evicted_first_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "make_engine", lambda rig: Bounded(lambda slot: rig.session(slot).tokens, pages=14))
    rig, last = Rig(), Attachment("last", "", 2, b"", 1)
    rig.open([index % 7 for index in range(60)])
    rig.tokens, opened = [index % 5 for index in range(60)], rig.tokens
    rig.scheduler.opened(last, MirrorSnapshot(tuple(rig.tokens), extend(EMPTY, rig.tokens), *TERMS))
    rig.tokens = opened
    with rig.at_work():
        await rig.until(lambda: rig.ended == 2)
        assert rig.cached() == rig.cached(last) == 60
        for _ in range(30):
            rig.commit([1, 2, 3, 4])
            await rig.rest()
        assert rig.cached() == len(rig.tokens) == 180
        assert rig.scheduler.members.preempted > 0
        assert rig.cached(last) == 0
        rig.scheduler.closed(KEY)
        await rig.until(lambda: rig.cached(last) == 60)
    assert rig.lost == 0
