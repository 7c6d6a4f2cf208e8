"""What all generations of a router share, in groups: each part of a router gets the groups that it needs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.config import RouterConfig
from outrider.core.control.drafters.tier_selection import TierSwitch
from outrider.limits.fair_turns import LoopTurns
from outrider.store.kept_responses import KeptResponses
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.session_events import SessionEvents
from outrider.store.sessions import Sessions
from outrider.store.tenant_storage import TenantStorage
from outrider.wire.tickets import TicketSigner
from router.background import BackgroundTasks
from router.counters.request_metrics import RouterMetrics
from router.drafters.warm_start import WarmStart
from router.requests.served_models import ServedModel
from router.scheduling.adapters import AdapterDirectory
from router.scheduling.admission import Admission
from router.scheduling.workers import WorkerPool
from router.sessions.sample_writer import SampleWriter
from router.sessions.verifier_link import VerifierLinks


@dataclass(frozen=True, slots=True)
class SessionStore:
    """The sessions of all routers, in Redis."""

    router_id: str
    sessions: Sessions
    events: SessionEvents
    storage: TenantStorage
    responses: KeptResponses
    clock: RedisClock

    def owner(self) -> str:
        """Return a new name for one acquisition of a session by this router."""
        return f"{self.router_id}/{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class DecodeResources:
    """What generations are decoded with: the workers and the way to them, and who learns from each step."""

    config: RouterConfig
    worker_pool: WorkerPool
    verifier_links: VerifierLinks
    tiers: TierSwitch
    ticket_signer: TicketSigner
    sample_writer: SampleWriter
    metrics: RouterMetrics
    background: BackgroundTasks


@dataclass(frozen=True, slots=True)
class RouterContext:
    """All that the service has."""

    models: Mapping[str, ServedModel]
    adapters: AdapterDirectory
    admission: Admission
    store: SessionStore
    decoding: DecodeResources
    warm_start: WarmStart
    turns: LoopTurns = field(default_factory=LoopTurns)  # turns at reading again from the log
