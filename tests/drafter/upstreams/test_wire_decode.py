"""What an upstream sends is checked before anything works with it: no peer can end a drafter by what it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from drafter_svc.ngram_drafter import NgramScheduler
from drafter_svc.sessions.sampled_session import SampledSession
from drafter_svc.sessions.session import DrafterSession
from drafter_svc.sessions.topk_session import TopKSession
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.construction.expansion import DrafterFits
from outrider.core.proposers.lookup import LookupMethod, Lookups
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.committed_window import ALIAS_SPAN
from outrider.engine.interface.logits import HostLogits, logits_rows
from outrider.errors import InvalidRequest
from outrider.v1 import drafter_pb2 as pb
from outrider.wire.drafter import LARGEST_VOCABULARY, NO_FEATURES, SNAPSHOT_TOKENS, PartialSnapshot, update_from_pb
from outrider.wire.types import contract_to_pb, plan_to_pb

OWN = 12  # ids of the drafter's model
PLAN = Plan(version=1, depth=4, width=2, nodes=6)
Drafts = Callable[[MirrorSnapshot], int]  # how many tokens it drafts


def snapshot_of(tokens: list[int], vocabulary: int, rule: str = "shared-noise") -> pb.Snapshot:
    contract = Contract(seed=4, max_tokens=100, temperature=0.0 if rule == "shared-noise" else 1.0, rule=rule)
    return pb.Snapshot(
        epoch=1,
        tokens=tokens,
        last=True,
        digest=extend(EMPTY, tokens),
        contract=contract_to_pb(contract),
        plan=plan_to_pb(PLAN),
        credit=100,
        vocabulary=vocabulary,
    )


def looked_up(way: LookupMethod) -> Drafts:
    def drafts(snapshot: MirrorSnapshot) -> int:
        scheduler = NgramScheduler(Lookups(way, None), slots=1, send=lambda *_: None, resync=lambda _: None)
        key = Attachment("s", "", 1, b"")

        async def drafted() -> int:
            scheduler.opened(key, snapshot)
            running = asyncio.create_task(scheduler.run())
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            scheduler.closed(key)
            return scheduler.nodes

        return asyncio.run(drafted())

    return drafts


def modelled(kind: type[TopKSession] | type[SampledSession]) -> Drafts:
    def drafts(snapshot: MirrorSnapshot) -> int:
        session: DrafterSession = kind(snapshot, 0, OWN)
        session.refill(DrafterFits())
        chosen = session.next_segment(DrafterFits(), chunk=64, limit=4, context=100, rows=100)
        assert chosen is not None
        segment, nodes = chosen
        assert segment.tokens.max() < OWN
        rows = logits_rows(HostLogits(np.zeros((len(nodes), OWN), np.float32)), 0, len(nodes))
        return len(session.expand(nodes, rows, DrafterFits()).tokens)

    return drafts


KINDS = {
    "prompt-lookup": (looked_up("prompt-lookup"), "shared-noise"),
    "suffix": (looked_up("suffix"), "shared-noise"),
    "ranked": (modelled(TopKSession), "shared-noise"),
    "drawn": (modelled(SampledSession), "recursive-rejection"),
}


@pytest.mark.parametrize("vocabulary", [0, 1, LARGEST_VOCABULARY])
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_takes_a_target_with_any_number_of_ids(kind: str, vocabulary: int) -> None:
    drafts, rule = KINDS[kind]
    last = (vocabulary or OWN) - 1
    snapshot = PartialSnapshot().add_part(snapshot_of([0, last] * 6, vocabulary, rule), OWN, NO_FEATURES)
    assert snapshot is not None
    assert drafts(snapshot) > 0


@pytest.mark.parametrize("vocabulary", [LARGEST_VOCABULARY + 1, 2**32 - 1])
def test_a_vocabulary_above_the_largest_is_refused(vocabulary: int) -> None:
    parts = PartialSnapshot()
    with pytest.raises(InvalidRequest, match="vocabulary: is"):
        parts.add_part(snapshot_of([1, vocabulary - 1, 3], vocabulary), OWN, NO_FEATURES)
    assert parts.vocabulary == 0


def test_a_frame_with_more_tokens_than_an_upstream_sends_is_refused() -> None:
    assert PartialSnapshot().add_part(snapshot_of([1] * SNAPSHOT_TOKENS, OWN), OWN, NO_FEATURES) is not None
    with pytest.raises(InvalidRequest, match=f"at most {SNAPSHOT_TOKENS}"):
        PartialSnapshot().add_part(snapshot_of([1] * (SNAPSHOT_TOKENS + 1), OWN), OWN, NO_FEATURES)
    assert len(update_from_pb(pb.Commit(tokens=[1] * ALIAS_SPAN), OWN, NO_FEATURES).tokens) == ALIAS_SPAN
    with pytest.raises(InvalidRequest, match=f"at most {ALIAS_SPAN}"):
        update_from_pb(pb.Commit(tokens=[1] * (ALIAS_SPAN + 1)), OWN, NO_FEATURES)
