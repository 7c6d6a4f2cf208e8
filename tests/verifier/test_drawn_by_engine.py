"""A loop whose engine draws the tokens itself commits what one does that draws them from logits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.config import VerifierConfig
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.holds.arrival_model import ArrivalPatterns
from outrider.core.sampling import noise, sampler
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.noise import Draw, gumbel_row
from outrider.core.sampling.sampler import Choice, Sampler
from outrider.core.session.contract import Contract, Plan
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Traits
from outrider.engine.interface.logits import HostLogits, Logits
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.errors import ConfigError
from tests.e2e.tiny_models import VOCABULARY, make_tiny
from tests.engine.gpu.taped import taped
from verifier_svc.batch import SessionWork, StepBatch, make_noise
from verifier_svc.commit_queue import StepCommit
from verifier_svc.proposers.ngram_proposer import LookaheadProposer, NgramProposers
from verifier_svc.scheduler import StepScheduler
from verifier_svc.server import load
from verifier_svc.session import SessionStart, VerifierSession

PLAN = Plan(version=1, depth=8, nodes=16, wait_us=0)
TEXT = (1, 2, 3, 1, 2, 3, 1)
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "choice": 3},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.02, "logit_bias": {3: 2.0}, "banned_ids": (1,)},
    {"temperature": 0.0, "allowed_ids": (2, 3, 4)},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 9, "presence_penalty": 0.5},
    {"temperature": 0.9, "min_tokens": 20, "stop_ids": (3,)},
    {"temperature": 1.0, "logprobs": 2, "repetition_penalty": 1.1},
]
OTHERS: list[dict[str, Any]] = [{"temperature": 1.0, "rule": "speculative-sampling"}]


class Undrawing(DeviceEngine):
    """The same passes, with all logits fetched."""

    draws = False

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 2) -> Logits:
        return HostLogits(self.forward(segments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=2, width=32)


async def generated(engine: DeviceEngine) -> tuple[list[list[int]], list[list[Choice]], int]:
    """Texts and choices of the sessions, and how many drafts were accepted."""
    cost, drafting = CostModel([(2, 0.010), (64, 0.011)]), NgramProposers(ahead=True)
    loop = StepScheduler(
        engine, cost, prefill_chunk=16, max_nodes=64, publish=lambda *_: None, ngram_proposers=drafting
    )
    running = asyncio.create_task(loop.run())
    sessions = []
    for number, terms in enumerate(PLAIN + OTHERS):
        contract = Contract(seed=number, max_tokens=60, **terms)
        session = loop.sessions.open(SessionStart(f"s{number}", "", 1, TEXT, len(TEXT), contract, PLAN, 64))
        assert isinstance(session.ngram_proposer, LookaheadProposer) or session.drawn
        sessions.append(session)
    choices: list[list[Choice]] = []
    accepted = 0
    for session in sessions:
        commits: list[StepCommit] = []
        while not session.finished or not session.commits.empty():
            commit = await session.commits.get()
            assert commit is not None
            commits.append(commit)
        choices.append([choice for commit in commits for choice in commit.choices])
        accepted += sum(commit.report.accepted for commit in commits)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return [session.tokens for session in sessions], choices, accepted


async def test_texts_gaps_and_logprobs_are_equal_whether_the_engine_or_the_sampler_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading: dict[str, Any] = {"device": "cpu", "dtype": "float32", "slots": 12}
    expected, chosen, _ = await generated(Undrawing.load(folder, EngineSettings(**loading)))
    here: set[int] = set()
    choose = Sampler.choose

    def counted(self: Sampler, *arguments: Any) -> Choice:
        here.add(self.contract.seed)
        return choose(self, *arguments)

    monkeypatch.setattr(Sampler, "choose", counted)
    engine = DeviceEngine.load(folder, EngineSettings(**loading))
    taped(engine)
    texts, drawn, accepted = await generated(engine)
    exact = len(PLAIN)  # what a p/q rule draws depends on the steps, too
    assert texts[:exact] == expected[:exact]
    for ours, theirs in zip(drawn[:exact], chosen[:exact], strict=True):
        assert [choice.gap for choice in ours] == pytest.approx([choice.gap for choice in theirs], abs=1e-4)
        assert [len(choice.logprobs) for choice in ours] == [len(choice.logprobs) for choice in theirs]
    assert accepted > 0
    assert here.isdisjoint(range(exact))
    assert all(len(choice.logprobs) == 4 + 8 * 2 for choice in drawn[exact - 1])


def test_noise_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a session go without it for which numpy chooses. Compiled code computes its own."""
    computed: list[int] = []  # seeds

    def counted(seed: int, *rest: int) -> FloatRow:
        computed.append(seed)
        return gumbel_row(seed, *rest)

    monkeypatch.setattr(noise, "gumbel_row", counted)
    contracts = [Contract(seed=1, max_tokens=9), Contract(seed=2, max_tokens=9, top_k=3)]
    engine = cast(Traits, SimpleNamespace(samples_tokens=True, restricts_tokens=False))
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(sampler, "compiled_sampler", lambda *_: None)
        sessions = [session_of(number, contract) for number, contract in enumerate(contracts)]
        works = [SessionWork(session, len(TEXT) - 1, len(TEXT)) for session in sessions]
        drawn, none = [work.draw(engine) for work in works], [None, None]
        assert [draw is None for draw in drawn] == [False, True]
        for draws, expected in ((drawn, [2]), (none, [2, 1]), (none, [2, 1])):
            make_noise(StepBatch(works, 0.0), draws)
            assert computed == ([] if compiled else expected)


def session_of(number: int, contract: Contract) -> VerifierSession:
    start = SessionStart(f"s{number}", "", 1, TEXT, len(TEXT), contract, PLAN, 64)
    return VerifierSession(start, AcquiredSlot(number, len(TEXT) - 1, None), VOCABULARY, ArrivalPatterns())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_verifier_without_its_device_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no cuda here"):
        load(VerifierConfig(model=folder, device="cuda"))
    with pytest.raises(ConfigError, match="numerics: invariant"):
        load(VerifierConfig(model=folder, device="cuda", numerics="invariant"))
