"""The row in one process: the same tokens as from the cluster, by the same loops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from bench.peers.gguf import write_gguf
from bench.rows.local import LocalPair
from bench.rows.requests import BenchRequest
from bench.rows.row import Models, worker_row
from drafter_svc.upstreams.upstream import Attachment
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.control.depth.policies import FixedGamma
from outrider.core.session.contract import Plan, StepReport
from outrider.core.session.snapshot import MirrorUpdate
from outrider.errors import ConfigError, InternalError
from tests.e2e.tiny_models import make_tiny

MODELS = Path(__file__).parents[3] / "models"
PROMPT = tuple(range(40, 80))


def config(target: Path, drafter: Path) -> ClusterConfig:
    return ClusterConfig(
        router=RouterConfig(models={"target": target}, overlap=True),
        verifier=[VerifierConfig(model=target, dtype="float32", slots=1)],
        drafter=[DrafterConfig(model=drafter, dtype="float32", slots=1)],
    )


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[LocalPair]:
    made = LocalPair(config(MODELS / "target", MODELS / "drafter"))
    yield made
    await made.close()


async def test_speculation_in_one_process_commits_the_tokens_of_plain_decoding(pair: LocalPair) -> None:
    saved = 0
    for seed in range(4):
        ask = BenchRequest(PROMPT, 0.7 if seed else 0.0, seed, 120)
        plain, speculative = await pair.generate(ask, "off"), await pair.generate(ask, "rounds")
        assert speculative.tokens == plain.tokens
        assert len(plain.tokens) == len(plain.arrivals) == plain.steps == 120
        saved += plain.steps - speculative.steps
    assert saved > 240  # of 480; in rounds a step waits for its drafts, so 337 beside busy processes too


class Shallower(FixedGamma):
    """Halves the depth after some steps."""

    def __init__(self, ceilings: Plan) -> None:
        super().__init__(ceilings)
        self._steps = 0

    def observe(self, report: StepReport) -> None:
        self._steps += 1
        if self._steps == 4:
            self._plan = replace(self._plan, version=2, depth=self._plan.depth // 2)


async def test_a_plan_that_changes_reaches_the_drafter(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.rows.local.policy", lambda name, ceilings: Shallower(ceilings))
    depths: list[int] = []
    updated_before = pair.scheduler.updated

    def listening(key: Attachment, update: MirrorUpdate) -> None:
        depths.extend([update.plan.depth] if update.plan else [])
        updated_before(key, update)

    monkeypatch.setattr(pair.scheduler, "updated", listening)
    await pair.generate(BenchRequest(PROMPT, 1.0, 1, 60))
    assert depths == [RouterConfig.model_fields["depth"].default // 2]
    assert not pair.loop.sessions
    assert not pair.scheduler.members


async def test_a_loop_that_ends_fails_the_generation_instead_of_hanging_it(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken on purpose")

    monkeypatch.setattr(pair.scheduler, "_propose", broken)
    with pytest.raises(InternalError, match="a loop of the pair has ended"):
        await pair.generate(BenchRequest(PROMPT, 0.0, 0, 40))


async def test_workers_answer_over_a_pipe_and_agree_on_a_greedy_text(tmp_path: Path) -> None:
    target = make_tiny(tmp_path / "target", layers=2, width=32)
    drafter = make_tiny(tmp_path / "drafter", layers=1, width=32)
    models = Models(target, drafter, "float32", threads=1)
    terms = config(target, drafter)
    ask = BenchRequest(tuple(range(1, 12)), 0.0, 0, 24)
    async with worker_row("assisted", models, terms) as assisted, worker_row("in-process", models, terms) as ours:
        texts = []
        for row in (assisted, ours):
            sample = await row.generate(ask)
            assert len(sample.tokens) == len(sample.arrivals) == 24
            assert list(sample.arrivals) == sorted(sample.arrivals)
            assert 1 <= sample.steps <= 24
            texts.append(sample.tokens)
            sampled = [await row.generate(BenchRequest(ask.prompt, 1.0, seed, 24)) for seed in (1, 1, 2)]
            assert sampled[0].tokens == sampled[1].tokens != sampled[2].tokens
        assert texts[0] == texts[1]


async def test_transformers_runs_a_gguf_file_dequantized(tmp_path: Path) -> None:
    write_gguf(MODELS / "drafter", file := tmp_path / "drafter.gguf", "float32")
    ask, texts = BenchRequest(PROMPT, 0.0, 0, 24), []
    for model in (MODELS / "drafter", file):
        models = Models(model, model, "float32", threads=1)
        async with worker_row("transformers", models, config(model, model)) as row:
            texts.append((await row.generate(ask)).tokens)
    assert texts[0] == texts[1]


async def test_a_worker_that_cannot_load_reports_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=f"^transformers: {missing}"):
        async with worker_row("transformers", Models(missing, missing, "float32", 1), config(missing, missing)):
            pass
