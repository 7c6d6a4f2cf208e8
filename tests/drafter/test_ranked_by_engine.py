"""A drafter whose engine ranks the candidates itself grows the trees of one that ranks them from logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_svc.sessions.topk_session import TopKSession
from outrider.core.construction.expansion import CANDIDATES, DrafterFits
from outrider.core.sampling.noise import Draw
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import HostLogits, Logits, logits_rows
from outrider.engine.interface.settings import EngineSettings
from tests.e2e.tiny_models import VOCABULARY, make_tiny
from tests.engine.gpu.taped import taped

TEXT = (1, 2, 3, 1, 2, 3, 1)
PLAN = Plan(version=1, depth=12, width=3, nodes=64)


class Asked(DeviceEngine):
    """Counts the rows of logits that are fetched one by one."""

    fetched = 0

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 2) -> Logits:
        logits = super().sample(segments, draws, best)
        row = logits.row

        def counted(index: int) -> Any:
            self.fetched += 1
            return row(index)

        logits.row = counted  # type: ignore[method-assign]
        return logits


def grown(engine: DeviceEngine, contract: Contract, *, ranks: bool) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What is sent level by level, with commits between: tokens and edge scores."""
    session = TopKSession(MirrorSnapshot(TEXT, extend(EMPTY, TEXT), contract, PLAN, 10_000), 0, VOCABULARY)
    fits, sent = DrafterFits(), []
    for level in range(12):
        chosen = session.next_segment(fits, chunk=64, limit=4, context=300, rows=400)
        if chosen is None:
            break
        segment, nodes = chosen
        session.advance(segment, nodes)
        logits = (
            engine.sample([segment], [session.draw(engine)], CANDIDATES)
            if ranks
            else HostLogits(engine.forward([segment]))
        )
        delta = session.expand(nodes, logits_rows(logits, 0, len(nodes)), fits)
        sent.append((delta.tokens, delta.edges))
        if level % 4 == 3:
            best = next(iter(session.tree.best_first(depth=9, width=9)))[1]
            move = session.commit([*session.tree.path(best), 5])
            if move is not None:
                engine.move(0, move.source, move.target)
            session.learn(fits)
    return sent


@pytest.mark.parametrize(
    ("terms", "fetches"),
    [
        ({"temperature": 0.0}, False),
        ({"temperature": 0.8}, False),
        ({"temperature": 1.0, "top_p": 0.9}, False),
        ({"temperature": 1.0, "top_k": 5, "logit_bias": {3: 2.0}, "banned_ids": (4,)}, False),
        ({"temperature": 1.0, "presence_penalty": 0.5}, True),
    ],
)
def test_trees_are_equal_whether_the_engine_or_the_session_ranks(
    terms: dict[str, Any], fetches: bool, tmp_path: Path
) -> None:
    engine = Asked.load(make_tiny(tmp_path, layers=2, width=32), EngineSettings(device="cpu", dtype="float32", slots=1))
    taped(engine)
    contract = Contract(seed=7, max_tokens=200, **terms)
    expected, ours = grown(engine, contract, ranks=False), grown(engine, contract, ranks=True)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
    for (_, scores), (_, others) in zip(ours, expected, strict=True):
        assert scores == pytest.approx(others, abs=0.07)  # a step of the code that the wire has for them
    assert len(ours) > 4
    assert sum(len(tokens) for tokens, _ in ours) > 20
    assert bool(engine.fetched) == fetches
    assert np.isfinite([score for _, scores in ours for score in scores]).all()
