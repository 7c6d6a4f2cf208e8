"""A verifier computes the log-probabilities of prompts in chunks, whatever it has cached, beside other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.core.control.cost.budget import CostModel
from outrider.core.sampling.logprobs import unpack
from outrider.core.session.contract import OFF, Contract
from outrider.core.session.decoding import PromptScores
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.engine import SCRATCH, Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from tests.engine.ranked import ranked
from tests.engine.small_checkpoints import MODELS, Reference, make_checkpoint, pad_vocabulary
from verifier_svc import session as verifier_session
from verifier_svc.commit_queue import StepCommit
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession
from verifier_svc.steps import step_choice

FOLDER = MODELS / "drafter"
TEXT = [*np.random.default_rng(1).integers(1, 4000, 200).tolist()]
ALTERNATIVES = 2
TOLERANCE = 1e-4


def scheduler_of(engine: Engine, chunk: int = 32) -> StepScheduler:
    return StepScheduler(
        engine, CostModel([(2, 1.0), (64, 1.0)]), prefill_chunk=chunk, max_nodes=16, publish=no_drafter
    )


def no_drafter(session: VerifierSession, position: int, tokens: Sequence[int]) -> None:
    """Nobody drafts."""


def native(folder: Path = FOLDER) -> Engine:
    return load_engine(folder, dtype="float32", slots=4, threads=1)


def on_torch(folder: Path = FOLDER) -> Engine:
    return DeviceEngine.load(folder, EngineSettings(device="cpu", dtype="float32", slots=4, rows=256 + SCRATCH))


def by_transformers(folder: Path = FOLDER) -> Engine:
    return load_engine(folder, dtype="float32", slots=4, threads=1, backend="transformers")


def opened(
    scheduler: StepScheduler, text: Sequence[int] = TEXT, *, name: str = "s", scored: int | None = 1, tenant: str = ""
) -> VerifierSession:
    contract = Contract(seed=5, max_tokens=8, temperature=0.0, prompt_logprobs=ALTERNATIVES)
    return scheduler.sessions.open(SessionStart(name, tenant, 1, text, len(text), contract, OFF, 64, scored=scored))


class Received:
    """What a session's router receives."""

    def __init__(self, session: VerifierSession) -> None:
        self.scores: list[PromptScores] = []
        self.commits: list[StepCommit] = []
        self._session = session

    def take(self, *, acknowledge: bool = True) -> None:
        while not self._session.commits.empty():
            item = self._session.commits.get_nowait()
            if isinstance(item, PromptScores):
                assert not self.commits
                assert item.position == (self.end or item.position)
                self.scores.append(item)
            elif item is not None:
                self.commits.append(item)
        if acknowledge:
            self._session.commits.acknowledge(len(self._session.tokens) if self.commits else self.end)

    @property
    def end(self) -> int:
        return self.scores[-1].position + len(self.scores[-1].ranks) if self.scores else 0

    @property
    def answer(self) -> list[int]:
        return [choice.token for commit in self.commits for choice in commit.choices]


async def served(scheduler: StepScheduler, session: VerifierSession) -> Received:
    received = Received(session)
    while not session.finished:
        await scheduler.step()
        received.take()
    scheduler.sessions.close(session)
    return received


def check(received: Received, logs: NDArray[np.float64], text: Sequence[int] = TEXT, first: int = 1) -> None:
    """They are those of `transformers`. `logs`: log-probabilities of all tokens after each of the text's."""
    assert (received.scores[0].position, received.end) == (first, len(text))
    blob = b"".join(part.logprobs for part in received.scores)
    ranks = [rank for part in received.scores for rank in part.ranks]
    for token, row, rank, entry in zip(
        text[first:], logs[first - 1 :], ranks, unpack(blob, ALTERNATIVES), strict=False
    ):
        assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
        assert entry.top_logprobs == pytest.approx(np.sort(row)[::-1][:ALTERNATIVES], abs=TOLERANCE)
        assert row[entry.top_ids] == pytest.approx(entry.top_logprobs, abs=TOLERANCE)
        assert (row > row[token] + TOLERANCE).sum() < rank <= (row > row[token] - TOLERANCE).sum() + 1


def log_probabilities(folder: Path, text: Sequence[int]) -> NDArray[np.float64]:
    logits = Reference.load(folder).logits(text)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.fixture(scope="module")
def logs() -> NDArray[np.float64]:
    return log_probabilities(FOLDER, TEXT)


@pytest.mark.parametrize("make", [native, on_torch, by_transformers])
async def test_they_are_those_of_transformers_with_and_without_cached_kv(
    make: Callable[[], Engine], logs: NDArray[np.float64]
) -> None:
    scheduler = scheduler_of(make())
    first = await served(scheduler, opened(scheduler))
    check(first, logs)
    again = opened(scheduler)
    assert again.kv_slot.cached == 0
    check(second := await served(scheduler, again), logs)
    plain = opened(scheduler, scored=None)
    assert plain.kv_slot.cached == len(TEXT) - 1
    third = await served(scheduler, plain)
    assert third.scores == []
    assert first.answer == second.answer == third.answer
    scheduler.stop()


async def test_those_that_a_router_has_are_not_computed_again(logs: NDArray[np.float64]) -> None:
    scheduler = scheduler_of(native())
    await served(scheduler, opened(scheduler))
    later = opened(scheduler, scored=150)
    assert later.kv_slot.cached == 149
    check(await served(scheduler, later), logs, first=150)
    scheduler.stop()


async def test_a_text_that_loses_its_kv_meanwhile_goes_on_where_it_was(logs: NDArray[np.float64]) -> None:
    engine = native()
    scheduler = scheduler_of(engine)
    session = opened(scheduler)
    received, lost = Received(session), False
    while not session.finished:
        await scheduler.step()
        received.take()
        if session.cached > 100 and not lost:
            session.cached, lost = 0, True
            scheduler.sessions.slots.mark_computed(session.kv_slot.slot, 0)
            engine.release(session.kv_slot.slot, 0)
    assert lost
    check(received, logs)
    scheduler.stop()


async def test_no_more_are_sent_than_a_router_takes(monkeypatch: pytest.MonkeyPatch, logs: NDArray[np.float64]) -> None:
    monkeypatch.setattr(verifier_session, "SCORED_AHEAD", 40)
    scheduler = scheduler_of(native())
    session = opened(scheduler)
    received = Received(session)
    while not session.finished:
        while session.ready and not session.finished:
            await scheduler.step()
            assert session.scored <= session.commits.durable + 40 or not session.scoring
        received.take()
    check(received, logs)
    assert max(len(part.ranks) for part in received.scores) <= 32
    scheduler.stop()


async def test_another_tenants_answer_goes_on_in_each_step(logs: NDArray[np.float64]) -> None:
    scheduler = scheduler_of(native())
    other = opened(scheduler, TEXT[:9], name="other", scored=None, tenant="other")
    await scheduler.step()
    scoring, received = opened(scheduler, tenant="one"), Received(other)
    results = Received(scoring)
    while not other.finished:
        step = await scheduler.step()
        assert {work.session for work in step.works} == {other, scoring}
        assert sum(work.end - work.start for work in step.works) <= 33
        received.take()
        results.take()
    while not scoring.finished:
        await scheduler.step()
        results.take()
    check(results, logs)
    scheduler.stop()


async def test_a_prompt_of_the_whole_context_never_has_all_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pad_vocabulary(make_checkpoint(tmp_path / "small"), tmp_path / "large", 2**18, loudness=0.5)
    engine = native(folder)
    text = [*np.random.default_rng(2).integers(1, 2**18, engine.context - 8).tolist()]
    scheduler, rows = scheduler_of(engine, chunk=512), list[int]()
    sample = engine.sample

    def counted(segments, draws, best=0):  # type: ignore[no-untyped-def]
        rows.append(sum(segment.outputs for segment in segments))
        return sample(segments, draws, best)

    monkeypatch.setattr(engine, "sample", counted)
    sessions = [opened(scheduler, text), opened(scheduler, text[:100], name="beside")]
    results = [Received(session) for session in sessions]
    while not all(session.finished for session in sessions):
        await scheduler.step()
        for received in results:
            received.take()
    most = step_choice.SCORED_LOGITS // engine.vocabulary
    assert max(rows) <= most + len(sessions)
    assert max(rows) < len(text) / 4
    check(results[0], log_probabilities(folder, text), text)
    scheduler.stop()


async def test_two_ranks_compute_those_of_one(logs: NDArray[np.float64]) -> None:
    with ranked(2, FOLDER, slots=4) as group, group.lead(FOLDER) as engine:
        scheduler = scheduler_of(engine)
        check(await served(scheduler, opened(scheduler)), logs)
        scheduler.stop()
