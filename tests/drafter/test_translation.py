"""Two tokenizers spell the same text, however it comes; a drafter of one drafts for a target of the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from drafter_svc.translation import (
    BROKEN,
    CONTEXT,
    MAX_OPEN,
    OPEN,
    PIECE,
    Translation,
    text_after,
    tokens_after,
)
from drafter_svc.translator import Translator
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.committed_window import settled_prefix
from outrider.core.tree.delta import Delta
from outrider.core.tree.token_tree import TokenTree
from tests.drafter.other_tokenizer import MODELS, make_other
from tests.loops import no_stall

TARGET = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
HELD_OUT = Path(__file__).parents[2] / "examples" / "held_out.jsonl"
LONG = "\n".join(json.loads(line)["prompt"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = make_other(tmp_path_factory.mktemp("other") / "drafter")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


texts = st.text(alphabet="abcdef ()_:\n é🙂'", max_size=60) | st.integers(0, len(LONG) - 400).map(
    lambda start: LONG[start : start + 400]
)


@given(texts, st.lists(st.integers(1, 40), max_size=12))
def test_a_translated_text_is_equal_however_it_arrives(own: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens, translation, done = TARGET.encode(text).ids, Translation(TARGET, own), 0
    for cut in [*cuts, len(tokens)]:
        translation.extend(tokens[done : done + cut])
        done = min(len(tokens), done + cut)
        assert own.decode(translation.draft_tokens) == TARGET.decode(tokens[:done])


class Reference(Translation):
    """As it was: settles in one go, in time that grows with the square of what is new."""

    def extend(self, tokens: Sequence[int]) -> int:
        self._tokens.extend(tokens)
        while True:
            text = text_after(TARGET, self._tokens[: self._settled], self._tokens[self._settled :])
            before = self._draft_tokenizer.decode(self.draft_tokens[max(0, self.settled - CONTEXT) : self.settled])
            self.draft_tokens[self.settled :] = tokens_after(self._draft_tokenizer, before, text)
            if len(self._tokens) - self._settled <= OPEN or not self._settle():
                return 0


@settings(max_examples=50)
@given(st.integers(0, len(LONG) - 3000), st.lists(st.integers(1, 300), max_size=5))
def test_a_translation_equals_the_reference_and_reports_its_unchanged_prefix(
    own: Tokenizer, start: int, cuts: list[int]
) -> None:
    """What comes at once is translated as if it had come in pieces."""
    tokens = TARGET.encode(LONG[start : start + 3000]).ids
    translation, reference, done = Translation(TARGET, own), Reference(TARGET, own), 0
    for cut in [*cuts, len(tokens)]:
        part, before = tokens[done : done + cut], list(translation.draft_tokens)
        same = translation.extend(part)
        for first in range(0, len(part), PIECE):
            reference.extend(part[first : first + PIECE])
        done += len(part)
        assert translation.draft_tokens == reference.draft_tokens
        assert (translation.settled, translation.open_tokens) == (reference.settled, reference.open_tokens)
        assert translation.draft_tokens[:same] == before[:same]
        assert same >= min(len(before), translation.settled) or before[same] != translation.draft_tokens[same]


def test_the_time_of_a_long_text_is_in_proportion_to_its_length(own: Tokenizer) -> None:
    tokens = TARGET.encode(LONG).ids
    translation, longest, looked_at = Translation(TARGET, own), 0, Counter()
    for token in tokens[:500]:
        translation.extend([token])
        longest = max(longest, len(translation.open_tokens))
    assert longest <= 2 * OPEN
    for length in (1000, 4000):
        began = time.thread_time()
        whole = Translation(TARGET, own)
        whole.extend(tokens[:length])
        looked_at[length] = time.thread_time() - began
        assert own.decode(whole.draft_tokens) == TARGET.decode(tokens[:length])
    assert looked_at[4000] < 8 * looked_at[1000], looked_at  # of the square it would be 16 times as long


def test_bytes_that_are_no_text_are_not_looked_at_again_and_again(own: Tokenizer) -> None:
    alone = [token for token in range(256) if TARGET.decode([token]) == BROKEN]
    assert alone
    translation, longest = Translation(TARGET, own), 0
    for start in range(0, 1000, 20):
        translation.extend([alone[(start + place) % len(alone)] for place in range(20)])
        longest = max(longest, len(translation.open_tokens))
    assert longest <= MAX_OPEN


@given(st.integers(0, len(LONG) - 300), st.integers(1, 30))
def test_translated_proposals_spell_the_text_of_the_path(own: Tokenizer, start: int, count: int) -> None:
    translation = Translation(TARGET, own)
    translation.extend(TARGET.encode(LONG[start : start + 200]).ids)
    path = own.encode(LONG[start + 200 : start + 300]).ids[:count]
    proposed = translation.propose(path)
    text = text_after(own, translation.draft_tokens, path)
    assert TARGET.decode(proposed) == text or text.endswith("\N{REPLACEMENT CHARACTER}")


def test_tokens_after_a_text_equal_those_of_the_whole_text_at_a_boundary() -> None:
    whole = TARGET.encode("def add(self, other):\n    return self").ids
    for cut in range(1, len(whole)):
        before = TARGET.decode(whole[:cut])
        assert tokens_after(TARGET, before, TARGET.decode(whole)[len(before) :]) == whole[cut:]


class Loop:
    """Stands in for the scheduler: records the calls, and drafts the given tokens."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self.received: list[MirrorSnapshot | MirrorUpdate] = []
        self.tokens: list[int] = []
        self.next_id = 1
        self.closings = 0
        translator.serve(self)  # type: ignore[arg-type]

    def opened(self, key: Attachment, snapshot: MirrorSnapshot) -> None:
        self.received.append(snapshot)
        self.tokens = list(snapshot.tokens)

    def updated(self, key: Attachment, update: MirrorUpdate) -> None:
        self.received.append(update)
        assert update.position == len(self.tokens)
        self.tokens += update.tokens
        assert update.digest == extend(EMPTY, self.tokens)

    def closed(self, key: Attachment) -> None:
        self.tokens = []
        self.closings += 1

    def draft(self, key: Attachment, path: list[int]) -> None:
        parents = (0, *range(self.next_id, self.next_id + len(path) - 1))
        root = len(self.tokens) - 1, extend(EMPTY, self.tokens)
        delta = Delta(*root, self.next_id, parents, tuple(path), (-0.125,) * len(path))
        self.next_id += len(path)
        self.translator.on_delta(key, delta, 1, False)


def test_drafts_are_sent_in_the_targets_tokens_and_commits_arrive_in_the_drafters(own: Tokenizer) -> None:
    sent: list[Delta] = []
    lost: list[Attachment] = []
    translator = Translator(TARGET, own, send=lambda key, delta, version, done: sent.append(delta), resync=lost.append)
    loop, key = Loop(translator), Attachment("s", "", 1, b"")
    text = TARGET.encode(LONG[:600]).ids
    committed = text[:80]
    upstream = TokenTree(committed)
    plan = Plan(version=1, depth=8, width=4, nodes=16)
    contract = Contract(seed=1, max_tokens=99, banned_ids=(7,), stop_ids=(0,))
    translator.opened(key, MirrorSnapshot(tuple(committed), upstream.digest, contract, plan, 300))
    accepted = 0
    for _ in range(40):
        behind = TARGET.decode(text)[len(TARGET.decode(committed)) :]
        loop.draft(key, own.encode(behind).ids[:6])
        upstream.graft(1, sent[-1])
        upstream.check_integrity()
        commit, node = [], upstream.root
        while (child := node.children.get(text[len(committed) + len(commit)])) is not None:
            commit.append(child.token)
            node = child
        accepted += len(commit)
        commit.append(text[len(committed) + len(commit)])
        upstream.commit(commit)
        translator.updated(
            key, MirrorUpdate(len(committed), tuple(commit), upstream.digest, None, SentTerms(), 3000, ())
        )
        committed = committed + commit
        assert own.decode(loop.tokens) == TARGET.decode(committed)
        if len(committed) > len(text) - 20:
            break
    assert accepted > 40
    assert not lost
    first = loop.received[0]
    assert isinstance(first, MirrorSnapshot)
    assert (first.contract.banned_ids, first.contract.stop_ids, first.contract.rule) == ((), (), "target-match")
    translator.updated(key, MirrorUpdate(3, (), 0, None, SentTerms(), 1, ()))
    assert lost == [key]
    assert not translator.members


def prepared(own: Tokenizer) -> tuple[Translator, Loop, Attachment, list[Delta], list[Attachment]]:
    sent: list[Delta] = []
    lost: list[Attachment] = []
    translator = Translator(TARGET, own, send=lambda key, delta, version, done: sent.append(delta), resync=lost.append)
    return translator, Loop(translator), Attachment("s", "", 1, b""), sent, lost


def a_snapshot(tokens: Sequence[int]) -> MirrorSnapshot:
    plan = Plan(version=1, depth=8, width=4, nodes=16)
    known = settled_prefix(tokens)
    digest = extend(known.digest, tokens[known.length :])
    return MirrorSnapshot(tuple(tokens), digest, Contract(seed=1, max_tokens=99), plan, 300, known=known)


async def test_translating_32000_tokens_stalls_no_loop_and_keeps_later_updates_in_order(own: Tokenizer) -> None:
    translator, loop, key, sent, lost = prepared(own)
    text = (TARGET.encode(LONG).ids * 4)[:32_100]
    begin = a_snapshot(text[:32_000])
    async with no_stall():
        translator.opened(key, begin)
        assert not loop.received, "nothing is drafted before it is translated"
        for at in range(32_000, 32_100):
            update = MirrorUpdate(
                at, (text[at],), extend(begin.digest, text[32_000 : at + 1]), None, SentTerms(), 300, ()
            )
            translator.updated(key, update)
            await asyncio.sleep(0.002)
        async with asyncio.timeout(60):
            while not loop.received:
                await asyncio.sleep(0.01)
    assert not lost
    assert own.decode(loop.tokens) == TARGET.decode(text)
    loop.draft(key, own.encode(" the").ids)
    assert sent[-1].root_position == len(text) - 1


async def test_a_session_closed_or_restarted_during_its_translation_is_left_alone(own: Tokenizer) -> None:
    translator, loop, key, _, lost = prepared(own)
    text = TARGET.encode(LONG).ids[:4000]
    translator.opened(key, a_snapshot(text))
    await asyncio.sleep(0.01)
    translator.opened(key, a_snapshot(text[:3000]))
    async with asyncio.timeout(30):
        while not loop.received:
            await asyncio.sleep(0.01)
    assert own.decode(loop.tokens) == TARGET.decode(text[:3000])
    translator.opened(key, a_snapshot(text))
    await asyncio.sleep(0.01)
    translator.closed(key)
    await asyncio.sleep(0.3)
    assert not translator.members
    assert len(loop.received) == 1
    assert not lost


def test_a_draft_is_dropped_when_the_end_of_its_text_became_other_tokens(own: Tokenizer) -> None:
    """A pass was under way: what it brings is not of the text as it is now. Of two tokens of the poorer vocabulary the
    richer one makes one, so that here the ends change."""
    sent: list[Delta] = []
    translator = Translator(own, TARGET, send=lambda key, delta, *_: sent.append(delta), resync=lambda key: None)
    loop, key = Loop(translator), Attachment("s", "", 1, b"")
    text = own.encode(LONG[:900]).ids
    begin = a_snapshot(text[:100])
    translator.opened(key, begin)
    digest, changes = begin.digest, 0
    for at in range(100, len(text)):
        before = list(loop.tokens)
        digest = extend(digest, (text[at],))
        translator.updated(key, MirrorUpdate(at, (text[at],), digest, None, SentTerms(), 300, ()))
        if loop.tokens[: len(before)] != before:
            changes += 1
            after, loop.tokens = loop.tokens, before
            loop.draft(key, [before[0]])
            loop.tokens = after
    assert changes
    assert not sent
    loop.draft(key, TARGET.encode(" the").ids)
    assert len(sent) == 1


def test_an_exhausted_delta_goes_up_even_if_its_root_became_other_tokens(own: Tokenizer) -> None:
    sent: list[tuple[Delta, bool]] = []
    translator = Translator(TARGET, own, send=lambda key, delta, _, done: sent.append((delta, done)), resync=print)
    loop, key = Loop(translator), Attachment("s", "", 1, b"")
    translator.opened(key, a_snapshot(TARGET.encode(LONG[:200]).ids))
    drifted = Delta(len(loop.tokens) - 1, 12345, 1, (0,), (7,), (-0.125,))
    translator.on_delta(key, drifted, 1, False)
    assert not sent
    translator.on_delta(key, drifted, 1, True)
    ((delta, done),) = sent
    assert (delta.tokens, done) == ((), True)


class Proposing:
    """A session whose drafter goes on exactly as the target's text does."""

    def __init__(self, own: Tokenizer) -> None:
        self._sent: list[Delta] = []
        self._translator = Translator(TARGET, own, send=lambda key, delta, *_: self._sent.append(delta), resync=print)
        self._loop = Loop(self._translator)
        text = TARGET.encode(LONG[:600]).ids
        self.committed = text[:80]
        self._drafted = own.encode(TARGET.decode(text)[len(TARGET.decode(self.committed)) :]).ids[:6]

    def proposed(self, depth: int, **more: int) -> list[Delta]:
        """What goes up for a snapshot with a plan of that depth; `more`: further fields of it."""
        self._sent.clear()
        key, contract = Attachment("s", "", 1, b""), Contract(seed=1, max_tokens=99)
        digest, plan = extend(EMPTY, self.committed), Plan(version=1, depth=depth, width=4, nodes=16)
        self._translator.opened(key, MirrorSnapshot(tuple(self.committed), digest, contract, plan, 300, **more))
        self._loop.draft(key, self._drafted)
        self._translator.closed(key)
        return self._sent


def test_a_token_of_the_tokenizer_that_the_model_lacks_is_not_proposed(own: Tokenizer) -> None:
    case = Proposing(own)

    def proposed(vocabulary: int) -> list[int]:
        return [token for delta in case.proposed(depth=8, unpadded_vocabulary=vocabulary) for token in delta.tokens]

    every = proposed(4096)
    assert len(every) > 2
    assert proposed(max(every)) == every[: every.index(max(every))]


def test_a_path_that_ends_inside_a_character_proposes_nothing() -> None:
    translation = Translation(TARGET, TARGET)
    translation.extend(TARGET.encode("x = '").ids)
    smile = TARGET.encode("🙂").ids
    assert len(smile) > 1
    assert translation.propose(smile[:-1]) == []
    assert translation.propose(smile) == smile


def test_translated_nodes_keep_to_the_plans_depth(own: Tokenizer) -> None:
    case = Proposing(own)
    tree = TokenTree(case.committed)
    for delta in case.proposed(depth=2):
        tree.graft(1, delta)
    assert len([*tree.levels()]) == 2
