"""Two tokenizers say the same text, however it comes; and a drafter of one drafts for a target of the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from drafter_svc.replica import Snapshot, Update
from drafter_svc.translation import OPEN, Translation, text_after, tokens_after
from drafter_svc.translator import Translator
from drafter_svc.upstream import Attachment
from outrider.core.contract import Contract, Plan
from outrider.core.digest import EMPTY, extend
from outrider.core.tree import Delta, TokenTree
from tests.drafter.other_tokenizer import MODELS, make_other

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


@settings(deadline=None)
@given(texts, st.lists(st.integers(1, 40), max_size=12))
def test_the_text_is_the_same_in_both_vocabularies_however_it_comes(own: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens, translation, done = TARGET.encode(text).ids, Translation(TARGET, own), 0
    for cut in [*cuts, len(tokens)]:
        translation.extend(tokens[done : done + cut])
        done = min(len(tokens), done + cut)
        assert own.decode(translation.own_tokens) == TARGET.decode(tokens[:done])


def test_a_long_text_is_translated_in_bounded_time_a_token(own: Tokenizer) -> None:
    tokens = TARGET.encode(LONG).ids
    translation, longest = Translation(TARGET, own), 0
    for token in tokens[:3000]:
        translation.extend([token])
        longest = max(longest, len(translation._tokens) - translation._settled)
    assert own.decode(translation.own_tokens) == TARGET.decode(tokens[:3000])
    assert longest <= 2 * OPEN


@settings(deadline=None)
@given(st.integers(0, len(LONG) - 300), st.integers(1, 30))
def test_what_is_proposed_says_the_path_s_text(own: Tokenizer, start: int, count: int) -> None:
    translation = Translation(TARGET, own)
    translation.extend(TARGET.encode(LONG[start : start + 200]).ids)
    path = own.encode(LONG[start + 200 : start + 300]).ids[:count]
    proposed = translation.propose(path)
    text = text_after(own, translation.own_tokens, path)
    assert TARGET.decode(proposed) == text or text.endswith("\N{REPLACEMENT CHARACTER}")


def test_tokens_behind_a_text_are_those_of_the_whole_where_it_has_a_boundary() -> None:
    whole = TARGET.encode("def add(self, other):\n    return self").ids
    for cut in range(1, len(whole)):
        before = TARGET.decode(whole[:cut])
        assert tokens_after(TARGET, before, TARGET.decode(whole)[len(before) :]) == whole[cut:]


class Loop:
    """Stands where the grower does: notes what it is told, and drafts what it is bidden to."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self.told: list[Snapshot | Update] = []
        self.tokens: list[int] = []
        self.next_id = 1
        translator.serve(self)  # type: ignore[arg-type]

    def opened(self, key: Attachment, snapshot: Snapshot) -> None:
        self.told.append(snapshot)
        self.tokens = list(snapshot.tokens)

    def updated(self, key: Attachment, update: Update) -> None:
        self.told.append(update)
        assert update.position == len(self.tokens)
        self.tokens += update.tokens
        assert update.digest == extend(EMPTY, self.tokens)

    def closed(self, key: Attachment) -> None:
        self.tokens = []

    def draft(self, key: Attachment, path: list[int]) -> None:
        parents = (0, *range(self.next_id, self.next_id + len(path) - 1))
        root = len(self.tokens) - 1, extend(EMPTY, self.tokens)
        delta = Delta(*root, self.next_id, parents, tuple(path), (-0.125,) * len(path))
        self.next_id += len(path)
        self.translator.take(key, delta, 1, False)


def test_drafts_go_up_in_the_target_s_tokens_and_commits_come_down_in_the_drafter_s(own: Tokenizer) -> None:
    sent: list[Delta] = []
    lost: list[Attachment] = []
    translator = Translator(TARGET, own, send=lambda key, delta, version, done: sent.append(delta), resync=lost.append)
    loop, key = Loop(translator), Attachment("s", "", 1, b"")
    text = TARGET.encode(LONG[:600]).ids
    committed = text[:80]
    upstream = TokenTree(committed)
    plan = Plan(version=1, depth=8, width=4, nodes=16)
    contract = Contract(seed=1, max_tokens=99, banned_ids=(7,), stop_ids=(0,))
    translator.opened(key, Snapshot(tuple(committed), upstream.digest, contract, plan, 300))
    accepted = 0
    for _ in range(40):
        behind = TARGET.decode(text)[len(TARGET.decode(committed)) :]
        loop.draft(key, own.encode(behind).ids[:6])
        upstream.graft(1, sent[-1])
        upstream.check_integrity()
        said, node = [], upstream.root
        while (child := node.children.get(text[len(committed) + len(said)])) is not None:
            said.append(child.token)
            node = child
        accepted += len(said)
        said.append(text[len(committed) + len(said)])
        upstream.commit(said)
        translator.updated(key, Update(len(committed), tuple(said), upstream.digest, None, 0.0, 0.0, False, 3000, ()))
        committed = committed + said
        assert own.decode(loop.tokens) == TARGET.decode(committed)
        if len(committed) > len(text) - 20:
            break
    assert accepted > 40
    assert not lost
    first = loop.told[0]
    assert isinstance(first, Snapshot)
    assert (first.contract.banned_ids, first.contract.stop_ids, first.contract.rule) == ((), (), "target-match")
    translator.updated(key, Update(3, (), 0, None, 0.0, 0.0, False, 1, ()))
    assert lost == [key]
    assert not translator.members
