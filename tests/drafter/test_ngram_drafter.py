"""A drafter without a model keeps its copies in step, and never lets a long text hold up a short one."""

import asyncio
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from drafter_svc.ngram_drafter import CHUNK, NgramScheduler
from drafter_svc.sessions.mirror import MAX_QUEUED
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.proposers.lookup import Lookups
from outrider.core.sampling.noise import gumbel_row
from outrider.core.session.contract import Contract, Grammar, Plan, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta
from outrider.core.tree.token_tree import TokenTree
from outrider.grammar.compiler import GrammarCompiler

PLAN = Plan(version=1, depth=6, width=2, nodes=6)
TEXT = [1, 2, 3, 4, 5, 6, 7, 8] * 3


class Upstream:
    """Both ends in one place: what the proposer sends is grafted at once."""

    def __init__(self, *, slots: int = 4, grammars: GrammarCompiler | None = None) -> None:
        self.sent: list[tuple[Attachment, Delta, bool]] = []
        self.lost: list[Attachment] = []
        self.scheduler = NgramScheduler(
            Lookups("suffix", None),
            slots=slots,
            send=lambda key, delta, version, exhausted: self.sent.append((key, delta, exhausted)),
            resync=self.lost.append,
            grammars=grammars,
        )

    def snapshot(self, tokens: list[int], **changes: object) -> MirrorSnapshot:
        fields: dict[str, object] = {
            "tokens": tuple(tokens),
            "digest": extend(EMPTY, tokens),
            "contract": Contract(seed=1, max_tokens=99, temperature=0.0),
            "plan": PLAN,
            "credit": 100,
        }
        return MirrorSnapshot(**(fields | changes))  # type: ignore[arg-type]

    async def settle(self) -> None:
        running = asyncio.create_task(self.scheduler.run())
        for _ in range(50):
            await asyncio.sleep(0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def key(name: str = "s", tenant: str = "") -> Attachment:
    return Attachment(name, tenant, 1, b"")


def update(whole: list[int], new: int, **changes: object) -> MirrorUpdate:
    fields: dict[str, object] = {
        "position": len(whole) - new,
        "tokens": tuple(whole[len(whole) - new :]),
        "digest": extend(EMPTY, whole),
        "plan": None,
        "terms": SentTerms(),
        "credit": 100,
        "dropped": (),
    }
    return MirrorUpdate(**(fields | changes))  # type: ignore[arg-type]


async def test_the_ngram_drafter_sends_a_continuation_and_extends_it_with_every_commit() -> None:
    upstream, session = Upstream(), key()
    upstream.scheduler.opened(session, upstream.snapshot(TEXT))
    await upstream.settle()
    tree = TokenTree(TEXT)
    (_, delta, exhausted), *_ = upstream.sent
    assert exhausted
    assert delta.tokens == (1, 2, 3, 4, 5, 6)
    tree.graft(1, delta)
    tree.commit([1, 2])
    upstream.scheduler.updated(session, update([*TEXT, 1, 2], 2))
    await upstream.settle()
    delta = upstream.sent[-1][1]
    assert delta.tokens == (7, 8)  # behind what is there already
    assert tree.graft(1, delta).dropped == []
    tree.commit([9])
    upstream.scheduler.updated(session, update([*TEXT, 1, 2, 9], 1))
    await upstream.settle()
    assert upstream.sent[-1][1].tokens == ()
    tree.commit([1])
    upstream.scheduler.updated(session, update([*TEXT, 1, 2, 9, 1], 1))
    await upstream.settle()
    delta = upstream.sent[-1][1]
    assert delta.root_digest == tree.digest
    assert delta.tokens[0] == 2
    tree.graft(1, delta)
    tree.check_integrity()
    assert not upstream.lost


async def test_a_token_forbidden_by_the_grammar_is_not_proposed() -> None:
    folder = Path(__file__).parents[2] / "models" / "target"
    tokenizer, grammars = Tokenizer.from_file(str(folder / "tokenizer.json")), GrammarCompiler(folder, 4096, [0])
    prompt = tokenizer.encode("def one(self):\n    return 1\n\ndef one(self").ids
    wide, narrow = Grammar("regex", r"[^$]*"), Grammar("regex", r"\)[^$]{1,3}[^r]*")
    for grammar in (wide, narrow):
        grammars.start(grammar)  # it is compiled before the session
    upstream = Upstream(grammars=grammars)
    answers = {}
    for name, grammar in (("free", None), ("wide", wide), ("narrow", narrow)):
        contract = Contract(seed=1, max_tokens=99, temperature=0.0, grammar=grammar)
        upstream.scheduler.opened(key(name), upstream.snapshot(prompt, contract=contract, answer_position=len(prompt)))
        await upstream.settle()
        answers[name] = upstream.sent[-1][1].tokens
    assert answers["free"] == answers["wide"]
    text = [tokenizer.decode(answers[name]) for name in ("free", "narrow")]
    assert "return" in text[0]
    assert 0 < len(text[1]) < len(text[0])
    assert text[0].startswith(text[1])
    assert "r" not in text[1]
    upstream.scheduler.updated(key("narrow"), update([*prompt, *answers["narrow"]], len(answers["narrow"])))
    await upstream.settle()
    assert "r" not in tokenizer.decode(upstream.sent[-1][1].tokens)


async def test_the_ngram_drafter_rests_at_a_min_path_score_of_1_or_no_depth() -> None:
    upstream = Upstream()
    upstream.scheduler.opened(key("a"), upstream.snapshot(TEXT, terms=SentTerms(1.0)))
    upstream.scheduler.opened(key("b"), upstream.snapshot(TEXT, plan=Plan(version=1, depth=0)))
    await upstream.settle()
    assert all(member.read == 0 for member in upstream.scheduler.members.values())
    assert all(delta.tokens == () for _, delta, _ in upstream.sent)


async def test_credit_and_min_path_score_bound_the_drafted_nodes() -> None:
    upstream = Upstream()
    upstream.scheduler.opened(key("a"), upstream.snapshot(TEXT, credit=2))
    upstream.scheduler.opened(key("b"), upstream.snapshot(TEXT, terms=SentTerms(0.9999)))
    upstream.scheduler.opened(key("c"), upstream.snapshot(TEXT, contract=Contract(seed=1, max_tokens=9, rule=DRAWN)))
    await upstream.settle()
    assert [(name.session_id, len(delta.tokens)) for name, delta, _ in upstream.sent] == [("a", 2), ("b", 0), ("c", 0)]


async def test_above_temperature_0_the_shared_noise_names_tokens_where_nothing_was_found() -> None:
    upstream, text = Upstream(), [*range(1, 30)]
    for heat in (0.0, 1.0):
        contract = Contract(seed=1, max_tokens=99, temperature=heat)
        upstream.scheduler.opened(key(str(heat)), upstream.snapshot(text, contract=contract))
    await upstream.settle()
    assert [len(delta.tokens) for _, delta, _ in upstream.sent] == [0, PLAN.width]
    noise = gumbel_row(1, 0, len(text), 30)[1:]
    assert set(upstream.sent[1][1].tokens) == {1 + token for token in np.argsort(-noise)[: PLAN.width].tolist()}


DRAWN = "recursive-rejection"


async def test_a_copy_that_drifted_is_given_up_for_a_snapshot() -> None:
    upstream, session = Upstream(), key()
    upstream.scheduler.opened(session, upstream.snapshot(TEXT))
    upstream.scheduler.updated(session, update([*TEXT, 1, 2], 1))  # one was lost on the way
    await upstream.settle()
    assert upstream.lost == [session]
    upstream.scheduler.updated(session, update([*TEXT, 1, 2, 3], 1))
    upstream.scheduler.opened(session, upstream.snapshot([*TEXT, 1, 2, 3]))
    await upstream.settle()
    assert upstream.sent[-1][1].tokens[0] == 4


async def test_a_flood_of_updates_is_bounded_and_ends_in_a_new_snapshot() -> None:
    upstream, session = Upstream(), key()
    upstream.scheduler.opened(session, upstream.snapshot(TEXT))
    for _ in range(3 * MAX_QUEUED):
        upstream.scheduler.updated(session, update(TEXT, 0))
        assert len(upstream.scheduler.members[session].inbox) <= MAX_QUEUED
    assert len(upstream.lost) == 2
    upstream.scheduler.opened(session, upstream.snapshot(TEXT))
    await upstream.settle()
    assert upstream.sent


async def test_a_long_prompt_is_read_in_parts_between_other_sessions() -> None:
    upstream = Upstream()
    upstream.scheduler.opened(key("long"), upstream.snapshot([*range(4 * CHUNK)] * 2))
    upstream.scheduler.opened(key("short"), upstream.snapshot(TEXT))
    await upstream.settle()
    assert [name.session_id for name, _, _ in upstream.sent] == ["short", "long"]
    assert upstream.sent[1][1].tokens == (0, 1, 2, 3, 4, 5)


async def test_sessions_beyond_the_slots_are_skipped_and_an_ended_answer_stays_its_tenants() -> None:
    upstream, first = Upstream(slots=1), key("a", "t")
    upstream.scheduler.opened(first, upstream.snapshot([1, 2, 40, 41, 42, 43, 44], answer_position=2))
    upstream.scheduler.opened(key("b", "t"), upstream.snapshot(TEXT))
    await upstream.settle()
    assert list(upstream.scheduler.members) == [first]
    upstream.scheduler.closed(first)
    for tenant, expected in (("t", (42, 43)), ("u", ())):
        other = key(tenant, tenant)
        upstream.scheduler.opened(other, upstream.snapshot([9, 40, 41]))
        await upstream.settle()
        assert upstream.sent[-1][1].tokens[:2] == expected
        upstream.scheduler.closed(other)


@pytest.mark.parametrize("dropped", [(1,), (2,)])
async def test_a_node_dropped_by_the_upstream_is_no_longer_proposed(dropped: tuple[int, ...]) -> None:
    upstream, session = Upstream(), key()
    upstream.scheduler.opened(session, upstream.snapshot(TEXT))
    await upstream.settle()
    upstream.scheduler.updated(session, update(TEXT, 0, dropped=dropped))
    await upstream.settle()
    again = upstream.sent[-1][1]
    assert again.first_id == 7
    assert again.tokens == (1, 2, 3, 4, 5, 6)[dropped[0] - 1 :]


async def test_an_answer_of_a_larger_vocabulary_is_cut_for_a_smaller_target() -> None:
    upstream, first = Upstream(), key("a", "t")
    upstream.scheduler.opened(
        first, upstream.snapshot([1, 2, 40, 41, 42, 99, 44, 45], answer_position=2, unpadded_vocabulary=100)
    )
    await upstream.settle()
    upstream.scheduler.closed(first)
    for vocabulary, expected in ((100, (42, 99, 44, 45)), (99, (42,))):
        other = key(str(vocabulary), "t")
        upstream.scheduler.opened(other, upstream.snapshot([9, 40, 41], unpadded_vocabulary=vocabulary))
        await upstream.settle()
        assert upstream.sent[-1][1].tokens == expected
        upstream.scheduler.closed(other)
