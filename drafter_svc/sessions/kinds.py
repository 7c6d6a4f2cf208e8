"""All kinds of sessions with a model, and which one drafts under a contract."""

from __future__ import annotations

from drafter_svc.sessions.eagle_session import EagleSampledSession, EagleTopKSession
from drafter_svc.sessions.sampled_session import SampledSession
from drafter_svc.sessions.session import DrafterSession
from drafter_svc.sessions.topk_session import TopKSession
from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction import construction_of, static_construction_of
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.engine.interface.engine import Engine
from outrider.engine.kv.kv_slots import AcquiredSlot


class SessionKinds:
    """Makes the sessions of a drafter whose trees grow by the construction `tree`."""

    def __init__(self, tree: str) -> None:
        self._construction, self._static_construction = construction_of(tree), static_construction_of(tree)

    def begin(
        self, snapshot: MirrorSnapshot, engine: Engine, kv_slot: AcquiredSlot, replaced: DrafterSession | None
    ) -> DrafterSession:
        """Return a session over a snapshot; its KV is that of `kv_slot`. `replaced`: the one before it, if any."""
        terms = snapshot, kv_slot.slot, engine.unpadded_vocabulary
        first_id, cached = replaced.next_id if replaced else 1, kv_slot.cached
        if rule_of(snapshot.contract).child_sampling is ChildSampling.SAMPLED:
            sampled_type = EagleSampledSession if engine.fed_width else SampledSession
            return sampled_type(*terms, self._static_construction, first_id=first_id, cached=cached)
        topk_type = EagleTopKSession if engine.fed_width else TopKSession
        repeats = replaced.repeats if isinstance(replaced, TopKSession) else None
        return topk_type(*terms, self._construction, first_id=first_id, cached=cached, repeats=repeats)
