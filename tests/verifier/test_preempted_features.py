"""With too little memory for KV, heads draft and features are kept as with enough, for texts that are read again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ByteSize

from outrider.config import VerifierConfig
from outrider.core.session.contract import OFF, Plan
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu.attention.page_table import PAGE_ROWS, TEXT_SPARE, pages_of
from outrider.engine.heads.config import KINDS, Kind
from outrider.engine.heads.fusing import load_fusion
from outrider.engine.heads.loading import check_heads, load_speculator
from outrider.engine.heads.speculator import HeadRoot, KeptFeatures
from outrider.engine.interface.engine import SCRATCH, Engine
from outrider.engine.interface.settings import EngineSettings
from tests.e2e.tiny_models import CONTEXT, make_tiny
from tests.engine.ranked import ranked
from tests.engine.taught import features_of, greedy, random_heads, target_with_heads, taught_heads
from tests.verifier.proposers.test_head_drafts import PLAN, TEXT, Always, Cluster, commits_of
from tests.verifier.test_kv_memory import least_memory
from verifier_svc.commit_queue import StepCommit
from verifier_svc.feature_store import HeadFeatureFuser, SessionFeatures
from verifier_svc.proposers.head_proposer import SpeculatorProposer
from verifier_svc.server import load, make_feature_fuser, make_head_proposer
from verifier_svc.session import VerifierSession

SLOTS = 12
MOST = 80  # tokens of an answer
SHARED = 40  # tokens of a prompt that begins as others do


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=4, width=96)


@pytest.fixture(scope="module")
def text(target: Path) -> list[int]:
    """A greedy text of the target."""
    return greedy(target, TEXT, MOST)


def bound(target: Path) -> int:
    """Bytes for KV of one text, and of about three."""
    return least_memory(CpuEngine.load(target, EngineSettings(dtype="float32", slots=SLOTS, threads=1)))


def bounded(target: Path, heads: Path) -> Engine:
    features = check_heads(heads, target).features
    return CpuEngine.load(
        target, EngineSettings(dtype="float32", slots=SLOTS, threads=1, features=features, kv_memory=bound(target))
    )


def bounded_on_device(target: Path, heads: Path) -> Engine:
    whole = target_with_heads(target, heads, slots=SLOTS)
    assert whole.eagle is not None
    page = PAGE_ROWS * whole.kv.row_bytes + whole.eagle.page_bytes
    least = pages_of(whole.rows + SCRATCH) + TEXT_SPARE
    return target_with_heads(target, heads, slots=SLOTS, kv_memory=least * page)


Bounding = Callable[[Path, Path], Engine]


def preemptions(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """The sessions that were preempted, and how long their texts were at the first time."""
    return {
        record.args[0]: record.args[1]
        for record in reversed(caplog.records)
        if isinstance(record.args, tuple) and "no memory for the KV" in record.msg
    }


def sampled(number: int) -> bool:
    """Return whether that session is sampled: few are, because how long passes take decides who is preempted."""
    return number % 4 == 1


async def generated(
    cluster: Cluster, prompt: Sequence[int], plan: Plan
) -> tuple[list[VerifierSession], list[list[StepCommit]]]:
    """Sessions of which every fourth is sampled, one for each slot; those after the first one open when its text has
    been read. `plan`: of the first one.
    """
    sessions: list[VerifierSession] = []
    first: StepCommit | None = None
    for number in range(SLOTS):
        most = MOST + len(TEXT) - len(prompt)
        terms = {"text": prompt, "most": most, "temperature": float(sampled(number))}
        session = cluster.open(number, PLAN if number else plan, **terms)
        if session.heads is not None:
            session.heads.trial_gate = Always()
        sessions.append(session)
        first = first or await session.commits.get()
    assert first is not None
    commits: list[list[StepCommit]] = []
    for session in sessions:
        commits.append(await commits_of(session))
        cluster.loop.sessions.close(session)
    commits[0].insert(0, first)
    return sessions, commits


async def check(
    cluster: Cluster,
    target: Path,
    heads: Path,
    prompt: Sequence[int],
    caplog: pytest.LogCaptureFixture,
    plan: Plan = PLAN,
) -> None:
    """The texts are those without heads and with enough memory, and heads draft what they draft from true features."""
    async with Cluster(target, None, slots=SLOTS) as plain:
        expected = [session.tokens for session in (await generated(plain, prompt, OFF))[0]]
    speculator = cluster.speculator
    with caplog.at_level(logging.INFO):
        async with cluster:
            sessions, commits = await generated(cluster, prompt, plan)
    assert [session.tokens for session in sessions] == expected
    every = enumerate(zip(sessions, commits, strict=True))
    greedy_ones = {session.id: each for number, (session, each) in every if not sampled(number)}
    preempted = {name: length for name, length in preemptions(caplog).items() if name in greedy_ones}
    later = [
        commit.report.accepted
        for name, length in preempted.items()
        for commit in greedy_ones[name]
        if commit.position > length
    ]
    assert sum(later) >= max(20, len(later) / 2)
    again = load_speculator(heads, target, precise=True, slots=1, context=CONTEXT)
    features = features_of(target, check_heads(heads, target).features, expected[0])
    compared = 0
    for tokens, row in speculator.roots:
        if tokens == expected[0][: len(tokens)]:
            again.open_slot(0, None, 0)
            again.add_features(features, [KeptFeatures(0, 0, range(len(tokens) - 1), tokens)])
            (true,), _ = again.begin([HeadRoot(0, tokens)])
            assert true is not None
            assert np.abs(row - true.logits).max() < 0.01 * np.abs(true.logits).max()
            compared += 1
    assert compared > 50
    assert threading.main_thread() not in speculator.threads


@pytest.mark.parametrize("kind", KINDS)
async def test_heads_draft_after_a_preemption(
    kind: Kind, target: Path, text: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taught_heads(kind, target, tmp_path, text)
    engine = bounded(target, tmp_path)
    await check(Cluster(target, tmp_path, engine, slots=SLOTS), target, tmp_path, TEXT, caplog)


@pytest.mark.parametrize("bounding", [bounded, bounded_on_device])
@pytest.mark.parametrize(("kind", "plan"), [("eagle", PLAN), ("eagle-3", PLAN), ("eagle-3", OFF)])
async def test_heads_have_the_features_of_shared_pages(
    kind: Kind,
    plan: Plan,
    bounding: Bounding,
    target: Path,
    text: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All take the KV of most of their prompt from the session that was opened first, and some are preempted. Heads
    have read the text of that session, or have drafted nothing for it.
    """
    taught_heads(kind, target, tmp_path, text)
    engine = bounding(target, tmp_path)
    cluster = Cluster(target, tmp_path, engine, slots=SLOTS)
    await check(cluster, target, tmp_path, text[:SHARED], caplog, plan)


@pytest.mark.extended
async def test_two_ranks_with_heads_keep_to_the_bound(
    target: Path, text: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taught_heads("eagle-3", target, tmp_path, text)
    features, memory = check_heads(tmp_path, target).features, bound(target) // 2  # of each rank
    with ranked(2, target, features=features, slots=SLOTS, kv_memory=memory) as ranks, ranks.lead(target) as leader:
        await check(Cluster(target, tmp_path, leader, slots=SLOTS), target, tmp_path, text[:SHARED], caplog)


def test_a_verifier_with_heads_and_features_keeps_to_the_bound(target: Path, tmp_path: Path) -> None:
    random_heads("eagle", target, tmp_path)
    config = VerifierConfig(
        model=target, dtype="float32", slots=SLOTS, heads=tmp_path, features=tmp_path, kv_memory=ByteSize(bound(target))
    )
    engine, _ = load(config)
    assert engine.kv_bytes <= bound(target)
    assert engine.memory(0, 0, 1) is not None
    assert isinstance(make_head_proposer(config, engine), SpeculatorProposer)
    assert isinstance(make_feature_fuser(config, engine), HeadFeatureFuser)


class Fused:
    """A bounded verifier's loop that keeps features, and how many rows it has fused."""

    def __init__(self, target: Path, heads: Path) -> None:
        self.features = check_heads(heads, target).features
        self.fusion = load_fusion(heads, target, precise=True)
        self.rows = 0
        engine = bounded(target, heads)
        fuser = HeadFeatureFuser(replace(self.fusion, fuse=self._fuse), engine.hidden, slots=SLOTS, rows=engine.rows)
        self.cluster = Cluster(target, None, engine, slots=SLOTS, feature_fuser=fuser)
        self.loop = self.cluster.loop

    def _fuse(self, hidden: torch.Tensor) -> Any:
        self.rows += len(hidden)
        return self.fusion.fuse(hidden)

    async def step(self) -> list[VerifierSession]:
        return (await self.loop.step()).sessions

    def check(self, session: VerifierSession, target: Path) -> None:
        """What drafters are sent is what the target computes of the text."""
        assert isinstance(session.fused, SessionFeatures)
        known = session.fused.known
        sent = torch.frombuffer(bytearray(session.fused.rows(0, known)), dtype=torch.bfloat16).view(known, -1).float()
        fused = self.fusion.fuse(features_of(target, self.features, session.tokens))[:known]
        expected = torch.from_numpy(fused).view(torch.bfloat16).float()
        assert np.abs((sent - expected).numpy()).max() < 0.01 * float(expected.abs().max())


@pytest.mark.parametrize("prefix", [0, SHARED])
@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
async def test_features_of_a_preempted_session_are_kept_for_its_drafters(
    kind: Kind, prefix: int, target: Path, text: list[int], tmp_path: Path
) -> None:
    """A drafter that subscribes while the session waits or reads again is sent all of them at once."""
    random_heads(kind, target, tmp_path)
    fused = Fused(target, tmp_path)
    prompt = text[: prefix or len(TEXT)]
    sessions = [fused.cluster.open(0, text=prompt, most=MOST + len(TEXT) - len(prompt), temperature=0.0)]
    while sessions[0].unread > 1:
        await fused.step()
    for number in range(1, SLOTS):
        most = MOST + len(TEXT) - len(prompt)
        sessions.append(fused.cluster.open(number, text=prompt, most=most, temperature=float(number % 2)))
    copied = sum(session.kv_slot.cached for session in sessions)
    begun: set[VerifierSession] = set()
    waited = 0
    while not all(session.finished for session in sessions):
        begun |= {session for session in await fused.step() if session.features_known}
        assert all(session.features_known for session in begun)
        waited += sum(session.unread > 1 for session in begun)
        for session in sessions:
            if session.finished:
                fused.loop.sessions.close(session)
    assert fused.loop.choice.memory.preempted > 0
    assert waited > 20
    for session in sessions[:1] + sessions[-3:]:
        fused.check(session, target)
    assert fused.rows == sum(len(session.tokens) - 1 for session in sessions) - copied
    assert (copied > 0) == (prefix > 0)
    fused.loop.stop()
