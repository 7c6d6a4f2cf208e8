"""With heads on the target a verifier commits what it commits without; good heads are accepted, bad ones let rest."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.config import VerifierConfig
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.trial_gate import GATE, TrialGate
from outrider.core.session.contract import OFF, Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.delta import Delta
from outrider.engine.growth import GrownLevel
from outrider.engine.heads.config import KINDS, Kind
from outrider.engine.heads.loading import check_heads, load_speculator
from outrider.engine.heads.speculator import FloatRows, HeadNodes, HeadRoot, Speculator
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import LogitsRow
from outrider.engine.loading import load_engine
from outrider.errors import ConfigError
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1.types_pb2 import Heartbeat
from tests.e2e.tiny_models import CONTEXT, VOCABULARY, make_tiny
from tests.engine.ranked import ranked
from tests.engine.small_checkpoints import MODELS, pad_vocabulary
from tests.engine.taught import random_heads, target_with_heads, taught_heads
from verifier_svc.commit_queue import StepCommit
from verifier_svc.proposers.head_proposer import HeadProposer, SpeculatorProposer
from verifier_svc.scheduler import StepScheduler
from verifier_svc.server import load, make_head_proposer
from verifier_svc.session import SessionStart, VerifierSession

PLAN = Plan(version=1, depth=8, nodes=16, width=4, wait_us=0)
FREE = CostModel([(2, 1000.0), (64, 1000.1)])  # a step takes so long that levels cost nothing beside it
TEXT = (1, 2, 3, 1, 2, 3, 1, 5)
TERMS: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "presence_penalty": 0.5, "min_tokens": 20, "stop_ids": (3,)},
    {"temperature": 0.0, "rule": "target-match"},
)


class Always(TrialGate):
    """A judge that every round pleases."""

    def takes(self, cost_tokens: float, *, trial: bool) -> bool:
        return True


class Watched:
    """A speculator; how often it was asked, the logits of all roots that it drafted from, and in which threads it
    copied."""

    def __init__(self, speculator: Speculator) -> None:
        self.begun = self.expanded = self.grown = 0
        self.level_s = 0.0  # a delay of each level
        self.roots: list[tuple[list[int], FloatRows]] = []
        self.threads: set[threading.Thread] = set()
        self.depth, self.unpadded_vocabulary = speculator.depth, speculator.unpadded_vocabulary
        self.all_levels_at_once, self.grows_trees = speculator.all_levels_at_once, speculator.grows_trees
        self._speculator = speculator

    def open_slot(self, *arguments: Any) -> None:
        self.threads.add(threading.current_thread())
        self._speculator.open_slot(*arguments)

    def add_features(self, *arguments: Any) -> None:
        self.threads.add(threading.current_thread())
        self._speculator.add_features(*arguments)

    def begin(self, roots: Sequence[HeadRoot], levels: int) -> tuple[list[LogitsRow | None], list[GrownLevel]]:
        self.begun += 1
        rows, grown = self._speculator.begin(roots, levels)
        self.roots += [([*it.tokens], row.logits.copy()) for it, row in zip(roots, rows, strict=True) if row]
        self.grown += len(grown)
        return rows, grown

    def expand(self, nodes: Sequence[HeadNodes]) -> list[LogitsRow]:
        self.expanded += 1
        time.sleep(self.level_s)
        return self._speculator.expand(nodes)


class Cluster:
    """A verifier's loop over a tiny target, with heads or without."""

    def __init__(
        self, target: Path, heads: Path | None, engine: Engine | None = None, slots: int = 4, **loop: Any
    ) -> None:
        """`loop`: what its StepScheduler is given in place of the usual."""
        features = None if heads is None else check_heads(heads, target).features
        if engine is None:
            engine = load_engine(target, dtype="float32", slots=slots, threads=1, features=features)
        self.heads: SpeculatorProposer | None = None
        if heads is not None and features is not None:
            self.speculator = Watched(
                engine.speculator or load_speculator(heads, target, precise=True, slots=slots, context=CONTEXT)
            )
            self.heads = SpeculatorProposer(self.speculator, engine.hidden, every=features.all_rows)
        self.loop = StepScheduler(
            engine,
            **{"cost": FREE, "prefill_chunk": 4, "max_nodes": 64, "head_proposer": self.heads, **loop},
            publish=lambda *_: None,
        )

    def open(
        self, number: int, plan: Plan = PLAN, text: Sequence[int] = TEXT, most: int = 60, **terms: Any
    ) -> VerifierSession:
        contract = Contract(seed=number, max_tokens=most, **terms)
        return self.loop.sessions.open(SessionStart(f"s{number}", "", 1, text, len(text), contract, plan, 256))

    async def __aenter__(self) -> Cluster:
        self.running = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running  # raises what ended it before


async def commits_of(session: VerifierSession) -> list[StepCommit]:
    found: list[StepCommit] = []
    while not found or not found[-1].last:
        async with asyncio.timeout(20):
            commit = await session.commits.get()
        assert commit is not None
        session.tree.check_integrity()
        found.append(commit)
    return found


def on_cpu(target: Path, heads: Path) -> Engine:
    return load_engine(target, dtype="float32", slots=4, threads=1, features=check_heads(heads, target).features)


def on_device(target: Path, heads: Path) -> Engine:
    return target_with_heads(target, heads, slots=4)


Loading = Callable[[Path, Path], Engine]
EAGLE_KINDS = ("eagle", "eagle-3")
BOTH = pytest.mark.parametrize(
    ("kind", "loading"), [(kind, on_cpu) for kind in KINDS] + [(kind, on_device) for kind in EAGLE_KINDS]
)


async def generated(
    target: Path, heads: Path | None, plan: Plan = PLAN, engine: Engine | None = None
) -> tuple[list[list[int]], list[int]]:
    """The texts of four sessions at once, and how many drafts of each were accepted."""
    async with Cluster(target, heads, engine) as cluster:
        sessions = [cluster.open(number, plan, **terms) for number, terms in enumerate(TERMS)]
        for session in sessions:
            if session.heads is not None:
                session.heads.trial_gate = Always()
        commits = [await commits_of(session) for session in sessions]
    return [s.tokens for s in sessions], [sum(commit.report.accepted for commit in each) for each in commits]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=3, width=96)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return asyncio.run(generated(target, None, OFF))[0]


@BOTH
async def test_random_heads_change_nothing(
    kind: Kind, loading: Loading, target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    random_heads(kind, target, tmp_path, own_head=True)
    texts, accepted = await generated(target, tmp_path, engine=loading(target, tmp_path))
    assert texts == plain
    assert sum(accepted) > 0  # of sixteen tokens some guesses are right


@BOTH
async def test_heads_that_know_the_text_are_accepted(
    kind: Kind, loading: Loading, target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    taught_heads(kind, target, tmp_path, plain[0])
    texts, accepted = await generated(target, tmp_path, engine=loading(target, tmp_path))
    assert texts == plain
    greedy_tokens = len(plain[0]) - len(TEXT)
    steps = greedy_tokens - accepted[0]
    assert greedy_tokens / steps > 1.5


async def test_a_device_grows_the_levels_of_a_round(
    target: Path, plain: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session's grammar takes what the host draws: its levels are expanded one by one."""
    monkeypatch.setattr(TrialGate, "takes", lambda *_, **__: True)  # else a busy machine decides which rounds pay
    taught_heads("eagle", target, tmp_path, plain[0])
    async with Cluster(target, tmp_path, on_device(target, tmp_path)) as cluster:
        assert cluster.heads is not None
        session = cluster.open(0, temperature=0.0)
        await commits_of(session)
        assert session.tokens == plain[0]
        assert cluster.speculator.grown > 10


@pytest.mark.parametrize("device", [False, True])
async def test_two_ranks_with_heads_generate_the_texts_of_one(
    device: bool, target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    taught_heads("eagle", target, tmp_path, plain[0])
    terms: dict[str, Any] = {"features": check_heads(tmp_path, target).features, "slots": 4}
    if device:
        terms |= {"by": "torch", "device": "cpu", "heads": tmp_path}
    with ranked(2, target, **terms) as ranks, ranks.lead(target) as leader:
        texts, accepted = await generated(target, tmp_path, engine=leader)
    assert texts == plain
    assert accepted[0] > 20


@pytest.mark.parametrize(("kind", "loading"), [("medusa", on_cpu), ("eagle", on_cpu), ("eagle-3", on_device)])
async def test_forks_turns_and_cancels_leave_other_texts_alone(
    kind: Kind, loading: Loading, target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    """Warm slots are taken up where they end, or copied; a session that goes while it is drafted for is forgotten."""
    taught_heads(kind, target, tmp_path, plain[0])

    async def life(cluster: Cluster) -> list[list[int]]:
        first, second = cluster.open(0, most=40, temperature=0.0), cluster.open(1, most=90, temperature=1.0)
        gone = cluster.open(2, text=(9, 9, 1), most=90, temperature=0.0)
        await commits_of(first)
        cluster.loop.sessions.close(first)
        cluster.loop.sessions.close(gone)
        fork = cluster.open(4, text=[*first.tokens[:20], 7], most=20, temperature=0.5)
        assert fork.kv_slot.cached == 20
        assert fork.kv_slot.source is not None
        turn = cluster.open(3, text=[*first.tokens, 4, 5], most=20, temperature=0.0)
        for session in (second, turn, fork):
            await commits_of(session)
        return [session.tokens for session in (first, second, turn, fork)]

    async with Cluster(target, None) as without:
        expected = await life(without)
    async with Cluster(target, tmp_path, loading(target, tmp_path)) as cluster:
        assert await life(cluster) == expected
        assert cluster.speculator.begun > 20


async def test_nodes_of_drafters_and_heads_form_one_tree(target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    """Heads draft below a drafter's nodes, and a token that both draft has both names."""
    taught_heads("eagle", target, tmp_path, plain[0])
    async with Cluster(target, tmp_path) as cluster:
        session = cluster.open(0, temperature=0.0)
        drafter = session.subscribe(UpstreamStream("drafter", Heartbeat), 1, Calibration()).sender
        sent, credited = 0, 0
        while not session.finished:
            async with asyncio.timeout(20):
                commit = await session.commits.get()
            assert commit is not None
            credited += commit.report.accepted
            following = [*plain[0][len(session.tokens) :], 0][0]
            root = len(session.tokens) - 1
            delta = Delta(root, extend(EMPTY, session.tokens), sent + 1, (0,), (following,), (-0.5,))
            session.tree.graft(drafter, delta)
            sent += 1
            session.tree.check_integrity()
    assert credited > 20
    assert session.tokens == plain[0]


async def test_a_rule_that_holds_p_against_q_is_not_drafted_for(target: Path, tmp_path: Path) -> None:
    random_heads("mlp", target, tmp_path)
    async with Cluster(target, tmp_path) as cluster:
        session = cluster.open(0, most=10, temperature=1.0, rule="recursive-rejection")
        assert session.heads is None
        await commits_of(session)
    assert cluster.speculator.begun == 0


async def test_a_session_restricted_to_ids_beyond_the_heads_runs_without_them(target: Path, tmp_path: Path) -> None:
    """The target has more ids than its heads, and a request allows none but such."""
    random_heads("mlp", target, tmp_path / "heads", own_head=True)
    wider = pad_vocabulary(target, tmp_path / "wider", VOCABULARY + 8, loudness=1.0)
    async with Cluster(wider, tmp_path / "heads") as cluster:
        only = cluster.open(0, most=10, temperature=0.0, allowed_ids=(VOCABULARY + 4,))
        both = cluster.open(1, most=10, temperature=0.0, allowed_ids=(3, VOCABULARY + 4))
        assert only.heads is None
        assert both.heads is not None
        for session in (only, both):
            await commits_of(session)
    assert only.tokens[len(TEXT) :] == [VOCABULARY + 4] * 10
    assert cluster.speculator.begun > 0


async def test_a_level_that_is_not_worth_its_time_is_not_drafted(target: Path, tmp_path: Path) -> None:
    random_heads("mlp", target, tmp_path)
    async with Cluster(target, tmp_path, cost=CostModel([(2, 1e-5), (64, 1e-5)])) as cluster:
        cluster.speculator.level_s = 0.1
        session = cluster.open(0, temperature=0.0)
        assert session.heads is not None
        session.heads.trial_gate = Always()
        await commits_of(session)
    assert cluster.speculator.begun > 10
    assert cluster.speculator.expanded == 1  # to measure it


async def test_heads_draft_nothing_without_speculation(target: Path, tmp_path: Path) -> None:
    random_heads("eagle", target, tmp_path)
    async with Cluster(target, tmp_path) as cluster:
        await commits_of(cluster.open(0, plan=OFF, temperature=0.0))
    assert cluster.speculator.begun == 0


async def test_heads_that_bring_nothing_rest_and_are_tried_again(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a trial there are no rounds, in this session and in others of its kind, until the next one is due."""
    observe = TrialGate.observe
    monkeypatch.setattr(TrialGate, "observe", lambda worth, gain, cost_tokens: observe(worth, 0.0, 1.0))
    random_heads("mlp", target, tmp_path)
    async with Cluster(target, tmp_path) as cluster:
        await commits_of(cluster.open(0, most=GATE.steps + 30, temperature=0.0))
        assert GATE.steps <= cluster.speculator.begun <= GATE.steps + 1
        session = cluster.open(1, temperature=0.0)
        await commits_of(session)
        assert cluster.speculator.begun <= GATE.steps + 1
        assert session.heads is not None
        session.heads.settle(session.tree, [], [1] * 10_000)
        assert session.heads.trial_gate.takes(0.4, trial=True)
        other = cluster.open(2, temperature=0.0)
        await commits_of(other)
        assert cluster.speculator.begun > GATE.steps + 1


def test_a_verifier_refuses_heads_of_another_target_before_it_loads_its_own(target: Path, tmp_path: Path) -> None:
    random_heads("medusa", target, tmp_path)
    with pytest.raises(ConfigError, match="was made for a target whose width is 96"):
        load(VerifierConfig(model=MODELS / "target", heads=tmp_path))
    with pytest.raises(ConfigError, match="only the native backend gives"):
        load(VerifierConfig(model=target, heads=tmp_path, backend="transformers"))
    with pytest.raises(ConfigError, match="medusa heads draft on a CPU alone, not on cuda:0; take EAGLE heads"):
        load(VerifierConfig(model=target, heads=tmp_path, device="cuda:0"))
    config = VerifierConfig(model=target, heads=tmp_path, slots=2)
    assert isinstance(make_head_proposer(config, load(config)[0]), SpeculatorProposer)
    config = VerifierConfig(model=target, slots=2)
    assert type(make_head_proposer(config, load(config)[0])) is HeadProposer
