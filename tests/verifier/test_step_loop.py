"""The step loop keeps windows, ends, owners and tenants apart, however good the tree is that it verifies."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.drafters.contributions import DrafterContribution
from outrider.core.session.contract import OFF, Contract, Plan, PlanOverlap
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.delta import Delta
from outrider.engine.checkpoints.checkpoint import UNPADDED
from outrider.engine.interface.logits import HostLogits
from outrider.engine.loading import load_engine
from outrider.errors import Moved, Superseded
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1 import types_pb2
from verifier_svc.batch import StepBatch, StepVerdicts
from verifier_svc.commit_queue import StepCommit
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession
from verifier_svc.steps.step_choice import LEAST_CHUNK

MODELS = Path(__file__).parents[2] / "models"
VOCABULARY = 64  # ids that are drafted wrongly; the target has more
PLAN = Plan(version=1, depth=8, nodes=16, width=4, wait_us=0)
IN_ROUNDS = Plan(version=1, depth=8, nodes=16, width=4, wait_us=0, overlap=PlanOverlap.ROUNDS)
TEXT = (1, 2, 3, 1, 2, 3, 1, 5, 4, 2)
DRAFTER = 9
STOPS = (3, 26, 199)  # tokens that it often generates


class Free(CostModel):
    """A node more costs nothing, whatever steps take."""

    def __init__(self) -> None:
        super().__init__([(2, 1.0), (64, 1.0)])

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns nothing."""


@pytest.fixture
def loop() -> Iterator[StepScheduler]:
    """A verifier's loop, whose steps the test takes by itself. The smallest of the reference models is the target."""
    loop = loop_of(MODELS / "drafter")
    yield loop
    loop.stop()


def loop_of(folder: Path) -> StepScheduler:
    engine = load_engine(folder, dtype="float32", slots=3, threads=1)
    return StepScheduler(engine, Free(), prefill_chunk=64, max_nodes=64, publish=lambda *_: None)


def opened(
    loop: StepScheduler,
    name: str = "s",
    tokens: Sequence[int] = TEXT,
    *,
    epoch: int = 1,
    tenant: str = "",
    plan: Plan = PLAN,
    window: int = 256,
    most: int = 40,
    **terms: Any,
) -> VerifierSession:
    contract = Contract(seed=5, max_tokens=most, **terms)
    return loop.sessions.open(SessionStart(name, tenant, epoch, tokens, len(TEXT), contract, plan, window))


def selected(loop: StepScheduler, *sessions: VerifierSession) -> StepBatch:
    """The step that the loop would take if only these sessions were ready."""
    step, _ = loop.choice.select(loop.choice.base_works(sessions), time.monotonic())
    return step


async def stepped(loop: StepScheduler, *sessions: VerifierSession) -> None:
    """A step, for these sessions."""
    step = await loop.step()
    assert {*step.sessions} == {*sessions}


async def generated(loop: StepScheduler, session: VerifierSession) -> list[int]:
    """The session's tokens when its generation has ended."""
    while not session.finished:
        await stepped(loop, session)
    return session.tokens


async def plain(loop: StepScheduler, **terms: Any) -> list[int]:
    """The text without drafts."""
    session = opened(loop, "plain", plan=OFF, **terms)
    tokens = [*await generated(loop, session)]
    loop.sessions.close(session)
    loop.sessions.slots.clear()
    return tokens


def draft(session: VerifierSession, tokens: Sequence[int], sender: int = DRAFTER) -> None:
    """A drafter sends a chain below the session's root."""
    count, first = len(tokens), session.tree.ids.of(sender).last_id + 1
    parents = (0, *range(first, first + count - 1))
    root, digest = len(session.tokens) - 1, extend(EMPTY, session.tokens)
    session.tree.graft(sender, Delta(root, digest, first, parents, tuple(tokens), (-0.125,) * count))


def bush(session: VerifierSession, tokens: Sequence[int], chance: random.Random) -> None:
    """A drafter sends a tree: a path of these tokens, and wrong ones beside and below each, in any order."""
    nodes: list[tuple[int, int]] = []  # (index of the parent, token); -1: the root
    right = wrong = -1
    for token in tokens:
        others = chance.sample([other for other in range(VOCABULARY) if other != token], 2)
        level = [(right, token), *((right, other) for other in others)]
        if wrong >= 0:
            level.append((wrong, chance.randrange(VOCABULARY)))
        chance.shuffle(level)
        first = len(nodes)
        nodes += level
        right, wrong = first + level.index((right, token)), first + level.index((right, others[0]))
    first_id = session.tree.ids.of(DRAFTER).last_id + 1
    session.tree.graft(
        DRAFTER,
        Delta(
            len(session.tokens) - 1,
            extend(EMPTY, session.tokens),
            first_id,
            tuple(parent + first_id if parent >= 0 else 0 for parent, _ in nodes),
            tuple(token for _, token in nodes),
            tuple(-chance.choice((0.125, 0.25, 0.5)) for _ in nodes),
        ),
    )


def commits(session: VerifierSession) -> list[StepCommit | None]:
    return [session.commits.get_nowait() for _ in range(session.commits.qsize())]


async def test_any_tree_keeps_the_targets_text_and_kv(loop: StepScheduler) -> None:
    terms: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ]
    texts = [await plain(loop, **each) for each in terms]
    chance = random.Random(3)
    sessions = [opened(loop, str(number), **each) for number, each in enumerate(terms)]
    accepted = 0
    await stepped(loop, *sessions)  # reads the prompts
    while running := [session for session in sessions if not session.finished]:
        for session in running:
            place = len(session.tokens)
            right = texts[sessions.index(session)][place : place + chance.randrange(5)]
            bush(session, [*right, chance.randrange(VOCABULARY)], chance)
        await stepped(loop, *running)
    for session, text in zip(sessions, texts, strict=True):
        assert session.tokens == text
        accepted += sum(commit.report.accepted for commit in commits(session) if commit is not None)
        loop.sessions.close(session)
    assert accepted > 40
    turns = []
    for number, (text, each) in enumerate(zip(texts, terms, strict=True)):  # they go on from the KV that was kept
        turn = opened(loop, str(number), [*text, 4, 5], most=60, **each)
        assert turn.kv_slot == (sessions[number].kv_slot.slot, len(text) - 1, None)
        turns.append(await generated(loop, turn))
        loop.sessions.close(turn)
    loop.sessions.slots.clear()
    for turn, text, each in zip(turns, texts, terms, strict=True):
        cold = opened(loop, "cold", [*text, 4, 5], most=60, **each)
        assert await generated(loop, cold) == turn
        loop.sessions.close(cold)
        loop.sessions.slots.clear()


@pytest.mark.parametrize("plan", [PLAN, IN_ROUNDS], ids=["chosen", "whole"])
async def test_a_session_commits_at_most_the_window_beyond_the_durable_position(
    loop: StepScheduler, plan: Plan
) -> None:
    text = await plain(loop)
    session = opened(loop, window=5, plan=plan)
    await stepped(loop, session)  # reads the prompt
    draft(session, text[len(TEXT) + 1 : len(TEXT) + 9])
    await stepped(loop, session)
    assert session.tokens == text[: len(TEXT) + 5]
    assert not session.ready
    session.commits.durable += 2
    assert session.ready
    await stepped(loop, session)
    assert session.tokens == text[: len(TEXT) + 7]
    assert not session.ready


async def test_no_token_follows_a_stop_id_even_if_it_was_drafted_correctly(loop: StepScheduler) -> None:
    text = await plain(loop)
    answer = text[len(TEXT) :]
    behind = next(place for place in range(2, 7) if answer[place] not in answer[:place])
    session = opened(loop, stop_ids=(answer[behind],))
    await stepped(loop, session)  # reads the prompt
    draft(session, answer[1:9])
    await stepped(loop, session)
    assert session.finished
    assert session.tokens == text[: len(TEXT) + behind + 1]


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"temperature": 0.7, "min_tokens": 25, "stop_ids": STOPS},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=["noise", "stops", "penalties"],
)
@pytest.mark.parametrize("count", [1, 7, 24])
async def test_a_generation_that_moves_commits_the_tokens_of_one_that_stays(
    loop: StepScheduler, terms: dict[str, Any], count: int
) -> None:
    text = await plain(loop, **terms)
    assert len(text) > len(TEXT) + count
    session = opened(loop, tokens=text[: len(TEXT) + count], epoch=2, **terms)
    await stepped(loop, session)  # reads what was committed
    draft(session, text[len(session.tokens) : len(session.tokens) + 4])
    assert await generated(loop, session) == text


async def test_an_epoch_that_is_not_higher_is_refused_and_a_higher_one_fences(loop: StepScheduler) -> None:
    first = opened(loop, epoch=2)
    await stepped(loop, first)
    for epoch in (1, 2):
        with pytest.raises(Superseded):
            opened(loop, tokens=first.tokens, epoch=epoch)
    assert loop.sessions == {"s": first}
    second = opened(loop, tokens=first.tokens, epoch=3)
    assert (first.finished, first.commits.fenced, first.commits.moved) == (True, True, False)
    assert commits(first)[-1] is None
    assert second.kv_slot == (first.kv_slot.slot, len(first.tokens) - 1, None)
    assert loop.sessions == {"s": second}


async def test_a_session_closed_during_a_pass_receives_no_tokens_of_it(loop: StepScheduler) -> None:
    gone, other = opened(loop, "gone"), opened(loop, "other")
    step = asyncio.create_task(loop.step())
    while not loop.progress.running:
        await asyncio.sleep(0)
    loop.sessions.close(gone)
    await step
    assert gone.tokens == [*TEXT]
    assert commits(gone) == [None]
    assert len(other.tokens) == len(TEXT) + 1


async def test_commits_are_sent_before_anything_is_learned_of_their_step(
    loop: StepScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, order = opened(loop, most=3), list[str]()
    monkeypatch.setattr(loop.learning.metrics, "record_pass", lambda *_: order.append("learned"))
    running = asyncio.create_task(loop.run())
    while (commit := await session.commits.get()) is not None:
        order.append("sent")
        session.commits.acknowledge(commit.position + 1)
        if commit.last:
            loop.sessions.close(session)
    while order[-1] == "sent":
        await asyncio.sleep(0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert order == ["sent", "learned"] * 3


async def test_only_a_new_drafter_triggers_another_trial(loop: StepScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    reconsidered: list[bool] = []
    monkeypatch.setattr(loop.learning.steering.governor, "reconsider", lambda: reconsidered.append(True))
    for drafter in ("one", "one", "other", "one"):
        loop.on_drafter_connected(drafter)
    assert len(reconsidered) == 2


async def test_a_draining_verifier_takes_no_session_and_sends_moved_to_all(loop: StepScheduler) -> None:
    session = opened(loop)
    left: list[bool] = []
    loop.sessions.begin_drain(lambda: left.append(session.commits.moved))
    with pytest.raises(Moved):
        opened(loop, "late")
    with pytest.raises(Moved):
        await loop.sessions.prefill(TEXT, "")
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(5):
        while not left:
            await asyncio.sleep(0.001)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert left[0]
    assert session.finished
    assert commits(session)[-1] is None


async def test_prefilled_rows_belong_to_their_tenant_alone(loop: StepScheduler) -> None:
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(5):
        assert await loop.sessions.prefill(TEXT, "one") == len(TEXT) - 1
    assert opened(loop, "b", tenant="other").kv_slot.cached == 0
    assert opened(loop, "c", tenant="").kv_slot.cached == 0
    assert opened(loop, "a", tenant="one").kv_slot.cached == len(TEXT) - 1
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_drafter_is_credited_for_the_tokens_that_it_alone_drafted(loop: StepScheduler) -> None:
    text = await plain(loop)
    answer = text[len(TEXT) :]
    session = opened(loop)
    await stepped(loop, session)  # reads the prompt
    for name, count in (("long", 3), ("short", 1)):
        stream = UpstreamStream(name, types_pb2.Heartbeat)
        subscription = session.subscribe(stream, 1, Calibration())
        draft(session, answer[1 : 1 + count], subscription.sender)
    await stepped(loop, session)
    _, commit = commits(session)
    assert commit is not None
    assert commit.contributions == (DrafterContribution("long", 3, 3, 2), DrafterContribution("short", 1, 1, 0))


@pytest.mark.parametrize("rule", ["speculative-sampling", "target-match"])
async def test_each_owner_of_a_session_has_draws_of_its_own(loop: StepScheduler, rule: str) -> None:
    """Else a drafter that is fenced could compute what will be accepted."""
    draws = []
    for epoch in (1, 2):
        session = opened(loop, epoch=epoch, rule=rule)
        verdicts = StepVerdicts(selected(loop, session).works[0], HostLogits.__new__(HostLogits), 0)
        draws.append(verdicts.random_source().pick(np.ones(2**16)))
    assert draws[0] != draws[1]


async def test_ids_outside_the_unpadded_vocabulary_are_not_generated(loop: StepScheduler, tmp_path: Path) -> None:
    """A family pads its vocabulary; here the padding would be generated if that were possible."""
    text = await plain(loop)
    limit = max(text[len(TEXT) :])
    shutil.copytree(MODELS / "drafter", tmp_path / "padded")
    config = json.loads((tmp_path / "padded" / "config.json").read_text())
    (tmp_path / "padded" / "config.json").write_text(json.dumps({**config, UNPADDED: limit}))
    padded = loop_of(tmp_path / "padded")
    session = opened(padded)
    await stepped(padded, session)
    draft(session, text[len(session.tokens) : len(session.tokens) + 4])
    assert max((await generated(padded, session))[len(TEXT) :]) < limit
    padded.stop()


async def test_a_session_copies_the_shared_prompt_of_a_running_session(loop: StepScheduler) -> None:
    random = np.random.default_rng(4)
    common = random.integers(1, 4000, 50).tolist()
    texts = [[*common, 7, 8, 9], [*common, 5]]
    alone = []
    for number, text in enumerate(texts):
        session = opened(loop, f"alone {number}", text, plan=OFF, most=100)
        alone.append([*await generated(loop, session)])
        loop.sessions.close(session)
        loop.sessions.slots.clear()
    first = opened(loop, "first", texts[0], plan=OFF, most=100)
    while len(first.tokens) < len(texts[0]) + 3:
        await stepped(loop, first)
    second = opened(loop, "second", texts[1], plan=OFF, most=100)
    assert second.cached == len(common)
    other = opened(loop, "other", texts[1], tenant="another", plan=OFF, most=100)
    assert other.cached == 0
    while not (first.finished and second.finished and other.finished):
        await stepped(loop, *(it for it in (first, second, other) if not it.finished))
    assert [first.tokens, second.tokens, other.tokens] == [alone[0], alone[1], alone[1]]


async def test_a_step_reads_less_of_a_long_prompt_where_another_tenant_decodes(loop: StepScheduler) -> None:
    loop.learning.cost = CostModel([(1, 0.01), (100, 1.0)])
    decoding = opened(loop, "decoding", tenant="one")
    await stepped(loop, decoding)
    long = opened(loop, "long", TEXT * 20, tenant="another")
    alone, beside = selected(loop, long), selected(loop, decoding, long)
    assert (alone.prompt_tokens, beside.prompt_tokens) == (64, LEAST_CHUNK)
