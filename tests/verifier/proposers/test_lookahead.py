"""Windows of guesses go along where they pay, cost what the cost model predicts, and change neither text nor tree."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.core.control.cost.budget import CostModel, VerificationBudget
from outrider.core.control.holds.arrival_model import ArrivalPatterns
from outrider.core.control.trial_gate import GATE, TrialGate
from outrider.core.proposers.lookahead import COLUMNS, LENGTH
from outrider.core.proposers.lookup import fits
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import OFF, RULES, Contract, Plan, StepReport
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.delta import Delta
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.kv.kv_slots import AcquiredSlot
from tests.e2e.tiny_models import VOCABULARY, make_tiny
from tests.engine.conftest import EngineClass, OnTorch
from verifier_svc.batch import StepBatch
from verifier_svc.commit_queue import StepCommit
from verifier_svc.proposers.lookahead import settle
from verifier_svc.proposers.ngram_proposer import LookaheadProposer, NgramProposers
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

PLAN = Plan(version=1, depth=8, nodes=16, wait_us=0)
CHEAP = CostModel([(2, 0.010), (64, 0.011)])
STEEP = CostModel([(2, 0.010), (64, 0.320)])
ROWS = COLUMNS * (LENGTH - 1) - 1
TEXT = (1, 2, 3, 1, 2, 3, 1)


class Always(TrialGate):
    """A judge that every window pleases."""

    def takes(self, cost_tokens: float, *, trial: bool) -> bool:
        return True


def session_of(drafting: NgramProposers, number: int = 0, plan: Plan = PLAN, **terms: Any) -> VerifierSession:
    contract = Contract(seed=1, max_tokens=100, **terms)
    start = SessionStart(f"s{number}", "", 1, TEXT, len(TEXT), contract, plan, 64)
    own = drafting.begin("", contract)
    session = VerifierSession(start, AcquiredSlot(number, len(TEXT) - 1, None), VOCABULARY, ArrivalPatterns(), own)
    session.propose_ngrams()
    return session


def loop_of(cost: CostModel, max_nodes: int = 64) -> StepScheduler:
    engine: Any = SimpleNamespace(slots=64, treeless="", rewinds=True, memory=lambda *_: None)
    return StepScheduler(engine, cost, prefill_chunk=128, max_nodes=max_nodes, publish=lambda *_: None)


def select(loop: StepScheduler, sessions: list[VerifierSession]) -> tuple[StepBatch, VerificationBudget]:
    return loop.choice.select(loop.choice.base_works(sessions), 0.0)


def step_of(sessions: list[VerifierSession], cost: CostModel, max_nodes: int = 64) -> StepBatch:
    return select(loop_of(cost, max_nodes), sessions)[0]


def windows_in(step: StepBatch) -> list[int]:
    return [len(work.window.tokens) for work in step.works]


def test_a_session_alone_tries_its_window_and_the_step_counts_its_rows() -> None:
    session = session_of(NgramProposers(ahead=True))
    step, budget = select(loop_of(CHEAP), [session])
    assert windows_in(step) == [ROWS]
    assert step.rows == 1 + len(step.works[0].nodes) + ROWS
    assert budget.seconds >= CHEAP.seconds(step.rows)
    assert step.works[0].window_cost_tokens > 0.0


def test_one_of_several_sessions_has_its_window_on_trial() -> None:
    drafting = NgramProposers(ahead=True)
    assert sorted(windows_in(step_of([session_of(drafting, n) for n in range(4)], CHEAP))) == [0, 0, 0, ROWS]


def test_a_crowd_is_not_slowed() -> None:
    """Where rows cost time, those of one window are time of all sessions."""
    drafting = NgramProposers(ahead=True)
    sessions = [session_of(drafting, number) for number in range(16)]
    assert sum(windows_in(step_of(sessions, STEEP))) == 0
    for _ in range(GATE.steps):  # even where one alone was found to be worth much
        own = sessions[0].ngram_proposer
        assert isinstance(own, LookaheadProposer)
        own.trial_gate.observe(0.6, 0.1)
    assert sum(windows_in(step_of(sessions, STEEP))) == 0
    assert sum(windows_in(step_of(sessions[:1], CHEAP))) == ROWS


@pytest.mark.parametrize("most", [0, ROWS - 1, ROWS, 20])
def test_nodes_and_windows_together_keep_to_the_steps_limit(most: int) -> None:
    drafting = NgramProposers(ahead=True)
    sessions = [session_of(drafting, number) for number in range(4)]
    for session in sessions:
        assert isinstance(session.ngram_proposer, LookaheadProposer)
        session.ngram_proposer.trial_gate = Always()
    step = step_of(sessions, CHEAP, most)
    assert step.rows - len(sessions) <= most


def test_no_session_looks_ahead_when_guesses_are_useless() -> None:
    drafting = NgramProposers(ahead=True)
    ending = session_of(drafting)
    ending.end = len(ending.tokens) + 1
    unread = session_of(drafting)
    unread.tokens.append(2)
    unread.cached += 1
    for session in (session_of(drafting, plan=OFF), ending, unread, session_of(NgramProposers())):
        assert windows_in(step_of([session], CHEAP)) == [0]
    for rule in RULES:
        contract = Contract(seed=1, max_tokens=10, rule=rule)
        assert (drafting.begin("", contract) is not None) == fits(contract)


def test_the_windows_rows_see_the_text_and_their_own_path_but_no_node() -> None:
    session = session_of(NgramProposers(ahead=True))
    (work,) = step_of([session], CHEAP).works
    assert work.nodes
    segment, count = work.segment(), len(work.nodes)
    assert segment.mask is not None
    assert segment.outputs == work.outputs == 1 + count + ROWS
    for row, token in enumerate(work.window.tokens):
        seen = np.flatnonzero(segment.mask[1 + count + row])
        assert segment.tokens[1 + count + row] == token
        assert not set(seen) & set(range(1, 1 + count))
        assert [segment.tokens[at] for at in seen] == [TEXT[-1], *work.window.path(row)]
        assert segment.positions[1 + count + row] == len(TEXT) - 1 + len(work.window.path(row))
    assert not segment.mask[: 1 + count, 1 + count :].any()


def test_a_token_that_a_drafter_proposed_too_is_not_credited_to_the_window() -> None:
    """The text never went from 1 to 5: that the guesses did is worth a token, unless a drafter proposed it too."""
    for beside, gain in ((False, 1.0), (True, 0.0)):
        session = session_of(NgramProposers(ahead=True))
        own = session.ngram_proposer
        assert isinstance(own, LookaheadProposer)
        (work,) = step_of([session], CHEAP).works
        own.lookahead.advance([5] * COLUMNS)  # what follows the text's last token, if that token comes again
        session.commit([Choice(2, 1.0), Choice(3, 1.0), Choice(1, 1.0)], StepReport(), 0.0)
        if beside:
            root = len(session.tokens) - 1
            session.tree.graft(1, Delta(root, extend(EMPTY, session.tokens), 1, (0,), (5,), (-0.1,)))
        session.cached = len(session.tokens) - 1
        (work,) = step_of([session], CHEAP).works
        node = next(node for node in work.nodes if node.token == 5 and node.parent is session.tree.root)
        settle(work, [node], [Choice(5, 1.0), Choice(0, 1.0)], 0.01)
        assert own.trial_gate.gain == gain


def test_ngram_drafts_are_replaced_and_drafters_nodes_stay() -> None:
    session = session_of(NgramProposers(ahead=True))
    tree = session.tree
    assert tree.root.children[2].children[3].children  # 1 2 3 goes round
    root = len(TEXT) - 1
    tree.graft(1, Delta(root, extend(EMPTY, TEXT), 1, (0, 1, 0), (2, 9, 7), (-1.0, -0.1, -0.1)))
    assert session.ngram_proposer is not None
    session.ngram_proposer.grow(tree, nodes=0, depth=8, width=4, vocabulary=VOCABULARY, min_path_score=0.0)
    assert {token: set(node.children) for token, node in tree.root.children.items()} == {2: {9}, 7: set()}
    tree.check_integrity()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=2, width=32)


@pytest.mark.parametrize("engine_class", [CpuEngine, OnTorch])
async def test_a_window_in_every_step_keeps_the_targets_text(folder: Path, engine_class: EngineClass) -> None:
    engine = engine_class.load(folder, EngineSettings(dtype="float32", slots=4, threads=1))
    terms = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 9, "presence_penalty": 0.5, "min_tokens": 20, "stop_ids": (3,)},
        {"temperature": 1.0, "rule": "target-match"},
    ]

    async def generated(drafting: NgramProposers | None, plan: Plan) -> tuple[list[list[int]], int]:
        loop = StepScheduler(
            engine, CHEAP, prefill_chunk=16, max_nodes=64, publish=lambda *_: None, ngram_proposers=drafting
        )
        running = asyncio.create_task(loop.run())
        sessions = []
        for number, each in enumerate(terms):
            contract = Contract(seed=number, max_tokens=60, **each)
            session = loop.sessions.open(SessionStart(f"s{number}", "", 1, TEXT, len(TEXT), contract, plan, 64))
            if isinstance(session.ngram_proposer, LookaheadProposer):
                session.ngram_proposer.trial_gate = Always()
            sessions.append(session)
        commits: list[StepCommit] = []
        for session in sessions:
            while not session.finished or not session.commits.empty():
                commit = await session.commits.get()
                assert commit is not None
                commits.append(commit)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [session.tokens for session in sessions], sum(commit.report.accepted for commit in commits)

    plain, nothing = await generated(None, OFF)
    ahead, accepted = await generated(NgramProposers(ahead=True), PLAN)
    assert ahead[:3] == plain[:3]  # the draws of target match are others where steps are others
    assert [len(text) for text in ahead] == [len(text) for text in plain]
    assert nothing == 0 < accepted
