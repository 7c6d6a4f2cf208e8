"""What a verifier has for drafters with heads: the true features of all that it has committed, and no others."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.session.contract import Contract
from outrider.engine.heads.config import Kind
from outrider.engine.heads.fusing import load_fusion
from outrider.engine.heads.loading import check_heads, load_speculator
from outrider.engine.loading import load_engine
from tests.e2e.tiny_models import CONTEXT, make_tiny
from tests.engine.taught import features_of, random_heads
from tests.verifier.proposers.test_head_drafts import FREE, PLAN, TEXT, Always, commits_of
from verifier_svc.feature_store import HeadFeatureFuser, SessionFeatures
from verifier_svc.proposers.head_proposer import SpeculatorProposer
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=4, width=96)


@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
async def test_features_follow_paths_forks_turns_and_texts_that_were_only_read(
    kind: Kind, target: Path, tmp_path: Path
) -> None:
    """The same heads draft inside the verifier meanwhile, from the same passes."""
    random_heads(kind, target, tmp_path)
    features = check_heads(tmp_path, target).features
    engine = load_engine(target, dtype="float32", slots=4, threads=1, features=features)
    speculator = load_speculator(tmp_path, target, precise=True, slots=4, context=CONTEXT)
    fusion = load_fusion(tmp_path, target, precise=True)
    loop = StepScheduler(
        engine,
        FREE,
        prefill_chunk=4,
        max_nodes=64,
        publish=lambda *_: None,
        head_proposer=SpeculatorProposer(speculator, engine.hidden, every=True),
        feature_fuser=HeadFeatureFuser(fusion, engine.hidden, slots=4, rows=engine.rows),
    )
    accepted = 0

    async def generate(text: list[int], most: int) -> VerifierSession:
        nonlocal accepted
        contract = Contract(seed=len(text), max_tokens=most, temperature=1.0)
        session = loop.sessions.open(SessionStart(f"s{len(text)}", "", 1, text, len(text), contract, PLAN, 256))
        assert session.heads is not None
        assert isinstance(session.fused, SessionFeatures)
        assert not session.features_known
        session.heads.trial_gate = Always()
        accepted += sum(commit.report.accepted for commit in await commits_of(session))
        assert session.features_known
        known = len(session.tokens) - 1
        rows = torch.frombuffer(bytearray(session.fused.rows(0, known)), dtype=torch.bfloat16).view(known, 96).float()
        fused = fusion.fuse(features_of(target, features, session.tokens))[:known]
        expected = torch.from_numpy(fused).view(torch.bfloat16).float()
        assert np.abs((rows - expected).numpy()).max() < 0.01 * float(expected.abs().max())
        loop.sessions.close(session)
        return session

    running = asyncio.create_task(loop.run())
    first = await generate([*TEXT], 40)
    turn = await generate([*first.tokens, 4, 5], 20)
    assert turn.kv_slot.cached > 40
    fork = await generate([*first.tokens[:20], 7], 30)
    assert (fork.kv_slot.cached, fork.kv_slot.source is None) == (20, False)
    await loop.sessions.prefill([9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3], "")
    assert (await generate([9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4], 20)).kv_slot.cached == 12
    assert accepted > 5
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
